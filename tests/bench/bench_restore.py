"""What bringing a large process back takes: `python -m tests.bench.bench_restore [--bytes N] [--zeros F] [--cycles 5]
[--json FILE]`.

A fake engine of an engine's size (`heavy.py`) goes to disk once, as a holder does it, and comes back several ways by turns: by
CRIU alone, with its bulk filled in by several threads, and so with its zeros nowhere in the image. Beside each: the same bytes
read (`cat`), and copied into new memory by one thread. What came back is compared with what went, page by page (some differ: a
parked engine looks for its release). What each image takes of the disk and of time to make is beside them.
"""

import argparse
import asyncio
import contextlib
import itertools
import json
import mmap
import os
import shutil
import statistics
import sys
import tempfile
import time
import zlib
from pathlib import Path
from typing import Any

from tests.bench.laddernotes import contents, kinds, ms
from worker.filedigest import digest, taken_bytes
from worker.holderlink import HolderLink
from worker.holdermessages import Held
from worker.images import bulk, criu, records, zeros
from worker.images.pages import Pages, Run
from worker.instancedir import InstanceDir
from worker.sources.fakes import fake_source

LIMIT_S = 120.0


class Bench:
    def __init__(self, work: Path, given: str) -> None:
        self.work = work
        found = Path(given) if given else criu.find(work)
        if found is None:
            raise SystemExit("there is no CRIU: --criu PATH, or compose/install-criu")
        self.criu = str(found)
        self.pid, self.place = 0, ""
        self.was = dict[int, int]()
        self.numbers = itertools.count()

    async def room(self) -> tuple[InstanceDir, HolderLink, float]:
        directory = InstanceDir(self.work / "run" / "inst", f"ins_{next(self.numbers)}")
        directory.create("cfg_bench")
        link = HolderLink(directory)
        begun = time.monotonic()
        await link.open(deadline_s=30)
        return directory, link, ms(begun)

    async def parked(self, size: int, threads: int, nothing: float) -> tuple[HolderLink, Held]:
        """An engine that may be written to disk."""
        directory, link, _ = await self.room()
        source = fake_source(self.work, "a", 1 << 20)
        argv = (sys.executable, "-P", "-m", "tests.bench.heavy", "--bytes", str(size), "--threads", str(threads))
        argv += ("--zeros", str(nothing), *(() if size >= 1 << 30 else ("--no-libraries",)), "--")
        await link.start((
            *argv, "--instance-dir", str(directory.path), "--engine", "fake", "--source", str(source),
            "--arguments", '{"context_tokens": 4096}',
        ))  # fmt: skip
        async with asyncio.timeout(LIMIT_S):
            while not (held := await link.ask()).connected:
                if held.exit is not None:
                    raise SystemExit(directory.engine_log.read_text()[-3000:])
                await asyncio.sleep(0.05)
        await link.park(deadline_s=LIMIT_S)
        return link, held

    async def save(self, size: int, threads: int, nothing: float) -> dict[str, Any]:
        """The same dump three times: as CRIU wrote it, with its bulk taken out, and so with its zeros taken off the disk."""
        link, held = await self.parked(size, threads, nothing)
        assert held.engine is not None
        self.pid, self.place, self.was = held.inner_pid, held.park_in, memory(held.engine.pid)
        row: dict[str, Any] = {"kinds": kinds(held.engine.pid)}
        begun = time.monotonic()
        whole = self.work / "whole"
        await link.dump(self.criu, whole, deadline_s=LIMIT_S)
        row["dump_ms"] = ms(begun)
        await link.leave()
        with contextlib.suppress(IndexError, KeyError, records.RecordsUnknown):  # nothing else waits for it
            row["contents"] = contents(whole, self.pid)
        row["image_bytes"] = sum(file.stat().st_size for file in whole.iterdir())
        row["finding"] = [finding(whole, self.pid) for _ in range(3)]
        row["lifted"], row["hollow"] = self.made("lifted", False), self.made("hollow", True)
        return row

    def made(self, name: str, without_zeros: bool) -> dict[str, Any]:
        """An image made of the dump as the product does it, or as it did before it looked for zeros."""
        image, row, find = self.work / name, dict[str, Any](), zeros.find
        shutil.copytree(self.work / "whole", image)
        if not without_zeros:
            zeros.find = lambda *_: []
        begun = time.monotonic()
        lifted = bulk.lift(image, self.pid, self.work)
        row |= {"lift_ms": ms(begun), "bulk_bytes": lifted.size, "zero_runs": len(lifted.zeros)}
        zeros.find = find
        begun = time.monotonic()
        row |= {"zero_bytes_gone": bulk.hollow(image, self.pid, lifted), "hollow_ms": ms(begun)}
        begun = time.monotonic()
        for path in image.iterdir():
            with path.open("rb") as file:
                os.fsync(file.fileno())
        row |= {"sync_ms": ms(begun), "on_disk": taken_bytes(image)}
        return row

    async def restore(self, image: str, settings: dict[str, str]) -> dict[str, Any]:
        directory, link, holder_ms = await self.room()
        with environment(settings):
            begun = time.monotonic()
            held = await link.restore(
                self.criu, self.work / image, pid=self.pid, place=self.place, deadline_s=LIMIT_S, parked=True
            )
            row: dict[str, Any] = {"holder_ms": holder_ms, "restore_ms": ms(begun)}
        assert held.engine is not None
        now = memory(held.engine.pid)
        row["pages"], row["differ"] = len(now), sum(now.get(page) != was for page, was in self.was.items())
        row["large_pages"] = sum(one["large"] for one in kinds(held.engine.pid).values())
        begun = time.monotonic()
        await link.release()
        async with asyncio.timeout(LIMIT_S):
            while not (await link.ask()).connected:
                await asyncio.sleep(0.002)
        row["answer_ms"] = ms(begun)
        await link.kill(0)
        await link.leave()
        shutil.rmtree(directory.path, ignore_errors=True)
        return row


