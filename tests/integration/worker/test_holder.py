"""Real holders with a scripted engine: locks, fencing, deaths."""

import asyncio
import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Callable
from pathlib import Path

import pytest

from worker import instancedir, namespaces, processes
from worker import spare as spare_holders
from worker.engines.messages import Drain, Health, Shutdown, State
from worker.holderlink import HolderDenied, HolderGone, HolderLink
from worker.holdermessages import Held
from worker.instancedir import InstanceDir
from worker.locks import CellConflict, Claim, Locks, Share
from worker.spare import Spare

START_S = 60.0
END_S = 30.0
ENGINE = Path(__file__).parent / "scripted.py"


class Site:
    """One instance directory, its link, and what must be ended afterwards."""

    def __init__(self, root: Path) -> None:
        self.directory = InstanceDir(root / "inst", "ins_1")
        self.directory.create("cfg_1")
        self.link = HolderLink(self.directory)
        self.locks = Locks(root / "locks")

    def argv(self, *flags: str) -> tuple[str, ...]:
        return (sys.executable, str(ENGINE), "--instance-dir", str(self.directory.path), *flags)

    async def connected(self, *flags: str) -> processes.Process:
        held = await self.link.start(self.argv(*flags))
        await until(self.link.ask, lambda held: held.connected)
        assert held.engine is not None
        return held.engine


async def until(ask: Callable[[], object], right: Callable[[object], object], deadline_s: float = START_S) -> object:
    async with asyncio.timeout(deadline_s):
        while True:
            answer = ask()
            if asyncio.iscoroutine(answer):
                answer = await answer
            if right(answer):
                return answer
            await asyncio.sleep(0.01)


def outside(inner: int, mate: processes.Process) -> processes.Process | None:
    """The process that has this pid in the pid namespace of `mate`."""
    space = os.readlink(f"/proc/{mate.pid}/ns/pid")
    for entry in Path("/proc").iterdir():
        with contextlib.suppress(OSError):
            if entry.name.isdigit() and os.readlink(entry / "ns" / "pid") == space:
                numbers = next(line for line in (entry / "status").read_text().splitlines() if line.startswith("NSpid"))
                if numbers.split()[-1] == str(inner):
                    return processes.identify(int(entry.name))
    return None


def children() -> set[processes.Process]:
    """Of this process, also those that have ended and that nobody has waited for."""
    pids = Path(f"/proc/self/task/{os.getpid()}/children").read_text().split()
    return {process for pid in pids if (process := processes.identify(int(pid))) is not None}


@pytest.fixture(scope="module", autouse=True)
def others() -> set[processes.Process]:
    """Children that tests of other files have left."""
    return children()


@pytest.fixture(params=["namespaces", "no namespaces"])
async def site(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Site]:
    """A holder works both ways; where namespaces are refused, only the second is tested."""
    if request.param == "namespaces" and (reason := namespaces.possible()) is not None:
        pytest.skip(f"no namespaces here: {reason}")
    monkeypatch.setenv(namespaces.SWITCH, "on" if request.param == "namespaces" else "off")
    monkeypatch.setenv("PYTHONPATH", str(Path(__file__).parents[3]))
    made = Site(tmp_path)
    yield made
    record = made.directory.read()
    for process in instancedir.living(record).values() if record else ():
        assert await processes.end(process, grace_s=0)


async def test_engine_is_started_told_and_ended_in_order(site: Site) -> None:
    holder, _ = await site.link.open(deadline_s=START_S)
    await site.connected()
    reply = await site.link.tell(Health(), 20)
    assert isinstance(reply, State)
    assert reply.bytes_private == (await site.link.ask()).inner_pid, "its pid in the namespace of its holder"
    await site.link.tell(Shutdown(), 20)
    held = await until(site.link.ask, lambda held: held.exit)
    assert held.exit.status == 0
    assert site.directory.read().exit == held.exit, "the exit is on record for a later worker"
    await site.link.leave()
    assert await processes.gone(holder, END_S)
    assert not site.directory.holder_socket.exists()


