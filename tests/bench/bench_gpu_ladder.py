"""The lower rungs on a GPU: `python -m tests.bench.bench_gpu_ladder --shape 8b --out FILE --criu PATH [--cycles 3]`.

A pool daemon, a holder in its namespaces, a vLLM engine in it, step processes and CRIU, driven as the worker does it, and no
plane: checkpoint and back, saved and back, from one image several times, beside the warmest cold start. Greedy tokens are
compared after every way up. `--engine fake` runs the same on a machine without a GPU, over the driver's twin.
"""

import argparse
import asyncio
import itertools
import json
import os
import shutil
import signal
import statistics
import subprocess
import sys
import time
import traceback
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import msgspec

from compose.bench.shapes import SHAPES, shape_of
from pool.client import Attachment, PoolClient
from pool.devicelink import attach_device
from tests.bench.tokenport import TokenPort
from worker import gpus, processes
from worker.cuda.operation import Operation, Theatre, operate, state_of
from worker.cuda.step import Said
from worker.engines.messages import Attach, Check, Checked, ControlCommand, Detach, Drain, Fault, Health, Sleep, Stage, Wake
from worker.failure import StepFailed
from worker.holderlink import HolderDenied, HolderLink
from worker.holdermessages import Held
from worker.images.fingerprint import Fingerprint
from worker.images.store import Manifest, Store
from worker.instancedir import InstanceDir
from worker.sources.fakes import fake_source

TOKENS = 64
DOWN, UP = ("lock", "checkpoint"), ("restore", "unlock")
STEP_S = 60.0


class Room:
    """One instance: holder, engine, token port."""

    def __init__(self, bench: "Bench", name: str) -> None:
        self.bench, self.name = bench, name
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
        argv = [sys.executable, "-P", "-m", "worker.engines.process", "--instance-dir", str(self.directory.path)]
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


