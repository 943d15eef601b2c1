"""One instance of a bench: a holder, the engine in it, the frontend's end of its wire."""

import asyncio
import sys
import time
from typing import TYPE_CHECKING, Any

import msgspec

from tests.bench.laddernotes import ms
from tests.bench.tokenport import TokenPort
from worker.engines.messages import Attach, Check, Checked, ControlCommand, Detach, Drain, Fault, Sleep, Wake
from worker.holderlink import HolderLink
from worker.holdermessages import Held
from worker.instancedir import InstanceDir

if TYPE_CHECKING:
    from tests.bench.ladderstage import Stage

TOKENS = 64


class Room:
    """One instance: holder, engine, token port."""

    def __init__(self, bench: "Stage", name: str) -> None:
        self.bench, self.name = bench, name
        bench.rooms.append(self)
        self.directory = InstanceDir(bench.work / "run" / "inst", name)
        self.directory.create("cfg_bench")
        self.link = HolderLink(self.directory)
        self.port = TokenPort()
        self.server: asyncio.Server | None = None
        self.held: Held | None = None

    async def open(self) -> float:
        """Start the holder; milliseconds."""
        begun = time.monotonic()
        self.server = await self.port.listen(self.directory.path / "tokens.sock")
        _, self.held = await self.link.open(deadline_s=30)
        return ms(begun)

    async def start(self, *, bare: bool) -> float:
        """From the order to the engine's first word; seconds."""
        begun, bench = time.monotonic(), self.bench
        heavy = getattr(bench.options, "heavy", 0)
        argv = [sys.executable, "-P", "-m"]
        argv += ["tests.bench.heavy", "--bytes", str(heavy), "--"] if heavy else ["worker.engines.process"]
        argv += ["--instance-dir", str(self.directory.path)]
        argv += ["--engine", bench.options.engine, "--source", str(bench.source)]
        argv += ["--arguments", msgspec.json.encode(bench.arguments).decode()]
        if bench.device:
            argv += ["--device", bench.device, *["--bare"] * bare]
        await self.link.start(tuple(argv))
        await self.connected(240)
        return time.monotonic() - begun

    async def connected(self, deadline_s: float) -> Held:
        ends = time.monotonic() + deadline_s
        while True:
            held = await self.link.ask()
            if held.connected:
                self.held = held
                return held
            if held.exit is not None or time.monotonic() > ends:
                raise RuntimeError(f"{held.exit}: {self.directory.engine_log.read_text()[-5000:]}")
            await asyncio.sleep(0.005)

    async def tell(self, command: ControlCommand, deadline_s: float = 120.0) -> Any:
        reply = await self.link.tell(command, deadline_s)
        if isinstance(reply, Fault):
            raise RuntimeError(f"{reply.code}: {reply.message}")
        return reply

    @property
    def pid(self) -> int:
        assert self.held is not None
        assert self.held.engine is not None
        return self.held.engine.pid

    async def up(self, weight_set: str) -> dict[str, Any]:
        """Map, wake, known answer, first token of a caller."""
        begun = time.monotonic()
        state = await self.tell(Attach(pool_socket=str(self.bench.socket), weight_set=weight_set))
        attach_ms, begun = ms(begun), time.monotonic()
        await self.tell(Wake(model="a"))
        wake_ms, begun = ms(begun), time.monotonic()
        checked = await self.tell(Check(prompt=tuple(range(1, 9)), tokens=8))
        assert isinstance(checked, Checked)
        same = checked.ids == self.bench.known.setdefault("check", checked.ids)
        check_ms, begun = ms(begun), time.monotonic()
        _, first_ms = await self.port.generate(1)
        return {
            "attach_ms": attach_ms, "copied_bytes": state.bytes_copied, "copy_ms": state.copy_ms, "wake_ms": wake_ms,
            "check_ms": check_ms, "check_same": same, "first_token_ms": first_ms,
        }  # fmt: skip

    async def same(self) -> bool:
        ids, _ = await self.port.generate(TOKENS)
        return ids == self.bench.known.setdefault("tokens", ids)

    async def down(self) -> float:
        begun = time.monotonic()
        await self.tell(Drain(deadline_ms=5000))
        await self.tell(Sleep())
        await self.tell(Detach())
        return ms(begun)

    async def close(self) -> None:
        try:
            await self.link.leave()
        finally:
            if self.server is not None:
                self.server.close()
