"""What a batch of events changes in `holding`: grants that end, cells that new ones take. Pure; both twins use it."""

from collections.abc import Sequence

import msgspec

from controlplane.envelope import Recorded
from controlplane.events import GrantGiven, GrantReturned


class Change(msgspec.Struct, frozen=True):
    """`freed`: (device, grant number) held before the batch. `held`: (device, cell, grant number) held after it."""

    freed: tuple[tuple[str, int], ...] = ()
    held: tuple[tuple[str, int, int], ...] = ()


NOTHING = Change()


def change(events: Sequence[Recorded]) -> Change:
    """The net change: a grant given and returned within the batch leaves no trace."""
    freed: list[tuple[str, int]] = []
    given: dict[int, GrantGiven] = {}
    for recorded in events:
        match recorded.event:
            case GrantGiven() as event:
                given[recorded.position] = event
            case GrantReturned() as event:
                if given.pop(event.grant, None) is None:
                    freed.append((event.device, event.grant))
            case _:
                continue
    if not freed and not given:
        return NOTHING
    held = [
        (event.device, cell, number)
        for number, event in given.items()
        for cell in range(event.offset, event.offset + event.cells)
    ]
    return Change(tuple(freed), tuple(held))