class Bench:
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
        self.rows: dict[str, Any] = {"shape": options.shape, "engine": options.engine}
        self.store = Store(self.work / "images")
        self.manifest: Manifest | None = None
        self.room: Room | None = None
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
            stocked = await room.tell(Stage(pool_socket=str(self.socket), source=str(self.source), form="bench"), 200)
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

    async def checkpoints(self) -> Any:
        return {"rows": (rows := [await self._checkpoint() for _ in range(self.options.cycles)]), "median": medians(rows)}

    async def _checkpoint(self) -> dict[str, Any]:
        room = self.room
        assert room is not None
        row: dict[str, Any] = {"device_before": self.used()}
        begun = time.monotonic()
        await room.link.park(deadline_s=20)
        row["park_ms"] = ms(begun)
        row["nvidia_files_parked"] = nvidia_files(room.pid)
        row |= spoken(await self.operate(room, DOWN))
        row["down_ms"] = ms(begun)
        row["device_down"], row["driver_says"] = self.used(), gpus.processes(self.device) if self.device else {}
        row["rss_down"], row["nvidia_files"] = processes.private_bytes(room.pid), nvidia_files(room.pid)
        row["threads"] = len(list(Path(f"/proc/{room.pid}/task").iterdir()))
        row |= await self._ascend(room)
        row["same_tokens"] = await room.same()
        await room.down()
        return row

    async def _ascend(self, room: Room, *, begun: float | None = None) -> dict[str, Any]:
        """From a parked process without a GPU to a caller's first token; the pool fills the device meanwhile."""
        begun = begun or time.monotonic()
        filling = asyncio.create_task(asyncio.to_thread(self.fill))
        readying = asyncio.create_task(Operation.prepare(self.theatre, UP))
        return await self._finish(room, begun, filling, readying)

    async def _finish(
        self, room: Room, begun: float, filling: "asyncio.Task[Attachment | None]", readying: "asyncio.Task[Operation]"
    ) -> dict[str, Any]:
        at = time.monotonic()
        operation = await readying
        row: dict[str, Any] = {"ready_ms": ms(at)}
        at = time.monotonic()
        if self.inside:
            await operation.end()
            said = spoken(await self.operate(room, UP))
        else:
            said = spoken(await operation.carry_out((room.pid,), STEP_S))
        row |= {**said, "cuda_ms": ms(at)}
        at = time.monotonic()
        await room.link.release()
        await room.connected(20)
        row["connect_ms"] = ms(at)
        at = time.monotonic()
        kept = await filling
        row["fill_waited_ms"] = ms(at)
        if kept is not None and (filled := getattr(kept, "filled", None)) is not None:
            row |= {"fill_bytes": filled.copied_bytes, "fill_ms": filled.took_ms}
        row |= await room.up(self.weight_set)
        row["to_first_token_ms"] = ms(begun)
        if kept is not None:
            kept.close()
        return row

    async def save(self) -> Any:
        """To disk: from a serving engine, so that it is the way down of a whole rung."""
        room = self.room
        assert room is not None
        await room.up(self.weight_set)
        begun = time.monotonic()
        row: dict[str, Any] = {"sleep_ms": await room.down()}
        row |= await self._dump(room)
        row["up_to_written_ms"] = ms(begun)
        await asyncio.to_thread(self._publish, row)
        row["up_to_published_ms"] = ms(begun)
        await room.close()
        row["device_after"], row["processes_left"] = self.used(), left_over(self.work)
        return row

    async def _dump(self, room: Room) -> dict[str, Any]:
        assert room.held is not None
        held, row = room.held, dict[str, Any]()
        at = time.monotonic()
        await room.link.park(deadline_s=20)
        row["park_ms"] = ms(at)
        row |= spoken(await self.operate(room, DOWN))
        row["nvidia_files"], row["files"] = nvidia_files(room.pid), open_files(room.pid)
        at = time.monotonic()
        draft = await asyncio.to_thread(self.store.draft, "img_bench")
        try:
            await room.link.dump(self.options.criu, draft, deadline_s=STEP_S)
        except HolderDenied as error:
            shutil.copy(draft / "dump.log", Path(self.options.out).with_suffix(".dump.log"))
            raise RuntimeError(f"{error.code}: {error.message}; {row}") from error
        row["criu_dump_ms"] = ms(at)
        row["image_bytes"] = sum(file.stat().st_size for file in draft.iterdir())
        row["largest"] = sorted(((file.stat().st_size, file.name) for file in draft.iterdir()), reverse=True)[:4]
        self.manifest = Manifest(
            image="img_bench", fingerprint=NOWHERE, mapped=(), files=(), pid=held.inner_pid, place=held.park_in,
            skeleton_bytes=0, made_ms=0, proof="",
        )  # fmt: skip
        return row

    def _publish(self, row: dict[str, Any]) -> None:
        assert self.manifest is not None
        at = time.monotonic()
        self.manifest = self.store.publish(self.manifest)
        row["publish_ms"] = ms(at)

    async def restores(self) -> Any:
        rows = [await self._restore(number) for number in range(self.options.cycles)]
        return {"rows": rows, "median": medians(rows)}

    async def _restore(self, number: int) -> dict[str, Any]:
        """As `_revive`, with its tokens compared; the last one stays, asleep."""
        row = await self._revive(number)
        room = self.room
        assert room is not None
        row["same_tokens"] = await room.same()
        row["device_up"] = self.used()
        if number + 1 < self.options.cycles:
            await room.link.kill(0)
            await room.close()
        else:
            await room.down()
        return row

    async def _revive(self, number: int) -> dict[str, Any]:
        """From nothing but the image to a caller's first token."""
        assert self.manifest is not None
        manifest, begun = self.manifest, time.monotonic()
        self.room = room = Room(self, f"ins_r{number}")
        filling = asyncio.create_task(asyncio.to_thread(self.fill))
        verifying = asyncio.create_task(asyncio.to_thread(self._verified))
        readying = asyncio.create_task(Operation.prepare(self.theatre, UP))
        row: dict[str, Any] = {"holder_ms": await room.open()}
        at = time.monotonic()
        try:
            room.held = await room.link.restore(
                self.options.criu, self.store.path("img_bench"), pid=manifest.pid, place=manifest.place, deadline_s=STEP_S,
                parked=True,
            )  # fmt: skip
        except HolderDenied as error:
            log = room.directory.path / "restore.log"
            if log.exists():
                shutil.copy(log, Path(self.options.out).with_suffix(".restore.log"))
            raise RuntimeError(f"{error.code}: {error.message}") from error
        row["criu_restore_ms"] = ms(at)
        row |= await self._finish(room, begun, filling, readying)
        row["verify_ms"] = await verifying
        row["over_goal_ms"] = row["to_first_token_ms"] - row["criu_restore_ms"] - row.get("restore_ms", 0)
        return row

    def _verified(self) -> float:
        assert self.manifest is not None
        at = time.monotonic()
        self.store.verify(self.manifest)
        return ms(at)

    async def round_trip(self) -> Any:
        """A restored process goes to checkpoint and to disk again."""
        room = self.room
        assert room is not None
        row: dict[str, Any] = {"checkpoint": await self._checkpoint()}
        row["dump"] = await self._dump(room)
        await asyncio.to_thread(self._publish, row)
        await room.close()
        row["restore"] = await self._restore(9)
        return row

    async def anatomy(self) -> Any:
        """Where CRIU's time goes: one restore that it talks about."""
        room, real = self.room, self.options.criu
        assert room is not None
        await room.link.kill(0)
        await room.close()
        talkative = self.work / "criu-v4"
        talkative.write_text(f'#!/bin/sh\nexec {real} "$@" -v4\n')
        talkative.chmod(0o700)
        self.options.criu = str(talkative)
        try:
            row = await self._restore(7)
        finally:
            self.options.criu = real
        assert self.room is not None
        found: list[tuple[float, str]] = []
        for line in (self.room.directory.path / "restore.log").read_text(errors="replace").splitlines():
            if line.startswith("("):
                found.append((float(line[1:].partition(")")[0]), line[10:110]))
        gaps = sorted(((b[0] - a[0], a[1], b[1]) for a, b in itertools.pairwise(found)), reverse=True)[:14]
        return {"restore": row, "last_s": found[-1][0] if found else 0, "gaps": [(round(gap, 3), a, b) for gap, a, b in gaps]}

    async def huge_pages(self) -> Any:
        """The same restores where the kernel gives large pages to everybody."""
        switch = Path("/sys/kernel/mm/transparent_hugepage/enabled")
        was = switch.read_text()
        room = self.room
        assert room is not None
        await room.link.kill(0)
        await room.close()
        switch.write_text("always")
        try:
            rows = [await self._restore(20 + number) for number in range(self.options.cycles)]
        finally:
            switch.write_text(was.partition("[")[2].partition("]")[0])
        return {"was": was.strip(), "rows": rows, "median": medians(rows)}

    async def endurance(self) -> Any:
        """Sleep, checkpoint and disk by turns: four prompts with one long beginning answer the same, and nothing grows."""
        rows = []
        beginning = tuple(range(100, 1124))
        prompts = [(*beginning, *range(200 + 50 * n, 232 + 50 * n)) for n in range(4)]
        for number in range(self.options.round_trips):
            assert self.room is not None
            if number % 3 == 2:
                row: dict[str, Any] = {"dump": await self._dump(self.room)}
                await asyncio.to_thread(self._publish, row)
                await self.room.close()
                row |= await self._revive(40 + number)
            elif number % 3 == 1:
                await self.room.link.park(deadline_s=20)
                await self.operate(self.room, DOWN)
                row = await self._ascend(self.room)
            else:
                row = await self.room.up(self.weight_set)
            said = [(await self.room.port.generate(24, prompt))[0] for prompt in prompts]
            same = said == self.known.setdefault("prefix", said)
            await self.room.down()
            pid = self.room.pid
            rows.append({
                "kind": ("sleep", "checkpoint", "saved")[number % 3], "same_tokens": same,
                "rss": processes.private_bytes(pid), "device": self.used(), "files": sum(open_files(pid).values()),
                "threads": len(list(Path(f"/proc/{pid}/task").iterdir())),
                "image_bytes": row.get("dump", {}).get("image_bytes"),
                "shm": sum(file.stat().st_size for file in Path("/dev/shm").rglob("*") if file.is_file()),
            })  # fmt: skip
        return rows

    async def poisoned(self) -> Any:
        """No room for a restore: it fails for good; from the image the engine comes back all the same."""
        room = self.room
        assert room is not None
        if not self.device:
            return {}
        await room.link.park(deadline_s=20)
        await self.operate(room, DOWN)
        hog = subprocess.Popen(
            [
                sys.executable, "-c",
                "import sys, torch; free, _ = torch.cuda.mem_get_info()\n"
                "kept = torch.empty(free - (700 << 20), dtype=torch.uint8, device='cuda')\n"
                "print('held', flush=True); sys.stdin.read()",
            ],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE,
        )  # fmt: skip
        assert hog.stdout is not None
        await asyncio.to_thread(hog.stdout.readline)
        row: dict[str, Any] = {"device_full": self.used()}
        try:
            row["restore"] = str(await self.operate(room, UP))
        except Exception as error:
            row["restore"] = f"{getattr(error, 'code', '')}: {error}"
        try:
            row["state"] = str(await state_of(self.theatre, room.pid))
        except Exception as error:
            row["state"] = f"{getattr(error, 'code', '')}: {error}"
        hog.kill()
        hog.wait()
        try:
            row["restore_again"] = str(await self.operate(room, UP))
        except Exception as error:
            row["restore_again"] = f"{getattr(error, 'code', '')}: {error}"
        begun = time.monotonic()
        await room.link.kill(0)
        row["killed_ms"] = ms(begun)
        await room.close()
        row["device_after_kill"] = self.used()
        row["from_image"] = await self._restore(8)
        return row


