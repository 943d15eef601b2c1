"""What belongs to a plane is found by what it was started with, and nothing else is touched."""

import os
import subprocess
import sys
from pathlib import Path

from compose.process import Identity
from compose.remains import MARK, belonging, clear


async def test_marked_processes_are_found_and_ended_and_others_are_left(tmp_path: Path) -> None:
    argv = [sys.executable, "-c", "import time; time.sleep(600)"]
    ours = subprocess.Popen(argv, env=os.environ | {MARK: str(tmp_path)})
    others = subprocess.Popen([*argv, f"{tmp_path}/looked/at"], env=os.environ | {MARK: f"{tmp_path}-other"})
    try:
        assert [one.pid for one in belonging(tmp_path)] == [ours.pid]
        assert await clear(tmp_path) == 1
        assert belonging(tmp_path) == []
        assert Identity.of(others.pid) is not None
    finally:
        for process in (ours, others):
            process.kill()
            process.wait()
