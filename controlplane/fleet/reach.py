"""How far down the ladder an instance can go, as far as state tells."""

from collections.abc import Mapping
from typing import Final

from controlplane.fleet.members import Instance
from controlplane.fleet.state import Fleet
from controlplane.rungs import NOT_CHECKPOINTABLE
from controlplane.spec import Argument

NO_CUDA: Final = "no_cuda"
"""Reason of a refusal: there is no GPU that the engine could be taken off, or nothing that takes it off."""


def holds_gpu(engine: str, arguments: Mapping[str, Argument]) -> bool:
    """Whether such an engine has memory of a GPU from its start on, or pretends to."""
    return engine == "vllm" or (engine == "fake" and bool(arguments.get("gpu")))


def no_checkpoint(fleet: Fleet, instance: Instance) -> str | None:
    """Why the instance can't go to `checkpoint` (reason `no_cuda`); None: it can."""
    configuration, node = fleet.configurations.get(instance.configuration), fleet.nodes.get(instance.node)
    if configuration is None or not holds_gpu(configuration.engine, configuration.arguments):
        return without_gpu(configuration.engine if configuration else "the engine")
    if instance.ranks and not configuration.arguments.get("gang_checkpoint"):
        return (
            f"{instance.instance} takes {len(instance.ranks)} devices: its ranks would have to give up their communicators and "
            "CUDA graphs and make them anew, which its model does not ask for (arguments.gang_checkpoint)"
        )
    if instance.directive is not None and instance.directive.code == NOT_CHECKPOINTABLE:
        return (
            f"{instance.instance} has tried and could not: its events since {instance.directive.number} say why. Ask again "
            "once it was used, or stop it"
        )
    if configuration.engine == "fake":
        return None  # it pretends to hold a GPU, and its node pretends to take it off
    if node is not None and node.no_checkpoint:
        return f"{instance.node} can't take engines off a GPU: {node.no_checkpoint}"
    return None


def why_still(fleet: Fleet, instance: Instance) -> str | None:
    """Why the instance can't be taken to another device; None: it can. One that holds no GPU is as well off on any device."""
    configuration = fleet.configurations.get(instance.configuration)
    if configuration is None or not holds_gpu(configuration.engine, configuration.arguments):
        return None
    return no_checkpoint(fleet, instance)


def without_gpu(engine: str) -> str:
    return f"a checkpoint takes a skeleton off a GPU, and {engine} holds none: use sleep or save"
