"""From a request's body to what the engine gets: ids, sampling, limits."""

import asyncio
from functools import partial
from pathlib import Path
from typing import Any

import msgspec

from worker.frontend.chat import LONG_CHARS, TextSide, load, prompt_ids
from worker.frontend.record import Opened
from worker.frontend.request import Invalid, wanted
from worker.frontend.serving import Serving


class Wish(msgspec.Struct, frozen=True, kw_only=True):
    """The body of `POST /generate`."""

    request: str
    attempt: int
    model: str
    grant: int
    kind: str
    body: dict[str, Any]
    """As the caller sent it."""


async def opened(wish: Wish, serving: Serving) -> Opened:
    """Return the request as it is recorded and submitted.

    Raises:
        Invalid: with the field's name; `too_long` with both numbers.
    """
    if wish.kind not in ("chat", "completion"):
        raise Invalid(f"'kind' must be 'chat' or 'completion', not {wish.kind!r}", "kind")
    want = wanted(wish.body)
    text_side = load(Path(serving.source))
    count = partial(prompt_ids, text_side, wish.kind, wish.body, most=serving.context_tokens - 1)
    ids = await asyncio.to_thread(count) if size(wish.body) > LONG_CHARS else count()
    most = room(len(ids), want.max_tokens, serving.context_tokens, wish)
    return Opened(
        request=wish.request, attempt=wish.attempt, model=wish.model, grant=wish.grant, source=serving.source,
        prompt=tuple(ids), stops=want.stops, sampling=_with(want.sampling, most, text_side),
    )  # fmt: skip


def room(prompt_tokens: int, max_tokens: int | None, context_tokens: int, wish: Wish) -> int:
    """Return how many tokens may be generated.

    Raises:
        Invalid: `too_long`.
    """
    if prompt_tokens >= context_tokens:
        field = "messages" if wish.kind == "chat" else "prompt"
        raise Invalid(
            f"the prompt has {prompt_tokens} tokens; {wish.model!r} takes fewer than {context_tokens} tokens, answer included",
            field, "too_long",
        )  # fmt: skip
    left = context_tokens - prompt_tokens
    if max_tokens is not None and max_tokens > left:
        field = "max_tokens" if wish.body.get("max_completion_tokens") is None else "max_completion_tokens"
        raise Invalid(
            f"the prompt's {prompt_tokens} tokens and {field} {max_tokens} are {prompt_tokens + max_tokens} together; "
            f"{wish.model!r} takes {context_tokens}", field, "too_long",
        )  # fmt: skip
    return left if max_tokens is None else max_tokens


def size(body: dict[str, Any]) -> int:
    """Return about how long a body's text is, in characters."""
    messages = body.get("messages")
    texts = [message.get("content") for message in messages if isinstance(message, dict)] if isinstance(messages, list) else []
    return sum(len(text) for text in (*texts, body.get("prompt")) if isinstance(text, str | list))


def _with(sampling: Any, most: int, text_side: TextSide) -> Any:
    return msgspec.structs.replace(sampling, max_tokens=most, stop_ids=text_side.stop_ids)
