"""The frontend of one instance, as its worker sees it: a process of its own session and an HTTP interface on loopback."""

import asyncio
import sys
from pathlib import Path
from typing import Any

import msgspec

from controlplane.plane import Plane
from controlplane.reservation import Reservation
from worker import processes
from worker.caller import Caller, Unanswered
from worker.instancedir import InstanceDir
from worker.moves import Served
from worker.processes import Process

POLL_S = 0.02
ANSWER_S = 2.0
"""Of a frontend that only looks at itself; under load its loop may be busy for a while."""


class FrontendGone(Exception):
    """It does not answer, or answers with an error; the message says which."""


class Status(msgspec.Struct, frozen=True):
    """What `GET /status` answers."""

    serving: Served | None = None
    running: int = 0
    engine_connected: bool = False
    tokens_per_s: float = 0.0


class Service:
    """Starts and speaks to one instance's frontend. Every call raises FrontendGone when it fails within its deadline."""

    def __init__(self, plane: Plane, caller: Caller, directory: InstanceDir) -> None:
        self._plane, self._caller, self._directory = plane, caller, directory

    def endpoint(self, port: int) -> str:
        """The URL that web is given."""
        return f"http://{self._plane.node_address}:{port}"

    async def start(self, port: int, *, deadline_s: float) -> tuple[Process, int]:
        """Start a frontend on `port` (0: any that is free) and wait until it answers; return it and its port."""
        try:
            kept = Reservation(self._plane.node_address, port)
        except OSError as error:
            raise FrontendGone(f"port {port} of {self._plane.node_address} can't be had: {error}") from error
        with kept:
            return await self._started(kept.port, deadline_s)

    async def _started(self, chosen: int, deadline_s: float) -> tuple[Process, int]:
        argv = [sys.executable, "-P", "-m", "worker.frontend.server", "--data", self._plane.data]
        argv += ["--instance", self._directory.instance, "--port", str(chosen)]
        process = processes.spawn(argv, log=self._directory.log("frontend"), directory=Path(self._plane.data))
        self._directory.edit(frontend=process, port=chosen)
        try:
            async with asyncio.timeout(deadline_s):
                while True:
                    try:
                        await self.status(chosen)
                    except FrontendGone:
                        if not processes.alive(process):
                            await processes.gone(process)
                            raise FrontendGone(f"the frontend ended at its start: {self._last_words()}") from None
                        await asyncio.sleep(POLL_S)
                    else:
                        return process, chosen
        except BaseException:
            await asyncio.shield(processes.end(process, grace_s=0))
            raise

    async def status(self, port: int, *, deadline_s: float = ANSWER_S) -> Status:
        return await self._call("GET", "/status", port, deadline_s=deadline_s)

    async def serve(self, port: int, what: dict[str, Any], *, deadline_s: float) -> Status:
        """Admit requests for what the body names (fields of `frontend.serving.Serving`)."""
        return await self._call("PUT", "/serving", port, deadline_s=deadline_s, body=what)

    async def read_ahead(self, port: int, source: Path, *, deadline_s: float) -> Status:
        """Have it begin to load a model's tokenizer, while the engine is still on its way."""
        return await self._call("PUT", "/source", port, deadline_s=deadline_s, data=str(source).encode())

    async def stop_serving(self, port: int, *, deadline_s: float, abort: bool = False) -> Status:
        """Admit nothing more; `abort` also ends what still runs, with a typed error to its callers."""
        return await self._call("DELETE", "/serving?abort=1" if abort else "/serving", port, deadline_s=deadline_s)

    async def _call(
        self, method: str, path: str, port: int, *, deadline_s: float, body: object = None, data: bytes | None = None
    ) -> Status:
        data = msgspec.json.encode(body) if body is not None else data
        url = self.endpoint(port) + path
        try:
            status, answer = await self._caller.call(method, url, self._plane.node_token, data, deadline_s=deadline_s)
            if status != 200:
                raise FrontendGone(f"{method} {path}: {status} {answer[:500].decode('utf-8', 'replace')}")
            return msgspec.json.decode(answer, type=Status)
        except (Unanswered, msgspec.DecodeError) as error:
            raise FrontendGone(f"{method} {path}: {error}") from error

    def _last_words(self) -> str:
        try:
            return self._directory.log("frontend").read_text(encoding="utf-8", errors="replace")[-1000:]
        except FileNotFoundError:
            return ""