NOWHERE = Fingerprint(
    configuration="cfg_bench", engine="", python="", torch="", kernel="", libc="", criu="", cpu="", namespaces="", node=""
)


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


def ms(begun: float) -> float:
    return round((time.monotonic() - begun) * 1000, 1)


def spoken(said: Any) -> dict[str, float]:
    return {f"{one.verb}_ms": one.took_ms for one in said}


def nvidia_files(pid: int) -> dict[str, int]:
    return {name: count for name, count in open_files(pid).items() if "nvidia" in name}


def open_files(pid: int) -> dict[str, int]:
    found: dict[str, int] = {}
    for entry in Path(f"/proc/{pid}/fd").iterdir():
        try:
            name = "".join(letter for letter in os.readlink(entry) if not letter.isdigit())
        except OSError:
            continue
        found[name] = found.get(name, 0) + 1
    return found


def left_over(work: Path) -> list[str]:
    """Command lines of processes that were started from this directory's engines or holders."""
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                line = (entry / "cmdline").read_bytes().replace(b"\0", b" ").decode("utf-8", "replace")
            except OSError:
                continue
            if str(work) in line and ("worker.holder" in line or "worker.engines" in line):
                found.append(line[:200])
    return found


def medians(rows: list[dict[str, Any]]) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for name in rows[0]:
        values = [row[name] for row in rows if name in row]
        if all(isinstance(value, bool) for value in values):
            found[name] = all(values)
        elif all(isinstance(value, int | float) for value in values):
            found[name] = [round(value, 1) for value in (statistics.median(values), min(values), max(values))]
    return found


