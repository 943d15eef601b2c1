"""Answers in OpenAI's shapes, as bytes. What is the same in every chunk of a stream is encoded once."""

import time
from typing import Any, Final

import msgspec

from web.attempt import Ask
from web.errors import ApiError
from web.frontend import Finish

DONE: Final = b"data: [DONE]\n\n"
_encoder = msgspec.json.Encoder()


def usage(finish: Finish) -> dict[str, int]:
    return {
        "prompt_tokens": finish.prompt_tokens, "completion_tokens": finish.completion_tokens,
        "total_tokens": finish.prompt_tokens + finish.completion_tokens,
    }  # fmt: skip


def comment(text: str) -> bytes:
    """An SSE comment: clients skip it, people and proxies see that something is going on."""
    return b": " + text.replace("\r", " ").replace("\n", " ").encode() + b"\n\n"


def error_event(error: ApiError) -> bytes:
    return b"data: " + error.openai() + b"\n\n" + DONE


class Chunks:
    """The events of one stream."""

    def __init__(self, request: str, ask: Ask, include_usage: bool) -> None:
        self._chat = ask.kind == "chat"
        self._usage = include_usage
        kind = "chat.completion.chunk" if self._chat else "text_completion"
        self._head: dict[str, Any] = {
            "id": _answer_id(request, ask), "object": kind, "created": int(time.time()), "model": ask.model,
        }  # fmt: skip
        before, after = self._event([self._choice({"content": "\0"} if self._chat else "\0", None)]).split(b'"\\u0000"')
        self._before, self._after = before, after

    def opening(self) -> bytes:
        """The first event: a chat names the role; a completion has nothing to say yet."""
        if self._chat:
            return self._event([self._choice({"role": "assistant", "content": ""}, None)])
        return comment("started")

    def text(self, text: str) -> bytes:
        return self._before + _encoder.encode(text) + self._after

    def closing(self, finish: Finish) -> bytes:
        """The last events: why it ended, the usage if it was asked for, and the end mark."""
        last = self._event([self._choice({} if self._chat else "", finish.finish_reason)])
        total = self._event([], usage(finish)) if self._usage else b""
        return last + total + DONE

    def _choice(self, content: dict[str, str] | str, finish_reason: str | None) -> dict[str, Any]:
        key = "delta" if self._chat else "text"
        return {"index": 0, key: content, "logprobs": None, "finish_reason": finish_reason}

    def _event(self, choices: list[dict[str, Any]], total: dict[str, int] | None = None) -> bytes:
        body = {**self._head, "choices": choices}
        if self._usage:
            body["usage"] = total
        return b"data: " + _encoder.encode(body) + b"\n\n"


def whole(request: str, ask: Ask, text: str, finish: Finish) -> bytes:
    """The body of an answer that isn't streamed."""
    choice: dict[str, Any] = {"index": 0, "logprobs": None, "finish_reason": finish.finish_reason}
    if ask.kind == "chat":
        choice["message"] = {"role": "assistant", "content": text, "refusal": None}
    else:
        choice["text"] = text
    return _encoder.encode(
        {"id": _answer_id(request, ask), "object": "chat.completion" if ask.kind == "chat" else "text_completion",
         "created": int(time.time()), "model": ask.model, "choices": [choice], "usage": usage(finish)}
    )  # fmt: skip


def _answer_id(request: str, ask: Ask) -> str:
    return ("chatcmpl-" if ask.kind == "chat" else "cmpl-") + request.partition("_")[2]
