"""Bodies of chat and text completions, checked before anything else happens; errors name the field as OpenAI does.

The frontend gets the body as it was received and checks it again with the model's tokenizer at hand; what can be known
without one is refused here, before anything is loaded. Unknown fields are ignored, as OpenAI's clients expect.
"""

import hashlib
import re
from typing import Annotated, Any, Final, Literal, TypeVar

import msgspec
from msgspec import Meta

from web.attempt import Ask
from web.errors import ApiError
from web.wording import reworded

T = TypeVar("T")

MODEL_NAME: Final = re.compile(r"[A-Za-z0-9](?:[A-Za-z0-9._-]{0,98}[A-Za-z0-9])?")
NAME_SHOWN: Final = 100
WAIT_DIGITS: Final = 6
ROLES: Final = ("system", "developer", "user", "assistant")
"""Of OpenAI's, those that make sense without tools; a model's template may take fewer."""

Tokens = Annotated[int, Meta(ge=1, le=2**31)]
Stop = Annotated[str, Meta(min_length=1)]


class Part(msgspec.Struct):
    """One part of a message's content."""

    type: str
    text: str = ""


class Message(msgspec.Struct):
    role: Annotated[str, Meta(min_length=1)]
    content: str | list[Part] | None = None
    name: str | None = None
    tool_calls: list[Any] | None = None


class StreamOptions(msgspec.Struct):
    include_usage: bool | None = None


class _Common(msgspec.Struct, kw_only=True):
    model: str
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    max_tokens: Tokens | None = None
    min_tokens: Annotated[int, Meta(ge=0, le=2**31)] | None = None
    temperature: Annotated[float, Meta(ge=0, le=2)] | None = None
    top_p: Annotated[float, Meta(ge=0, le=1)] | None = None
    top_k: Annotated[int, Meta(ge=-1, le=2**31)] | None = None
    seed: Annotated[int, Meta(ge=-(2**63), le=2**63 - 1)] | None = None
    presence_penalty: Annotated[float, Meta(ge=-2, le=2)] | None = None
    frequency_penalty: Annotated[float, Meta(ge=-2, le=2)] | None = None
    repetition_penalty: Annotated[float, Meta(ge=0.01, le=100)] | None = None
    ignore_eos: bool | None = None
    stop: Stop | Annotated[list[Stop], Meta(max_length=4)] | None = None
    n: int | None = None
    best_of: int | None = None
    logprobs: bool | int | None = None
    logit_bias: dict[str, Any] | None = None


class ChatBody(_Common, kw_only=True):
    """`POST /v1/chat/completions`."""

    messages: Annotated[list[Message], Meta(min_length=1)]
    max_completion_tokens: Tokens | None = None
    top_logprobs: int | None = None
    tools: list[Any] | None = None
    tool_choice: Any = None
    functions: list[Any] | None = None
    function_call: Any = None
    response_format: dict[str, Any] | None = None
    modalities: list[str] | None = None
    audio: Any = None
    prediction: Any = None
    web_search_options: Any = None


class CompletionBody(_Common, kw_only=True):
    """`POST /v1/completions`."""

    prompt: str | list[str | int | list[int]]
    echo: bool | None = None
    suffix: str | None = None


UNSUPPORTED: Final[dict[str, tuple[object, ...]]] = {
    "n": (1,), "best_of": (1,), "logprobs": (False, 0), "top_logprobs": (0,), "logit_bias": ({},), "tools": ([],),
    "tool_choice": ("none", "auto"), "functions": ([],), "function_call": ("none", "auto"),
    "response_format": ({"type": "text"},), "modalities": (["text"],), "audio": (), "echo": (False,), "suffix": ("",),
    "prediction": (), "web_search_options": (),
}  # fmt: skip
"""Fields that would change the answer -> the values with which they don't. Refused, never ignored; a frontend would refuse
them too, but only once a model has been loaded for it."""

_chat = msgspec.json.Decoder(ChatBody)
_completion = msgspec.json.Decoder(CompletionBody)


def chat(raw: bytes) -> tuple[ChatBody, Ask]:
    """Check a chat body. Raises ApiError (400, with the parameter)."""
    body = _decode(_chat, raw)
    _supported(body)
    size = sum(_message_bytes(message, f"messages[{nth}]") for nth, message in enumerate(body.messages))
    return body, _ask(body, "chat", raw, size, body.max_completion_tokens or body.max_tokens)


