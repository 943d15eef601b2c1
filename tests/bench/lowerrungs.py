"""The ways down and up of the lower rungs: off the device and back, to disk and back."""

import asyncio
import shutil
import time
from pathlib import Path
from typing import Any

from compose.bench.rows import medians
from pool.client import Attachment
from tests.bench.laddernotes import kinds, left_over, mappings, ms, nvidia_files, open_files, spoken
from tests.bench.ladderroom import Room
from tests.bench.ladderstage import STEP_S, Stage
from worker import gpus, processes
from worker.cuda.operation import Operation
from worker.holderlink import HolderDenied
from worker.images import bulk
from worker.images.fingerprint import Fingerprint
from worker.images.manifest import Manifest

DOWN, UP = ("lock", "checkpoint"), ("restore", "unlock")
NOWHERE = Fingerprint(
    configuration="cfg_bench", engine="", python="", torch="", kernel="", libc="", criu="", cpu="", namespaces="", node=""
)


class LowerRungs(Stage):
    """Each method is one part; it leaves an engine asleep behind."""

    @property
    def image(self) -> Path:
        """What is restored from."""
        return self.store.path("img_bench")

    def keep(self, draft: Path, pid: int) -> dict[str, Any]:
        """Look at a dump as CRIU wrote it, before anything is done to it."""
        return {}

    def hollow(self, draft: Path, pid: int, lifted: bulk.Lifted) -> int:
        """Bytes of zeros that are gone from the disk."""
        return bulk.hollow(draft, pid, lifted)

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
        await operation.end()
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
        before = mappings(room.pid)
        row |= spoken(await self.operate(room, DOWN))
        new = [size for place, size in mappings(room.pid).items() if place not in before]
        row["new_since_parked"] = {"mappings": len(new), "bytes": sum(new), "largest": sorted(new, reverse=True)[:8]}
        row["kinds"] = kinds(room.pid)
        row["nvidia_files"], row["files"] = nvidia_files(room.pid), open_files(room.pid)
        at = time.monotonic()
        draft = await asyncio.to_thread(self.store.draft, "img_bench")
        try:
            await room.link.dump(self.options.criu, draft, deadline_s=STEP_S)
        except HolderDenied as error:
            shutil.copy(draft / "dump.log", Path(self.options.out).with_suffix(".dump.log"))
            raise RuntimeError(f"{error.code}: {error.message}; {row}") from error
        row["criu_dump_ms"] = ms(at)
        row |= await asyncio.to_thread(self.keep, draft, held.inner_pid)
        at = time.monotonic()
        lifted = await asyncio.to_thread(bulk.lift, draft, held.inner_pid, room.directory.path)
        row |= {"lift_ms": ms(at), "bulk_bytes": lifted.size, "zero_runs": len(lifted.zeros)}
        at = time.monotonic()
        row["zero_bytes_gone"] = await asyncio.to_thread(self.hollow, draft, held.inner_pid, lifted)
        row["hollow_ms"] = ms(at)
        row["image_bytes"] = sum(file.stat().st_blocks * 512 for file in draft.iterdir())
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
                self.options.criu, self.image, pid=manifest.pid, place=manifest.place, deadline_s=STEP_S,
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
