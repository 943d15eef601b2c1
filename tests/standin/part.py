"""What one process of the stand-in engine has of one device: weights mapped from the pool or its own, KV memory, a skeleton."""

import mmap
import os
import time
from pathlib import Path
from typing import Any

import msgspec
from blake3 import blake3

from pool.devicelink import DeviceAttachment, attach_device, deposit, find
from pool.layout import lay_out
from pool.messages import Attached, Deposit, Tensor
from pool.native import Native, Span, compare
from pool.ranks import JOINT, form_of
from pool.safetensors import Source, read_source
from tests.fakegpu import MIB
from tests.standin.install import place
from tests.standin.room import DeviceFull, Room, Taker
from worker.engines.interface import EngineFault
from worker.engines.vllm_faults import faults

SKELETON_BYTES = 6 * MIB
SHARE = 2 * MIB
"""Segments are multiples of it."""
GRAPHS = 3
"""Captured by the start of each process on a device, and again only where a gang had to give them up."""
COMMUNICATOR = "communicator"
"""A file that a rank has open while it has communicators: the driver then restores no process that it has checkpointed."""


STRANDS = "strands"
"""While a file of this name is there, rank 1 of a gang does not come to where the ranks make their communicators anew."""


class Brought(msgspec.Struct, frozen=True):
    weight_set: str
    read_bytes: int


class Part:
    """Rank `rank` of `ranks`: every so many-th tensor is its."""

    def __init__(self, source: str, arguments: dict[str, Any], device: str, *, rank: int = 0, ranks: int = 1) -> None:
        room = Room(place())
        if device not in room.devices:
            raise SystemExit(f"this machine has no GPU {device!r}")
        self._device, self._arguments, self._rank, self._ranks = device, arguments, rank, ranks
        self._native = self._laid_out(self._read(source))
        self._skeleton, self._own, self._kv = (Taker(room, device) for _ in range(3))
        _take(self._skeleton, SKELETON_BYTES)
        _take(self._own, self.size)
        _take(self._kv, self._kv_wanted)
        self._kv.give(self._kv.size)
        self._communicator = self._opened()
        self.graphs, self._graphs_there = GRAPHS, True
        self._attachment: DeviceAttachment | None = None
        self.weights = b""
        """A digest of what was mapped last."""

    @property
    def size(self) -> int:
        return sum(self._native.segments)

    @property
    def own_bytes(self) -> int:
        return self._own.size

    @property
    def kv_bytes(self) -> int:
        return self._kv.size

    @property
    def attached(self) -> str | None:
        return self._attachment.attached.weight_set if self._attachment is not None else None

    @property
    def _kv_wanted(self) -> int:
        return int(self._arguments.get("kv_bytes", 16 * MIB)) // self._ranks

    def bring(self, pool_socket: str, source: str, form: str) -> Brought:
        """Into the pool, unless it is there."""
        if self._ranks > 1:
            form = form_of(form, self._rank, self._ranks)
        with faults(pool_socket, self._device):
            if (known := find(pool_socket, source, form)) is not None:
                return Brought(known, 0)
            if not self._own.size:
                _take(self._own, self.size)
            read = self._read(source)
            tensors = self._laid_out(read).tensors
            request = Deposit(source=source, form=form, segments=self._native.segments, host_segments=0, tensors=tensors)
            staged = deposit(pool_socket, request, lambda fds: _write(read, self._native, fds))
        return Brought(staged.weight_set, staged.read_bytes)

    def map(self, pool_socket: str, weight_set: str) -> None:
        """Weights and KV memory, or nothing. Of a gang's joint name a rank maps its own."""
        self.drop_own()
        maps: list[mmap.mmap] = []

        def map_them(attached: Attached, fds: list[int]) -> None:
            compare(self._native, attached)
            maps.extend(mmap.mmap(fd, os.fstat(fd).st_size, mmap.MAP_SHARED, mmap.PROT_READ) for fd in fds)
            self.make_kv()

        own = weight_set.split(JOINT)[self._rank]
        try:
            with faults(pool_socket, self._device):
                self._attachment = attach_device(pool_socket, own, self._device, map_them)
            self._attachment.close_fds()
            digest = blake3()
            for one in maps:
                digest.update(one)
            self.weights = digest.digest()
        except BaseException:
            self.drop_kv()
            raise
        finally:
            for one in maps:
                one.close()

    def unmap(self) -> None:
        if self._attachment is not None:
            attachment, self._attachment = self._attachment, None
            attachment.release()

    def drop_own(self) -> None:
        self._own.give(self._own.size)

    def make_kv(self) -> None:
        if not self._kv.size:
            _take(self._kv, self._kv_wanted)

    def drop_kv(self) -> None:
        self._kv.give(self._kv.size)

    def checkpoint_prepare(self) -> None:
        self._graphs_there = False
        if self._communicator is not None:
            os.close(self._communicator)
            self._communicator = None

    def checkpoint_restore(self) -> None:
        while self._rank == 1 and (place() / STRANDS).exists():
            time.sleep(0.05)
        self._communicator = self._opened()

    def capture_graphs(self) -> None:
        if not self._graphs_there:
            self.graphs, self._graphs_there = self.graphs + GRAPHS, True

    def _opened(self) -> int | None:
        return os.open(place() / COMMUNICATOR, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600) if self._ranks > 1 else None

    def moved(self, device: str) -> None:
        self._device = device
        for taker in (self._skeleton, self._own, self._kv):
            taker.moved(device)

    def _read(self, source: str) -> dict[str, Source]:
        """By what stands before the names of their tensors."""
        draft = self._arguments.get("draft_model")
        return {"": read_source(source)} | ({"draft.": read_source(draft)} if draft else {})

    def _laid_out(self, sources: dict[str, Source]) -> Native:
        entries = [
            msgspec.structs.replace(entry, name=before + entry.name)
            for before, read in sources.items()
            for entry in read.entries
        ]
        layout = lay_out(entries[self._rank :: self._ranks])
        spans, address = [], SHARE
        for size in layout.segments:
            spans.append(Span(address, -(-size // SHARE) * SHARE))
            address = spans[-1].end
        tensors = tuple(
            Tensor(
                name=one.entry.name, dtype=one.entry.dtype, shape=one.entry.shape, segment=one.segment, offset=one.offset,
                size_bytes=one.entry.size_bytes,
            )
            for one in layout.tensors
        )  # fmt: skip
        return Native(tuple(spans), 0, tensors, {})


def _take(taker: Taker, size: int) -> None:
    try:
        taker.take(size)
    except DeviceFull as error:
        raise EngineFault("no_memory", str(error)) from error


def _write(sources: dict[str, Source], native: Native, fds: list[int]) -> None:
    entries = {before + entry.name: (read, entry) for before, read in sources.items() for entry in read.entries}
    for tensor in native.tensors:
        source, entry = entries[tensor.name]
        with (Path(source.path) / source.files[entry.file].name).open("rb") as file:
            file.seek(entry.offset)
            os.pwrite(fds[tensor.segment], file.read(entry.size_bytes), tensor.offset)
