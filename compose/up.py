"""`up`: everything of a plane, started in order, kept running, ended in order."""

import asyncio
import errno
import os
import signal
import socket
import time
from collections.abc import Callable
from pathlib import Path
from typing import Final

import msgspec
import structlog

from compose import parts, remains, servers
from compose.directory import Directory
from compose.logs import write_own_log
from compose.node import Offer, offer
from compose.nursery import Nursery
from compose.process import end
from compose.refusal import EnvironmentRefusal
from compose.servers import Servers
from compose.settingsfile import choose
from compose.supervisor import Supervisor
from controlplane.plane import Plane
from controlplane.reservation import Reservation
from migrations.upgrade import NewerSchema, NotMigrated, upgrade

INSTANCES_END_S: Final = 5.0
PORT: Final = 8480

log = structlog.get_logger("up")
Say = Callable[[str], None]


class UpOptions(msgspec.Struct, frozen=True, kw_only=True):
    data: Path
    settings: Path | None = None
    """None: `enginehouse.toml` in the data directory, if there is one."""
    host: str = "127.0.0.1"
    port: int = PORT
    """0: any that is free."""
    postgres_url: str | None = None
    nats_url: str | None = None
    demo: bool = False


async def up(options: UpOptions, say: Say, nursery: Nursery | None = None) -> None:
    """Run a plane until SIGINT or SIGTERM. Raises EnvironmentRefusal, ServerRefusal or SettingsError before it is started."""
    if (options.postgres_url is None) is not (options.nats_url is None):
        raise EnvironmentRefusal("servers", "Only one of --postgres and --nats is given.", "Give both, or neither.")
    ending = asyncio.Event()
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        asyncio.get_running_loop().add_signal_handler(number, ending.set)
    with Directory.open(options.data) as directory:
        write_own_log(directory.path / "logs" / "up.log")
        supervisor = Supervisor(directory.path, nursery, say)
        running = asyncio.create_task(_run(options, directory, supervisor, say), name="up")
        stopping = asyncio.create_task(ending.wait())
        await asyncio.wait({running, stopping}, return_when=asyncio.FIRST_COMPLETED)
        for task in (running, stopping):
            task.cancel()
        failure = (await asyncio.gather(running, stopping, return_exceptions=True))[0]
        if ending.is_set() or supervisor.children.keys() & parts.SURVIVORS:
            say("ending ...")
            await _end(directory.path, supervisor, say)
        else:  # refused before anything was started: what an earlier `up` has left stays for the next one
            await supervisor.stop()
        if isinstance(failure, Exception):
            raise failure


async def _run(options: UpOptions, directory: Directory, supervisor: Supervisor, say: Say) -> None:
    began = time.monotonic()
    early = await _port(options, supervisor) if options.demo else None  # making its models takes a minute or two
    chosen = await choose(options.settings, directory.path, say, demo=options.demo)
    offered = offer(chosen.settings.node, directory)
    os.environ[remains.MARK] = str(directory.path)
    kept = early or await _port(options, supervisor)
    embedded = None
    if options.postgres_url and options.nats_url:
        given = await servers.given(options.postgres_url, options.nats_url)
    else:
        embedded = servers.Embedded(supervisor, directory)
        given = embedded.servers
    plane = _plane(directory, given, offered, at=(options.host, kept.port), settings=chosen.path)
    plane.write()
    plane.settings_due.touch()
    plane.settings_unapplied.unlink(missing_ok=True)
    children = {spec.name: supervisor.add(spec) for spec in parts.faces(plane)}
    if embedded is not None:
        await embedded.start()
    await migrate(given.owner_url)
    children |= {spec.name: supervisor.add(spec) for spec in parts.hands(plane)}
    for note in filter(None, (offered.note, parts.pool_note(plane))):
        say(note)
    # While the children import what they need, so do we; before, it would have kept them waiting.
    from compose.attendance import attend  # noqa: PLC0415

    with kept:  # over web's restarts, too
        await attend(plane, directory, chosen, supervisor, children["web"], say=say, began=began)


