"""What is ended with an engine, and what is not."""

import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from msgspec.structs import replace

from worker import processes
from worker.deadlines import Deadlines
from worker.failure import StepFailed
from worker.holderlink import HolderDenied, HolderLink
from worker.holdermessages import Held
from worker.instancedir import InstanceDir
from worker.local import LocalInstance
from worker.processes import Process
from worker.skeleton import _left_of, clear, start_engine, start_holder


@pytest.fixture
def leader() -> Iterator[Process]:
    code = "import subprocess, sys; p = subprocess.Popen(['sleep', '600']); print(p.pid, flush=True); p.wait()"
    started = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, start_new_session=True)
    assert started.stdout is not None
    other = processes.identify(int(started.stdout.readline()))
    known = processes.identify(started.pid)
    assert known is not None and other is not None
    yield known
    for process in (known, other):
        processes.send(process, signal.SIGKILL)
    started.communicate()


def test_what_an_engine_has_started_is_its_own(leader: Process) -> None:
    assert len(_left_of(leader)) == 2


def test_who_has_an_engines_pid_by_now_and_leads_a_session_is_a_stranger_with_all_of_it(leader: Process) -> None:
    engine = replace(leader, started=leader.started - 1)
    assert _left_of(engine) == []


class Busy:
    """A holder in which an earlier worker has begun something: an engine is there, or comes, before there is another."""

    def __init__(self, local: LocalInstance, *, comes: bool, parked: bool) -> None:
        self._local, self._engine = local, None if comes else processes.identify(os.getpid())
        self._parked, self.done = parked, list[str]()

    async def start(self, argv: tuple[str, ...]) -> Held:
        if "kill" not in self.done:
            raise HolderDenied("started_already", "an engine is being brought back, or written to disk")
        self.done.append("start")
        return Held(pid=1, engine=processes.identify(os.getpid()), exit=None, connected=False, grant=None)

    async def ask(self) -> Held:
        return Held(pid=1, engine=self._engine, exit=None, connected=False, grant=None, parked=self._parked)

    async def kill(self, grace_s: float) -> Held:
        assert self._local.record.unread, "should this worker die now, the next one releases nothing"
        self.done.append("kill")
        return await self.ask()


@pytest.mark.parametrize(
    ("comes", "parked", "done"), [(True, False, ["kill", "start"]), (False, True, ["kill", "start"]), (False, False, [])]
)
async def test_of_the_engines_of_an_earlier_worker_only_one_that_it_has_started_is_kept(
    tmp_path: Path, comes: bool, parked: bool, done: list[str]
) -> None:
    images = SimpleNamespace(started=lambda configuration, kind: None)
    site: Any = SimpleNamespace(instances=tmp_path, plane=None, caller=None, images=images, data=tmp_path)
    local = LocalInstance(site, "ins_1", lambda: None)
    local.directory.create("cfg_1")
    local.directory.edit(unread=True, unproven="img_a")
    spec = SimpleNamespace(engine="fake", arguments={}, gpus=1)
    local.shelved = SimpleNamespace(model=SimpleNamespace(spec=spec), draft=None, source=tmp_path)  # type: ignore[assignment]
    local.holder = holder = Busy(local, comes=comes, parked=parked)  # type: ignore[assignment]
    await start_engine(local)
    assert holder.done == done
    assert (local.record.unread, local.record.unproven) == (False, None)
    local.forget()


@pytest.mark.parametrize("hindrance", ["another disk", "no directory"])
async def test_an_engines_log_that_can_t_be_kept_in_place_holds_up_nobody(tmp_path: Path, hindrance: str) -> None:
    """Its instance was never gone once, and its cells never free."""
    directory = InstanceDir(tmp_path / "inst", "ins_1")
    directory.path.mkdir(parents=True)
    directory.engine_log.write_text("its last words\n")
    with tempfile.TemporaryDirectory(dir="/dev/shm") as other:
        if hindrance == "another disk":
            if os.stat(other).st_dev == tmp_path.stat().st_dev:
                pytest.skip("all is on one disk here")
            (tmp_path / "logs").symlink_to(other)
        else:
            (tmp_path / "logs").write_text("a file")
        local: Any = SimpleNamespace(
            directory=directory, holder=HolderLink(directory), instance="ins_1", forget=lambda: None, logs=tmp_path / "logs"
        )
        await clear(local)
        assert not directory.path.exists()
        if hindrance == "another disk":
            assert (Path(other) / "ins_1.log").read_text() == "its last words\n"


async def test_a_holder_that_has_said_nothing_is_no_loss_of_its_directory(tmp_path: Path) -> None:
    site: Any = SimpleNamespace(
        instances=tmp_path, plane=None, caller=None, images=SimpleNamespace(hindrance=None),
        deadlines=Deadlines(start_holder=0.1), spare=SimpleNamespace(take=lambda argv: processes.identify(os.getpid())),
    )  # fmt: skip
    local = LocalInstance(site, "ins_1", lambda: None)
    local.directory.create("cfg_1")
    assert isinstance(local.holder, HolderLink)
    with pytest.raises(StepFailed, match="it said: nothing") as failed:
        await start_holder(local)
    assert failed.value.code == "start_failed"
