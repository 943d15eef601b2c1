"""What is ended with an engine, and what is not."""

import signal
import subprocess
import sys
from collections.abc import Iterator

import pytest
from msgspec.structs import replace

from worker import processes
from worker.processes import Process
from worker.skeleton import _left_of


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
