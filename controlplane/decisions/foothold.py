"""What is done for a model while it waits for a place: all of the way up that needs none."""

from controlplane.decisions import hostroom, images, room, standing
from controlplane.decisions.board import Board, Plan
from controlplane.decisions.draft import Draft
from controlplane.events import InstanceDirected
from controlplane.fleet.members import Instance, Model
from controlplane.fleet.state import Fleet
from controlplane.rungs import Rung


def prepare(draft: Draft, model: Model, found: Plan, board: Board, operation: str | None) -> None:
    """Bring a saved skeleton from the disk to `checkpoint`, and the weights into the pool: only the way from the host to the
    device is left then. It takes none of the device's bytes, and nobody is sent away for it.
    """
    fleet, node = draft.fleet, draft.fleet.devices[found.slot.device].node
    assert model.facts is not None
    if found.instance is not None or model.spec.gpus > 1 or not room.pool_has_room(fleet, model, node, board):
        return
    here = [
        i for i in fleet.instances.values()
        if i.node == node and i.configuration == model.facts.configuration and i.instance not in board.kept
    ]  # fmt: skip
    if any(i.rung is Rung.CHECKPOINT or standing.rising(i) for i in here):
        return  # one waits there already, or is on its way
    for instance in sorted(here, key=lambda i: (i.since_ms, i.instance)):
        if _can_rise(draft.fleet, instance):
            board.kept.add(instance.instance)
            draft.emit(
                InstanceDirected(
                    node=node, instance=instance.instance, rung=Rung.CHECKPOINT, model=model.model, revision=model.revision,
                    code="waiting", pool_bytes=model.facts.weight_bytes,
                ),
                operation=operation,
            )  # fmt: skip
            return


def _can_rise(fleet: Fleet, instance: Instance) -> bool:
    usable = any(image.state == "ok" for image in images.of(fleet, instance))
    saved = instance.rung is Rung.SAVED and standing.idle(fleet, instance)
    return saved and usable and hostroom.unable(fleet, instance) is None
