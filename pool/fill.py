"""Filling a device: what is to be done is planned first (pure), then done in one go by the device's lane."""

import itertools
import logging
import os
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import msgspec

from pool.blocks import Groups
from pool.gpu import Block, Gpu, NoDeviceMemory
from pool.journey import InFlight, Journey, Route
from pool.making import Making, ahead
from pool.messages import Filled, Shard
from pool.pace import FREE, Pace
from pool.residency import Refused
from pool.sizes import both, written
from pool.slabs import Slab, Slabs

RESERVE_BYTES = 64 << 20
"""Left on the device: a driver without any memory fails at kernels' local memory, in whoever launches next."""
_USERS_SHOWN = 6
log = logging.getLogger("pool")


@dataclass(frozen=True)
class Step:
    """One block: create it; of each segment in it: pin it if it is not, queue its copy."""

    block: int
    size_bytes: int
    register: bool


def plan(gpu: Gpu, slabs: Slabs, blocks: Groups) -> tuple[Step, ...]:
    """Steps in the order in which bytes shall travel: pinned blocks first, so that the link is busy while the rest is pinned;
    of those the largest first, since memory for the next one takes 1 ms to make beside a copy, and small ones would not last.

    Raises Refused: `device_full` with both numbers, `bad_layout` for segments that a device can't hold.
    """
    odd = [part.size for part in slabs.parts if part.size % gpu.granularity]
    if odd:
        unit = gpu.granularity
        raise Refused("bad_layout", f"{slabs.weight_set} has a segment of {odd[0]} bytes; {gpu.uuid} maps multiples of {unit}")
    need, have = slabs.bytes_of(blocks), max(gpu.free_bytes() - RESERVE_BYTES, 0)
    if need > have:
        raise full(slabs.weight_set, gpu, need, have)
    parts = [[slabs.parts[number] for number in group] for group in blocks]
    sizes = [sum(part.size for part in group) for group in parts]
    there = [all(part.registered for part in group) for group in parts]
    order = sorted(range(len(blocks)), key=lambda number: (not there[number], -sizes[number], number))
    return tuple(Step(number, sizes[number], any(part.to_pin for part in parts[number])) for number in order)


def full(weight_set: str, gpu: Gpu, need: int, have: int) -> Refused:
    users = sorted(gpu.users().items(), key=lambda user: -user[1])[:_USERS_SHOWN]
    needs, has = both(need, have)
    who = ", ".join(f"process {pid} has {written(size)}" for pid, size in users if pid != os.getpid())
    return Refused(
        "device_full",
        f"{weight_set} needs {needs} on {gpu.uuid}, {has} are free there{f' ({who})' if who else ''}: put an instance to "
        "sleep, or end the processes that use it",
        need_bytes=need,
        free_bytes=have,
    )


@dataclass
class OnDevice:
    """A set's memory on one device."""

    blocks: list[Block]
    fds: list[int]
    """One a block, ours to close."""
    groups: Groups = ()
    """The segments in each."""
    writers: tuple[str, ...] = ()
    """Devices that may relay into it."""


