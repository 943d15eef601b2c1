"""What the lower rungs are measured on: a pool daemon's set, engines in holders, the driver or its twin."""

import argparse
import asyncio
import contextlib
import json
import os
import subprocess
import sys
import time
import traceback
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import msgspec

from compose.bench.rows import machine, medians
from compose.bench.shapes import shape_of
from pool.client import Attachment, PoolClient
from pool.devicelink import attach_device
from tests.bench.laddernotes import ms
from tests.bench.ladderroom import Room
from worker import gpus, processes
from worker.cuda.operation import Operation, Theatre, operate, state_of
from worker.cuda.step import Said
from worker.engines.messages import Health
from worker.engines.messages import Stage as Bring
from worker.failure import StepFailed
from worker.images.manifest import Manifest
from worker.images.store import Store
from worker.sources.fakes import fake_source

STEP_S = 60.0


class Stage:
    """A pool, a checkpoint, an engine that was started cold; what is measured is kept in `rows`."""

    def __init__(self, options: argparse.Namespace) -> None:
        self.options = options
        self.work = Path(options.work)
        self.socket = self.work / "pool" / "pool.sock"
        fake = options.engine == "fake"
        self.device = "" if fake else chosen(options.gpu)
        self.theatre = Theatre(self.work / "twin") if fake else Theatre()
        kv = shape_of(options.shape).kv_bytes
        self.arguments: dict[str, Any] = {"kv_bytes": kv, "max_num_seqs": 256, "max_model_len": 4096}
        if fake:
            self.arguments = {"context_tokens": 4096}
        self.source = Path()
        self.known: dict[str, Any] = {}
        self.weight_set = ""
        self.rows: dict[str, Any] = {**machine(), "shape": options.shape, "engine": options.engine}
        self.store = Store(self.work / "images")
        self.manifest: Manifest | None = None
        self.room: Room | None = None
        self.rooms: list[Room] = []
        self.cold: list[float] = []
        self.inside = False

    async def phase(self, name: str, work: Callable[[], Awaitable[Any]], limit_s: float = 200.0) -> None:
        begun = time.monotonic()
        try:
            found = await asyncio.wait_for(work(), limit_s)
        except Exception as error:
            traceback.print_exc()
            found = {"failed": repr(error)[:3000]}
        self.rows[name] = found
        print(
            f"{time.strftime('%H:%M:%S')} [{name}] {time.monotonic() - begun:.1f} s {json.dumps(found, default=str)[:2500]}",
            flush=True,
        )
        Path(self.options.out).write_text(json.dumps(self.rows, indent=1, default=str))

    async def end(self) -> None:
        """Of what was started nothing goes on."""
        for room in self.rooms:
            with contextlib.suppress(Exception):  # most have ended long ago
                await asyncio.wait_for(room.link.kill(0), 10)
                await room.close()

    # ---- pieces ---------------------------------------------------------------------------------------------

    def used(self) -> int:
        return gpus.used_bytes(self.device) if self.device else 0

    def fill(self) -> Attachment | None:
        """Blocking: the pool fills the device for somebody who is not there yet; hold it until he has mapped it."""
        if not self.device:
            return None
        kept = attach_device(self.socket, self.weight_set, self.device, lambda attached, fds: None)
        kept.close_fds()
        return kept

    async def models(self) -> Any:
        if self.options.engine == "fake":
            self.source = fake_source(self.work, "a", 1 << 20)
            async with await PoolClient.connect(self.socket) as pool:
                self.weight_set = (await pool.stage(self.source)).weight_set
            return {}
        from compose.bench.checkpoints import make

        self.source = await asyncio.to_thread(make, self.work / f"{self.options.shape}-a", self.options.shape, 1)
        return {"bytes": sum(file.stat().st_size for file in self.source.glob("*.safetensors"))}

    async def start(self, *, bare: bool = False) -> Any:
        """A cold start as a caller sees it: holder, engine, weights, first token. The first one stages as well."""
        begun = time.monotonic()
        self.room = room = Room(self, f"ins_{len(self.cold)}")
        holder_ms = await room.open()
        engine_s = await room.start(bare=bare)
        stage_ms = 0.0
        if not self.weight_set:
            at = time.monotonic()
            stocked = await room.tell(Bring(pool_socket=str(self.socket), source=str(self.source), form="bench"), 200)
            self.weight_set, stage_ms = stocked.weight_set, ms(at)
        up = await room.up(self.weight_set)
        whole_s = time.monotonic() - begun
        self.cold.append(whole_s - stage_ms / 1000)
        same = await room.same()
        down_ms = await room.down()
        state = await room.tell(Health())
        return {
            "cold_start_s": self.cold[-1], "holder_ms": holder_ms, "engine_s": engine_s, "stage_ms": stage_ms, **up,
            "same_tokens": same, "down_ms": down_ms, "state": str(state), "device_bytes": self.used(), "pid": room.pid,
            "rss": processes.private_bytes(room.pid),
        }  # fmt: skip

    async def step_process(self) -> Any:
        """What a step process costs before its first call, and what it says of a process without CUDA and of the engine."""
        assert self.room is not None
        found: dict[str, Any] = {}
        for name in ("first", "second"):
            begun = time.monotonic()
            operation = await Operation.prepare(self.theatre, ("state",))
            found[f"{name}_ready_ms"] = ms(begun)
            begun = time.monotonic()
            found[f"{name}_state"] = str(await operation.carry_out((self.room.pid,), 20))
            found[f"{name}_ms"] = ms(begun)
            await operation.end()
        if self.device:
            found["driver_calls"] = await asyncio.to_thread(driver_calls, self.room.pid)
        found["of_this_process"] = str(await state_of(self.theatre, os.getpid()))
        try:
            found["outside"] = str(await operate(self.theatre, (self.room.pid,), ("lock", "unlock"), deadline_s=20))
        except StepFailed as failure:
            found["outside"] = f"{failure.code}: {failure.message}"
            self.inside = True
            found["inside"] = str(await self.operate(self.room, ("lock", "unlock")))
        return found

    async def operate(self, room: Room, verbs: tuple[str, ...]) -> list[Said]:
        """By a step process outside of the holder's namespaces, or inside where that is what works."""
        if not self.inside:
            return await operate(self.theatre, (room.pid,), verbs, deadline_s=STEP_S)
        assert room.held is not None
        argv = [
            "nsenter",
            "-t",
            str(room.held.pid),
            "-p",
            "-m",
            "-n",
            "-i",
            "--",
            sys.executable,
            "-P",
            "-m",
            "worker.cuda.step",
        ]
        argv += ["--pid", str(room.held.inner_pid), *verbs]
        done = await asyncio.to_thread(subprocess.run, argv, capture_output=True, text=True, timeout=STEP_S, check=False)
        if done.returncode:
            raise RuntimeError(done.stdout + done.stderr[-1500:])
        return [msgspec.json.decode(line, type=Said) for line in done.stdout.splitlines()]

    async def warm_cycles(self) -> Any:
        assert self.room is not None
        rows = []
        for _ in range(self.options.cycles):
            begun = time.monotonic()
            row = await self.room.up(self.weight_set)
            row["whole_ms"] = ms(begun)
            row["same_tokens"] = await self.room.same()
            row["down_ms"] = await self.room.down()
            rows.append(row)
        return {"rows": rows, "median": medians(rows)}


def driver_calls(pid: int) -> str:
    """Whether the driver answers before it was initialised, and what that takes."""
    code = (
        "import time; a = time.monotonic(); from cuda.bindings import driver as d; b = time.monotonic()\n"
        f"s = d.cuCheckpointProcessGetState({pid}); c = time.monotonic(); i = d.cuInit(0); e = time.monotonic()\n"
        "print(f'import {b - a:.3f} s, state before cuInit {s} {c - b:.3f} s, cuInit {i} {e - c:.3f} s')"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=30, check=False)
    return done.stdout + done.stderr[-500:]


def chosen(gpu: str) -> str:
    return next(one.uuid for one in gpus.gpus() if gpu in (str(one.index), one.uuid))
