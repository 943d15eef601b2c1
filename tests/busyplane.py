"""A staged plane on a busy morning: two devices, five models, one of each state that a model can be in."""

from controlplane.events import GrantReturned, InstanceFailed, ModelRejected, ModelSetBack, ReignBegan
from controlplane.subjects import InstanceBeat, NodeBeat, Progress
from tests.staged import GIB, MIB, StagedPlane


def busy(plane: StagedPlane) -> StagedPlane:
    """Fill `plane`, and return it."""
    plane.emit(ReignBegan(host="house", pid=811, epoch=3), ago_ms=700_000)
    plane.node()
    cpu0, cpu1 = plane.device("cpu0"), plane.device("cpu1")
    llama, tiny = "cfg_2b8c1f0d9e7a6b54", "cfg_91aa7c3e5d2f8b06"
    plane.model("smollm2-135m", llama, aliases=("smollm2", "default"))
    plane.model("smollm2-sailor", llama)
    plane.model("tiny-qwen", tiny, weight_bytes=11 * MIB, architecture="Qwen2ForCausalLM", note="random weights")
    plane.model("sql-coder", "cfg_c4", weight_bytes=610 * MIB, architecture="GPT2LMHeadModel")
    plane.model("whale-70b", "cfg_d5", weight_bytes=140 * GIB, architecture="LlamaForCausalLM")
    plane.emit(
        ModelRejected(
            model="whale-70b", revision=1, code="cannot_fit", need_bytes=140 * GIB, limit_bytes=GIB,
            message="whale-70b needs 140 GiB; the largest device, cpu0, has 1.0 GiB. Add a larger device.",
        )
    )  # fmt: skip
    plane.emit(
        ModelSetBack(
            model="sql-coder", failures=3, retry_at_ms=plane.now_ms + 47_000, code="start_failed",
            message="the engine ended with status 1 while it read model.safetensors: no space left on /dev/shm",
        ),
        ago_ms=13_000,
    )  # fmt: skip
    plane.weights("smollm2-135m", "ws_9f2c41d7aa0be3c85512", ago_ms=560_000)
    plane.weights("smollm2-sailor", "ws_41b07c9d2e6f8a1355aa", ago_ms=120_000)
    plane.weights("tiny-qwen", "ws_70aa11bb22cc33dd44ee", 11 * MIB, ago_ms=400_000)
    plane.instance("ins_01JDXB4M9S7QKC2W5T8A", llama)
    plane.instance("ins_01JDXB4M9S7QKC2W5T8B", llama)
    plane.instance("ins_01JDXB4M9S7QKC2W5T8C", tiny)
    plane.instance("ins_01JDXB4M9S7QKC2W5T8D", tiny)
    plane.climb("ins_01JDXB4M9S7QKC2W5T8A", "smollm2-135m", cpu0, 0, 4, ago_ms=310_000)
    plane.up("ins_01JDXB4M9S7QKC2W5T8A", weight_set="ws_9f2c41d7aa0be3c85512", ago_ms=309_000)
    plane.climb("ins_01JDXB4M9S7QKC2W5T8C", "tiny-qwen", cpu1, 0, 1, ago_ms=200_000)
    plane.up("ins_01JDXB4M9S7QKC2W5T8C", weight_set="ws_70aa11bb22cc33dd44ee", ago_ms=199_000, mapped=11 * MIB, used=96 * MIB)
    plane.climb("ins_01JDXB4M9S7QKC2W5T8D", "tiny-qwen", cpu1, 2, 2, ago_ms=180_000)
    plane.up("ins_01JDXB4M9S7QKC2W5T8D", weight_set="ws_70aa11bb22cc33dd44ee", ago_ms=179_000, mapped=11 * MIB, used=96 * MIB)
    plane.sleep("ins_01JDXB4M9S7QKC2W5T8D", ago_ms=61_000)
    for minute in range(24):
        model, instance = (
            ("smollm2-135m", "ins_01JDXB4M9S7QKC2W5T8A") if minute % 3 else ("tiny-qwen", "ins_01JDXB4M9S7QKC2W5T8C")
        )
        request = plane.request(model, instance=instance, ago_ms=(25 - minute) * 9_000)
        plane.end(
            request, {5: "failed", 11: "cancelled"}.get(minute, "finished"), ago_ms=(25 - minute) * 9_000 - 1_700 - minute * 90
        )
    plane.request("smollm2-135m", instance="ins_01JDXB4M9S7QKC2W5T8A", ago_ms=2_300)
    plane.request("smollm2-135m", instance="ins_01JDXB4M9S7QKC2W5T8A", ago_ms=900)
    plane.climb("ins_01JDXB4M9S7QKC2W5T8B", "smollm2-sailor", cpu1, 4, 4, ago_ms=4_100, operation="op_01JDXB4MOPERATION")
    plane.request("smollm2-sailor", reason="smollm2-sailor is on its way up: map weights", ago_ms=4_200)
    plane.request("sql-coder", reason="sql-coder backs off after 3 failed starts", place=2, ago_ms=2_000)
    plane.beat(measured(plane))
    return plane


def measured(plane: StagedPlane, tokens_per_s: float = 41.3, done: int = 163 * MIB) -> NodeBeat:
    """A beat of node n1 that suits `busy`."""
    running = plane.fleet.instances
    return NodeBeat(
        node="n1", incarnation="inc_1", at_ms=plane.now_ms, pool_used_bytes=527 * MIB, pool_budget_bytes=GIB, pool_ok=True,
        device_bytes={"dev-n1-cpu0": 466 * MIB, "dev-n1-cpu1": 402 * MIB},
        instances=tuple(
            InstanceBeat(
                instance=i.instance, running=i.running, tokens_per_s=i.running and tokens_per_s, bytes_used=i.bytes_used
            )
            for i in running.values()
        ),
        progress=(Progress(subject="ins_01JDXB4M9S7QKC2W5T8B", step="map_weights", done=done, total=258 * MIB),),
    )  # fmt: skip


def failed(plane: StagedPlane, instance: str) -> None:
    """The instance's engine dies: it is gone, its cells are free."""
    found = plane.fleet.instances[instance]
    grant = plane.fleet.grants.get(found.grant or 0)
    directive = found.directive.number if found.directive else 0
    told = InstanceFailed(
        node=found.node, instance=instance, directive=directive, rung=found.rung, step="map_weights", code="engine_died",
        message="the engine was killed by signal 9",
    )  # fmt: skip
    plane.emit(told)
    if grant is not None:
        plane.emit(GrantReturned(node=grant.node, device=grant.device, instance=instance, grant=grant.number))
