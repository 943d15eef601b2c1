"""What events mean for the grants of devices' cells."""

from msgspec.structs import replace

from controlplane.events import GrantGiven, GrantReturned
from controlplane.fleet import instances
from controlplane.fleet.members import Grant
from controlplane.fleet.state import Fleet


def given(fleet: Fleet, e: GrantGiven, at: int, position: int) -> Fleet:
    grant = Grant(
        number=position, node=e.node, device=e.device, instance=e.instance, offset=e.offset, cells=e.cells, since_ms=at
    )  # fmt: skip
    held = replace(fleet, grants=fleet.grants.set(position, grant))
    return instances.changed(held, e.instance, grant=position, device=e.device)


def returned(fleet: Fleet, e: GrantReturned) -> Fleet:
    freed = replace(fleet, grants=fleet.grants.delete(e.grant))
    instance = freed.instances.get(e.instance)
    return instances.changed(freed, e.instance, grant=None) if instance and instance.grant == e.grant else freed