@contextlib.contextmanager
def environment(settings: dict[str, str]) -> Any:
    os.environ.update(settings)
    try:
        yield
    finally:
        for name in settings:
            del os.environ[name]


def memory(pid: int) -> dict[int, int]:
    """Every page of the memory of no file, as a number."""
    found = dict[int, int]()
    with open(f"/proc/{pid}/mem", "rb", buffering=0) as file:
        for line in Path(f"/proc/{pid}/maps").read_text(encoding="utf-8").splitlines():
            fields = line.split()
            start, end = (int(word, 16) for word in fields[0].split("-"))
            if fields[1].startswith("rw") and (len(fields) == 5 or "[heap]" in fields or "/dev/zero" in fields[5]):
                file.seek(start)
                while start < end:
                    piece = memoryview(file.read(min(end - start, 1 << 22)))
                    found |= {start + at: zlib.crc32(piece[at : at + 4096]) for at in range(0, len(piece), 4096)}
                    start += len(piece)
    return found


def finding(image: Path, pid: int) -> dict[str, Any]:
    """Looking for zeros in what CRIU has written, by so many threads, beside other things that are done with the same."""
    pages = Pages.read(image / f"pagemap-{pid}.img")
    row: dict[str, Any] = {"bytes": pages.size, "cat_ms": cat_ms(image), "find_ms": {}}
    for threads in (1, 2, zeros.THREADS, 16):
        begun = time.monotonic()
        zeros.find(pages.bytes_in, [Run(0, pages.size, 0)], threads)
        row["find_ms"][threads] = ms(begun)
    begun = time.monotonic()
    digest(pages.bytes_in)
    row["blake3_ms"] = ms(begun)
    return row


def cat_ms(directory: Path) -> float:
    room, begun = bytearray(1 << 20), time.monotonic()
    for path in directory.iterdir():
        with path.open("rb", buffering=0) as file:
            while file.readinto(room):
                pass
    return ms(begun)


def copy_ms(directory: Path) -> float:
    """All of it into fresh memory, by one thread."""
    files = [(path, path.stat().st_size) for path in directory.iterdir()]
    with mmap.mmap(-1, sum(size for _, size in files), flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS) as room:
        view, at, begun = memoryview(room), 0, time.monotonic()
        for path, size in files:
            with path.open("rb", buffering=0) as file:
                end = at + size
                while at < end:
                    at += file.readinto(view[at:end])
        took = ms(begun)
        view.release()
    return took


async def measure(options: argparse.Namespace) -> dict[str, Any]:
    work = Path(tempfile.mkdtemp(prefix="ehrestore-", dir=options.work))
    bench = Bench(work, options.criu)
    try:
        rows: dict[str, Any] = {"save": await bench.save(options.bytes, options.threads, options.zeros)}
        print(json.dumps(rows["save"]), flush=True)
        ways: dict[str, tuple[str, dict[str, str]]] = {
            "criu alone": ("whole", {}), "bulk by threads": ("lifted", {}), "without zeros": ("hollow", {}),
        }  # fmt: skip
        for name in ways:
            rows[name] = []
        for _ in range(options.cycles):
            for name, (image, settings) in ways.items():
                row = {"cat_ms": cat_ms(work / image), "copy_ms": copy_ms(work / image)}
                begun = time.monotonic()
                for path in (work / image).iterdir():
                    digest(path)
                row["verify_ms"] = ms(begun)
                row |= await bench.restore(image, settings)
                rows[name].append(row)
                print(name, json.dumps(row), flush=True)
        for name in ways:
            one = {
                key: statistics.median(row[key] for row in rows[name])
                for key in ("restore_ms", "verify_ms", "cat_ms", "copy_ms")
            }
            times = f"{one['restore_ms'] / one['copy_ms']:.2f} x copy, {one['restore_ms'] / one['cat_ms']:.1f} x cat"
            most = max(row["differ"] for row in rows[name])
            print(f"{name:20} {times}; {one}; at most {most} pages differ", flush=True)
        return rows
    finally:
        shutil.rmtree(work, ignore_errors=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--bytes", type=int, default=2 << 30)
    parser.add_argument("--zeros", type=float, default=0.49, help="part of it that is pages of zeros; an 8B engine's was 0.49")
    parser.add_argument("--threads", type=int, default=100)
    parser.add_argument("--cycles", type=int, default=5)
    parser.add_argument("--criu", default="")
    parser.add_argument("--work")
    parser.add_argument("--json")
    options = parser.parse_args()
    rows = asyncio.run(measure(options))
    if options.json:
        Path(options.json).write_text(json.dumps(rows, indent=1))


if __name__ == "__main__":
    main()
