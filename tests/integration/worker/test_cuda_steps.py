"""Step processes, over the driver's twin: what is told, what is refused, what is left when one hangs or its worker dies."""

import asyncio
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from worker import processes
from worker.cuda.operation import STATE_S, Operation, Theatre, operate
from worker.cuda.surgeon import CudaState
from worker.failure import StepFailed
from worker.local import LocalInstance

DOWN, UP = ("lock", "checkpoint"), ("restore", "unlock")


@pytest.fixture
def pid() -> Iterator[int]:
    """A process that counts for ever."""
    child = subprocess.Popen([sys.executable, "-c", "while True: pass"])
    yield child.pid
    child.kill()
    child.wait()


async def state_of(theatre: Theatre, pid: int) -> CudaState | None:
    [said] = await operate(theatre, (pid,), ("state",), deadline_s=STATE_S)
    return said.state


async def test_down_and_up_again(pid: int, tmp_path: Path) -> None:
    theatre = Theatre(tmp_path / "twin")
    assert await state_of(theatre, pid) is CudaState.RUNNING
    assert [said.verb for said in await operate(theatre, (pid,), DOWN, deadline_s=20)] == ["lock", "checkpoint"]
    assert await state_of(theatre, pid) is CudaState.CHECKPOINTED
    assert [said.verb for said in await operate(theatre, (pid,), UP, deadline_s=20)] == ["restore", "unlock"]
    assert await state_of(theatre, pid) is CudaState.RUNNING


async def test_every_process_is_restored_before_the_first_is_unlocked(pid: int, tmp_path: Path) -> None:
    theatre = Theatre(tmp_path / "twin")
    with subprocess.Popen([sys.executable, "-c", "while True: pass"]) as other:
        await operate(theatre, (pid, other.pid), DOWN, deadline_s=20)
        said = await operate(theatre, (pid, other.pid), UP, deadline_s=20, devices={"GPU-a": "GPU-b", "GPU-b": "GPU-a"})
        other.kill()
    assert [(one.verb, one.pid) for one in said] == [
        ("restore", pid), ("restore", other.pid), ("unlock", pid), ("unlock", other.pid),
    ]  # fmt: skip


async def test_what_is_out_of_order_is_refused(pid: int, tmp_path: Path) -> None:
    theatre = Theatre(tmp_path / "twin")
    with pytest.raises(StepFailed) as failed:
        await operate(theatre, (pid,), ("checkpoint",), deadline_s=20)
    assert failed.value.code == "cuda_illegal_state"
    with pytest.raises(StepFailed) as failed:
        await operate(theatre, (2**22 - 1,), ("lock",), deadline_s=20)
    assert failed.value.code == "cuda_invalid"


async def test_a_call_that_hangs_is_given_up_and_its_process_killed(pid: int, tmp_path: Path) -> None:
    """C26."""
    theatre = Theatre(tmp_path / "twin", "lock_hangs:1")
    operation = await Operation.prepare(theatre, DOWN)
    step = operation.pid
    with pytest.raises(StepFailed) as failed:
        await operation.carry_out((pid,), 2.0)
    assert failed.value.code == "step_deadline"
    assert "lock" in failed.value.message
    assert processes.identify(step) is None
    assert await state_of(theatre, pid) is CudaState.RUNNING
    await operate(theatre, (pid,), DOWN, deadline_s=20)


async def test_a_failed_restore_is_final(pid: int, tmp_path: Path) -> None:
    """C17."""
    theatre = Theatre(tmp_path / "twin", "restore_fails:1")
    await operate(theatre, (pid,), DOWN, deadline_s=20)
    with pytest.raises(StepFailed) as failed:
        await operate(theatre, (pid,), UP, deadline_s=20)
    assert failed.value.code == "cuda_out_of_memory"
    assert await state_of(theatre, pid) is CudaState.FAILED
    with pytest.raises(StepFailed):
        await operate(theatre, (pid,), ("unlock",), deadline_s=20)


async def test_one_that_was_got_ready_and_is_not_needed_does_nothing(pid: int, tmp_path: Path) -> None:
    theatre = Theatre(tmp_path / "twin")
    operation = await Operation.prepare(theatre, DOWN)
    await operation.end()
    assert await state_of(theatre, pid) is CudaState.RUNNING


async def test_without_a_driver_it_says_so(pid: int) -> None:
    pytest.importorskip("pynvml")
    if Path("/dev/nvidiactl").exists():
        pytest.skip("this machine has a GPU")
    with pytest.raises(StepFailed) as failed:
        await operate(Theatre(), (pid,), DOWN, deadline_s=20)
    assert failed.value.code == "cuda_not_supported"


async def test_a_step_process_dies_with_its_worker(pid: int, tmp_path: Path) -> None:
    program = (
        "import asyncio, sys; from pathlib import Path; from worker.cuda.operation import Operation, Theatre\n"
        "async def main():\n"
        f"    step = await Operation.prepare(Theatre(Path({str(tmp_path / 'twin')!r}), 'lock_hangs'), ('lock',))\n"
        "    print(step.pid, flush=True); await step.carry_out(({pid},), 60)\n"
        "asyncio.run(main())"
    )
    with subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL) as worker:
        assert worker.stdout is not None
        step = processes.identify(int(await asyncio.to_thread(worker.stdout.readline)))
        assert step is not None
        os.kill(worker.pid, signal.SIGKILL)
    assert await processes.gone(step, 30)


async def test_one_that_was_got_ready_is_ended_when_it_is_not_needed(tmp_path: Path) -> None:
    readying = asyncio.create_task(Operation.prepare(Theatre(tmp_path / "twin"), UP))
    local: Any = SimpleNamespace(readying=readying)
    operation = await readying
    step = processes.identify(operation.pid)
    assert step is not None
    LocalInstance.stand_down(local)
    assert local.readying is None
    assert await processes.ended(step, 30)
    await operation.end()  # the loop has heard of it, too
