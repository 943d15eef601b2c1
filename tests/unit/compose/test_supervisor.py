"""The supervisor with stand-in processes: start, restart, adoption, stop, logs."""

import asyncio
import errno
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import AsyncIterator, Callable
from pathlib import Path

import pytest

from compose.child import ChildSpec
from compose.parts import holder_of
from compose.process import Identity, end
from compose.supervisor import Supervisor, bound, read_states

SLEEPER = (sys.executable, "-c", "import time; time.sleep(600)")
DEAF = (
    sys.executable,
    "-c",
    "import signal,time; signal.signal(signal.SIGTERM, signal.SIG_IGN); print('deaf', flush=True); time.sleep(600)",
)


async def until(condition: Callable[[], bool], deadline_s: float = 30) -> None:
    async with asyncio.timeout(deadline_s):
        while not condition():
            await asyncio.sleep(0.01)


@pytest.fixture
async def supervisor(tmp_path: Path) -> AsyncIterator[Supervisor]:
    supervisor = Supervisor(tmp_path)
    yield supervisor
    await supervisor.stop()


def pid_of(supervisor: Supervisor, name: str) -> int:
    pid = supervisor.children[name].state.pid
    assert pid is not None
    return pid


async def test_a_child_that_is_killed_comes_back(supervisor: Supervisor) -> None:
    child = supervisor.add(ChildSpec(name="a", argv=SLEEPER))
    assert await child.ready(30)
    first = pid_of(supervisor, "a")
    os.kill(first, signal.SIGKILL)
    await until(lambda: child.state.restarts == 1 and child.state.state == "ready")
    assert pid_of(supervisor, "a") != first
    assert child.state.last_exit == "killed by SIGKILL"
    assert [(s.name, s.pid) for s in read_states(supervisor.data)] == [("a", pid_of(supervisor, "a"))]


async def test_an_end_and_the_return_are_told_once_and_a_stop_is_not(tmp_path: Path) -> None:
    said = list[str]()
    supervisor = Supervisor(tmp_path, say=said.append)
    child = supervisor.add(ChildSpec(name="a", argv=SLEEPER))
    assert await child.ready(30)
    os.kill(pid_of(supervisor, "a"), signal.SIGKILL)
    await until(lambda: child.state.restarts == 1 and child.state.state == "ready")

    async def never() -> bool:
        return False

    looping = supervisor.add(ChildSpec(name="b", argv=(sys.executable, "-c", "raise SystemExit(3)"), ready=never))
    await until(lambda: looping.state.restarts > 2)
    await supervisor.stop()
    assert said == [
        "a has ended (killed by SIGKILL) and is started again; see logs/a.log",
        "a is ready again",
        "b has ended (exit code 3) and is started again; see logs/b.log",
    ]


async def test_nobody_who_listens_is_no_end_of_the_keeping(tmp_path: Path) -> None:
    def gone(_: str) -> None:
        raise BrokenPipeError

    supervisor = Supervisor(tmp_path, say=gone)
    child = supervisor.add(ChildSpec(name="a", argv=SLEEPER))
    assert await child.ready(30)
    os.kill(pid_of(supervisor, "a"), signal.SIGKILL)
    await until(lambda: child.state.restarts == 1 and child.state.state == "ready")
    await supervisor.stop()


@pytest.mark.parametrize(
    "fault", [TimeoutError("process 1 is alive 5 s after SIGKILL"), OSError(errno.EMFILE, "too many open files")]
)
async def test_one_child_that_cannot_be_ended_leaves_none_of_the_others_running(
    supervisor: Supervisor, monkeypatch: pytest.MonkeyPatch, fault: Exception
) -> None:
    first, last = (supervisor.add(ChildSpec(name=name, argv=SLEEPER)) for name in ("a", "b"))
    assert await first.ready(30)
    assert await last.ready(30)

    async def hang() -> bool:
        raise fault

    with monkeypatch.context() as patch:
        patch.setattr(last, "stop", hang)
        await supervisor.stop()
    assert first.state.state == "stopped"


