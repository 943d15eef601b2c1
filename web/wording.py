"""What a validator says of a value, in words for people who know neither Python's types nor this program's."""

import re
from typing import Final

_PLACE: Final = re.compile(r" - at `(?:key in )?\$\.?(.*?)`$")
_MISSING: Final = re.compile(r"Object missing required field `(\w+)`")
_UNKNOWN: Final = re.compile(r"Object contains unknown field `(.+)`")
_LENGTH: Final = re.compile(r"Expected `(\w+)` of length (<=|>=|==) (\d+)")
_BOUND: Final = re.compile(r"Expected `(int|float)` (<=|>=|<|>) (\S+)")
_EXPECTED: Final = re.compile(r"Expected `([\w |]+)`(?:, got `(\w+)`)?")
_ENUM: Final = re.compile(r"Invalid enum value (.+)")

_KINDS: Final = {
    "int": "a whole number", "float": "a number", "str": "a text", "bool": "true or false", "array": "a list",
    "object": "a JSON object", "null": "null",
}  # fmt: skip
_GIVEN: Final = {**_KINDS, "float": "a number with a fraction"}
_UNITS: Final = {"str": "character", "array": "entry", "object": "field"}
_MANY: Final = {"character": "characters", "entry": "entries", "field": "fields"}
_BOUNDS: Final = {">=": "at least", "<=": "at most", ">": "more than", "<": "less than", "==": "exactly"}


def reworded(said: str, name: str | None = None) -> tuple[str | None, str]:
    """Return the place of what is wrong, and what is allowed there; the validator's own words where they are none of these.

    name: of the parameter, where the validator doesn't know it; else the place is taken from what it said.
    """
    found = _PLACE.search(said)
    place = ".".join(filter(None, (name, found[1] if found else None))) or None
    text = said[: found.start()] if found else said
    if missing := _MISSING.fullmatch(text):
        place = ".".join(filter(None, (place, missing[1])))
        return place, f"'{place}' is missing"
    if unknown := _UNKNOWN.fullmatch(text):
        place = ".".join(filter(None, (place, unknown[1])))
        return place, f"there is no field '{place}'"
    what = f"'{place}'" if place else "the body"
    if (allowed := _allowed(text)) is not None:
        return place, f"{what} must {allowed}"
    if enum := _ENUM.fullmatch(text):
        return place, f"{what} can't be {enum[1]}"
    return place, f"{what}: {text}" if place else text


def _allowed(text: str) -> str | None:
    if (length := _LENGTH.fullmatch(text)) and length[1] in _UNITS:
        kind, count = length[1], int(length[3])
        if (length[2], count) == (">=", 1):
            return "not be empty"
        unit = _UNITS[kind]
        return f"have {_BOUNDS[length[2]]} {count} {unit if count == 1 else _MANY[unit]}"
    if bound := _BOUND.fullmatch(text):
        return f"be {_KINDS[bound[1]]}, {_BOUNDS[bound[2]]} {bound[3].removesuffix('.0')}"
    if expected := _EXPECTED.fullmatch(text):
        named = [kind.strip() for kind in expected[1].split("|")]  # null is as good as left out: not worth a word
        kinds = [_KINDS.get(kind, kind) for kind in named if kind != "null" or named == ["null"]]
        wanted = f"{', '.join(kinds[:-1])} or {kinds[-1]}" if len(kinds) > 1 else kinds[0]
        return f"be {wanted}" + (f", not {_GIVEN.get(expected[2], expected[2])}" if expected[2] else "")
    return None
