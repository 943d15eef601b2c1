"""The nursery: children that are born there are as those that were started; and nobody needs it."""

import asyncio
import os
import sys
from collections.abc import AsyncIterator, Callable
from pathlib import Path

import pytest

from compose.child import ChildSpec
from compose.nursery import NAMES, Birth, Nursery
from compose.supervisor import Supervisor

DECIDER = (sys.executable, "-P", "-m", "controlplane.decider")


async def until(condition: Callable[[], bool], deadline_s: float = 30) -> None:
    async with asyncio.timeout(deadline_s):
        while not condition():
            await asyncio.sleep(0.01)


def embryos() -> list[int]:
    """Living processes of a nursery of ours."""
    found = []
    for name in filter(str.isdigit, os.listdir("/proc")):
        try:
            words = Path(f"/proc/{name}/cmdline").read_bytes().split(b"\0")
        except OSError:
            continue
        if b"compose.embryo" in words and str(os.getpid()).encode() in words:
            found.append(int(name))
    return found


@pytest.fixture
async def nursery() -> AsyncIterator[Nursery]:
    made = Nursery()
    yield made
    made.close()
    await until(lambda: embryos() == [])


async def test_who_is_born_has_a_line_a_log_a_session_and_a_parent_of_its_own(nursery: Nursery, tmp_path: Path) -> None:
    log = tmp_path / "log"
    os.mkfifo(log)  # it stops where it opens this, having said what it is
    argv = [*DECIDER, "--data", str(tmp_path)]
    pid = await nursery.take("decider", Birth(argv=argv, environment=dict(os.environ), log=str(log), tie=15))
    assert pid is not None
    try:
        parent, _, session = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1:4]
        assert (int(parent), int(session)) == (os.getpid(), pid)
        with log.open("rb") as said:
            words = [word for word in Path(f"/proc/{pid}/cmdline").read_bytes().decode().split("\0") if word]
            told = await asyncio.to_thread(said.read)
    finally:
        status = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    assert status != 0 and b"plane.json" in told, "there is no plane in that directory"
    assert words == argv


async def test_a_child_ends_and_is_started_again_without_it(nursery: Nursery, tmp_path: Path) -> None:
    supervisor = Supervisor(tmp_path, nursery)
    child = supervisor.add(ChildSpec(name="decider", argv=(*DECIDER, "--help")))
    await until(lambda: child.state.restarts >= 2)
    await supervisor.stop()
    assert child.state.last_exit == "exit code 0"
    assert child.last_words(100).count("usage: controlplane.decider") >= 2, "born once, started once"


async def test_a_child_that_is_stopped_at_once_is_ended(nursery: Nursery, tmp_path: Path) -> None:
    supervisor = Supervisor(tmp_path, nursery)
    supervisor.add(ChildSpec(name="decider", argv=(*DECIDER, "--data", str(tmp_path))))
    await asyncio.sleep(0)  # it asks the nursery now
    await asyncio.wait_for(supervisor.stop(), 30)
    assert supervisor.children["decider"].state.state == "stopped"


@pytest.mark.parametrize("program", ["/bin/true", "/bin/cat"])
async def test_a_nursery_that_does_not_work_is_in_nobodys_way(
    program: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patch:
        patch.setattr(sys, "executable", program)
        nursery = Nursery()
    supervisor = Supervisor(tmp_path, nursery)
    child = supervisor.add(ChildSpec(name="web", argv=(sys.executable, "-c", "import time; time.sleep(600)")))
    assert await child.ready(30)
    await supervisor.stop()
    nursery.close()


async def test_who_is_not_wanted_is_gone(nursery: Nursery) -> None:
    await until(lambda: len(embryos()) >= len(NAMES))
    for name in NAMES[1:]:
        nursery.decline(name)
    nursery.close()
    await until(lambda: embryos() == [])