async def test_a_full_disk_starts_no_child_twice(
    supervisor: Supervisor, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(path: Path, data: bytes) -> int:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(Path, "write_bytes", full)
    starts = tmp_path / "starts"
    script = "import os, sys, time; open(sys.argv[1], 'a').write('x'); time.sleep(600)"
    child = supervisor.add(ChildSpec(name="a", argv=(sys.executable, "-c", script, str(starts))))
    await until(lambda: starts.exists() and child.state.state == "ready")
    pid = pid_of(supervisor, "a")
    await asyncio.sleep(0.3)  # three times the first pause between starts
    assert (starts.read_text(), pid_of(supervisor, "a"), child.state.restarts) == ("x", pid, 0)


async def test_a_child_that_keeps_crashing_is_shown_and_tried_again(supervisor: Supervisor) -> None:
    child = supervisor.add(ChildSpec(name="bad", argv=(sys.executable, "-c", "import sys; sys.exit('no good')")))
    await until(lambda: child.state.restarts >= 3)
    assert child.state.last_exit == "exit code 1"
    assert "no good" in child.last_words()


async def test_a_program_that_is_not_there_is_an_end_too(supervisor: Supervisor) -> None:
    child = supervisor.add(ChildSpec(name="gone", argv=("/no/such/program",)))
    await until(lambda: child.state.restarts >= 1)
    assert "No such file" in child.state.last_exit


async def test_ready_means_that_it_says_so(supervisor: Supervisor, tmp_path: Path) -> None:
    flag = tmp_path / "flag"

    async def ready() -> bool:
        return flag.exists()

    child = supervisor.add(ChildSpec(name="a", argv=SLEEPER, ready=ready))
    assert not await child.ready(0.1)
    flag.touch()
    assert await child.ready(30)


async def test_a_child_that_ignores_the_signal_is_killed(supervisor: Supervisor) -> None:
    child = supervisor.add(ChildSpec(name="deaf", argv=DEAF, stop_s=0.2))
    await until(lambda: "deaf" in child.last_words())
    pid = pid_of(supervisor, "deaf")
    assert not await child.stop()
    assert Identity.of(pid) is None


async def test_children_stop_in_the_opposite_order(supervisor: Supervisor, tmp_path: Path) -> None:
    note = """
import signal, sys, time
def bye(*_):
    open(sys.argv[2], "a").write(sys.argv[1])
    sys.exit()
signal.signal(15, bye)
print(1, flush=True)
time.sleep(600)
"""
    for name in "abc":
        child = supervisor.add(ChildSpec(name=name, argv=(sys.executable, "-c", note, name, str(tmp_path / "order"))))
        await until(lambda child=child: "1" in child.last_words())  # type: ignore[misc]
    await supervisor.stop()
    assert (tmp_path / "order").read_text() == "cba"


STARTER = """
import asyncio, sys
from pathlib import Path
from compose.child import ChildSpec
from compose.parts import holder_of
from compose.supervisor import Supervisor
async def yes(): return True
async def main():
    supervisor = Supervisor(Path(sys.argv[1]))
    for name in ("stays", "goes"):
        argv = (sys.executable, "-c", "import time; time.sleep(600)")
        child = supervisor.add(ChildSpec(name=name, argv=argv, survives=name == "stays", ready=yes))
        assert await child.ready(30)
    print("up", flush=True)
    await asyncio.sleep(600)
asyncio.run(main())
"""


async def test_a_survivor_of_a_killed_up_is_adopted_and_the_others_end(tmp_path: Path) -> None:
    starter = subprocess.Popen([sys.executable, "-c", STARTER, str(tmp_path)], stdout=subprocess.PIPE)
    try:
        assert starter.stdout is not None
        assert await asyncio.to_thread(starter.stdout.readline) == b"up\n"
        states = {state.name: state.pid for state in read_states(tmp_path)}
    finally:
        starter.kill()
        starter.wait()
        assert starter.stdout is not None
        starter.stdout.close()
    assert states["goes"] is not None and states["stays"] is not None
    goes, stays = Identity.of(states["goes"]), Identity.of(states["stays"])
    assert goes is None or await goes.ended(30)
    assert stays is not None

    async def ready() -> bool:
        return True

    supervisor = Supervisor(tmp_path)
    child = supervisor.add(ChildSpec(name="stays", argv=SLEEPER, survives=True, ready=ready))
    assert await child.ready(30)
    assert child.adopted and child.state.pid == stays.pid
    await supervisor.stop()
    assert not stays.alive


async def test_a_survivor_that_does_not_answer_is_replaced(tmp_path: Path) -> None:
    old = subprocess.Popen(SLEEPER)
    identity = Identity.of(old.pid)
    assert identity is not None
    calls = 0

    async def ready() -> bool:
        nonlocal calls
        calls += 1
        return calls > 1

    supervisor = Supervisor(tmp_path)
    (tmp_path / "run/pids/pool.json").write_text(f'{{"pid":{old.pid},"started":{identity.started},"boot":"{identity.boot}"}}')
    child = supervisor.add(ChildSpec(name="pool", argv=SLEEPER, survives=True, ready=ready))
    assert await child.ready(30)
    assert not child.adopted and child.state.pid != old.pid
    old.wait()
    await supervisor.stop()


async def test_a_pid_that_was_used_again_is_nobody(tmp_path: Path) -> None:
    me = Identity.of(os.getpid())
    assert me is not None and me.alive
    stranger = Identity(me.pid, me.started - 1, me.boot)
    assert not stranger.alive
    assert await end([stranger], deadline_s=1) == []  # and we are still here


def test_a_log_is_bounded_while_its_writer_appends(tmp_path: Path) -> None:
    path = tmp_path / "a.log"
    with path.open("ab", buffering=0) as writer:
        writer.write(b"x" * 100)
        bound(path, 50)
        writer.write(b"y")
    assert path.read_bytes() == b"y"
    assert path.with_name("a.log.1").read_bytes() == b"x" * 100


async def test_a_survivor_whose_pid_was_not_kept_is_adopted_too(supervisor: Supervisor, tmp_path: Path) -> None:
    lock, taken = tmp_path / "lock", tmp_path / "taken"
    holding = "import fcntl, os, sys, time; f = open(sys.argv[1], 'w'); fcntl.flock(f, 2); f.write(str(os.getpid())); f.flush()"
    argv = (sys.executable, "-c", f"{holding}; open(sys.argv[2], 'w'); time.sleep(600)", str(lock), str(taken))
    assert holder_of(lock) is None
    survivor = subprocess.Popen(argv)
    try:
        await until(taken.exists)

        async def ready() -> bool:
            return True

        child = supervisor.add(ChildSpec(name="a", argv=argv, survives=True, ready=ready, already=lambda: holder_of(lock)))
        assert await child.ready(30)
        assert (child.adopted, pid_of(supervisor, "a"), child.state.restarts) == (True, survivor.pid, 0)
    finally:
        survivor.kill()
        survivor.wait()
    assert holder_of(lock) is None


async def test_a_stranger_who_has_the_pid_of_an_earlier_holder_is_not_taken_for_the_one_who_holds_it_now(
    tmp_path: Path,
) -> None:
    lock, taken = tmp_path / "lock", tmp_path / "taken"
    holding = "import fcntl, sys, time; f = open(sys.argv[1], 'r'); fcntl.flock(f, 2); open(sys.argv[2], 'w'); time.sleep(600)"
    stranger = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
    lock.write_text(str(stranger.pid))
    holder = subprocess.Popen([sys.executable, "-c", holding, str(lock), str(taken)])
    try:
        await until(taken.exists)
        assert holder_of(lock) is None
        lock.write_text(str(holder.pid))
        found = holder_of(lock)
        assert found is not None and found.pid == holder.pid
    finally:
        for one in (stranger, holder):
            one.kill()
            one.wait()


async def test_one_log_that_can_not_be_bounded_now_leaves_no_log_unbounded(
    supervisor: Supervisor, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("compose.supervisor.LOG_LIMIT_BYTES", 50)
    monkeypatch.setattr("compose.supervisor.LOG_CHECK_S", 0.01)
    full = tmp_path / "logs" / "x.log"
    full.write_bytes(b"x" * 100)
    kept, refusals = full.with_name("x.log.1"), [OSError(errno.ENOSPC, "no room for a while")] * 2
    copy = shutil.copyfile

    def refuses(source: Path, target: Path) -> None:
        if refusals:
            raise refusals.pop()
        copy(source, target)

    monkeypatch.setattr(shutil, "copyfile", refuses)
    supervisor.add(ChildSpec(name="a", argv=SLEEPER))
    await until(lambda: kept.exists() and not full.stat().st_size)


async def test_a_child_that_could_not_be_seen_for_a_while_is_kept_all_the_same(
    supervisor: Supervisor, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An end that nobody hears of is no reason to start it again; and one that is never ready is shown as starting for good."""
    monkeypatch.setattr("compose.child.SEEN_AGAIN_S", 0.01)
    faults, unseen, ended = (
        [ValueError("a fault of ours")] * 2,
        [OSError(errno.EMFILE, "too many open files")] * 2,
        Identity.ended,
    )

    async def ready() -> bool:
        if faults:
            raise faults.pop()
        return True

    async def seen(identity: Identity, deadline_s: float | None = None) -> bool:
        if unseen:
            raise unseen.pop()
        return await ended(identity, deadline_s)

    monkeypatch.setattr(Identity, "ended", seen)
    child = supervisor.add(ChildSpec(name="a", argv=SLEEPER, ready=ready))
    assert await child.ready(30)
    assert (faults, unseen) == ([], [])
    os.kill(pid_of(supervisor, "a"), signal.SIGKILL)
    await until(lambda: child.state.restarts == 1 and child.state.state == "ready")
