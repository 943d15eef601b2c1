"""What events mean for the grants of devices' cells."""

from msgspec.structs import replace

from controlplane.events import GrantGiven, GrantReturned
from controlplane.fleet import instances
from controlplane.fleet.places import Grant
from controlplane.fleet.state import Fleet


def given(fleet: Fleet, e: GrantGiven, at: int, position: int) -> Fleet:
    """Of a gang's first rank, of a further one, or (to whoever holds one already) of the device that it moves to."""
    grant = Grant(
        number=position, node=e.node, device=e.device, instance=e.instance, offset=e.offset, cells=e.cells, since_ms=at,
        gang=e.gang, rank=e.rank,
    )  # fmt: skip
    held = replace(fleet, grants=fleet.grants.set(position, grant))
    known = fleet.instances[e.instance]
    if e.gang:
        ranks, gang = (*(known.ranks or known.devices), e.device), (*(known.gang or (e.gang,)), position)
        return instances.changed(held, e.instance, ranks=ranks, gang=gang)
    if known.grant is not None:
        return instances.changed(held, e.instance, moving_to=position)
    return instances.changed(held, e.instance, grant=position, device=e.device, ranks=(), gang=())


def returned(fleet: Fleet, e: GrantReturned) -> Fleet:
    freed = replace(fleet, grants=fleet.grants.delete(e.grant))
    known = freed.instances.get(e.instance)
    if known is None or e.grant not in known.grants:
        return freed
    return instances.changed(
        freed, e.instance, grant=None if known.grant == e.grant else known.grant,
        gang=tuple(number for number in known.gang if number != e.grant),
        moving_to=None if known.moving_to == e.grant else known.moving_to,
    )  # fmt: skip
