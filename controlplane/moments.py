"""Moments of the log, as people write them: a position, or a time in UTC. Pure."""

from datetime import UTC, datetime, timedelta
from typing import Final

import msgspec

EXAMPLES: Final = "write a position of the log such as 4711, or a time in UTC such as 2026-11-29T13:20:01Z"
LONGEST: Final = 64
"""Characters; what is longer is neither."""
SHOWN: Final = 100
_EPOCH: Final = datetime(1970, 1, 1, tzinfo=UTC)


class Position(msgspec.Struct, frozen=True):
    """After that event."""

    position: int


class Time(msgspec.Struct, frozen=True):
    """After the last event at or before it. Unix milliseconds."""

    at_ms: int


When = Position | Time


def when(text: str) -> When:
    """Read a position, or a time of ISO 8601 (a `T` or a space; without an offset it is UTC's, and ` UTC` may follow it).

    What is finer than a millisecond is left off. Raises ValueError, with what can be written.
    """
    written = text.strip()
    if len(written) <= LONGEST:
        if written.isascii() and written.isdigit():
            return Position(int(written))
        try:
            at = datetime.fromisoformat(written.removesuffix("UTC").rstrip())
            utc = at.replace(tzinfo=UTC) if at.tzinfo is None else at.astimezone(UTC)
        except (ValueError, OverflowError):  # the latter: an offset that leads out of the years there are
            pass
        else:
            return Time((utc - _EPOCH) // timedelta(milliseconds=1))
    raise ValueError(f"{written[:SHOWN]!r} is no moment; {EXAMPLES}")


def utc(at_ms: int) -> str:
    """A time as people read it, and as `when` does: `2026-11-29 13:20:01.301 UTC`."""
    at = _EPOCH + timedelta(milliseconds=at_ms)
    return f"{at.replace(tzinfo=None).isoformat(' ', 'milliseconds')} UTC"


def as_it_was(position: int, at_ms: int) -> str:
    """Which past is shown: the same words on the page and on the command line."""
    return f"as it was after event {position}, {utc(at_ms)}"
