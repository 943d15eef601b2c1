"""vLLM on a real device, one tiny model of each kind: taken, woken, switched; tokens are those of a fresh vLLM."""

from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path

import pytest

from compose.bench import swapreport
from compose.bench.engineprocess import EngineFailed
from compose.bench.scene import Scene, Setting
from compose.bench.swap import measure
from compose.bench.swapparts import SwapParts
from worker import gpus
from worker.engines.messages import Attach, Detach, Wake

pytestmark = [
    pytest.mark.skipif(find_spec("vllm") is None, reason="vllm is missing (pip install 'enginehouse[gpu]')"),
    pytest.mark.timeout(400),
]
KINDS = ("tiny", "tiny-untied", "tiny-fp8", "tiny-moe", "tiny-draft")


def _setting(shape: str, work: Path, device: gpus.Gpu) -> Setting:
    return Setting(shape=shape, source=None, devices=(device,), cycles=2, work=work)


@pytest.mark.parametrize("shape", KINDS)
def test_a_kind_of_model_is_swapped_like_any_other(shape: str, tmp_path: Path, device: gpus.Gpu) -> None:
    rows = measure(_setting(shape, tmp_path, device), ["vllm-l1", "vllm-b"], ["switches"], None)
    assert not [part for part in rows["parts"].values() if "failed" in part]
    assert swapreport.same_tokens(rows)
    assert rows["parts"]["plain vLLM"]["same_tokens_as_ours"] and rows["parts"]["plain vLLM, b"]["same_tokens_as_ours"]
    assert rows["parts"]["stage a"]["set"] != rows["parts"]["stage b"]["set"]


@pytest.fixture
def scene(tmp_path: Path, device: gpus.Gpu) -> Iterator[Scene]:
    with Scene(_setting("tiny", tmp_path, device)) as scene:
        scene.make()
        scene.start_pool()
        yield scene


def test_a_set_of_another_layout_is_refused_before_anything_is_mapped(scene: Scene, tmp_path: Path, device: gpus.Gpu) -> None:
    other = Scene(_setting("tiny-untied", tmp_path / "other", device))
    other.socket = scene.socket
    with other:
        other.make()
        stranger = SwapParts(other)
        stranger.start()
        stranger.stage("a")
    parts = SwapParts(scene)
    parts.start()
    parts.stage("a")
    own = parts.cycles("a")
    assert own["median"]["same_tokens"]
    engine = parts.engine
    engine.tell(Detach())
    with pytest.raises(EngineFailed, match=r"layout.* has layout [0-9a-f]{16}, this engine has [0-9a-f]{16}: .*lm_head"):
        engine.tell(Attach(pool_socket=str(scene.socket), weight_set=stranger.sets["a"]))
    state = engine.tell(Detach())
    assert state.attached is None and state.bytes_mapped == 0
    engine.tell(Attach(pool_socket=str(scene.socket), weight_set=parts.sets["a"]))
    engine.tell(Wake(model="a"))
    assert engine.generate(64).ids == parts.tokens["a"], "a refusal leaves no trace"


def test_a_skeleton_that_started_without_weights_brings_any(scene: Scene) -> None:
    parts = SwapParts(scene)
    parts.start()
    parts.stage("a")
    parts.cycles("a")
    bare = scene.start_engine("bare", bare=True)
    staged, row = scene.stage(bare, "b")
    assert row["read_bytes"] > 0 and staged != parts.sets["a"]
    again, found = scene.stage(parts.engine, "b")
    assert (again, found["read_bytes"]) == (staged, 0), "the same files, wherever they were loaded"
    for engine in (bare, parts.engine):
        engine.tell(Attach(pool_socket=str(scene.socket), weight_set=parts.sets["a"]))
        engine.tell(Wake(model="a"))
        assert engine.generate(64).ids == parts.tokens["a"]


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_a_climb_of_a_30b_takes_its_bytes_time_and_little_more(tmp_path: Path, device: gpus.Gpu) -> None:
    """N24's time. (That nothing is pinned on the way of a wake: tests/integration/pool/test_devices.py.)"""
    rows = measure(_setting("30b", tmp_path, device), [], [], None)
    assert not [part for part in rows["parts"].values() if "failed" in part]
    cycle, bus = rows["parts"]["cycles a"]["median"], rows["parts"]["bus"]["bytes_per_s"][0]
    goal_ms = swapreport.OVER_COPY * cycle["bytes_copied"][0] / bus * 1000 + swapreport.CYCLE_MS
    assert cycle["up_ms"][0] <= goal_ms, rows["parts"]["cycles a"]
