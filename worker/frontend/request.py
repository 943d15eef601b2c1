"""Bodies of the OpenAI API: which fields count, what each may be, and what is refused rather than ignored.

Fields that change nothing of the answer (`user`, `metadata`, `store`, ...) and unknown ones are ignored. Fields that would
change it and are not supported are refused by name: an answer without them would look like one with them.
"""

from collections.abc import Mapping
from typing import Any, Final

import msgspec

from worker.engines.messages import Sampling

MOST_STOPS: Final = 4
REFUSED: Final[dict[str, tuple[object, ...]]] = {
    "n": (1,), "best_of": (1,), "logprobs": (False,), "top_logprobs": (0,), "logit_bias": ({},), "tools": ([],),
    "functions": ([],), "tool_choice": ("none", "auto"), "function_call": ("none", "auto"),
    "response_format": ({"type": "text"},), "echo": (False,), "suffix": ("",), "modalities": (["text"],),
    "audio": (), "web_search_options": (), "prediction": (),
}  # fmt: skip
"""Field -> the values with which it asks for nothing; null always does."""


class Invalid(Exception):
    """The caller's mistake. `param`: the field, as the OpenAI API names it. `code`: `invalid` or `too_long`."""

    def __init__(self, message: str, param: str | None = None, code: str = "invalid") -> None:
        super().__init__(message)
        self.message, self.param, self.code = message, param, code


class Wanted(msgspec.Struct, frozen=True, kw_only=True):
    """What a body asks for, apart from its text. `max_tokens` None: all that the context leaves."""

    sampling: Sampling
    max_tokens: int | None
    stops: tuple[str, ...]


def wanted(body: Mapping[str, Any]) -> Wanted:
    """Return what `body` asks for.

    Raises:
        Invalid: with the field's name.
    """
    for name, harmless in REFUSED.items():
        value = body.get(name)
        if value is not None and value not in harmless:
            raise Invalid(
                f"{name!r} is not supported" + (f" with a value other than {harmless[0]!r}" if harmless else ""), name
            )
    most = _integer(body, "max_completion_tokens", 1, 2**31)
    name = "max_tokens" if most is None else "max_completion_tokens"
    if most is None:
        most = _integer(body, "max_tokens", 1, 2**31)
    least = _integer(body, "min_tokens", 0, 2**31) or 0
    if most is not None and least > most:
        raise Invalid(f"'min_tokens' is {least}, more than {name!r}, {most}", "min_tokens")
    sampling = Sampling(
        max_tokens=most or 1,
        min_tokens=least,
        temperature=_number(body, "temperature", 0, 2, 1.0),
        top_p=_number(body, "top_p", 0, 1, 1.0),
        top_k=max(_integer(body, "top_k", -1, 2**31) or 0, 0),
        seed=_integer(body, "seed", -(2**63), 2**63 - 1),
        presence_penalty=_number(body, "presence_penalty", -2, 2, 0.0),
        frequency_penalty=_number(body, "frequency_penalty", -2, 2, 0.0),
        repetition_penalty=_number(body, "repetition_penalty", 0.01, 100, 1.0),
        ignore_eos=_flag(body, "ignore_eos"),
    )
    return Wanted(sampling=sampling, max_tokens=most, stops=_stops(body.get("stop")))


def messages(body: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Return the messages of a chat body, each content one text.

    Raises:
        Invalid: with the place, e.g. `messages[2].content`.
    """
    given = body.get("messages")
    if not isinstance(given, list) or not given:
        raise Invalid("'messages' must be a list with at least one message", "messages")
    return [_message(message, f"messages[{nth}]") for nth, message in enumerate(given)]


def prompt(body: Mapping[str, Any]) -> str | list[int]:
    """Return the prompt of a completion body: a text, or token ids.

    Raises:
        Invalid: there is none, or more than one.
    """
    match body.get("prompt"):
        case str(text) | [str(text)]:
            return text
        case [list(ids)] if ids and all(type(token) is int for token in ids):
            return ids
        case [*ids] if ids and all(type(token) is int for token in ids):
            return ids
        case [_, _, *_]:
            raise Invalid("'prompt' holds more than one prompt: send one request for each", "prompt")
        case _:
            raise Invalid("'prompt' must be a text or a list of token ids", "prompt")


def _message(message: object, where: str) -> dict[str, Any]:
    if not isinstance(message, dict):
        raise Invalid(f"'{where}' must be an object", where)
    if not isinstance(message.get("role"), str) or not message["role"]:
        raise Invalid(f"'{where}.role' must be a text", f"{where}.role")
    if message.get("tool_calls"):
        raise Invalid(f"'{where}.tool_calls' is not supported", f"{where}.tool_calls")
    content = message.get("content")
    if content is None and message["role"] == "assistant":
        content = ""
    if isinstance(content, list):
        content = "".join(_part(part, f"{where}.content[{nth}]") for nth, part in enumerate(content))
    if not isinstance(content, str):
        raise Invalid(f"'{where}.content' must be a text or a list of parts", f"{where}.content")
    role = "system" if message["role"] == "developer" else message["role"]  # OpenAI's newer name; no template knows it
    return {**message, "role": role, "content": content}


def _part(part: object, where: str) -> str:
    match part:
        case {"type": "text", "text": str(text)}:
            return text
        case {"type": str(kind)} if kind != "text":
            raise Invalid(f"'{where}' is of type {kind!r}; this model takes text only", f"{where}.type")
        case _:
            raise Invalid(f'\'{where}\' must be {{"type": "text", "text": ...}}', where)


def _stops(given: object) -> tuple[str, ...]:
    match given:
        case None:
            return ()
        case str(stop):
            stops = [stop]
        case [*stops] if all(isinstance(stop, str) for stop in stops):
            pass
        case _:
            raise Invalid("'stop' must be a text or a list of texts", "stop")
    if len(stops) > MOST_STOPS:
        raise Invalid(f"'stop' has {len(stops)} texts; at most {MOST_STOPS}", "stop")
    if "" in stops:
        raise Invalid("'stop' has an empty text", "stop")
    return tuple(stops)


def _number(body: Mapping[str, Any], name: str, low: float, high: float, default: float) -> float:
    value = body.get(name)
    if value is None:
        return default
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise Invalid(f"{name!r} must be a number, not {value!r}", name)
    if not low <= value <= high:  # also for a NaN
        raise Invalid(f"{name!r} is {value}, outside {low} to {high}", name)
    return float(value)


def _integer(body: Mapping[str, Any], name: str, low: int, high: int) -> int | None:
    value = body.get(name)
    if value is None:
        return None
    if isinstance(value, bool) or not isinstance(value, int):
        raise Invalid(f"{name!r} must be a whole number, not {value!r}", name)
    if not low <= value <= high:
        raise Invalid(f"{name!r} is {value}, outside {low} to {high}", name)
    return value


def _flag(body: Mapping[str, Any], name: str) -> bool:
    value = body.get(name)
    if value is None:
        return False
    if not isinstance(value, bool):
        raise Invalid(f"{name!r} must be true or false, not {value!r}", name)
    return value
