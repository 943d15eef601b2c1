"""What belongs to a plane is found by what it was started with, and nothing else is touched."""

import asyncio
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

from compose.process import Identity
from compose.remains import MARK, belonging, clear


async def until(condition: Callable[[], bool]) -> None:
    """Who has just been started has neither words nor an environment for a moment."""
    async with asyncio.timeout(30):
        while not condition():
            await asyncio.sleep(0.01)


async def test_marked_processes_are_found_and_ended_and_others_are_left(tmp_path: Path) -> None:
    argv = [sys.executable, "-c", "import time; time.sleep(600)"]
    ours = subprocess.Popen(argv, env=os.environ | {MARK: str(tmp_path)})
    others = subprocess.Popen([*argv, f"{tmp_path}/looked/at"], env=os.environ | {MARK: f"{tmp_path}-other"})
    try:
        await until(lambda: [one.pid for one in belonging(tmp_path)] == [ours.pid])
        assert await clear(tmp_path) == 1
        assert belonging(tmp_path) == []
        assert Identity.of(others.pid) is not None
    finally:
        for process in (ours, others):
            process.kill()
            process.wait()


async def test_a_plane_below_the_directory_is_another_plane(tmp_path: Path) -> None:
    """`down --data /tmp` must not end what runs in /tmp/other."""
    idle = tmp_path / "worker" / "idle.py"
    idle.parent.mkdir()
    idle.write_text("import time\ntime.sleep(600)\n")
    argv = [sys.executable, "-S", "-m", "worker.idle"]  # -S: without the installed package of that name
    data = tmp_path / "plane"
    arguments = (
        ("--data", f"{data}"),
        ("--instance-dir", f"{data}/run/inst/ins_1"),
        ("--socket", f"{data}/run/pool/pool.sock"),
    )
    started = [subprocess.Popen([*argv, *one], cwd=tmp_path) for one in arguments]
    try:
        await until(lambda: {one.pid for one in belonging(data)} == {one.pid for one in started})
        assert belonging(tmp_path) == []
        assert belonging(data / "run") == []
        assert await clear(data) == len(started)
    finally:
        for process in started:
            process.kill()
            process.wait()
