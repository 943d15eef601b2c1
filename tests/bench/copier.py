"""Ways to queue a copy to a GPU, each timed by the host's clock."""

import os
import time
from collections.abc import Callable
from typing import Any

from tests.bench.copyhosts import MIB, Host


class Copier:
    """This process's device and the ways to queue a copy there."""

    def __init__(self, wanted: list[int]) -> None:
        from pool.cuda import CudaGpu, checked, driver

        self.gpu, self.checked, self.driver = CudaGpu(0), checked, driver
        self.sizes = wanted
        self.blocks: list[Any] = []
        self.streams = [checked("stream", driver.cuStreamCreate(1)) for _ in range(4)]
        self.start, self.end = [checked("event", driver.cuEventCreate(0)) for _ in range(2)]
        self.blocking = checked("event", driver.cuEventCreate(1))

    def make(self) -> None:
        self.blocks = [self.gpu.create(size) for size in self.sizes]

    def free(self) -> None:
        for block in self.blocks:
            self.gpu.destroy(block)
        self.blocks = []

    def queue(self, host: Host, way: str) -> None:
        match way:
            case "each":
                self._queue(host, lambda n: 0, max(self.sizes))
            case "2m" | "8m" | "32m" | "128m":
                self._queue(host, lambda n: 0, int(way[:-1]) * MIB)
            case "2streams" | "4streams":
                self._queue(host, lambda n: n % int(way[0]), max(self.sizes))
            case "batch":
                self._batch(host)
            case _:
                self._throttled(host, int(way.split()[1]))

    def _queue(self, host: Host, stream: Callable[[int], int], piece: int) -> None:
        number = 0
        for block, (address, size) in zip(self.blocks, host.pieces, strict=True):
            for at in range(0, size, piece):
                to = self.streams[stream(number)]
                call = self.driver.cuMemcpyHtoDAsync(block.address + at, address + at, min(piece, size - at), to)
                self.checked("copy", call)
                number += 1

    def _throttled(self, host: Host, most: int) -> None:
        """Never more than so many pieces of 32 MiB on their way: the engine that copies is free in between."""
        events = [self.checked("event", self.driver.cuEventCreate(2)) for _ in range(most)]
        number = 0
        for block, (address, size) in zip(self.blocks, host.pieces, strict=True):
            for at in range(0, size, 32 * MIB):
                if number >= most:
                    self.checked("wait", self.driver.cuEventSynchronize(events[number % most]))
                call = self.driver.cuMemcpyHtoDAsync(
                    block.address + at, address + at, min(32 * MIB, size - at), self.streams[0]
                )
                self.checked("copy", call)
                self.checked("record", self.driver.cuEventRecord(events[number % most], self.streams[0]))
                number += 1
        for event in events:
            self.checked("destroy", self.driver.cuEventDestroy(event))

    def _batch(self, host: Host) -> None:
        kind = self.driver.CUmemcpyAttributes()
        kind.srcAccessOrder = self.driver.CUmemcpySrcAccessOrder.CU_MEMCPY_SRC_ACCESS_ORDER_STREAM
        to = [self.driver.CUdeviceptr(block.address) for block in self.blocks]
        of = [self.driver.CUdeviceptr(address) for address, _ in host.pieces]
        counts = [size for _, size in host.pieces]
        call = self.driver.cuMemcpyBatchAsync(to, of, counts, len(counts), [kind], [0], 1, self.streams[0])
        self.checked("batch", call)

    def timed(self, host: Host, way: str, *, blocking: bool = False, meanwhile: Callable[[], None] | None = None) -> float:
        """Milliseconds from the first queued to the last arrived, by the host's clock."""
        begun = time.monotonic()
        early = way.startswith("throttled")  # which returns when nearly all has arrived
        if early and meanwhile is not None:
            meanwhile()
        self.queue(host, way)
        if not early and meanwhile is not None:
            meanwhile()
        for stream in self.streams:
            if blocking:
                self.checked("record", self.driver.cuEventRecord(self.blocking, stream))
                self.checked("wait", self.driver.cuEventSynchronize(self.blocking))
            else:
                self.checked("wait", self.driver.cuStreamSynchronize(stream))
        return (time.monotonic() - begun) * 1000

    def filled(self, host: Host, order: str) -> dict[str, float]:
        """The whole of a wake in this process: memory made, copied, exported."""
        begun = time.monotonic()
        fds: list[int] = []
        made = begun
        if order != "made first":
            pairs = list(zip(self.sizes, host.pieces, strict=True))
            for size, (address, _) in sorted(pairs, key=lambda pair: -pair[0]) if order == "largest first" else pairs:
                block = self.gpu.create(size)
                self.blocks.append(block)
                call = self.driver.cuMemcpyHtoDAsync(block.address, address, size, self.streams[0])
                self.checked("copy", call)
                fds.append(self.gpu.export(block))
            made = time.monotonic()
        else:
            self.make()
            made = time.monotonic()
            self.queue(host, "each")
            fds += [self.gpu.export(block) for block in self.blocks]
        queued = time.monotonic()
        self.checked("wait", self.driver.cuStreamSynchronize(self.streams[0]))
        done = time.monotonic()
        for fd in fds:
            os.close(fd)
        self.free()
        freed = time.monotonic()
        points = {"made": made, "queued": queued, "done": done}
        return {name: (at - begun) * 1000 for name, at in points.items()} | {"free": (freed - done) * 1000}
