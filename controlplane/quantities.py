"""Sizes, durations and shares as people write them."""

import re
from fractions import Fraction
from typing import Final

from controlplane.spec import CELLS

_SIZE: Final = re.compile(r"(\d{1,24}(?:\.\d{1,18})?)\s*(B|[KMGT]iB|[KMGT]B)?", re.ASCII)
_UNITS: Final = {
    "B": 1, "KiB": 1 << 10, "MiB": 1 << 20, "GiB": 1 << 30, "TiB": 1 << 40,
    "KB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12,
}  # fmt: skip
_DURATION: Final = re.compile(r"(\d{1,18}(?:\.\d{1,18})?)\s*(ms|s|m|h|d)", re.ASCII)
_MILLISECONDS: Final = {"ms": 1, "s": 1000, "m": 60_000, "h": 3_600_000, "d": 86_400_000}

LONGEST_MS: Final = 3650 * _MILLISECONDS["d"]
"""Ten years, in milliseconds."""

_SHARE: Final = re.compile(r"\d{1,18}(?:\.\d{1,18}|/\d{1,18})?", re.ASCII)
"""No exponents: a fraction of 1e999999999 takes all the memory there is to be found too large."""

SHARES: Final = (1, 2, 4, 8)
"""Runs of cells that a grant may have: the nodes of the buddy tree."""


def size_bytes(value: object) -> int:
    """Return bytes from a whole number or a text such as `"64GiB"` or `"1.5 GB"`, the part of a byte left off that `"1.1GiB"`
    comes to. Raises ValueError, with an example."""
    if isinstance(value, int) and not isinstance(value, bool) and value >= 0:
        return value
    found = _SIZE.fullmatch(value.strip()) if isinstance(value, str) else None
    if found is None:
        raise ValueError(f'{value!r} is not a size; write bytes as a whole number, or a text such as "512MiB" or "64GiB"')
    size = Fraction(found[1]) * _UNITS[found[2] or "B"]
    if size.denominator > 1 and (found[2] or "B") == "B":
        raise ValueError(f'{value!r} is no whole number of bytes; write one, or a text such as "512MiB" or "64GiB"')
    return int(size)


def duration_ms(value: object) -> int | None:
    """Return milliseconds from `"5m"`, `"1.5s"`, `"250ms"`, ...; None for `"never"`. Raises ValueError, with an example."""
    if value == "never":
        return None
    found = _DURATION.fullmatch(value.strip()) if isinstance(value, str) else None
    if found is None:
        raise ValueError(f'{value!r} is not a duration; write a text such as "30s", "5m", "4h", or "never"')
    exact = Fraction(found[1]) * _MILLISECONDS[found[2]]
    milliseconds = int(exact)
    if milliseconds != exact:
        raise ValueError(f'{value!r} is no whole number of milliseconds; write a text such as "250ms" or "1.5s"')
    if milliseconds > LONGEST_MS:
        raise ValueError(f'{value!r} is longer than {LONGEST_MS // _MILLISECONDS["d"]} days; write "never" if that is meant')
    return milliseconds


def share_cells(value: object) -> int | None:
    """Return how many cells (1, 2, 4 or 8) a share of a device is; None for `"auto"`.

    Takes 1, 0.5, "1/2", "0.25", "1/8" and the like. Raises ValueError, with the nearest shares that there are.
    """
    if value == "auto":
        return None
    wrong = ValueError(f'{value!r} is not a share of a device; write "auto", or one of {_WRITTEN}')
    written = value.replace(" ", "") if isinstance(value, str) else ""
    try:
        if isinstance(value, int | float) and not isinstance(value, bool) and 0 < value <= 1:
            share = Fraction(value)
        elif _SHARE.fullmatch(written):
            share = Fraction(written)
        else:
            raise wrong
    except ZeroDivisionError:
        raise wrong from None
    if not 0 < share <= 1:
        raise wrong
    above = next(cells for cells in SHARES if share * CELLS <= cells)
    if share * CELLS != above:
        smaller = f"{_share_text(above // 2)} (less), " if above > 1 else ""
        raise ValueError(
            f"{value!r} is not a share that a device has: they are {_WRITTEN}; "
            f'write {smaller}{_share_text(above)} (which holds it), or "auto"'
        )
    return above


def _share_text(cells: int) -> str:
    return "1" if cells == CELLS else f'"1/{CELLS // cells}"'


_WRITTEN: Final = f"{', '.join(map(_share_text, SHARES[:-1]))} and {_share_text(SHARES[-1])}"


def times(number: int) -> str:
    """How often something happened: `once`, `twice`, `3 times`."""
    return {1: "once", 2: "twice"}.get(number, f"{number} times")


def human_bytes(size: int) -> str:
    """Write bytes for people: `1.5 GiB`."""
    scaled, unit = float(size), "B"
    for unit in ("B", "KiB", "MiB", "GiB", "TiB"):
        if scaled < 1024 or unit == "TiB":
            break
        scaled /= 1024
    return f"{scaled:.0f} {unit}" if unit == "B" or scaled >= 100 else f"{scaled:.1f} {unit}"


def need_and_limit(need: int, limit: int) -> tuple[str, str]:
    """Write two numbers of bytes for people, to the byte where they would read the same and are not."""
    texts = human_bytes(need), human_bytes(limit)
    return texts if need == limit or texts[0] != texts[1] else (f"{need} bytes", f"{limit} bytes")
