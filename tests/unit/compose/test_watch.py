"""The watch with a stand-in process: asked, shown as silent, killed, started again."""

import asyncio
import errno
import signal
import sys
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from compose import watch as watch_module
from compose.child import Child, ChildSpec
from compose.childstate import ChildState
from compose.process import Identity
from compose.signs import Ask
from compose.supervisor import Supervisor, read_states
from compose.vigil import Patience, Standstill, Vigil, Vitals
from compose.watch import PATIENCE, _missed, patience, watch
from controlplane.uptime import uptime_s

SLEEPER = (sys.executable, "-c", "import time; time.sleep(600)")
QUICK = Patience(every=0.01, answer=0.2, frozen=0.5, hung=600)


class Signs:
    """Answers as it is told to."""

    def __init__(self) -> None:
        self.sign: bool | None = True
        self.pids: list[int] = []

    async def ask(self, pid: int, _deadline_s: float) -> bool | None:
        self.pids.append(pid)
        return self.sign


async def until(condition: Callable[[], object], deadline_s: float = 30) -> None:
    async with asyncio.timeout(deadline_s):
        while not condition():
            await asyncio.sleep(0.01)


async def ticking(standstill: Standstill) -> None:
    """As `watch_all` does; without it all that lasts three seconds counts as a standstill of ours."""
    while True:
        standstill.tick(uptime_s())
        await asyncio.sleep(0.1)


@asynccontextmanager
async def watched(data: Path, ask: Ask) -> AsyncIterator[Child]:
    supervisor = Supervisor(data)
    child = supervisor.add(ChildSpec(name="a", argv=SLEEPER))
    assert await child.ready(30)
    standstill = Standstill(uptime_s())
    tasks = [asyncio.create_task(watch(child, ask, QUICK, standstill)), asyncio.create_task(ticking(standstill))]
    try:
        yield child
        assert not any(task.done() for task in tasks)
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await supervisor.stop()


def shown(child: Child, data: Path) -> ChildState:
    [state] = read_states(data)
    assert state == child.state
    return state


async def test_one_that_answers_no_more_is_shown_then_killed_and_started_again(tmp_path: Path) -> None:
    signs = Signs()
    async with watched(tmp_path, signs.ask) as child:
        await until(lambda: signs.pids)
        first = child.state
        assert first.pid is not None
        stopped = Identity.of(first.pid)
        assert stopped is not None
        stopped.send(signal.SIGSTOP)
        signs.sign = False
        await until(lambda: child.state.state == "silent")
        assert shown(child, tmp_path).pid == first.pid
        await until(lambda: child.state.restarts == 1)
        signs.sign = True
        await until(lambda: child.state.state == "ready" and child.state.pid in signs.pids)
        assert child.state.pid != first.pid
        assert child.state.last_exit.startswith("killed: it gave no answer for ")
        assert child.state.last_exit.endswith("was stopped")
        assert not stopped.alive


async def test_one_that_answers_again_in_time_is_left_as_it_is(tmp_path: Path) -> None:
    signs = Signs()
    async with watched(tmp_path, signs.ask) as child:
        await until(lambda: signs.pids)
        pid, signs.sign = child.state.pid, False
        await until(lambda: child.state.state == "silent")
        signs.sign = True
        await until(lambda: child.state.state == "ready")
        assert (child.state.pid, child.state.restarts) == (pid, 0)


@pytest.mark.parametrize("fault", [None, RuntimeError("no way to ask")])
async def test_nothing_follows_from_a_question_that_could_not_be_asked(tmp_path: Path, fault: Exception | None) -> None:
    asked = 0

    async def ask(_pid: int, _deadline_s: float) -> None:
        nonlocal asked
        asked += 1
        if fault is not None:
            raise fault

    async with watched(tmp_path, ask) as child:
        await until(lambda: asked > 3 * QUICK.frozen / QUICK.every)
        assert (child.state.state, child.state.restarts) == ("ready", 0)


async def test_nothing_follows_for_one_whose_process_can_not_be_looked_at(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    looked = 0

    def vitals(_pid: int) -> Vitals:
        nonlocal looked
        looked += 1
        raise OSError(errno.EMFILE, "too many open files")

    monkeypatch.setattr(watch_module, "vitals", vitals)
    signs = Signs()
    signs.sign = False
    async with watched(tmp_path, signs.ask) as child:
        await until(lambda: looked > 3)
        assert (child.state.state, child.state.restarts) == ("ready", 0)


async def test_one_that_could_not_be_killed_is_shown_as_silent_and_killed_later(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    faults, give_up = [OSError(errno.EMFILE, "too many open files")] * 2, Child.give_up

    async def breaks(self: Child, verdict: str) -> None:
        assert self.state.state == "silent"
        if faults:
            raise faults.pop()
        await give_up(self, verdict)

    monkeypatch.setattr(Child, "give_up", breaks)
    signs = Signs()
    async with watched(tmp_path, signs.ask) as child:
        await until(lambda: signs.pids)
        stopped = Identity.of(child.state.pid or 0)
        assert stopped is not None
        stopped.send(signal.SIGSTOP)
        signs.sign = False
        await until(lambda: child.state.restarts == 1)
        signs.sign = True
        await until(lambda: child.state.state == "ready" and child.state.pid in signs.pids)
        assert faults == []
        assert not stopped.alive


async def test_a_fault_of_ours_ends_no_watch_and_is_shown_while_it_lasts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    broken = False

    class Faulty(Vigil):
        def answered(self, now: float) -> None:
            if broken:
                raise ValueError("a fault of ours")
            super().answered(now)

    monkeypatch.setattr(watch_module, "Vigil", Faulty)
    signs = Signs()
    async with watched(tmp_path, signs.ask) as child:
        await until(lambda: signs.pids)
        pid, broken = child.state.pid, True
        await until(lambda: child.state.state == "unwatched")
        assert shown(child, tmp_path).pid == pid
        broken = False
        await until(lambda: child.state.state == "ready")
        assert (child.state.pid, child.state.restarts) == (pid, 0)


async def test_one_that_is_excused_for_once_is_shown_as_silent_still(tmp_path: Path) -> None:
    child = Supervisor(tmp_path).add(ChildSpec(name="a", argv=SLEEPER))
    try:
        assert await child.ready(30)
        assert child.silent(5)
        vigil = Vigil(QUICK, 0.0)  # it has answered never, or we were away since
        await _missed(child, child.state.pid or 0, vigil, Vitals("waits", 0))
        assert vigil.silent_s == 0
        assert child.state.state == "silent"
    finally:
        await child.stop()


async def test_an_end_while_it_was_asked_is_no_silence(tmp_path: Path) -> None:
    ended = asyncio.Event()

    async def ask(pid: int, _deadline_s: float) -> bool:
        if not ended.is_set() and (process := Identity.of(pid)) is not None:
            process.send(signal.SIGKILL)
            await process.ended()
            ended.set()
        return True

    async with watched(tmp_path, ask) as child:
        await until(lambda: child.state.restarts == 1 and child.state.state == "ready")
        assert child.state.last_exit == "killed by SIGKILL"


def test_the_environment_may_carry_other_times(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(PATIENCE, raising=False)
    assert patience() == Patience()
    monkeypatch.setenv(PATIENCE, '{"frozen": 5}')
    assert patience() == Patience(frozen=5)
    monkeypatch.setenv(PATIENCE, '{"froze": 5}')
    with pytest.raises(ValueError, match="froze"):
        patience()
