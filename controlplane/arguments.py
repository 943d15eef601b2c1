"""Engine arguments: what a model's spec may say, per engine. There is no way to pass anything else on to an engine."""

from collections.abc import Mapping
from typing import Final

import msgspec

from controlplane import sourcename
from controlplane.quantities import size_bytes
from controlplane.refusal import Code, Refused
from controlplane.spec import Argument, EngineName

_TIB: Final = 2**40
_HOUR_MS: Final = 3_600_000


class Allowed(msgspec.Struct, frozen=True, kw_only=True):
    """One argument: its kind, its range, and whether two models that differ in it may still share a skeleton."""

    kind: type[int] | type[float] | type[str] | type[bool]
    low: float = 0
    high: float = 0
    choices: tuple[str, ...] = ()
    pattern: str = ""
    """Of a text: what it may be, in words."""
    is_size: bool = False
    """Bytes; `"20GiB"` is accepted for the number."""
    shapes: bool = True
    """Part of the configuration. Whatever an engine process is started with is."""


VLLM_SEQS: Final = 64
"""`max_num_seqs` of vLLM, unless the spec gives it."""

FAULTS: Final = (
    "start", "wake", "rank_wake", "sleep", "generate_after", "lock_hangs", "checkpoint_hangs", "checkpoint_fails",
    "restore_hangs", "restore_fails",
)  # fmt: skip
"""What the fake engine, or the GPU that it pretends to hold (`gpu`), can be told to do wrong."""

ALLOWED: Final[dict[EngineName, dict[str, Allowed]]] = {
    "transformers": {
        "max_model_len": Allowed(kind=int, low=16, high=10_000_000),
        "max_num_seqs": Allowed(kind=int, low=1, high=256),
        "kv_bytes": Allowed(kind=int, low=2**16, high=16 * _TIB, is_size=True),
        "dtype": Allowed(kind=str, choices=("float32", "bfloat16")),
        "threads": Allowed(kind=int, low=1, high=1024),
    },
    "vllm": {
        "max_model_len": Allowed(kind=int, low=16, high=10_000_000),
        "max_num_seqs": Allowed(kind=int, low=1, high=4096),
        "max_num_batched_tokens": Allowed(kind=int, low=16, high=1_000_000),
        "kv_bytes": Allowed(kind=int, low=2**24, high=16 * _TIB, is_size=True),
        "dtype": Allowed(kind=str, choices=("bfloat16", "float16")),
        "enforce_eager": Allowed(kind=bool),
        "compile": Allowed(kind=bool),
        "prefix_caching": Allowed(kind=bool),
        "gang_checkpoint": Allowed(kind=bool),
        "draft_model": Allowed(kind=str, pattern="hf:ORG/NAME@COMMIT or an absolute directory"),
        "num_speculative_tokens": Allowed(kind=int, low=1, high=16),
    },
    "fake": {
        "load_ms": Allowed(kind=int, low=0, high=_HOUR_MS),
        "wake_ms": Allowed(kind=int, low=0, high=_HOUR_MS),
        "sleep_ms": Allowed(kind=int, low=0, high=_HOUR_MS),
        "tokens_per_s": Allowed(kind=float, low=0, high=1e9),
        "context_tokens": Allowed(kind=int, low=16, high=10_000_000),
        "weight_bytes": Allowed(kind=int, low=16, high=_TIB, is_size=True, shapes=False),
        "kv_bytes": Allowed(kind=int, low=0, high=_TIB, is_size=True),
        "skeleton_bytes": Allowed(kind=int, low=0, high=_TIB, is_size=True),
        "max_num_seqs": Allowed(kind=int, low=1, high=100_000),
        "fail": Allowed(kind=str, pattern=f"one of {', '.join(FAULTS)}, then `:` and a number"),
        "ignore_stop": Allowed(kind=bool),
        "gpu": Allowed(kind=bool),
        "gang_checkpoint": Allowed(kind=bool),
        "keep_fraction": Allowed(kind=float, low=0, high=1),
    },
}


