"""What 200 open pages cost the web process: its share of a core at ten frames a second, four changes a frame.

`python -m tests.bench.bench_live [--readers 200] [--seconds 10]`. The server runs in a process of its own; readers are
sockets in this one that read and throw away. Yardstick beside it: the same bytes written by a bare asyncio server that
prepares nothing.
"""

import argparse
import asyncio
import contextlib
import multiprocessing
import os
import time
from collections.abc import Callable
from multiprocessing.connection import Connection
from typing import cast

import uvloop

from controlplane.subjects import InstanceBeat, NodeBeat
from tests.bench.figures import Table
from tests.staged import GIB, MIB, StagedPlane
from tests.stagehouse import Stagehouse

DEVICES = 8
FRAME_S = 0.1
CHANGES = 4


def _fleet() -> StagedPlane:
    """Eight devices of eight cells; 64 instances of one cell each, all up."""
    plane = StagedPlane(time.time_ns() // 1_000_000)
    plane.node()
    for d in range(DEVICES):
        device = plane.device(f"cpu{d}")
        for cell in range(8):
            model, instance = f"model-{d}{cell}", f"ins_01JDXB4M9S7QKC2W{d}{cell}"
            plane.model(model, f"cfg_{d}")
            plane.weights(model, f"ws_{d}{cell}")
            plane.instance(instance, f"cfg_{d}")
            plane.climb(instance, model, device, cell, 1)
            plane.up(instance, weight_set=f"ws_{d}{cell}", used=100 * MIB)
    return plane


def _beat(plane: StagedPlane, frame: int, speeds: list[float]) -> NodeBeat:
    """Four cells, on four devices, changed since the last frame."""
    for n in range(CHANGES):
        speeds[(frame * 5 + n * 17) % 64] = 20.0 + frame % 50
    return NodeBeat(
        node="n1", incarnation="i", at_ms=plane.now_ms, pool_used_bytes=GIB, pool_budget_bytes=2 * GIB, pool_ok=True,
        device_bytes=dict.fromkeys(plane.fleet.devices, 800 * MIB),
        instances=tuple(
            InstanceBeat(instance=name, running=0, tokens_per_s=speed, bytes_used=100 * MIB)
            for name, speed in zip(sorted(plane.fleet.instances), speeds, strict=True)
        ),
    )  # fmt: skip


async def _serve(pipe: Connection) -> None:
    plane = _fleet()
    async with Stagehouse(plane).open() as house:
        pipe.send(house.socket.getsockname()[1])
        loop, frame, speeds = asyncio.get_running_loop(), 0, [10.0] * 64
        while not pipe.poll():
            frame += 1
            plane.beat(_beat(plane, frame, speeds))
            await asyncio.sleep(FRAME_S - loop.time() % FRAME_S)


async def _serve_bare(pipe: Connection) -> None:
    """8 KB to everybody ten times a second, from a constant."""
    writers: set[asyncio.StreamWriter] = set()

    async def hello(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        writer.write(b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n")
        writers.add(writer)

    server = await asyncio.start_server(hello, "127.0.0.1", 0)
    pipe.send(server.sockets[0].getsockname()[1])
    chunk = b"2000\r\n" + b"id: ".ljust(8192, b"x") + b"\r\n"
    while not pipe.poll():
        for writer in writers:
            writer.write(chunk)
        await asyncio.sleep(FRAME_S)
    for writer in writers:
        writer.close()
    server.close()


def _child(serve: Callable[[Connection], "asyncio.Future[None]"], pipe: Connection) -> None:
    uvloop.run(serve(pipe))  # type: ignore[arg-type]


class _Counting(asyncio.Protocol):
    """Counts bytes and frames, keeps nothing."""

    def __init__(self) -> None:
        self.size = self.frames = 0

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        cast("asyncio.Transport", transport).write(b"GET /live?from=x HTTP/1.1\r\nHost: x\r\nAccept: text/event-stream\r\n\r\n")

    def data_received(self, data: bytes) -> None:
        self.size += len(data)
        self.frames += data.count(b"id: ")


def _cpu_s(pid: int) -> float:
    with open(f"/proc/{pid}/stat") as stat:
        fields = stat.read().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


async def _measure(serve: Callable[[Connection], object], readers: int, seconds: float) -> dict[str, float]:
    ours, theirs = multiprocessing.Pipe()
    child = multiprocessing.get_context("spawn").Process(target=_child, args=(serve, theirs))
    child.start()
    assert child.pid is not None
    try:
        port = await asyncio.to_thread(ours.recv)
        loop = asyncio.get_running_loop()
        made = [await loop.create_connection(_Counting, "127.0.0.1", port) for _ in range(readers)]
        await asyncio.sleep(1.5)  # the first, whole frames are out
        before, began = [(c.size, c.frames) for _, c in made], time.monotonic()
        cpu = _cpu_s(child.pid)
        await asyncio.sleep(seconds)
        spent, took = _cpu_s(child.pid) - cpu, time.monotonic() - began
        size = sum(c.size - size for (_, c), (size, _) in zip(made, before, strict=True))
        frames = sum(c.frames - frames for (_, c), (_, frames) in zip(made, before, strict=True))
        for transport, _ in made:
            transport.close()
        return {
            "core_percent": round(spent / took * 100, 1),
            "frames_per_s": round(frames / took / readers, 2) if readers else 0.0,
            "frame_bytes": round(size / frames) if frames else 0,
            "mb_per_s": round(size / took / 1e6, 1),
        }
    finally:
        ours.send("stop")
        with contextlib.suppress(OSError):
            await asyncio.to_thread(child.join, 5)
        if child.is_alive():
            child.kill()


async def measure(readers: int = 200, seconds: float = 10.0) -> list[Table]:
    """The figures: with readers, with one, and the bare server's."""
    pages = await _measure(_serve, readers, seconds)
    one = await _measure(_serve, 1, seconds / 2)
    bare = await _measure(_serve_bare, readers, seconds / 2)
    table = Table("Live page: 64 cells, 4 changes a frame, 10 frames/s")
    for what, f in ((f"{readers} readers", pages), ("1 reader", one), (f"bare server, {readers} readers", bare)):
        frames = f"{f['frames_per_s']:.1f} frames/s of {f['frame_bytes'] / 1000:.1f} kB, {f['mb_per_s']:.1f} MB/s"
        table.figure(what, f"{f['core_percent']:5.1f} % of a core   {frames}")
    table.row(
        f"{readers} open pages, 64 cells, 4 changes a frame, 10 frames/s", "< 15 % of a core",
        f"{pages['core_percent']:.1f} % ({pages['frames_per_s']:.1f} frames/s of {pages['frame_bytes'] / 1000:.1f} kB)",
        f"a bare asyncio server with frames of {bare['frame_bytes'] / 1000:.1f} kB: {bare['core_percent']:.1f} %",
    )  # fmt: skip
    table.show()
    return [table]


if __name__ == "__main__":
    arguments = argparse.ArgumentParser()
    arguments.add_argument("--readers", type=int, default=200)
    arguments.add_argument("--seconds", type=float, default=10.0)
    given = arguments.parse_args()
    uvloop.run(measure(given.readers, given.seconds))
