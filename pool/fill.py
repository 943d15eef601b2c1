"""Filling a device: what is to be done is planned first (pure), then done in one go by the device's lane."""

import os
import time
from collections.abc import Callable
from dataclasses import dataclass

from pool.gpu import Block, Gpu, NoDeviceMemory
from pool.messages import Filled
from pool.residency import Refused
from pool.slabs import Slab, Slabs

RESERVE_BYTES = 64 << 20
"""Left on the device: a driver without any memory fails at kernels' local memory, in whoever launches next."""


@dataclass(frozen=True)
class Step:
    """One segment: pin it if it is not, create its place, queue its copy."""

    segment: int
    size_bytes: int
    register: bool


def plan(device: str, slabs: Slabs, *, free_bytes: int, granularity: int) -> tuple[Step, ...]:
    """Steps in the order in which bytes shall travel: pinned segments first, so that the link is busy while the rest is pinned.

    Raises Refused: `device_full` with both numbers, `bad_layout` for segments that a device can't hold.
    """
    odd = [part.size for part in slabs.parts if part.size % granularity]
    if odd:
        raise Refused(
            "bad_layout", f"{slabs.weight_set} has a segment of {odd[0]} bytes; {device} maps multiples of {granularity}"
        )
    need, have = slabs.size_bytes, max(free_bytes - RESERVE_BYTES, 0)
    if need > have:
        raise full(slabs.weight_set, device, need, have)
    order = sorted(range(len(slabs.parts)), key=lambda number: (not slabs.parts[number].registered, number))
    return tuple(
        Step(number, slabs.parts[number].size, not (slabs.parts[number].registered or slabs.parts[number].refused))
        for number in order
    )


def full(weight_set: str, device: str, need: int, have: int) -> Refused:
    return Refused(
        "device_full",
        f"{weight_set} needs {need} bytes on {device}, {have} are free there: put an instance to sleep, or end the processes "
        "that use it (nvidia-smi lists them)",
        need_bytes=need,
        free_bytes=have,
    )


@dataclass
class OnDevice:
    """A set's memory on one device."""

    blocks: list[Block]
    fds: list[int]
    """One a segment, ours to close."""


def fill(gpu: Gpu, slabs: Slabs, exported: Callable[[OnDevice], None]) -> Filled:
    """Create, copy, export. `exported` is called when all descriptors are there and bytes still travel.

    Raises Refused (`device_full`), OSError; the device is then as it was before.
    """
    begun = time.monotonic()
    steps = plan(gpu.uuid, slabs, free_bytes=gpu.free_bytes(), granularity=gpu.granularity)
    blocks: dict[int, Block] = {}
    fds: dict[int, int] = {}
    try:
        for step in steps:
            part: Slab = slabs.parts[step.segment]
            block = blocks[step.segment] = gpu.create(step.size_bytes)
            if step.register:
                part.register(gpu)
            gpu.copy(block, part.address)
            fds[step.segment] = gpu.export(block)
        count = range(len(slabs.parts))
        made = OnDevice([blocks[number] for number in count], [fds[number] for number in count])
        exported(made)
        gpu.wait()
    except BaseException as error:
        _undo(gpu, OnDevice(list(blocks.values()), list(fds.values())))
        if isinstance(error, NoDeviceMemory):
            raise full(slabs.weight_set, gpu.uuid, slabs.size_bytes, gpu.free_bytes()) from error
        raise
    seconds = time.monotonic() - begun
    moved = slabs.size_bytes
    return Filled(copied_bytes=moved, took_ms=seconds * 1000, bytes_per_s=moved / seconds, path="host")


def _undo(gpu: Gpu, made: OnDevice) -> None:
    try:
        gpu.wait()  # nothing may be in flight into memory that goes
    finally:
        free(gpu, made)


def free(gpu: Gpu, made: OnDevice) -> int:
    """Bytes given back."""
    for fd in made.fds:
        os.close(fd)
    made.fds.clear()
    freed = sum(block.size for block in made.blocks)
    for block in made.blocks:
        gpu.destroy(block)
    made.blocks.clear()
    return freed