def _plane(directory: Directory, given: Servers, offered: Offer, *, at: tuple[str, int], settings: Path | None) -> Plane:
    data = directory.path
    return Plane(
        data=str(data), postgres_url=given.postgres_url, nats_url=given.nats_url, nats_token=given.nats_token,
        nats_logins=given.nats_logins,
        web_host=at[0], web_port=at[1], node_token=directory.secret("node-token"), cookie_key=directory.secret("cookie-key"),
        pool_socket=str(data / "run" / "pool" / "pool.sock"), pool_bytes=offered.pool_bytes, devices=offered.devices,
        settings_path=str(settings) if settings else None, embedded=given.embedded, deadlines=offered.deadlines,
        criu=offered.criu, image_quota_bytes=offered.image_quota_bytes, image_pins=offered.image_pins,
        checkpoint_bytes=offered.checkpoint_bytes, pool_ready_bytes=offered.pool_ready_bytes,
        pool_helpers=offered.pool_helpers, pool_beside_decoding=offered.pool_beside_decoding,
    )  # fmt: skip


async def migrate(owner_url: str) -> None:
    """Bring the database to this release's schema. Raises EnvironmentRefusal."""
    import asyncpg  # noqa: PLC0415 (once the children import theirs)

    try:
        await upgrade(owner_url)
    except NewerSchema as error:
        raise EnvironmentRefusal(
            "newer_schema", f"The log is newer than this release: {error}.", "Upgrade enginehouse."
        ) from error
    except (NotMigrated, OSError, TimeoutError, asyncpg.PostgresError) as error:
        raise EnvironmentRefusal(
            "not_migrated", f"The database can't be brought to this release's schema: {error or 'it took too long'}.",
            "Give a Postgres role that may create tables in a database of its own, or give no URL.",
        ) from error  # fmt: skip


async def _port(options: UpOptions, supervisor: Supervisor) -> Reservation:
    """Keep the port, which may be held by what an earlier `up` has left. Raises EnvironmentRefusal."""
    await supervisor.end_left_over(but=parts.SURVIVORS)
    return reserved(options.host, options.port)


def reserved(host: str, port: int) -> Reservation:
    """Keep the port, or a free one for 0. Raises EnvironmentRefusal."""
    try:
        return Reservation(host, port)
    except OSError as error:
        foreign = isinstance(error, socket.gaierror) or error.errno == errno.EADDRNOTAVAIL
        code = "no_such_address" if foreign else "port_taken"
        cure = "Give an address of this machine with --host." if foreign else "Free it, or give another with --port."
        raise EnvironmentRefusal(code, f"Port {port} on {host} can't be used: {error.strerror}.", cure) from error


async def _say_farewell(data: Path) -> None:
    """At best: without it the next worker finds out what is gone."""
    try:
        from compose.farewell import say_farewell  # noqa: PLC0415 (as above)

        await say_farewell(data)
    except Exception as error:  # whatever it is, the rest has to end in order
        log.warning("farewell_not_heard", reason=repr(error))


async def _end(data: Path, supervisor: Supervisor, say: Say) -> None:
    """Callers first, then engines, then what holds their memory, then the log, which is told of it; nothing is left."""
    await supervisor.stop(["web", "worker"])
    kept = {state.pid for state in supervisor.states}
    await end([one for one in remains.belonging(data) if one.pid not in kept], deadline_s=INSTANCES_END_S)
    await supervisor.stop(["pool"])
    log_keepers = {child.state.pid for name, child in supervisor.children.items() if name not in ("web", "worker", "pool")}
    if "worker" in supervisor.children and all(one.pid in log_keepers for one in remains.belonging(data)):
        await _say_farewell(data)
    await supervisor.stop()
    if left := await remains.clear(data):
        log.warning("left_over", count=left)
        say(f"{left} processes had to be ended on their own; see {data / 'logs'}")
