"""What surrounds an engine, as real processes: pool daemon, frontend, the engine itself. Only its holder is played here."""

import asyncio
import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import aiohttp
import msgspec

from controlplane.plane import Plane
from pool.client import PoolClient
from tests.poolroom import forget
from worker.engines.messages import Attach, ControlReply, Fault, Health, State, Wake
from worker.engines.wire import decoder, read, write

DEADLINE_S = 60.0
TOKEN = "node-token-of-the-test"


class Died(Exception):
    """A process ended, or a wait did not."""


class Holder:
    """The holder's end of the control wire."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._streams: asyncio.Queue[tuple[asyncio.StreamReader, asyncio.StreamWriter]] = asyncio.Queue()
        self._stream: tuple[asyncio.StreamReader, asyncio.StreamWriter] | None = None
        self._server: asyncio.Server | None = None
        self.writers: list[asyncio.StreamWriter] = []
        self.check_alive: Callable[[], None] = lambda: None

    async def listen(self) -> None:
        async def accept(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            self.writers.append(writer)
            await self._streams.put((reader, writer))

        self._server = await asyncio.start_unix_server(accept, str(self._path))

    async def tell(self, command: msgspec.Struct) -> ControlReply:
        async with asyncio.timeout(60):
            while self._stream is None:
                try:
                    self._stream = await asyncio.wait_for(self._streams.get(), 0.1)
                except TimeoutError:
                    self.check_alive()
            reader, writer = self._stream
            await write(writer, command)
            reply = await read(reader, decoder(ControlReply))
            assert reply is not None, "the engine has closed its control connection"
            return reply

    async def ok(self, command: msgspec.Struct) -> State:
        reply = await self.tell(command)
        assert isinstance(reply, State), reply
        return reply

    async def fault(self, command: msgspec.Struct) -> Fault:
        reply = await self.tell(command)
        assert isinstance(reply, Fault), reply
        return reply

    def hang_up(self) -> None:
        if self._stream is not None:
            self._stream[1].close()
            self._stream = None

    async def close(self) -> None:
        self.hang_up()
        if self._server is not None:
            self._server.close()
        await end_all(self.writers)


async def end_all(writers: list[asyncio.StreamWriter]) -> None:
    for writer in writers:
        writer.close()
    for writer in writers:
        with contextlib.suppress(OSError):
            await writer.wait_closed()


class Room:
    """One instance in a data directory of its own, its processes started and killed by hand."""

    def __init__(self, data: Path, instance: str = "ins_1") -> None:
        self.data, self.instance = data, instance
        self.directory = data / "run" / "inst" / instance
        self.directory.mkdir(mode=0o700, parents=True)
        self.pool_socket = data / "pool.sock"
        self.holder = Holder(self.directory / "control.sock")
        self.processes: dict[str, subprocess.Popen[bytes]] = {}
        self.session: aiohttp.ClientSession | None = None
        self.writers: list[asyncio.StreamWriter] = []
        self.servers: list[asyncio.Server] = []
        """Both of whatever a test plays itself; closed at its end."""
        Plane(data=str(data), postgres_url="", nats_url="", node_token=TOKEN, pool_socket=str(self.pool_socket)).write()

    def start(self, name: str, *argv: str) -> subprocess.Popen[bytes]:
        log = (self.data / f"{name}.log").open("ab")
        process = subprocess.Popen([sys.executable, "-m", *argv], stdin=subprocess.DEVNULL, stdout=log, stderr=log)
        log.close()
        self.processes[name] = process
        return process

    async def start_pool(self, budget: int = 2**30) -> None:
        segments = self.data / "segments"
        segments.mkdir(mode=0o700, exist_ok=True)
        self.start(
            "pool", "pool.daemon", "--socket", str(self.pool_socket), "--directory", str(segments), "--budget", str(budget)
        )
        await self.until("the pool", self._pool_listens)  # its socket is there a moment before it listens

    def _pool_listens(self) -> bool:
        with socket.socket(socket.AF_UNIX) as probe:
            return probe.connect_ex(str(self.pool_socket)) == 0

    async def stage(self, source: Path) -> str:
        client = await PoolClient.connect(self.pool_socket)
        try:
            return (await client.stage(source)).weight_set
        finally:
            await client.close()

    async def start_engine(self, engine: str, source: Path, **arguments: Any) -> None:
        if "engine" not in self.processes:
            await self.holder.listen()
            self.holder.check_alive = self._engine_alive
        self.start(
            "engine", "worker.engines.process", "--instance-dir", str(self.directory), "--engine", engine,
            "--source", str(source), "--arguments", json.dumps(arguments),
        )  # fmt: skip

    async def start_frontend(self) -> None:
        file = self.directory / "frontend.json"
        file.unlink(missing_ok=True)
        self.start("frontend", "worker.frontend.server", "--data", str(self.data), "--instance", self.instance)
        await self.until("the frontend", file.exists)
        if self.session is not None:
            await self.session.close()
        port = json.loads(file.read_bytes())["port"]
        self.session = aiohttp.ClientSession(f"http://127.0.0.1:{port}", headers={"Authorization": f"Bearer {TOKEN}"})

    async def serve(self, source: Path, *, model: str = "m", grant: int = 1, context_tokens: int = 4096) -> None:
        body = {
            "model": model, "revision": 1, "grant": grant, "weight_set": "ws_1", "source": str(source),
            "context_tokens": context_tokens, "engine": "fake",
        }  # fmt: skip
        async with self.http.put("/serving", json=body) as response:
            assert response.status == 200, await response.text()

    async def up(self, source: Path, **arguments: Any) -> None:
        """All of it, with a fake model: staged, attached, awake, served."""
        await self.start_pool()
        weight_set = await self.stage(source)
        await self.start_engine("fake", source, **arguments)
        await self.start_frontend()
        await self.holder.ok(Attach(pool_socket=str(self.pool_socket), weight_set=weight_set))
        await self.holder.ok(Wake(model="m"))
        await self.serve(source)

    @property
    def http(self) -> aiohttp.ClientSession:
        assert self.session is not None
        return self.session

    async def status(self) -> dict[str, Any]:
        async with self.http.get("/status") as response:
            return dict(await response.json())

    async def running(self) -> int:
        """What the engine itself says."""
        return (await self.holder.ok(Health())).running

    async def until(self, what: str, condition: Any, deadline_s: float = DEADLINE_S) -> None:
        """Wait on a condition, an await of it included, with a deadline."""
        end = asyncio.get_running_loop().time() + deadline_s
        while True:
            found = condition()
            if asyncio.iscoroutine(found):
                found = await found
            if found:
                return
            dead = [name for name, process in self.processes.items() if process.poll() is not None]
            if asyncio.get_running_loop().time() > end:
                logs = "\n".join(f"--- {log.name}\n{log.read_text()[-2000:]}" for log in self.data.glob("*.log"))
                raise Died(f"{what}: not within {deadline_s} s (dead: {dead})\n{logs}")
            await asyncio.sleep(0.01)

    def _engine_alive(self) -> None:
        if "engine" in self.processes and (status := self.processes["engine"].poll()) is not None:
            raise Died(f"the engine ended with {status}:\n{(self.data / 'engine.log').read_text()[-2000:]}")

    def kill(self, name: str) -> None:
        self.processes[name].send_signal(signal.SIGKILL)
        self.processes[name].wait(DEADLINE_S)

    async def close(self) -> None:
        if self.session is not None:
            await self.session.close()
        for process in self.processes.values():
            if process.poll() is None:
                process.terminate()
        for process in self.processes.values():
            try:
                await asyncio.to_thread(process.wait, 5)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait(DEADLINE_S)
        await self.holder.close()  # last: a living engine would connect again
        for server in self.servers:
            server.close()
        await end_all(self.writers)
        forget(self.data / "segments")


def wish(request: str = "req_1", text: str = "hello", **body: Any) -> dict[str, Any]:
    body = {"messages": [{"role": "user", "content": text}], **body}
    return {"request": request, "attempt": 1, "model": "m", "grant": 1, "kind": "chat", "body": body}


async def lines(response: aiohttp.ClientResponse) -> AsyncIterator[dict[str, Any]]:
    async for raw in response.content:
        yield json.loads(raw)


async def whole(response: aiohttp.ClientResponse) -> tuple[str, dict[str, Any]]:
    """The joined text, and the last line."""
    text, last = "", {}
    async with asyncio.timeout(DEADLINE_S):
        async for line in lines(response):
            last = line
            text += line["text"] if line["t"] == "delta" else ""
    return text, last


def open_fds(pid: int) -> int:
    return len(os.listdir(f"/proc/{pid}/fd"))
