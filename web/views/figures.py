"""Figures and names as the pages write them."""

from datetime import UTC, datetime
from typing import Final

from controlplane.quantities import human_bytes
from controlplane.spec import CELLS

SHARES: Final = {1: "⅛", 2: "¼", 4: "½", 8: "whole"}


def size(value: int | None) -> str:
    """Bytes for people: `1.5 GiB`; a dash for unknown."""
    return "–" if value is None else human_bytes(max(value, 0))


def span(value_ms: float | None) -> str:
    """A length of time: `41 ms`, `1.3 s`, `2 min 5 s`, `3 h 10 min`; a dash for unknown."""
    if value_ms is None:
        return "–"
    if value_ms < 1000:
        return f"{value_ms:.0f} ms"
    seconds = value_ms / 1000
    if seconds < 100:
        return f"{seconds:.1f} s"
    minutes = round(seconds) // 60
    if minutes < 60:
        return f"{minutes} min {rest} s" if (rest := round(seconds) % 60) else f"{minutes} min"
    return f"{minutes // 60} h {rest} min" if (rest := minutes % 60) else f"{minutes // 60} h"


def count(value: int | None) -> str:
    """A whole number with thin spaces between thousands."""
    return "–" if value is None else f"{value:,}".replace(",", "\u202f")


def rate(value: float) -> str:
    """Tokens a second: one decimal below ten."""
    return f"{value:.1f}" if 0 < value < 10 else f"{value:.0f}"


def clock(at_ms: int) -> str:
    """Time of day, UTC: what a reader without scripts sees."""
    return datetime.fromtimestamp(at_ms / 1000, UTC).strftime("%H:%M:%S")


def iso(at_ms: int) -> str:
    """RFC 3339 in UTC with milliseconds, for `<time datetime>`."""
    return datetime.fromtimestamp(at_ms / 1000, UTC).isoformat(timespec="milliseconds").replace("+00:00", "Z")


def day(at_ms: int) -> str:
    return datetime.fromtimestamp(at_ms / 1000, UTC).strftime("%Y-%m-%d %H:%M:%S")


def percent(part: float, whole: float) -> float:
    """Share of `whole` in percent, between 0 and 100 and with two decimals: widths in drawings."""
    return round(min(max(part / whole, 0.0), 1.0) * 100, 2) if whole > 0 else 0.0


def share(cells: int) -> str:
    """The part of a device that `cells` are: `½`, `whole`."""
    return SHARES.get(cells, f"{cells}/{CELLS}")


def slug(name: str) -> str:
    """Make any name fit for an element's id and a CSS selector, without two names falling together."""
    return "".join(c if c.isascii() and (c.isalnum() or c == "-") else f"_{ord(c):x}_" for c in name)


def short(name: str) -> str:
    """The telling end of an id: `ins_01J8...7QXK` -> `7QXK`. Names without a prefix stay whole."""
    head, mark, tail = name.partition("_")
    return f"{head} …{tail[-5:]}" if mark and len(tail) > 10 else name
