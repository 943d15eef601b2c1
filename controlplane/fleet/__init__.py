"""The fleet's state and its evolution."""

from controlplane.fleet.callers import Gateway, Operation, Request
from controlplane.fleet.evolve import Gap, evolve, fold
from controlplane.fleet.members import (
    ANEW,
    DISK_FULL,
    ENGINE_OUTDATED,
    MOVE,
    REBUILD,
    Configuration,
    Directive,
    Image,
    Instance,
    Model,
    Rejection,
    SetBack,
    Unsaved,
    WeightSet,
)
from controlplane.fleet.places import Device, Grant, Node
from controlplane.fleet.state import EVOLVE_VERSION, Fleet, dump, load

__all__ = [
    "ANEW", "DISK_FULL", "ENGINE_OUTDATED", "EVOLVE_VERSION", "MOVE", "REBUILD", "Configuration", "Device", "Directive",
    "Fleet", "Gap", "Gateway", "Grant", "Image", "Instance", "Model", "Node", "Operation", "Rejection", "Request", "SetBack",
    "Unsaved", "WeightSet", "dump", "evolve", "fold", "load",
]  # fmt: skip
