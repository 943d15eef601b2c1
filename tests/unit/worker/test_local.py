"""What a worker takes over from the one before it, and what it lets go of in time."""

import asyncio
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from worker import adoption, cells, checkpoint
from worker.adoption import adopt_holder
from worker.cuda.operation import Theatre
from worker.cuda.step import Said
from worker.cuda.surgeon import CudaState
from worker.deadlines import Deadlines
from worker.desired import Wanted
from worker.failure import StepFailed
from worker.holdermessages import Held
from worker.images import steps as images
from worker.local import LocalInstance
from worker.moves import EngineState
from worker.processes import Process

ENGINE = Process(2, 3, "boot")


@pytest.fixture
def blamed() -> list[str]:
    return []


@pytest.fixture
def local(tmp_path: Path, blamed: list[str]) -> LocalInstance:
    cabinet = SimpleNamespace(fail=lambda image, *_, **__: blamed.append(image))
    site: Any = SimpleNamespace(instances=tmp_path, plane=None, caller=None, images=cabinet)
    found = LocalInstance(site, "ins_1", lambda: None)
    found.directory.create("cfg_1")
    return found


def says(local: LocalInstance, **held: Any) -> None:
    """Have its holder answer so."""

    async def answer() -> Held:
        return Held(**{"pid": 1, "engine": ENGINE, "exit": None, "connected": False, "grant": None} | held)

    holder: Any = SimpleNamespace(ask=answer, release=answer, drop_cells=answer)
    local.holder = holder


@pytest.mark.parametrize(("grant", "verified"), [(7, False), (None, True)])
async def test_an_engine_that_was_starting_on_its_cells_is_measured_before_they_are_given_up(
    local: LocalInstance, grant: int | None, verified: bool
) -> None:
    says(local, grant=grant)
    await adopt_holder(local, local.record)
    assert (local.seen.engine, local.seen.grant, local.seen.verified) == (EngineState.STARTING, grant, verified)


async def test_where_a_checkpointed_engine_was_is_written_down_by_whoever_finds_it(
    local: LocalInstance, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    async def off(_: Theatre, pids: tuple[int, ...], verbs: tuple[str, ...], **__: object) -> list[Said]:
        assert (pids, verbs) == ((ENGINE.pid,), ("state",))
        return [Said(verb="state", pid=ENGINE.pid, state=CudaState.CHECKPOINTED)]

    monkeypatch.setattr(checkpoint, "theatre", lambda _: Theatre(tmp_path))
    monkeypatch.setattr(adoption, "operate", off)
    says(local, grant=7, parked=True)
    local.directory.edit(device="GPU-a")
    await adopt_holder(local, local.record)
    assert (local.seen.engine, local.seen.verified, local.record.left_device) == (EngineState.CHECKPOINTED, True, "GPU-a")


@pytest.mark.parametrize(
    ("states", "engine", "unlocked"),
    [
        ((CudaState.CHECKPOINTED, CudaState.CHECKPOINTED), EngineState.CHECKPOINTED, []),
        ((CudaState.LOCKED, CudaState.RUNNING), EngineState.STARTING, [11]),
        ((CudaState.CHECKPOINTED, CudaState.LOCKED), EngineState.DEAD, []),
        ((CudaState.RUNNING, CudaState.NONE), EngineState.DEAD, []),
    ],
)  # fmt: skip
async def test_a_gang_that_was_caught_half_off_its_gpus_is_let_go_on_only_if_no_rank_has_left(
    local: LocalInstance, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, states: tuple[CudaState, ...], engine: EngineState,
    unlocked: list[int],
) -> None:  # fmt: skip
    known, told = dict(zip((11, 12), states, strict=True)), list[int]()

    async def operate(_: Theatre, pids: list[int], verbs: tuple[str, ...], **__: object) -> list[Said]:
        if verbs == ("state",):
            return [Said(verb="state", pid=pid, state=known[pid]) for pid in pids]
        assert verbs == ("unlock",)
        told.extend(pids)
        return []

    monkeypatch.setattr(checkpoint, "theatre", lambda _: Theatre(tmp_path))
    monkeypatch.setattr(adoption, "operate", operate)
    says(local, grant=7, parked=True)
    local.site.deadlines = Deadlines()  # type: ignore[misc]
    local.directory.edit(device="GPU-a", members=tuple(Process(pid, 3, "boot") for pid in (11, 12)))
    await adopt_holder(local, local.record)
    assert (local.seen.engine, told) == (engine, unlocked)


async def test_what_the_pool_has_filled_for_it_goes_before_its_cells(local: LocalInstance) -> None:
    closed: list[bool] = []
    filling: Any = SimpleNamespace(close=lambda: closed.append(True))
    local.filling = filling
    says(local)
    await cells.drop_cells(local)
    assert (closed, local.filling, local.seen.filled) == ([True], None, None)


async def test_the_first_wrong_answer_is_its_images_fault_whatever_the_restore_was_for(
    local: LocalInstance, monkeypatch: pytest.MonkeyPatch, blamed: list[str]
) -> None:
    wanted = Wanted(instance="ins_1", configuration="cfg_1")

    async def wrong(_: LocalInstance) -> str:
        raise StepFailed("check_mismatch", "the engine answered (1,), it used to answer (2,)")

    async def right(_: LocalInstance) -> str:
        return "same_tokens"

    local.directory.edit(unproven="img_1")
    monkeypatch.setattr(images.knownanswer, "check", wrong)
    with pytest.raises(StepFailed):
        await images.check(local, wanted)
    assert blamed == ["img_1"]
    monkeypatch.setattr(images.knownanswer, "check", right)
    assert await images.check(local, wanted) == "same_tokens"
    monkeypatch.setattr(images.knownanswer, "check", wrong)
    with pytest.raises(StepFailed):
        await images.check(local, wanted)
    assert blamed == ["img_1"], "it has been right since"


async def test_an_end_is_heard_of_although_it_could_not_be_watched_for_at_first(
    local: LocalInstance, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nothing else says that an engine has ended: unheard, it is served from for ever."""
    monkeypatch.setattr("worker.local.AGAIN_S", 0.0)
    faults = [OSError(24, "too many open files"), ValueError("a fault of ours")]

    async def gone(process: Process) -> bool:
        if faults:
            raise faults.pop()
        return True

    monkeypatch.setattr("worker.processes.gone", gone)
    says(local)
    local.note(engine=EngineState.CONNECTED)
    local.watch("engine", ENGINE)
    async with asyncio.timeout(20):
        while local.seen.engine is not EngineState.DEAD:
            await asyncio.sleep(0.005)
    assert local.lost is not None
    assert local.lost[0] == "engine_died"
    local.forget()
