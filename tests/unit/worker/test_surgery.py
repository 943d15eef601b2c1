"""What a failed restore leaves is ended, and what can't be ended is told."""

import errno
import fcntl
import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from worker.census import Census
from worker.engines.parking import RELEASE
from worker.holdermessages import Restore
from worker.images import surgery
from worker.images.steps import BLAMELESS
from worker.images.surgery import Surgery, SurgeryFailed
from worker.instancedir import InstanceDir


@pytest.fixture
def child(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> subprocess.Popen[bytes]:
    """What CRIU brought back before it failed; nobody reaps it, so it is there whatever kills it."""
    left = subprocess.Popen([sys.executable, "-S", "-c", "import time; time.sleep(600)"])
    monkeypatch.setattr(surgery, "children", lambda: [left.pid] if Path(f"/proc/{left.pid}").exists() else [])

    async def failing(*_: object) -> None:
        raise SurgeryFailed("restore_failed", "criu ended with status 1")

    monkeypatch.setattr(Surgery, "_run_criu", failing)
    return left


async def restored(directory: InstanceDir, pid: int = 1 << 23) -> SurgeryFailed:
    directory.create("cfg_1")
    wanted = Restore(
        criu="criu", directory=str(directory.path / "image"), pid=pid, place=str(directory.path / "place"), deadline_ms=9
    )
    with pytest.raises(SurgeryFailed) as failed:
        await Surgery(directory, Census.before()).restore(wanted)
    return failed.value


async def test_one_that_outlives_its_end_is_told_and_stays_on_record(
    tmp_path: Path, child: subprocess.Popen[bytes], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(surgery, "REAP_S", 0.05)
    directory = InstanceDir(tmp_path / "run" / "inst", "ins_1")
    failure = await restored(directory)
    assert failure.code == "unkillable"
    assert f"pid {child.pid} " in failure.message and "criu ended with status 1" in failure.message
    record = directory.read()
    assert record is not None and record.engine is not None and record.engine.pid == child.pid
    assert child.wait(30) == -9


async def test_one_that_ends_leaves_the_failure_itself(
    tmp_path: Path, child: subprocess.Popen[bytes], monkeypatch: pytest.MonkeyPatch
) -> None:
    kill = os.kill

    def and_reap(pid: int, number: int) -> None:
        kill(pid, number)
        child.wait(30)

    monkeypatch.setattr(os, "kill", and_reap)
    directory = InstanceDir(tmp_path / "run" / "inst", "ins_1")
    assert (await restored(directory)).code == "restore_failed"
    record = directory.read()
    assert record is not None and record.engine is None


@pytest.mark.parametrize("under_way", [False, True])
async def test_one_that_finds_its_pid_taken_leaves_the_owner_its_release(tmp_path: Path, under_way: bool) -> None:
    directory = InstanceDir(tmp_path / "run" / "inst", "ins_1")
    release = directory.path / "place" / RELEASE
    release.parent.mkdir(parents=True)
    release.write_text("ins_2", encoding="utf-8")
    with (tmp_path / "run" / "restore.lock").open("wb") as lock:
        if under_way:
            fcntl.flock(lock, fcntl.LOCK_EX)
        failure = await restored(directory, pid=os.getpid())
    assert failure.code == "pid_taken" and ("another restore" in failure.message) == under_way
    assert release.read_text(encoding="utf-8") == "ins_2"


def no_room(*_: object, **__: object) -> int:
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


async def test_a_restore_for_which_the_disk_is_too_full_is_not_begun_and_blames_no_image(
    tmp_path: Path, child: subprocess.Popen[bytes], monkeypatch: pytest.MonkeyPatch
) -> None:
    directory = InstanceDir(tmp_path / "run" / "inst", "ins_1")
    directory.create("cfg_1")
    monkeypatch.setattr(Path, "write_text", no_room)
    failure = await restored(directory)
    assert failure.code in BLAMELESS
    assert "No space left" in failure.message
    assert child.poll() is None, "nobody has begun"
    child.kill()
    child.wait(30)


async def test_an_engine_whose_release_could_not_be_written_is_not_parked(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    directory = InstanceDir(tmp_path / "run" / "inst", "ins_1")
    directory.create("cfg_1")
    monkeypatch.setattr(Path, "write_text", no_room)
    told: list[object] = []
    port: Any = SimpleNamespace(tell=lambda *words: told.append(words))
    with pytest.raises(SurgeryFailed) as failed:
        await Surgery(directory, Census.before()).park(port, os.getpid(), 9)
    assert (failed.value.code, told) == ("no_space", [])
