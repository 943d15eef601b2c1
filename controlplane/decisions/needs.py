"""What a model needs of a device and of a pool, in bytes and cells, and whether any has it."""

from collections import Counter
from typing import Final

import msgspec
from msgspec.structs import replace

from controlplane.decisions.placement import smallest_share
from controlplane.fleet.members import Instance, Model
from controlplane.fleet.places import Device
from controlplane.fleet.state import Fleet
from controlplane.quantities import need_and_limit
from controlplane.refusal import Code
from controlplane.rungs import Rung
from controlplane.spec import CELLS, EngineName, ModelFacts, ModelSpec

KINDS: Final[dict[EngineName, frozenset[str]]] = {
    "vllm": frozenset({"gpu"}),
    "transformers": frozenset({"cpu"}),
    "fake": frozenset({"cpu", "gpu"}),
}
"""Kinds of device that an engine runs on."""
SKELETON_BYTES: Final = {"cpu": 512 << 20, "gpu": 3 << 30}
"""Assumed until a transition has measured it: torch with a small model takes 150-400 MiB, a vLLM context with its graphs
1-7 GiB."""
NO_GPU: Final = (
    'write engine = "transformers", or run a node with an NVIDIA GPU, its driver and pip install "enginehouse[gpu]" '
    "(`enginehouse doctor` there says what is missing)"
)


class CannotFit(msgspec.Struct, frozen=True):
    """Both numbers of a need that nothing here will ever meet."""

    where: str
    """`device` or `pool`; `devices`: those of one node, counted instead of bytes; `gpu`, `cpu`: there is none of that kind."""
    need_bytes: int
    limit_bytes: int
    kv_bytes: int = 0
    """Of `need_bytes`, the model's own wish."""

    def message(self, model: str) -> str:
        if self.where == "devices":
            return (
                f"{model} needs {self.need_bytes} whole devices of one node, and no node has more than {self.limit_bytes} "
                "that could hold its part: write a smaller share.gpus, or run it on a larger node"
            )
        if self.where == "gpu":
            return f"{model} needs a GPU, and no node has one that it can use: {NO_GPU}"
        if self.where == "cpu":
            return f"{model} needs a share of host memory, and no node declares one: add it to devices in the node's settings"
        remedy = "raise the node's pool_bytes"
        if self.where == "device":
            less = self.need_bytes - self.kv_bytes <= self.limit_bytes
            remedy = "declare a larger device" + (", or lower the model's kv_bytes" if less else "")
        needs, has = need_and_limit(self.need_bytes, self.limit_bytes)
        return f"{model} needs {needs} of one {self.where}, and the largest {self.where} has {has}: {remedy}"


def suits(model: Model, device: Device) -> bool:
    return device.kind in KINDS[model.spec.engine]


def skeleton_bytes(fleet: Fleet, model: Model) -> int | None:
    """As measured, else as the fake engine is told to pretend; None: nobody knows yet."""
    configuration = fleet.configurations.get(model.facts.configuration) if model.facts else None
    if configuration is not None and configuration.skeleton_bytes is not None:
        return configuration.skeleton_bytes
    told = model.spec.arguments.get("skeleton_bytes") if model.spec.engine == "fake" else None
    return int(told) if told is not None else None