def fill(
    gpu: Gpu,
    slabs: Slabs,
    groups: Groups,
    exported: Callable[[OnDevice], None],
    routes: Sequence[Route] = (),
    *,
    making: Making | None = None,
    pace: Pace = FREE,
) -> Filled:
    """Create, copy, export. `exported` is called when all descriptors are there and bytes still travel.

    groups: the segments of each block that is made, see `pool.blocks`; of a part of the set they may be.
    routes: the device's own link first; none: that alone. making: what making memory takes there. Raises Refused
    (`device_full`), OSError; the device is then as it was before, and descriptors that `exported` was given are the caller's
    to close: another thread may be handing them out.
    """
    begun = time.monotonic()
    steps = plan(gpu, slabs, groups)
    making = making or Making()
    ready = list(itertools.takewhile(lambda step: not step.register, steps))
    blocks: dict[int, Block] = {}
    fds: dict[int, int] = {}
    journey = Journey(gpu, routes, pace)

    longest_s = 0.0

    def make(step: Step) -> float:
        """Seconds that it took."""
        nonlocal longest_s
        at = time.monotonic()
        block = blocks[step.block] = gpu.create(step.size_bytes, journey.writers)
        fds[step.block] = gpu.export(block)
        took = time.monotonic() - at
        longest_s = max(longest_s, took)
        return took

    def send(step: Step) -> None:
        for at, part in _placed(slabs, groups[step.block]):
            if step.register:
                part.register(gpu)
            journey.send(blocks[step.block], at, part)

    try:
        early = ahead([step.size_bytes for step in ready], journey.bytes_per_s, making.beside_s)
        for step in steps[:early]:
            make(step)
        for step in steps[:early]:
            send(step)
        beside_s = 0.0  # without what sending takes: a copy that is slowed for a neighbour waits there
        for step in steps[early:]:
            beside_s += make(step)
            send(step)
        if len(ready) == len(steps):
            making.saw(early, len(steps) - early, beside_s)
        count = range(len(groups))
        made = OnDevice([blocks[number] for number in count], [fds[number] for number in count], groups, journey.writers)
        fds.clear()
        exported(made)
        made_s = time.monotonic() - begun
        shards = journey.arrive(begun)
    except BaseException as error:
        _undo(journey, OnDevice(list(blocks.values()), list(fds.values())))
        if isinstance(error, NoDeviceMemory):
            raise full(slabs.weight_set, gpu, slabs.bytes_of(groups), gpu.free_bytes()) from error
        raise
    return msgspec.structs.replace(
        _filled(slabs.bytes_of(groups), shards, begun), made_ms=made_s * 1000, made_ahead=early, longest_ms=longest_s * 1000
    )


def refill(gpu: Gpu, slabs: Slabs, made: OnDevice, routes: Sequence[Route] = (), *, pace: Pace = FREE) -> Filled:
    """Another set of the same layout into memory that is there: nothing is made, nothing mapped, nothing given back.

    Only those help who could when it was made. Raises OSError; then the memory is gone, and its descriptors are the caller's to
    close.
    """
    begun = time.monotonic()
    able = [route for route in routes if route.helper is None or route.helper.uuid in made.writers]
    journey = Journey(gpu, able, pace)
    try:
        all_of_them = [
            (part.registered, block, at, part)
            for block, group in zip(made.blocks, made.groups, strict=True)
            for at, part in _placed(slabs, group)
        ]
        for _, block, at, part in sorted(all_of_them, key=lambda one: not one[0]):
            part.register(gpu)
            journey.send(block, at, part)
        shards = journey.arrive(begun)
    except BaseException:
        _undo(journey, OnDevice(made.blocks, []))
        raise
    return _filled(slabs.bytes_of(made.groups), shards, begun)


def _placed(slabs: Slabs, group: tuple[int, ...]) -> Iterator[tuple[int, Slab]]:
    """Offset in the block and segment."""
    at = 0
    for number in group:
        yield at, slabs.parts[number]
        at += slabs.parts[number].size


def _filled(moved: int, shards: tuple[Shard, ...], begun: float) -> Filled:
    seconds = time.monotonic() - begun
    path = "links" if len(shards) > 1 else "host"
    return Filled(copied_bytes=moved, took_ms=seconds * 1000, bytes_per_s=moved / seconds, path=path, shards=shards)


def _undo(journey: Journey, made: OnDevice) -> None:
    """Nothing may be in flight into memory that goes. Raises OSError; InFlight: the memory is kept for the bytes to come."""
    try:
        journey.abandon()
    except InFlight as error:
        kept = sum(block.size for block in made.blocks)
        log.error("memory_kept", extra={"device": journey.gpu.uuid, "bytes": kept, "why": str(error)})
        made.blocks.clear()  # nobody's any more: it goes with this process
        free(journey.gpu, made)
        raise
    except BaseException:
        free(journey.gpu, made)
        raise
    free(journey.gpu, made)


def free(gpu: Gpu, made: OnDevice) -> int:
    """Bytes given back. Raises OSError for the first block that did not go; all others went."""
    for fd in made.fds:
        os.close(fd)
    made.fds.clear()
    freed = sum(block.size for block in made.blocks)
    failures: list[OSError] = []
    for block in made.blocks:
        try:
            gpu.destroy(block)
        except OSError as error:
            failures.append(error)
    made.blocks.clear()
    if failures:
        raise failures[0]
    return freed
