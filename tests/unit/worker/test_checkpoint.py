"""Taking a gang off its GPUs: whose processes its ranks are, when they are looked up, and where it may come back."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from msgspec.structs import replace

from controlplane.fleet import Grant
from worker import cells, checkpoint, steps
from worker.cuda.operation import Theatre
from worker.cuda.step import Said
from worker.cuda.surgeon import CudaState
from worker.deadlines import Deadlines
from worker.failure import StepFailed
from worker.holdermessages import Held
from worker.local import LocalInstance
from worker.moves import EngineState, Move, StepName
from worker.processes import Process

ENGINE = Process(2, 3, "boot")
RANKS = (Process(11, 3, "boot"), Process(12, 3, "boot"))
GPUS = ("GPU-a", "GPU-b")


class Surgeon:
    """A step process to which all goes well."""

    def __init__(self) -> None:
        self.told: list[tuple[tuple[str, ...], tuple[int, ...]]] = []

    async def prepare(self, _: Theatre, verbs: tuple[str, ...], **__: object) -> Any:
        async def carry_out(pids: tuple[int, ...], _: float) -> list[Said]:
            self.told.append((verbs, tuple(pids)))
            return [Said(verb=verbs[-1], pid=pid, state=CudaState.CHECKPOINTED) for pid in pids]

        async def end() -> None:
            pass

        return SimpleNamespace(carry_out=carry_out, end=end)


class Holder:
    def __init__(self) -> None:
        self.done: list[str] = []
        self.connected = True

    async def ask(self) -> Held:
        return Held(pid=1, engine=ENGINE, exit=None, connected=self.connected, grant=7)

    async def park(self, *, deadline_s: float) -> Held:
        self.done.append("park")
        return await self.ask()

    async def release(self) -> Held:
        self.done.append("release")
        return await self.ask()


@pytest.fixture
def surgeon(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Surgeon:
    made = Surgeon()
    monkeypatch.setattr(checkpoint.Operation, "prepare", staticmethod(made.prepare))
    monkeypatch.setattr(checkpoint, "theatre", lambda _: Theatre(tmp_path))
    monkeypatch.setattr(checkpoint.gpus, "gpus", list)
    return made


@pytest.fixture
def gang(tmp_path: Path) -> LocalInstance:
    """Asleep on two GPUs, nothing mapped, its ranks not looked up."""
    board = SimpleNamespace(show=lambda *_: None, clear=lambda *_: None)
    site: Any = SimpleNamespace(instances=tmp_path, plane=None, caller=None, deadlines=Deadlines(cuda_restore=1.5), board=board)
    found = LocalInstance(site, "ins_1", lambda: None)
    found.directory.create("cfg_1")
    found.directory.edit(device=GPUS[0], ranks=GPUS, engine=ENGINE, kind="vllm")
    found.holder = Holder()  # type: ignore[assignment]
    found.note(present=True, engine=EngineState.CONNECTED, verified=True)
    return found


async def test_its_ranks_are_looked_up_while_they_are_on_their_gpus_and_each_is_taken_off(
    gang: LocalInstance, surgeon: Surgeon, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(checkpoint.ranks, "members", lambda _: RANKS)
    await checkpoint.take_off(gang, checkpoint.Parts())
    assert gang.record.members == RANKS
    assert surgeon.told == [(checkpoint.DOWN, (11, 12))]
    assert gang.seen.engine is EngineState.CHECKPOINTED


async def test_one_of_whose_ranks_not_all_are_found_is_left_as_it_was(
    gang: LocalInstance, surgeon: Surgeon, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(checkpoint.ranks, "members", lambda _: RANKS[:1])
    with pytest.raises(StepFailed, match="of 2 ranks the processes of 1 were found") as failure:
        await checkpoint.take_off(gang, checkpoint.Parts())
    assert failure.value.code == "not_checkpointable"
    assert (gang.record.members, gang.holder.done, surgeon.told) == ((), [], [])  # type: ignore[attr-defined]


async def test_ranks_that_never_connect_again_are_followed_by_a_start_within_the_same_step(
    gang: LocalInstance, surgeon: Surgeon, monkeypatch: pytest.MonkeyPatch
) -> None:
    fell = list[str]()

    async def fall_back(_: LocalInstance, failure: StepFailed) -> None:
        fell.append(failure.code)

    monkeypatch.setattr(checkpoint, "fall_back", fall_back)
    gang.directory.edit(members=RANKS, left_device=GPUS[0])
    gang.holder.connected = False  # type: ignore[attr-defined]
    await steps.run(gang, SimpleNamespace(), Move(StepName.CUDA_RESTORE, grant=7))  # type: ignore[arg-type]
    assert fell == ["step_deadline"]
    assert surgeon.told == [(checkpoint.UP, (11, 12))]


async def test_it_comes_back_where_it_was_and_nowhere_else(gang: LocalInstance) -> None:
    gang.directory.edit(members=RANKS)
    gang.note(engine=EngineState.CHECKPOINTED, own_layout=True)
    first = Grant(number=7, node="n1", device=GPUS[1], instance="i", offset=0, cells=8, since_ms=0)
    there: Any = SimpleNamespace(grant=first, grants=(first, replace(first, number=8, device=GPUS[0], rank=1)))
    with pytest.raises(StepFailed, match="was started on GPU-a and GPU-b; its grant is of GPU-b and GPU-a") as failure:
        await cells.take_cells(gang, there)
    assert failure.value.code == "wrong_device"