async def measure(bench: Bench) -> None:
    await bench.phase("models", bench.models)
    await bench.phase("cold_first", bench.start)
    if bench.room is None or not bench.weight_set:
        return
    left_out = bench.options.without.split(",")
    phases = {
        "step_process": bench.step_process, "warm_cycles": bench.warm_cycles, "checkpoint": bench.checkpoints,
        "save": bench.save, "saved": bench.restores, "round_trip": bench.round_trip, "endurance": bench.endurance,
        "poisoned": bench.poisoned, "anatomy": bench.anatomy, "huge_pages": bench.huge_pages,
        "cold_warmest": lambda: bench.start(bare=True),
    }  # fmt: skip
    for name, work in phases.items():
        if name not in left_out:
            await bench.phase(name, work, 120)
    up = bench.rows.get("saved", {}).get("median", {}).get("to_first_token_ms", [0])[0]
    bench.rows["summary"] = {"cold_s": bench.cold, "saved_ms": up, "times": min(bench.cold) * 1000 / up if up else 0}
    print(bench.rows["summary"], flush=True)
    Path(bench.options.out).write_text(json.dumps(bench.rows, indent=1, default=str))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--shape", default="8b", choices=list(SHAPES))
    parser.add_argument("--engine", default="vllm", choices=("vllm", "fake"))
    parser.add_argument("--out", required=True)
    parser.add_argument("--work", default="/tmp/bench_ladder")
    parser.add_argument("--criu", required=True)
    parser.add_argument("--gpu", default="0", help="number on the bus, or UUID")
    parser.add_argument("--cycles", type=int, default=3)
    parser.add_argument("--round-trips", type=int, default=10)
    parser.add_argument("--without", default="huge_pages,anatomy", help="phases to leave out")
    bench = Bench(parser.parse_args())
    (bench.work / "pool").mkdir(parents=True, exist_ok=True, mode=0o700)
    argv = [sys.executable, "-m", "pool.daemon", "--socket", str(bench.socket), "--directory", str(bench.work / "pool")]
    argv += ["--budget", str((24 if bench.device else 1) << 30), "--forget", *["--gpus"] * bool(bench.device)]
    with (bench.work / "pool.log").open("wb") as log:
        daemon = subprocess.Popen(argv, stderr=log)
    while not bench.socket.exists():
        time.sleep(0.05)
    try:
        asyncio.run(measure(bench))
    finally:
        for file in [*(bench.work / "run" / "inst").glob("*/*.log"), bench.work / "pool.log"]:
            print(f"--- {file}\n{file.read_text(errors='replace')[-2500:]}", flush=True)
        daemon.send_signal(signal.SIGTERM)
        daemon.wait(20)


if __name__ == "__main__":
    main()
