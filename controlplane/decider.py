"""The decider's process: `python -m controlplane.decider --data DIR`.

    wait for Postgres --> lead (or stand by) --> fold the log --> begin the reign --> listen on the bus

It ends with 0 on SIGTERM, in order: it stops listening, answers what it has, lets the relay catch up. It ends with
another status when a commit fails or leadership is lost; whoever supervises it starts it again, and it folds the log.
"""

import argparse
import asyncio
import contextlib
import os
import signal
import socket
import sys
import time
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from pathlib import Path
from typing import Any, Final

import asyncpg
import nats.errors
import structlog
import uvloop

import migrations
from controlplane import ids, lean, parties
from controlplane.bus import Bus
from controlplane.commands import BeginReign, Order
from controlplane.decisions.decide import decide
from controlplane.desk import DESK, Desk
from controlplane.envelope import Recorded
from controlplane.fleet import Fleet
from controlplane.log.leader import Leadership
from controlplane.log.postgres import PostgresLog
from controlplane.log.snapshots import Snapshotter, restore
from controlplane.logs import write_json_lines
from controlplane.plane import Plane
from controlplane.reception import Reception
from controlplane.refusal import Refusal
from controlplane.relay import Relay

FAILED: Final = 70
"""Exit status after a failed commit, lost leadership or a closed bus."""
POSTGRES_S: Final = 60.0
CONNECT_S: Final = 5.0
POLL_S: Final = 0.02
WORK_OFF_S: Final = 0.8
CATCH_UP_S: Final = 0.4
SNAPSHOT_S: Final = 0.3
END_S: Final = 1.8
"""Sum of the above and of closing the connections: an ordered end takes less than two seconds."""
log = structlog.get_logger("decider")


class Failed(Exception):
    """The process can't go on."""


async def reign(plane: Plane, stop: asyncio.Event, begun: asyncio.Event) -> None:
    """Lead until `stop`; `begun` is set once commands are taken. Raises an ExceptionGroup of what made it fail, or Failed
    or Refused while starting."""
    started = time.monotonic()
    host, pid = socket.gethostname(), os.getpid()
    await _schema(plane.postgres_url)
    async with contextlib.AsyncExitStack() as stack:
        leadership = await Leadership.acquire(plane.postgres_url, host, pid)
        stack.push_async_callback(_end, leadership.resign)
        log_ = await PostgresLog.open(plane.postgres_url)
        stack.push_async_callback(_end, log_.close)
        fleet = await restore(log_, storing=True)
        bus = await Bus.connect(plane, "decider", parties.DECIDER)
        stack.push_async_callback(_end, bus.close)
        relay, snapshotter = Relay(bus, log_), Snapshotter(log_, fleet)

        def committed(events: Sequence[Recorded], after: Fleet) -> None:
            relay.feed(events)
            snapshotter.note(after)

        desk = Desk(log_, fleet, leadership.epoch, decide, floor_ms=await _last_ms(log_), on_commit=committed)
        reception = Reception(bus, desk)
        async with asyncio.TaskGroup() as group:
            working = group.create_task(desk.run())
            lasting = [
                group.create_task(_lasting(work, what))
                for work, what in (
                    (relay.run(), "the relay"), (snapshotter.run(), "snapshots"), (reception.rounds(), "the clock"),
                    (leadership.lost(), "leadership"), (bus.closed.wait(), "the bus"),
                )
            ]  # fmt: skip
            order = Order(id=ids.new(ids.COMMAND), actor=DESK, body=BeginReign(host=host, pid=pid, epoch=leadership.epoch))
            if isinstance(reply := await desk.submit(order), Refusal):
                raise Failed(reply.message)
            await reception.open()
            begun.set()
            took_ms = round((time.monotonic() - started) * 1000)
            log.info(
                "reigning", epoch=leadership.epoch, position=desk.fleet.position, folded_to=fleet.position, took_ms=took_ms
            )
            await stop.wait()
            await reception.close()
            desk.close()
            await _within(WORK_OFF_S, working, "commands")
            await _within(CATCH_UP_S, relay.caught_up(desk.fleet.position), "relay")
            await _within(SNAPSHOT_S, snapshotter.take(), "snapshot")
            for task in (working, *lasting):
                task.cancel()


async def _lasting(work: Coroutine[Any, Any, object], what: str) -> None:
    """Run what must not end before we do."""
    await work
    raise Failed(f"{what} came to an end")


async def _within(limit_s: float, work: Awaitable[object], what: str) -> None:
    """Give the work of an ordered end its share of the time. None of it is needed for the truth."""
    try:
        async with asyncio.timeout(limit_s):
            await work
    except TimeoutError:
        log.info("left_undone", what=what, limit_s=limit_s)


async def _end(close: Callable[[], Awaitable[None]]) -> None:
    """Close a connection, which may be broken: that is no news any more."""
    try:
        async with asyncio.timeout(1):
            await close()
    except (OSError, TimeoutError, asyncpg.PostgresError, asyncpg.InterfaceError, nats.errors.Error) as error:
        log.info("close_failed", error=repr(error))


async def _schema(url: str) -> None:
    """Wait until Postgres answers with the schema that this release knows: it may be starting, recovering, or being
    migrated. Raises Failed after POSTGRES_S."""
    deadline = time.monotonic() + POSTGRES_S
    while True:
        try:
            async with asyncio.timeout(CONNECT_S):
                revision = await migrations.current(url)
        except (OSError, TimeoutError, asyncpg.PostgresError, asyncpg.InterfaceError) as error:
            fault = f"Postgres does not answer: {error!r}"
        else:
            if revision == migrations.newest():
                return
            fault = f"the log's schema is at {revision}, this release needs {migrations.newest()}"
        if time.monotonic() > deadline:
            raise Failed(f"after {POSTGRES_S:g} s {fault}")
        await asyncio.sleep(POLL_S)


async def _last_ms(log_: PostgresLog) -> int:
    head = await log_.head()
    last = await log_.read(head - 1, 1) if head else []
    return last[0].at_ms if last else 0


async def run(data: Path) -> int:
    """Lead until SIGTERM or SIGINT; return the exit status."""
    stop, begun, loop = asyncio.Event(), asyncio.Event(), asyncio.get_running_loop()
    reigning = asyncio.create_task(reign(Plane.read(data), stop, begun))
    stopping = asyncio.create_task(stop.wait())
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stop.set)
    await asyncio.wait((reigning, stopping), return_when=asyncio.FIRST_COMPLETED)
    if stop.is_set() and not begun.is_set():  # a standby, or still starting: there is nothing to end in order
        reigning.cancel()
    try:
        async with asyncio.timeout(END_S if stop.is_set() else None):
            await reigning
    except (TimeoutError, asyncio.CancelledError):
        log.info("cut_short", begun=begun.is_set())
    except Exception:
        log.exception("decider_failed")
        return FAILED
    finally:
        stopping.cancel()
    return 0


def main() -> None:
    lean.started()
    parser = argparse.ArgumentParser(prog="controlplane.decider", description="Decides, alone; writes the log.")
    parser.add_argument("--data", type=Path, required=True, help="the plane's data directory")
    write_json_lines()
    arguments = parser.parse_args()
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        sys.exit(runner.run(run(arguments.data)))


if __name__ == "__main__":
    main()
