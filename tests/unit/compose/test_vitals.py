"""What the kernel says of processes of ours."""

import asyncio
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from compose.vitals import vitals

SLEEPS = "import time; time.sleep(600)"
SPINS = "while True: pass"
USES = "import time\nwhile time.process_time() < 0.5: pass"
CHILD_ENDS = f"import subprocess, sys, time; subprocess.run([sys.executable, '-c', {USES!r}]); time.sleep(600)"
BESIDE = f"import threading, time; threading.Thread(target=exec, args=({SPINS!r},)).start(); time.sleep(600)"
PARENT = f"import subprocess, sys; subprocess.run([sys.executable, '-c', {SPINS!r}])"


@contextmanager
def process(program: str) -> Iterator[int]:
    started = subprocess.Popen([sys.executable, "-c", program], start_new_session=True)
    try:
        yield started.pid
    finally:
        os.killpg(started.pid, signal.SIGKILL)  # a session of its own
        started.wait()


async def until(pid: int, state: str) -> float:
    """Wait until it is in that state; return what it has used by then."""
    async with asyncio.timeout(30):
        while (seen := vitals(pid)) is None or seen.state != state:
            await asyncio.sleep(0.01)
    return seen.cpu_s


async def test_one_that_waits_one_that_runs_and_one_that_is_stopped() -> None:
    with process(SLEEPS) as sleeper, process(SPINS) as spinner:
        await until(sleeper, "waits")
        used_s = await until(spinner, "runs")
        async with asyncio.timeout(30):
            while (seen := vitals(spinner)) is None or seen.cpu_s < used_s + 0.05:
                await asyncio.sleep(0.01)
        for pid in (sleeper, spinner):
            os.kill(pid, signal.SIGSTOP)
            await until(pid, "stopped")


async def test_who_waits_for_a_child_that_works_works() -> None:
    with process(PARENT) as parent:
        await until(parent, "runs")


async def test_who_waits_beside_a_thread_that_works_works() -> None:
    with process(BESIDE) as both:
        await until(both, "runs")
        async with asyncio.timeout(30):
            while len(os.listdir(f"/proc/{both}/task")) < 2 or state_of_main_thread(both) != "S":
                await asyncio.sleep(0.01)
        await until(both, "runs")


def state_of_main_thread(pid: int) -> str:
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]


async def test_what_a_child_has_used_is_not_lost_with_its_end() -> None:
    with process(CHILD_ENDS) as parent:
        async with asyncio.timeout(30):
            while (seen := vitals(parent)) is None or seen.cpu_s < 0.3:
                await asyncio.sleep(0.01)
            while Path(f"/proc/{parent}/task/{parent}/children").read_text():
                await asyncio.sleep(0.01)
        after = vitals(parent)
        assert after is not None
        assert after.cpu_s >= seen.cpu_s


def test_one_that_is_gone_has_none() -> None:
    gone = subprocess.Popen([sys.executable, "-c", ""])
    gone.wait()
    assert vitals(gone.pid) is None
