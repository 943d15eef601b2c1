"""Commands: what somebody wants to happen, or says has happened. A closed union; the decider alone answers."""

import msgspec

from controlplane.commands.desk import BeginReign, NodeHeard, NodeSilent, Tick
from controlplane.commands.gateway import Admit, CancelRequest, CloseGateway, End, EndRequests, Interrupt, OpenGateway
from controlplane.commands.node import (
    DeviceFound,
    Farewell,
    Hello,
    ImageFound,
    InstanceFound,
    ReportCheckpointed,
    ReportDropped,
    ReportEnded,
    ReportFailed,
    ReportForeign,
    ReportImageBuilt,
    ReportImageFailed,
    ReportImageRefused,
    ReportImageRemoved,
    ReportImageRoom,
    ReportModel,
    ReportSaved,
    ReportSlept,
    ReportStaged,
    ReportUnusable,
    ReportUp,
)
from controlplane.commands.operator import (
    ApplySettings,
    Checkpoint,
    Load,
    Move,
    PinImage,
    RebuildImage,
    RegisterModel,
    RemoveImage,
    RetireModel,
    Retry,
    ReviseModel,
    Save,
    Sleep,
    Stop,
)

AnyCommand = (
    BeginReign | Tick | NodeSilent | NodeHeard
    | OpenGateway | CloseGateway | Admit | EndRequests | Interrupt | CancelRequest
    | RegisterModel | ReviseModel | RetireModel | ApplySettings | Load | Sleep | Checkpoint | Save | Move | Stop | Retry
    | RemoveImage | RebuildImage | PinImage
    | Hello | Farewell | ReportModel | ReportUnusable | ReportStaged | ReportDropped | ReportForeign
    | ReportUp | ReportSlept | ReportCheckpointed | ReportSaved | ReportEnded | ReportFailed
    | ReportImageBuilt | ReportImageRefused | ReportImageFailed | ReportImageRemoved | ReportImageRoom
)  # fmt: skip


class Order(msgspec.Struct, frozen=True, kw_only=True):
    """A command with its id and its author, as it travels on `cmd.*`.

    The id makes it idempotent: sent again, it gets its first answer. `actor` is set by whoever authenticated
    the author (web for people, the node's credentials for workers).
    """

    id: str
    actor: str
    body: AnyCommand
    trace: str | None = None


__all__ = [
    "Admit", "AnyCommand", "ApplySettings", "BeginReign", "CancelRequest", "Checkpoint", "CloseGateway", "DeviceFound",
    "End", "EndRequests", "Farewell", "Hello", "ImageFound", "InstanceFound", "Interrupt", "Load", "Move", "NodeHeard",
    "NodeSilent", "OpenGateway", "Order", "PinImage", "RebuildImage", "RegisterModel", "RemoveImage", "ReportCheckpointed",
    "ReportDropped", "ReportEnded", "ReportFailed", "ReportForeign", "ReportImageBuilt", "ReportImageFailed",
    "ReportImageRefused", "ReportImageRemoved", "ReportImageRoom", "ReportModel", "ReportSaved", "ReportSlept", "ReportStaged",
    "ReportUnusable", "ReportUp", "RetireModel", "Retry", "ReviseModel", "Save", "Sleep", "Stop", "Tick",
]  # fmt: skip
