"""A new image's proof overlaps what a climb overlaps, and nothing of that is left when it fails."""

import asyncio
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from msgspec.structs import replace

from tests.unit.worker.test_image_store import drafted
from worker.deadlines import Deadlines
from worker.failure import StepFailed
from worker.images import proving
from worker.images.store import Store
from worker.moves import EngineState, Goal
from worker.parts import Parts

GOAL = Goal("m", 1)


class Scene:
    """An instance, and what is done to it in its order."""

    def __init__(self, root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.done: list[str] = []
        self.filling, self.restored = asyncio.Event(), asyncio.Event()
        store = Store(root / "images")
        self.manifest = replace(drafted(store, "pages"), gpu="GPU-1")
        self.local: Any = SimpleNamespace(
            site=SimpleNamespace(images=SimpleNamespace(store=store), deadlines=Deadlines()),
            seen=SimpleNamespace(own_layout=True, engine=EngineState.CONNECTED, staged=("source", "ws_a")),
            stand_down=lambda: self.done.append("stand_down"), unfill=lambda: self.done.append("unfill"),
        )  # fmt: skip
        monkeypatch.setattr(proving.filling, "fill", self._fill)
        monkeypatch.setattr(proving, "bring_back", self._bring_back)
        monkeypatch.setattr(proving.checkpoint, "get_ready", lambda *_: self.done.append("get_ready"))
        monkeypatch.setattr(proving.checkpoint, "up", self._step("up"))
        monkeypatch.setattr(proving.knownanswer, "check", self._step("check", "same_tokens"))
        for name in ("attach", "wake", "sleep", "detach", "verify"):
            monkeypatch.setattr(proving.occupancy, name, self._step(name))

    def _step(self, name: str, found: str = "") -> Callable[..., Any]:
        async def step(*_: Any) -> str:
            self.done.append(name)
            return found

        return step

    async def _fill(self, local: Any) -> int:
        self.filling.set()
        try:
            await self.restored.wait()
            await asyncio.sleep(0)
        except asyncio.CancelledError:
            self.done.append("fill_given_up")
            raise
        self.done.append("filled")
        return 1

    async def _bring_back(self, *_: Any) -> None:
        await self.filling.wait()  # it is begun before CRIU is through
        self.done.append("restore")
        self.restored.set()

    async def prove(self) -> str:
        parts = Parts()
        async with asyncio.timeout(30), proving.returned(self.local, self.manifest, parts) as coming:
            self.done.append("digests")
            return await proving.prove(self.local, GOAL, Any, self.manifest, coming, parts=parts)  # type: ignore[arg-type]


async def test_the_pool_fills_the_device_while_the_engine_comes_back(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    scene = Scene(tmp_path, monkeypatch)
    assert await scene.prove() == "same_tokens"
    assert scene.done[:3] == ["get_ready", "restore", "digests"]
    assert scene.done.index("filled") < scene.done.index("attach")
    assert scene.done[-8:] == ["attach", "wake", "check", "sleep", "detach", "verify", "stand_down", "unfill"]


async def test_an_engine_that_does_not_come_back_leaves_neither_fill_nor_step_process(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    scene = Scene(tmp_path, monkeypatch)

    async def lost(*_: Any) -> None:
        await scene.filling.wait()
        raise StepFailed("restore_failed", "criu ended with status 1")

    monkeypatch.setattr(proving, "bring_back", lost)
    with pytest.raises(StepFailed, match="status 1"):
        await scene.prove()
    assert scene.done == ["get_ready", "stand_down", "fill_given_up", "unfill"]


async def test_one_that_never_had_a_gpu_is_filled_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    scene = Scene(tmp_path, monkeypatch)
    scene.manifest = replace(scene.manifest, gpu=None)
    scene.filling.set()
    assert await scene.prove() == "same_tokens"
    assert not {"get_ready", "filled", "up"} & set(scene.done)


async def test_weights_that_have_left_the_pool_prove_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    scene = Scene(tmp_path, monkeypatch)

    async def gone(local: Any) -> int:
        local.seen.staged = None
        return 0

    monkeypatch.setattr(proving.occupancy, "attach", gone)
    with pytest.raises(StepFailed) as failed:
        await scene.prove()
    assert failed.value.code == "unknown_set"
    assert "wake" not in scene.done and scene.done[-1] == "unfill"
