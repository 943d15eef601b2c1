"""Events: frozen, past tense, a closed union. `AnyEvent` is what `fleet.evolve` matches on."""

from typing import Final, get_args

from controlplane.events.image import ImageBuilt, ImageDismissed, ImageFailed, ImagePinned, ImageRefused, ImageRemoved
from controlplane.events.instance import (
    GrantGiven,
    GrantReturned,
    ImageRoomFound,
    InstanceCheckpointed,
    InstanceCreated,
    InstanceDirected,
    InstanceEnded,
    InstanceFailed,
    InstanceOverdue,
    InstanceSaved,
    InstanceSlept,
    InstanceUp,
    Step,
)
from controlplane.events.model import (
    ConfigurationFound,
    ModelCleared,
    ModelInspected,
    ModelRegistered,
    ModelRejected,
    ModelRetired,
    ModelRevised,
    ModelSetBack,
    SkeletonMeasured,
)
from controlplane.events.node import (
    DeviceDeclared,
    DeviceWithdrawn,
    ForeignMemoryFound,
    ForeignMemoryGone,
    NodeFellSilent,
    NodeHeardAgain,
    NodeJoined,
    NodeLeft,
    NodeLimits,
    NodeLimitsChanged,
    Outsider,
)
from controlplane.events.operation import OperationFailed, OperationRequested, OperationSucceeded
from controlplane.events.plane import GatewayClosed, GatewayOpened, ReignBegan, Revision, SettingsApplied
from controlplane.events.record import Event
from controlplane.events.request import (
    RequestAccepted,
    RequestCancelled,
    RequestFailed,
    RequestFinished,
    RequestInterrupted,
    RequestQueued,
    RequestRouted,
)
from controlplane.events.weights import WeightsDismissed, WeightsDropped, WeightsStaged

AnyEvent = (
    ReignBegan | GatewayOpened | GatewayClosed | SettingsApplied
    | NodeJoined | NodeFellSilent | NodeHeardAgain | NodeLeft | NodeLimitsChanged | DeviceDeclared | DeviceWithdrawn
    | ForeignMemoryFound | ForeignMemoryGone
    | ModelRegistered | ModelRevised | ModelRetired | ModelInspected | ModelRejected | ModelSetBack | ModelCleared
    | ConfigurationFound | SkeletonMeasured
    | WeightsStaged | WeightsDismissed | WeightsDropped
    | GrantGiven | GrantReturned
    | InstanceCreated | InstanceDirected | InstanceUp | InstanceSlept | InstanceCheckpointed | InstanceSaved
    | InstanceEnded | InstanceFailed | InstanceOverdue
    | ImageBuilt | ImageRefused | ImageFailed | ImageDismissed | ImagePinned | ImageRemoved | ImageRoomFound
    | RequestAccepted | RequestQueued | RequestRouted | RequestInterrupted
    | RequestFinished | RequestFailed | RequestCancelled
    | OperationRequested | OperationSucceeded | OperationFailed
)  # fmt: skip

BY_NAME: Final[dict[str, type[AnyEvent]]] = {kind.__name__: kind for kind in get_args(AnyEvent)}

__all__ = [
    "BY_NAME", "AnyEvent", "ConfigurationFound", "DeviceDeclared", "DeviceWithdrawn", "Event", "ForeignMemoryFound",
    "ForeignMemoryGone", "GatewayClosed", "GatewayOpened", "GrantGiven", "GrantReturned", "ImageBuilt", "ImageDismissed",
    "ImageFailed", "ImagePinned", "ImageRefused", "ImageRemoved", "ImageRoomFound", "InstanceCheckpointed", "InstanceCreated",
    "InstanceDirected", "InstanceEnded", "InstanceFailed", "InstanceOverdue", "InstanceSaved", "InstanceSlept",
    "InstanceUp", "ModelCleared", "ModelInspected",
    "ModelRegistered", "ModelRejected", "ModelRetired", "ModelRevised", "ModelSetBack", "NodeFellSilent", "NodeHeardAgain",
    "NodeJoined", "NodeLeft", "NodeLimits", "NodeLimitsChanged", "OperationFailed", "OperationRequested", "OperationSucceeded",
    "Outsider", "ReignBegan", "RequestAccepted", "RequestCancelled", "RequestFailed", "RequestFinished", "RequestInterrupted",
    "RequestQueued", "RequestRouted",
    "Revision", "SettingsApplied", "SkeletonMeasured", "Step", "WeightsDismissed", "WeightsDropped", "WeightsStaged",
]  # fmt: skip
