"""The measure by which tests excuse a silence: starved is who is ready to run and may not, not who is stopped or waits."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.starvation import Starvation, delay_s, starvation

if delay_s(os.getpid()) is None:
    pytest.skip("this kernel keeps no book of what waits for a processor", allow_module_level=True)

BUSY = "import os; os.sched_setaffinity(0, {min(os.sched_getaffinity(0))}); print(flush=True)\nwhile True: pass"
IDLE = "import time; print(flush=True); time.sleep(600)"


@pytest.fixture
def pids() -> Iterator[dict[str, int]]:
    started = {
        name: subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE)
        for name, code in (("one", BUSY), ("two", BUSY), ("three", BUSY), ("stopped", BUSY), ("idle", IDLE))
    }
    for process in started.values():
        assert process.stdout is not None
        process.stdout.readline()
    started["stopped"].send_signal(signal.SIGSTOP)
    os.waitpid(started["stopped"].pid, os.WUNTRACED)  # until it has stopped it waits for a processor, too
    while Path(f"/proc/{started['idle'].pid}/stat").read_text().rpartition(")")[2].split()[0] != "S":
        time.sleep(0.01)  # it has said a word, and is on its way to its rest
    yield {name: process.pid for name, process in started.items()}
    for process in started.values():
        process.kill()
        process.communicate()


def test_who_has_to_share_a_processor_is_found_starved_and_who_is_stopped_or_waits_is_not(pids: dict[str, int]) -> None:
    began = time.time()
    with starvation(pids) as measured:
        deadline = time.monotonic() + 30
        while measured.of("one", began, time.time()) < 0.3 and time.monotonic() < deadline:
            time.sleep(0.05)
    took = time.time() - began
    assert measured.of("one", began, time.time()) >= 0.3
    assert measured.of("stopped", began, time.time()) < 0.1 * took
    assert measured.of("idle", began, time.time()) < 0.1 * took
    assert measured.of("one", began - 10, began - 5) == 0.0, "what came later excuses nothing"


def test_what_was_not_seen_excuses_nothing() -> None:
    measured = Starvation({"gone": 2**22 + 1})
    measured.look()
    assert measured.of("gone", 0.0, time.time()) == 0.0
