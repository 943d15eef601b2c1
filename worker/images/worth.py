"""Which images go first when they take too much room. Pure.

Those that can't be used go before all others. Of the rest the least valuable first: what an image saves is the time that it
took to make, as often as it is used; that is worth less the longer nobody wanted it, and less per byte the larger it is.
"""

from collections.abc import Iterable
from typing import Final

from msgspec import Struct

DAY_MS: Final = 86_400_000


class Holding(Struct, frozen=True, kw_only=True):
    """An image, as far as its value goes. Times in Unix milliseconds."""

    image: str
    size_bytes: int
    made_ms: int = 0
    used_ms: int = 0
    """0: never used."""
    uses: int = 0
    took_ms: int = 0
    """What it took to make."""
    usable: bool = True
    kept: bool = False
    """Pinned, or just made."""


def worth(holding: Holding, now_ms: int) -> float:
    """Milliseconds saved per mebibyte and day of not being wanted."""
    days = max(0, now_ms - max(holding.used_ms, holding.made_ms)) / DAY_MS
    return (1 + holding.took_ms) * (1 + holding.uses) / (1 + days) / (1 + holding.size_bytes / (1 << 20))


def surplus(holdings: Iterable[Holding], over_bytes: int, now_ms: int) -> list[Holding]:
    """What has to go for `over_bytes` to be free, in order; less than that if only kept ones are left."""
    gone: list[Holding] = []
    for holding in sorted(holdings, key=lambda one: (one.usable, worth(one, now_ms), one.image)):
        if over_bytes > 0 and not holding.kept:
            gone.append(holding)
            over_bytes -= holding.size_bytes
    return gone