def sure_bytes(fleet: Fleet, model: Model) -> int:
    """What it takes on a device at the very least: measured and declared bytes, no assumption. 0 before inspection.

    Of a gang on each of its devices: weights and KV are cut over them, a skeleton each has whole.
    """
    if model.facts is None:
        return 0
    return -(-(model.facts.weight_bytes + model.facts.kv_bytes) // model.spec.gpus) + (skeleton_bytes(fleet, model) or 0)


def device_bytes(fleet: Fleet, model: Model, device: Device) -> int:
    """What `up` is to take there. An assumption about the skeleton never claims more than the whole device, or what others
    leave of it."""
    sure = sure_bytes(fleet, model)
    if skeleton_bytes(fleet, model) is not None:
        return sure
    return max(sure, min(sure + SKELETON_BYTES.get(device.kind, 0), device.usable_bytes))


def cells(fleet: Fleet, model: Model, device: Device) -> int | None:
    """Cells it takes of that device: as its spec says, else the smallest share that holds it; None: it can't fit there."""
    if sure_bytes(fleet, model) > device.size_bytes or not suits(model, device):
        return None
    if model.spec.gpus > 1:
        return CELLS
    if model.spec.cells is not None:
        return model.spec.cells
    return smallest_share(device_bytes(fleet, model, device), device.size_bytes)


def wanted(fleet: Fleet, model: Model, *, beside: bool = True) -> dict[str, int]:
    """Device -> cells, over all devices of nodes that are heard and whose pool could hold the weights.

    For a gang, of nodes that have enough of them. `beside`: only where it fits beside memory that is not the plane's.
    """
    weights, sure = model.facts.weight_bytes if model.facts else 0, sure_bytes(fleet, model)
    found = {}
    for device in fleet.devices.values():
        node = fleet.nodes.get(device.node)
        if node is None or not node.heard or node.pool_budget_bytes < weights:
            continue
        if beside and sure > device.usable_bytes:
            continue
        if (count := cells(fleet, model, device)) is not None:
            found[device.device] = count
    if model.spec.gpus > 1:
        there = Counter(fleet.devices[device].node for device in found)
        found = {device: count for device, count in found.items() if there[fleet.devices[device].node] >= model.spec.gpus}
    return found


def cannot_fit(fleet: Fleet, model: Model) -> CannotFit | None:
    """Why no device and pool that the fleet knows, busy or silent or not, could ever hold the model; None: one could.

    A fleet without devices says nothing: they may still come.
    """
    if not fleet.devices:
        return None
    suiting = [device for device in fleet.devices.values() if suits(model, device)]
    if not suiting:
        return CannotFit(min(KINDS[model.spec.engine]), sure_bytes(fleet, model), 0)
    if model.facts is None:
        return None
    sure, weights = sure_bytes(fleet, model), model.facts.weight_bytes
    fitting = [d.node for d in fleet.devices.values() if cells(fleet, model, d) is not None]
    if not fitting:
        return CannotFit("device", sure, max(d.size_bytes for d in suiting), model.facts.kv_bytes // model.spec.gpus)
    most = max(Counter(fitting).values())
    if most < model.spec.gpus:
        return CannotFit("devices", model.spec.gpus, most)
    pools = [fleet.nodes[node].pool_budget_bytes for node in fitting if node in fleet.nodes]
    if pools and max(pools) < weights:
        return CannotFit("pool", weights, max(pools))
    return None


def told_facts(spec: ModelSpec) -> ModelFacts | None:
    """What the arguments alone say of the sizes (the fake engine's do); None: the source must be opened first."""
    weights, kv = spec.arguments.get("weight_bytes"), spec.arguments.get("kv_bytes", 0)
    if spec.engine != "fake" or weights is None:
        return None
    return ModelFacts(configuration="", architecture="", weight_bytes=int(weights), kv_bytes=int(kv), context_tokens=0)


def never_fits(fleet: Fleet, model: Model) -> CannotFit | None:
    """`cannot_fit`, also before a node has inspected the model, as far as its spec gives the numbers."""
    if model.facts is None:
        model = replace(model, facts=told_facts(model.spec))
    return cannot_fit(fleet, model)


def refusal_code(code: str) -> Code:
    """The stable code of a rejection that state holds as text."""
    return Code.CANNOT_FIT if code == Code.CANNOT_FIT else Code.MODEL_UNUSABLE


def held_bytes(fleet: Fleet, instance: Instance, device: str) -> int:
    """The ledger's line for one instance on one device: measured when it stands still, promised while it climbs.

    The promise is the directive's own: the model may have been revised since. A gang's measure is cut evenly over its
    devices. What moves has the device that it leaves and is promised the other.
    """
    directive = instance.directive
    if (target := fleet.grants.get(instance.moving_to or 0)) is not None and target.device == device:
        return directive.need_bytes if directive is not None else 0
    if device not in instance.devices:
        return 0
    measured = -(-instance.bytes_used // len(instance.devices))
    if target is not None:
        return measured
    climbing = directive is not None and directive.rung in (Rung.UP, Rung.SAVED) and not instance.directive_settled
    return max(measured, directive.need_bytes) if directive is not None and climbing else measured


def on(fleet: Fleet, instance: Instance, device: str) -> bool:
    """Whether the instance has, or is promised, memory of the device."""
    target = fleet.grants.get(instance.moving_to or 0)
    return device in instance.devices or (target is not None and target.device == device)