def check(engine: EngineName, arguments: Mapping[str, object]) -> dict[str, Argument]:
    """Return the arguments, sizes as numbers of bytes and names in order.

    Raises:
        Refused: `invalid`; `details["param"]` is `arguments.<name>`, and both numbers are there where two arguments disagree.
    """
    found = {name: _checked(engine, name, arguments[name]) for name in sorted(arguments)}
    if "num_speculative_tokens" in found and "draft_model" not in found:
        raise _invalid("num_speculative_tokens", "argument 'num_speculative_tokens' is of a draft_model, and none is named")
    if engine == "vllm":
        _check_step(found)
    return found


def _check_step(found: Mapping[str, Argument]) -> None:
    """A step must have room for a token of every sequence; a model that drafts takes one more of each. Raises Refused."""
    tokens, sequences = found.get("max_num_batched_tokens"), found.get("max_num_seqs", VLLM_SEQS)
    if not (isinstance(tokens, int) and isinstance(sequences, int)):
        return
    least = sequences + 1 if "draft_model" in found else sequences
    if tokens < least:
        beside = ", and more with a draft_model" if "draft_model" in found else ""
        raise _invalid(
            "max_num_batched_tokens",
            f"argument 'max_num_batched_tokens' is {tokens}; {sequences} sequences (max_num_seqs) need one token each{beside}: "
            f"give {least} or more, or lower max_num_seqs",
            max_num_batched_tokens=tokens, max_num_seqs=sequences,
        )  # fmt: skip


def shaping(engine: EngineName, arguments: Mapping[str, Argument]) -> dict[str, Argument]:
    """Return those that shape the skeleton: models that differ in others only can share one."""
    return {name: value for name, value in arguments.items() if ALLOWED[engine][name].shapes}


def _checked(engine: EngineName, name: str, value: object) -> Argument:
    allowed = ALLOWED[engine].get(name)
    if allowed is None:
        known = ", ".join(sorted(ALLOWED[engine]))
        raise _invalid(name, f"engine {engine!r} takes no argument {name!r}; it takes {known}")
    if allowed.is_size:
        try:
            value = size_bytes(value)
        except ValueError as error:
            raise _invalid(name, f"argument {name!r}: {error}") from None
    if allowed.kind is float and isinstance(value, int) and not isinstance(value, bool):
        value = float(value)
    if type(value) is not allowed.kind:
        raise _invalid(name, f"argument {name!r} is {type(value).__name__}, not {allowed.kind.__name__}: {value!r}")
    if isinstance(value, str):
        return _checked_text(name, value, allowed)
    assert isinstance(value, int | float)
    if not isinstance(value, bool) and not allowed.low <= value <= allowed.high:
        raise _invalid(name, f"argument {name!r} is {value}, outside {allowed.low:.15g} to {allowed.high:.15g}")
    return value


def _checked_text(name: str, value: str, allowed: Allowed) -> str:
    if allowed.choices and value not in allowed.choices:
        raise _invalid(name, f"argument {name!r} is {value!r}, not one of {', '.join(allowed.choices)}")
    if name == "fail":
        what, _, count = value.partition(":")
        if what not in FAULTS or not (count.isdecimal() or count == value[len(what) :]):
            raise _invalid(name, f"argument 'fail' is {value!r}, not {allowed.pattern}")
    if name == "draft_model":
        return _draft(name, value, allowed)
    return value


def _draft(name: str, value: str, allowed: Allowed) -> str:
    if value.endswith(".gguf"):
        raise _invalid(name, f"argument {name!r} is a GGUF file, not {allowed.pattern}: this engine reads safetensors files")
    try:
        return sourcename.files(value)
    except ValueError as error:
        raise _invalid(name, f"argument {name!r}: {error}") from None


def _invalid(name: str, message: str, **details: int) -> Refused:
    return Refused(Code.INVALID, message, param=f"arguments.{name}", **details)
