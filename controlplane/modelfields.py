"""A model's fields, as a settings file or a REST body gives them, to a checked `ModelSpec`."""

import re
from collections.abc import Iterable, Mapping
from difflib import get_close_matches
from typing import Final, get_args

from controlplane import sourcename
from controlplane.arguments import check
from controlplane.quantities import duration_ms, share_cells
from controlplane.refusal import Code, Refused
from controlplane.spec import CELLS, EngineName, Idle, ModelSpec

KEYS: Final = ("name", "source", "engine", "arguments", "share", "idle", "aliases", "note")
_NAME: Final = re.compile(r"[A-Za-z0-9](?:[A-Za-z0-9._-]{0,98}[A-Za-z0-9])?", re.ASCII)
GANGS: Final = (1, 2, 4, 8)
"""Devices that an instance may take; attention heads are cut over them, and numbers of heads are multiples of these."""
GANG_ENGINES: Final = ("vllm", "fake")
_NOTE_LIMIT: Final = 200
_ALIASES_LIMIT: Final = 32
"""With it an event about a model stays far below what NATS takes in one message."""
_IDLE: Final = ("sleep", "checkpoint", "saved", "cold")

LATER: Final = {
    "priority": "priority classes are not in this version; take the key out: requests are served first come, first served",
}
"""Settings that this version knows by name and does not have, with what to do."""


def spec_from_fields(fields: Mapping[str, object]) -> ModelSpec:
    """Return the spec that one `[[model]]` table, or one REST body, means.

    Raises:
        Refused: `invalid` or `not_available`; `details["param"]` is the dotted key at fault ("" for the whole).
    """
    for key in fields:
        if key == "priority":
            raise later(key)
        if key not in KEYS:
            raise unknown(key, KEYS)
    engine = _engine(fields.get("engine", "transformers"))
    arguments = _table(fields.get("arguments", {}), "arguments")
    name = model_name(_required(fields, "name"), "name")
    gpus = _gpus(fields.get("share", "auto"), engine)
    if gpus == 1 and "gang_checkpoint" in arguments:
        raise invalid("arguments.gang_checkpoint", "of a model on several devices; leave it out, or write share = { gpus = 2 }")
    if gpus > 1 and "draft_model" in arguments:
        raise Refused(
            Code.NOT_AVAILABLE,
            f"arguments.draft_model: a model on {gpus} devices can have none; leave it out, or write gpus = 1",
            param="arguments.draft_model",
        )
    return ModelSpec(
        name=name,
        source=_source(_required(fields, "source"), engine),
        engine=engine,
        arguments=check(engine, arguments),
        cells=_cells(fields.get("share", "auto")),
        gpus=gpus,
        idle=_idle(_table(fields.get("idle", {}), "idle")),
        aliases=_aliases(fields.get("aliases", ()), name),
        note=_note(fields.get("note", "")),
    )


def invalid(key: str, message: str) -> Refused:
    return Refused(Code.INVALID, f"{key}: {message}" if key else message, param=key)


def later(key: str) -> Refused:
    return Refused(Code.NOT_AVAILABLE, f"{key}: {LATER[key]}", param=key)


def unknown(key: str, known: Iterable[str], prefix: str = "") -> Refused:
    """The refusal of a key that means nothing, with the nearest one that does."""
    names = sorted(known)
    near = get_close_matches(key, names, n=1)
    hint = f"did you mean {near[0]}?" if near else f"known: {', '.join(names)}"
    return Refused(Code.INVALID, f"{prefix}{key}: unknown key; {hint}", param=f"{prefix}{key}")


def model_name(value: object, key: str, what: str = "a model name") -> str:
    """Return a name, of `what` it is. Raises Refused unless it is 1 to 100 of letters, digits, `.`, `_`, `-`."""
    if not isinstance(value, str) or not _NAME.fullmatch(value):
        shown = value if not isinstance(value, str) or len(value) <= 40 else f"{value[:40]}..."
        raise invalid(
            key,
            f"{shown!r} is not {what}; use 1 to 100 letters, digits, dots, dashes and underscores, "
            "with a letter or digit at both ends",
        )
    return value


