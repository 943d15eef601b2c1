"""What should be on this node: a pure fold of the node's own events and those of models over the plane's state."""

from immutables import Map
from msgspec import Struct
from msgspec.structs import replace

from controlplane.envelope import Recorded
from controlplane.events import (
    GrantGiven,
    GrantReturned,
    ImageBuilt,
    ImageDismissed,
    ImagePinned,
    ImageRefused,
    ImageRemoved,
    ImageRoomFound,
    InstanceCheckpointed,
    InstanceCreated,
    InstanceDirected,
    InstanceEnded,
    InstanceFailed,
    InstanceSaved,
    InstanceSlept,
    InstanceUp,
    ModelCleared,
    ModelInspected,
    ModelRegistered,
    ModelRejected,
    ModelRetired,
    ModelRevised,
    NodeJoined,
    NodeLimits,
    NodeLimitsChanged,
    WeightsDismissed,
    WeightsDropped,
    WeightsStaged,
)
from controlplane.fleet import ANEW, DISK_FULL, ENGINE_OUTDATED, Directive, Fleet, Grant, Image, Model, Rejection
from controlplane.rungs import Rung


class Wanted(Struct, frozen=True, kw_only=True):
    """Where one instance should be. `directive` is None between its creation and its first directive."""

    instance: str
    configuration: str
    directive: Directive | None = None
    grant: Grant | None = None
    """The cells that go with the directive; set when it says `up`, or `saved` and there is an image to prove."""
    gang: tuple[Grant, ...] = ()
    """Of a gang: those of all ranks, in order of rank, `grant` the first."""
    answered: bool = False
    """Whether the plane has this worker's report that the directive was reached."""
    reached: Rung = Rung.COLD
    """The rung last reported."""
    unsaved: bool = False
    """Whether it stayed off the disk for want of room there, and the plane has not heard of any since."""

    @property
    def grants(self) -> tuple[Grant, ...]:
        return self.gang or ((self.grant,) if self.grant is not None else ())


class Wish(Struct, frozen=True):
    """What people want of one image. `leaving`: who asked for its removal, and why (`ImageDismissed.code`)."""

    pinned: bool = False
    leaving: tuple[str, str] | None = None
    anew: bool = False
    """It must not be used again: a new one is wanted in its place."""


class Desired(Struct, frozen=True, kw_only=True):
    """`position` is that of the last event taken in; older ones are ignored, so a repeated delivery changes nothing."""

    node: str
    position: int = 0
    instances: "Map[str, Wanted]" = Map()
    models: "Map[str, Model]" = Map()
    grants: "Map[int, Grant]" = Map()
    dismissed: frozenset[str] = frozenset()
    """Weight sets that must leave the pool."""
    images: "Map[str, Wish]" = Map()
    """Those of which anybody wants anything."""
    limits: NodeLimits = NodeLimits()
    """What the node's settings allow at present."""
    staged: "Map[str, tuple[tuple[str, int], ...]]" = Map()
    """Weight set -> the (model, revision) pairs that the plane knows it for."""

    @staticmethod
    def of(fleet: Fleet, node: str) -> "Desired":
        """What the plane's state wants of `node`."""
        grants = Map({number: grant for number, grant in fleet.grants.items() if grant.node == node})
        instances = {
            name: Wanted(
                instance=name, configuration=known.configuration, directive=known.directive,
                grant=grants.get(known.directive.grant or 0) if known.directive else None,
                gang=_gang(grants, known.directive.gang) if known.directive else (),
                answered=known.directive is not None and known.directive_settled, reached=known.rung,
                unsaved=known.unsaved is not None and known.unsaved.code in DISK_FULL and not known.unsaved.room,
            )
            for name, known in fleet.instances.items()
            if known.node == node
        }  # fmt: skip
        sets = [known for known in fleet.weights.values() if known.node == node]
        return Desired(
            node=node, position=fleet.position, instances=Map(instances), models=fleet.models, grants=grants,
            dismissed=frozenset(known.weight_set for known in sets if known.dismissed),
            staged=Map({known.weight_set: known.models for known in sets}),
            limits=fleet.nodes[node].limits if node in fleet.nodes else NodeLimits(),
            images=Map({
                image.image: Wish(image.pinned, (image.leaving, "operator") if image.leaving else None, _anew(image))
                for image in fleet.images.values() if image.node == node and (image.pinned or image.leaving or _anew(image))
            }),
        )  # fmt: skip

    def after(self, recorded: Recorded) -> "Desired":
        """The state after one event; an older one than `position`, or one of no concern to a worker, changes nothing."""
        if recorded.position <= self.position:
            return self
        return replace(_apply(self, recorded), position=recorded.position)