async def test_a_second_start_makes_no_second_engine(site: Site) -> None:
    await site.link.open(deadline_s=START_S)
    engine = await site.connected()
    with pytest.raises(HolderDenied) as caught:
        await site.link.start(site.argv())
    assert caught.value.code == "started_already"
    assert (await site.link.ask()).engine == engine


async def test_a_second_holder_steps_back(site: Site) -> None:
    first, held = await site.link.open(deadline_s=START_S)
    second, again = await site.link.open(deadline_s=START_S)
    assert held.pid == again.pid == first.pid
    assert second == first, "the one that answers; the other has gone"


def spare_ones() -> list[processes.Process]:
    """Holders of this process that are nobody's."""
    return [one for one in children() if b"--await" in Path(f"/proc/{one.pid}/cmdline").read_bytes().split(b"\0")]


@contextlib.asynccontextmanager
async def spared(site: Site, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[tuple[Spare, processes.Process]]:
    """A spare holder that is at hand."""
    monkeypatch.setattr(spare_holders, "REST_S", 0.0)
    spare = Spare(site.directory.path.parents[1])
    keeping = asyncio.create_task(spare.run())
    await until(spare_ones, bool)
    (waiting,) = spare_ones()
    try:
        yield spare, waiting
    finally:
        keeping.cancel()
        await asyncio.gather(keeping, return_exceptions=True)
        assert not spare_ones()


async def test_a_spare_holder_is_as_good_as_one_that_was_started_for_the_instance(
    site: Site, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with spared(site, monkeypatch) as (spare, waiting):
        holder, _ = await site.link.open(deadline_s=START_S, spare=spare)
        assert waiting == holder or await processes.ended(waiting, END_S), "it went ahead of the holder"
        assert str(site.directory.path).encode() in Path(f"/proc/{holder.pid}/cmdline").read_bytes().split(b"\0")
        streams = [os.readlink(f"/proc/{holder.pid}/fd/{number}") for number in range(3)]
        assert streams == [os.devnull, *[str(site.directory.log("holder"))] * 2]
        assert os.readlink(f"/proc/{holder.pid}/cwd") == str(site.directory.path.parent)
        await until(spare_ones, bool)
        (following,) = spare_ones()
    assert await processes.ended(following, END_S), "it is nobody's, and leaves with its worker"
    await site.connected()
    assert isinstance(await site.link.tell(Health(), 20), State)
    await site.link.leave()
    assert await processes.gone(holder, END_S)


async def test_a_spare_holder_that_has_died_is_not_missed(site: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    async with spared(site, monkeypatch) as (spare, waiting):
        processes.send(waiting, signal.SIGKILL)
        await processes.ended(waiting, END_S)
        await site.link.open(deadline_s=START_S, spare=spare)
        assert processes.identify(waiting.pid) != waiting, "it was reaped"
    assert isinstance(await site.link.ask(), Held)


async def test_a_spare_holder_that_dies_once_it_is_told_whose_it_is_is_followed_by_another(
    site: Site, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with spared(site, monkeypatch) as (spare, waiting):
        processes.send(waiting, signal.SIGSTOP)  # it never reads its line
        opening = asyncio.create_task(site.link.open(deadline_s=START_S, spare=spare))
        await until(lambda: [one for one in spare_ones() if one != waiting], bool)
        processes.send(waiting, signal.SIGKILL)
        holder, held = await opening
        assert holder != waiting and held.pid == holder.pid
        assert processes.identify(waiting.pid) != waiting, "it was reaped"


async def test_a_spare_holder_that_can_t_be_told_whose_it_is_stays_at_hand(site: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    async with spared(site, monkeypatch) as (spare, waiting):
        assert spare.take(["worker.holder", os.fsdecode(b"/data-\xff")]) is None
        assert spare_ones() == [waiting]
        holder, _ = await site.link.open(deadline_s=START_S, spare=spare)
        assert waiting == holder or processes.identify(waiting.pid) != waiting, "it went ahead of the holder"


async def test_a_spare_holder_does_not_outlive_its_worker(tmp_path: Path) -> None:
    program = (
        "import asyncio, os; from pathlib import Path; from worker import spare\n"
        "children = Path(f'/proc/self/task/{os.getpid()}/children')\n"
        "spare.REST_S = 0.0\n"
        "async def main():\n"
        f"    one = spare.Spare(Path({str(tmp_path)!r})); keeping = asyncio.create_task(one.run())\n"
        "    while not (pids := children.read_text()): await asyncio.sleep(0.01)\n"
        "    print(int(pids), flush=True); await keeping\n"
        "asyncio.run(main())"
    )
    with subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE) as worker:
        assert worker.stdout is not None
        waiting = processes.identify(int(await asyncio.to_thread(worker.stdout.readline)))
        assert waiting is not None
        worker.kill()
    assert await processes.ended(waiting, END_S)


async def test_cells_stay_locked_until_dropped_and_an_older_grant_is_fenced(site: Site) -> None:
    await site.link.open(deadline_s=START_S)
    cells = site.locks.take([Share("dev", (0, 1), 7)], instance="ins_1")
    assert (await site.link.take_cells(7, cells)).grant == 7
    cells.close()
    assert site.locks.holder("dev", 0) == Claim(7, "ins_1"), "the holder's copy keeps the lock"
    with pytest.raises(CellConflict):
        site.locks.take([Share("dev", (1,), 8)], instance="ins_2")
    await site.link.drop_cells()
    assert site.locks.holder("dev", 0) is None
    older = Locks(site.directory.path / "elsewhere").take([Share("dev", (0,), 6)], instance="ins_1")
    with pytest.raises(HolderDenied) as caught:
        await site.link.take_cells(6, older)
    assert caught.value.code == "fenced"
    older.close()


async def test_other_cells_are_taken_only_after_the_first_are_dropped(site: Site) -> None:
    await site.link.open(deadline_s=START_S)
    first = site.locks.take([Share("dev", (0,), 1)], instance="ins_1")
    second = site.locks.take([Share("dev", (4,), 2)], instance="ins_1")
    await site.link.take_cells(1, first)
    with pytest.raises(HolderDenied, match="drop them"):
        await site.link.take_cells(2, second)
    first.close()
    second.close()
    assert site.locks.holder("dev", 4) is None, "refused descriptors are closed by the holder"


async def test_when_the_holder_is_killed_the_engine_dies_and_the_locks_go(site: Site) -> None:
    holder, _ = await site.link.open(deadline_s=START_S)
    engine = await site.connected("--ignore-term")
    cells = site.locks.take([Share("dev", (3,), 1)], instance="ins_1")
    await site.link.take_cells(1, cells)
    cells.close()
    assert processes.send(holder, signal.SIGKILL)
    assert await processes.gone(holder, END_S)
    assert await processes.gone(engine, END_S)
    assert site.locks.holder("dev", 3) is None
    with pytest.raises(HolderGone):
        await site.link.ask()


async def test_an_engines_death_fails_what_it_was_told_and_is_recorded(site: Site) -> None:
    await site.link.open(deadline_s=START_S)
    engine = await site.connected("--delay-ms", "60000")
    telling = asyncio.create_task(site.link.tell(Drain(deadline_ms=60000), 30))
    await asyncio.sleep(0)
    assert processes.send(engine, signal.SIGKILL)
    with pytest.raises(HolderDenied) as caught:
        await telling
    assert caught.value.code in ("engine_died", "not_connected")
    held = await until(site.link.ask, lambda held: held.exit)
    assert held.exit.status == -signal.SIGKILL
    assert not held.connected


async def test_what_an_engine_leaves_behind_is_ended_too(site: Site) -> None:
    await site.link.open(deadline_s=START_S)
    engine = await site.connected("--child")
    child = outside(int((site.directory.path / "child").read_text()), engine)
    assert child is not None
    assert processes.send(engine, signal.SIGKILL)
    assert await processes.gone(child, END_S)


async def test_an_engine_that_ignores_the_stop_is_killed_after_its_grace(site: Site) -> None:
    await site.link.open(deadline_s=START_S)
    engine = await site.connected("--ignore-term")
    started = time.monotonic()
    held = await site.link.kill(0.2)
    assert held.exit is not None
    assert held.exit.status == -signal.SIGKILL
    assert time.monotonic() - started >= 0.2
    assert not processes.alive(engine)


async def test_a_late_answer_is_not_taken_for_the_next_commands(site: Site) -> None:
    await site.link.open(deadline_s=START_S)
    await site.connected("--delay-ms", "1500")
    with pytest.raises(HolderDenied) as caught:
        await site.link.tell(Drain(deadline_ms=1), 0.1)
    assert caught.value.code == "step_deadline"
    reply = await site.link.tell(Health(), 20)
    assert isinstance(reply, State)


async def test_a_holder_without_engine_and_without_worker_goes(site: Site) -> None:
    holder, _ = await site.link.open(deadline_s=START_S, linger_s=0.3)
    assert await processes.gone(holder, END_S)


async def test_a_holder_with_an_engine_stays_without_a_worker_and_goes_after_its_death(site: Site) -> None:
    holder, _ = await site.link.open(deadline_s=START_S, linger_s=1.5)  # room for the start on a busy machine
    engine = await site.connected()
    assert not await processes.gone(holder, 3.5)
    assert processes.send(engine, signal.SIGKILL)
    assert await processes.gone(holder, END_S)


async def test_a_noisy_engines_log_is_bounded(site: Site) -> None:
    await site.link.open(deadline_s=START_S)
    await site.connected("--noise", str(6 << 20))
    await until(lambda: site.directory.engine_log.stat().st_size, lambda size: size < (3 << 20))


@pytest.fixture
def surgeon(site: Site) -> tuple[Path, str]:
    """A CRIU that kills what it is to write to disk, and never ends a restore; and what a restore of its is known by."""
    mark, script = f"600.{time.monotonic_ns()}", site.directory.path.parent / "criu"
    dump = 'kill -9 "$3"; while kill -0 "$3" 2>/dev/null; do sleep 0.01; done; exit 1'
    script.write_text(f'#!/bin/sh\nif [ "$1" = dump ]; then {dump}; fi\nexec sleep {mark}\n')
    script.chmod(0o700)
    return script, mark


def of_a_restore(mark: str) -> list[processes.Process]:
    found = []
    for entry in Path("/proc").iterdir():
        with contextlib.suppress(OSError):
            if entry.name.isdigit() and mark.encode() in (entry / "cmdline").read_bytes().split(b"\0"):
                found.append(processes.identify(int(entry.name)))
    return [one for one in found if one is not None]


@pytest.mark.parametrize("word", ["kill", "leave"])
async def test_a_restore_that_nobody_waits_for_any_more_brings_nothing_to_life(
    site: Site, surgeon: tuple[Path, str], word: str
) -> None:
    script, mark = surgeon
    holder, _ = await site.link.open(deadline_s=START_S)
    place = str(site.directory.path)
    restoring = asyncio.create_task(
        site.link.restore(str(script), site.directory.path / "image", pid=(1 << 22) - 1, place=place, deadline_s=60)
    )
    [criu] = await until(lambda: of_a_restore(mark), bool)
    restoring.cancel()
    await asyncio.wait([restoring])
    await (site.link.kill(0) if word == "kill" else site.link.leave())
    assert not processes.alive(criu)
    if word == "kill":
        await site.connected()  # the cold start that follows
    else:
        assert await processes.gone(holder, END_S)


async def test_an_engine_that_dies_while_it_is_written_to_disk_is_dead(site: Site, surgeon: tuple[Path, str]) -> None:
    await site.link.open(deadline_s=START_S)
    engine = await site.connected()
    with pytest.raises(HolderDenied) as caught:
        await site.link.dump(str(surgeon[0]), site.directory.path / "image", deadline_s=START_S)
    assert caught.value.code == "dump_failed"
    held = await site.link.ask()
    assert held.engine == engine
    assert held.exit is not None
    assert held.exit.status == -signal.SIGKILL


async def test_start_failure_is_typed(site: Site) -> None:
    await site.link.open(deadline_s=START_S)
    with pytest.raises(HolderDenied) as caught:
        await site.link.start((str(site.directory.path / "nothing"),))
    assert caught.value.code == "start_failed"


async def test_no_test_left_a_zombie(others: set[processes.Process]) -> None:
    await until(lambda: {one for one in children() - others if not processes.alive(one)}, lambda left: not left)