def _required(fields: Mapping[str, object], key: str) -> object:
    if key not in fields:
        raise invalid(key, "missing; every model needs a name and a source")
    return fields[key]


def _table(value: object, key: str) -> Mapping[str, object]:
    if not isinstance(value, Mapping):
        raise invalid(key, f"{value!r} is not a table of keys and values")
    return value


def _engine(value: object) -> EngineName:
    for name in get_args(EngineName):
        if value == name:
            engine: EngineName = name
            return engine
    raise invalid("engine", f"{value!r} is not an engine; known: {', '.join(get_args(EngineName))}")


def _source(value: object, engine: EngineName) -> str:
    if not isinstance(value, str) or not sourcename.is_text(value):
        raise invalid("source", f"must be a text of printable characters, at most {sourcename.LIMIT}")
    if (value.startswith("fake:")) is not (engine == "fake"):
        raise invalid("source", f'{value!r} with engine "{engine}": the fake engine, and it alone, takes a source "fake:"')
    if engine == "fake":
        if value != "fake:":
            model_name(value.removeprefix("fake:"), "source")
        return value
    try:
        return sourcename.files(value)
    except ValueError as error:
        raise invalid("source", str(error)) from None


def _cells(value: object) -> int | None:
    if isinstance(value, Mapping):
        return CELLS  # whole devices
    try:
        return share_cells(value)
    except ValueError as error:
        raise invalid("share", str(error)) from None


def _gpus(value: object, engine: EngineName) -> int:
    """How many whole devices: `share = { gpus = 2 }`."""
    if not isinstance(value, Mapping):
        return 1
    if set(value) != {"gpus"}:
        raise invalid("share", f'{value!r} is not a share; write "auto", one of 1/8, 1/4, 1/2 and 1, or {{ gpus = 2 }}')
    count = value["gpus"]
    if isinstance(count, bool) or not isinstance(count, int) or count not in GANGS:
        raise invalid("share.gpus", f"{count!r} is not a number of devices; write {', '.join(map(str, GANGS))}")
    if count > 1 and engine not in GANG_ENGINES:
        raise Refused(
            Code.NOT_AVAILABLE, f'share.gpus: engine "{engine}" runs on one device; write gpus = 1, or engine = "vllm"',
            param="share.gpus",
        )  # fmt: skip
    return count


def _idle(fields: Mapping[str, object]) -> Idle:
    limits: dict[str, int | None] = {}
    for key, value in fields.items():
        if f"idle.{key}" in LATER:
            raise later(f"idle.{key}")
        if key not in _IDLE:
            raise unknown(key, _IDLE, "idle.")
        try:
            limits[f"{key}_ms"] = duration_ms(value)
        except ValueError as error:
            raise invalid(f"idle.{key}", str(error)) from None
    return Idle(**limits)


def _aliases(value: object, name: str) -> tuple[str, ...]:
    if not isinstance(value, (list, tuple)):
        raise invalid("aliases", f"{value!r} is not a list of names")
    if len(value) > _ALIASES_LIMIT:
        raise invalid("aliases", f"{len(value)} names; at most {_ALIASES_LIMIT} are taken")
    aliases = tuple(model_name(alias, "aliases") for alias in value)
    if name in aliases or len(set(aliases)) < len(aliases):
        raise invalid("aliases", f"{list(aliases)!r} holds a name twice, or the model's own")
    return aliases


def _note(value: object) -> str:
    if not isinstance(value, str) or not value.isprintable() or len(value) > _NOTE_LIMIT:
        raise invalid("note", f"must be a text of printable characters, at most {_NOTE_LIMIT}")
    return value
