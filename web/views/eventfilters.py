"""What is wrong with a filter over events that can't match any: a type or a stream that there is not."""

from collections.abc import Iterable
from difflib import get_close_matches
from typing import Final

from controlplane.events import BY_NAME

SHOWN: Final = 100
"""Characters of what somebody wrote that are said again."""


def wrong_type(name: str) -> str | None:
    """A sentence for a type that no event has, with the nearest; None: events of it may be there."""
    if name in BY_NAME:
        return None
    return f"there is no event of type {_shown(name)}; {_nearest(name, BY_NAME)}"


def wrong_stream(name: str) -> str | None:
    """Likewise for a stream; None: it is KIND:NAME, and there are events of that kind."""
    kind, colon, rest = name.partition(":")
    kinds = sorted({event.AGGREGATE for event in BY_NAME.values()})
    if kind in kinds and rest:
        return None
    if kind in kinds or not colon:
        return f"{_shown(name)} is no stream; write one as KIND:NAME, for example model:NAME or device:cpu0"
    return f"there is no stream of the kind {_shown(kind)}; {_nearest(kind, kinds)}"


def _shown(name: str) -> str:
    return repr(name[:SHOWN])


def _nearest(name: str, known: Iterable[str]) -> str:
    near = get_close_matches(name, known, n=1)
    return f"did you mean {near[0]!r}?" if near else f"there are {', '.join(sorted(known))}"