def completion(raw: bytes) -> tuple[CompletionBody, Ask]:
    """Check a completion body. Raises ApiError (400, with the parameter)."""
    body = _decode(_completion, raw)
    _supported(body)
    match body.prompt:
        case str(text) | [str(text)]:
            size = _bytes(text)
        case [list(ids)] | list(ids) if ids and all(isinstance(token, int) for token in ids):
            size = len(ids)  # the bound on length is one of tokens
        case [_, _, *_]:
            raise invalid("prompt", "'prompt' holds more than one prompt: send one request for each")
        case _:
            raise invalid("prompt", "'prompt' must be a text or a list of token ids, and not empty")
    return body, _ask(body, "completion", raw, size, body.max_tokens)


def patience(prefer: str | None) -> float | None:
    """Seconds of `Prefer: wait=<seconds>` (RFC 7240), None where the header asks for nothing of the kind. Raises ApiError."""
    for preference in (prefer or "").split(","):
        name, _, value = preference.partition(";")[0].partition("=")
        if name.strip().lower() == "wait":
            seconds = value.strip().strip('"')
            if not seconds.isascii() or not seconds.isdigit() or len(seconds) > WAIT_DIGITS:
                raise invalid("Prefer", f"'Prefer: wait={seconds[:40]}' must be a whole number of seconds")
            return float(seconds)
    return None


def invalid(param: str | None, message: str) -> ApiError:
    return ApiError(400, "invalid", message, param=param)


def _decode(decoder: msgspec.json.Decoder[T], raw: bytes) -> T:
    try:
        return decoder.decode(raw)
    except msgspec.ValidationError as error:
        raise invalid(*reworded(str(error))) from None
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise invalid(None, f"the body is not JSON: {error}") from None


def _supported(body: _Common) -> None:
    for name, harmless in UNSUPPORTED.items():
        value = getattr(body, name, None)
        if value is not None and value not in harmless:
            only = f"; leave it out, or give {msgspec.json.encode(harmless[0]).decode()}" if harmless else "; leave it out"
            raise invalid(name, f"'{name}' is not supported{only}")
    if not MODEL_NAME.fullmatch(body.model):
        raise unknown_model(body.model)
    most = getattr(body, "max_completion_tokens", None) or body.max_tokens
    if most is not None and (body.min_tokens or 0) > most:
        raise invalid("min_tokens", f"'min_tokens' is {body.min_tokens}, more than the most tokens allowed, {most}")
    if body.stream_options is not None and not body.stream:
        raise invalid("stream_options", "'stream_options' goes with 'stream': true only")


def unknown_model(name: str, near: str | None = None) -> ApiError:
    """404 for a name that no model has, or can't have."""
    shown = repr(name[:NAME_SHOWN])
    hint = f"; did you mean '{near}'?" if near else "; GET /v1/models lists what there is"
    return ApiError(404, "model_unknown", f"there is no model {shown}{hint}", param="model")


def _message_bytes(message: Message, where: str) -> int:
    if message.role in ("tool", "function"):
        raise invalid(f"{where}.role", f"'{where}.role' is {message.role!r}, and tools are not supported")
    if message.role not in ROLES:
        supported = ", ".join(map(repr, ROLES))
        raise invalid(f"{where}.role", f"'{where}.role' is {message.role[:40]!r}; supported are {supported}")
    if message.tool_calls:
        raise invalid(f"{where}.tool_calls", f"'{where}.tool_calls' is not supported")
    match message.content:
        case None:
            if message.role != "assistant":
                raise invalid(f"{where}.content", f"'{where}.content' must be a text or a list of text parts")
            size = 0
        case str(text):
            size = _bytes(text)
        case parts:
            for nth, part in enumerate(parts):
                if part.type != "text":
                    place = f"{where}.content[{nth}].type"
                    raise invalid(place, f"'{place}' is {part.type[:40]!r}; only text is supported")
            size = sum(_bytes(part.text) for part in parts)
    return size + _bytes(message.role) + _bytes(message.name or "")


def _bytes(text: str) -> int:
    return len(text) if text.isascii() else len(text.encode())


def _ask(body: _Common, kind: Literal["chat", "completion"], raw: bytes, size: int, most: int | None) -> Ask:
    return Ask(
        model=body.model, kind=kind, streamed=bool(body.stream), body=raw, prompt_bytes=size, max_tokens=most,
        body_sha256=hashlib.sha256(raw).hexdigest(),
    )  # fmt: skip