def _apply(desired: Desired, recorded: Recorded) -> Desired:
    position, at = recorded.position, recorded.at_ms
    match recorded.event:
        case GrantGiven() as e:
            grant = Grant(
                number=position, node=e.node, device=e.device, instance=e.instance, offset=e.offset, cells=e.cells,
                since_ms=at, gang=e.gang, rank=e.rank,
            )  # fmt: skip
            return replace(desired, grants=desired.grants.set(position, grant))
        case GrantReturned() as e:
            return replace(desired, grants=desired.grants.delete(e.grant)) if e.grant in desired.grants else desired
        case InstanceCreated() as e:
            return _wanted(desired, Wanted(instance=e.instance, configuration=e.configuration))
        case InstanceDirected() as e:
            directive = Directive(
                number=position, rung=e.rung, model=e.model, revision=e.revision, grant=e.grant, code=e.code, at_ms=at,
                gang=e.gang, operation=recorded.operation, victim_of=e.victim_of,
            )  # fmt: skip
            known = desired.instances[e.instance]
            grant_of = desired.grants.get(e.grant) if e.grant is not None else None
            gang = _gang(desired.grants, e.gang)
            return _wanted(desired, replace(known, directive=directive, grant=grant_of, gang=gang, answered=False))
        case InstanceUp() as e:
            return _reached(desired, e.instance, e.directive, Rung.UP, unsaved=False)
        case InstanceSlept() as e:
            return _reached(desired, e.instance, e.directive, Rung.SLEEP, **_unsaved(e))
        case InstanceCheckpointed() as e:
            return _reached(desired, e.instance, e.directive, Rung.CHECKPOINT, **_unsaved(e))
        case InstanceSaved() as e:
            return _reached(desired, e.instance, e.directive, Rung.SAVED, unsaved=False)
        case ImageRoomFound() as e:
            return _wanted(desired, replace(desired.instances[e.instance], unsaved=False))
        case InstanceEnded() | InstanceFailed() as e:
            left = desired.instances.delete(e.instance) if e.instance in desired.instances else desired.instances
            return replace(desired, instances=left)
        case WeightsStaged() as e:
            pairs = (*desired.staged.get(e.weight_set, ()), (e.model, e.revision))
            staged = desired.staged.set(e.weight_set, tuple(dict.fromkeys(pairs)))
            return replace(desired, staged=staged, dismissed=desired.dismissed - {e.weight_set})
        case WeightsDismissed() as e:
            return replace(desired, dismissed=desired.dismissed | {e.weight_set})
        case WeightsDropped() as e:
            staged = desired.staged.delete(e.weight_set) if e.weight_set in desired.staged else desired.staged
            return replace(desired, staged=staged, dismissed=desired.dismissed - {e.weight_set})
        case _:
            return _apply_image(desired, recorded)


def _apply_image(desired: Desired, recorded: Recorded) -> Desired:
    match recorded.event:
        case ImagePinned() as e:
            return _image(desired, e.image, pinned=e.pinned)
        case ImageDismissed() as e:
            return _image(desired, e.image, leaving=(recorded.actor, e.code))
        case ImageRefused() as e:
            return _image(desired, e.image, anew=True) if e.code == ANEW else desired
        case ImageBuilt() as e:
            return _image(desired, e.image, leaving=None, anew=False)
        case ImageRemoved() as e:
            return replace(desired, images=desired.images.delete(e.image)) if e.image in desired.images else desired
        case NodeLimitsChanged() as e:
            return replace(desired, limits=e.after)
        case NodeJoined() as e:
            limits = NodeLimits(
                image_quota_bytes=e.image_quota_bytes, image_pins=e.image_pins, checkpoint_bytes=e.checkpoint_bytes
            )
            return replace(desired, limits=limits)
        case _:
            return _apply_model(desired, recorded)


def _apply_model(desired: Desired, recorded: Recorded) -> Desired:
    match recorded.event:
        case ModelRegistered() as e:
            model = Model(model=e.model, spec=e.spec, revision=e.revision, origin=e.origin, registered_ms=recorded.at_ms)
            return replace(desired, models=desired.models.set(e.model, model))
        case ModelRevised() as e:
            changed: dict[str, object] = {"spec": e.spec, "revision": e.revision}
            return _model(desired, e.model, **changed, **({"facts": None, "rejection": None} if e.hard else {}))
        case ModelRetired() as e:
            return _model(desired, e.model, retired=True)
        case ModelInspected() as e:
            return _model(desired, e.model, facts=e.facts, rejection=None)
        case ModelRejected() as e:
            return _model(desired, e.model, rejection=Rejection(e.code, e.message, e.need_bytes, e.limit_bytes))
        case ModelCleared() as e:
            return _model(desired, e.model, rejection=None, fresh_ms=recorded.at_ms)
        case _:
            return desired  # of no concern to a worker


def _anew(image: Image) -> bool:
    return (image.state, image.code) == ("refused", ANEW)


def _image(desired: Desired, name: str, **changes: object) -> Desired:
    return replace(desired, images=desired.images.set(name, replace(desired.images.get(name, Wish()), **changes)))


def _gang(grants: "Map[int, Grant]", numbers: tuple[int, ...]) -> tuple[Grant, ...]:
    return tuple(grants[number] for number in numbers if number in grants)


def _wanted(desired: Desired, wanted: Wanted) -> Desired:
    return replace(desired, instances=desired.instances.set(wanted.instance, wanted))


def _unsaved(e: InstanceSlept | InstanceCheckpointed) -> dict[str, bool]:
    return {"unsaved": e.code in DISK_FULL} if e.code in DISK_FULL | {ENGINE_OUTDATED} else {}


def _reached(desired: Desired, instance: str, directive: int, rung: Rung, **changes: bool) -> Desired:
    known = desired.instances.get(instance)
    if known is None or known.directive is None:
        return desired
    return _wanted(desired, replace(known, reached=rung, answered=known.directive.number == directive, **changes))


def _model(desired: Desired, name: str, **changes: object) -> Desired:
    known = desired.models.get(name)
    return replace(desired, models=desired.models.set(name, replace(known, **changes))) if known is not None else desired
