"""Sets that an engine brings itself, in the layout in which it wants them back: room first, then bytes, then digests."""

import asyncio
import errno
import logging
import os
import threading
import time
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass

import msgspec

from pool.arena import Draft
from pool.layout import PAGE, native_digest, weight_set_id
from pool.manifest import Manifest, Origin
from pool.messages import Deposit, Staged, Tensor
from pool.residency import Refused
from pool.safetensors import BadSource, read_source
from pool.sizes import written
from pool.stage import DIGEST_BYTES, READERS, Progress, digest_of, yield_to_copies
from pool.stagings import Stagings

DIGESTERS = max(2, min(16, (os.cpu_count() or 2) * 3 // 4))
"""2 GB/s each, beside an engine that writes and waits for them."""
LARGE_BYTES = 256 << 20
"""A tensor from here on is digested by several threads: if it comes last, all the others wait for it."""
LARGE_PIECE = 16 << 20
LARGE_THREADS = max(1, min(4, (os.cpu_count() or 2) // 4))
log = logging.getLogger("pool")
_NO_ROOM = frozenset({errno.ENOSPC, errno.ENOMEM, errno.EDQUOT})


@dataclass
class Pledge:
    """Room that has been given and not yet been sealed."""

    request: Deposit
    origin: Origin
    draft: Draft
    ticket: int
    begun: float
    digests: "Digests"
    ended: bool = False


class Deposits:
    def __init__(self, stagings: Stagings) -> None:
        self._stagings = stagings
        self._residency = stagings.residency

    async def find(self, source: str, form: str) -> Staged:
        """Raises Refused: `unknown_set`, `bad_source`."""
        begun = time.monotonic()
        known = self._residency.by_origin(await origin_of(source, form))
        if known is None:
            raise Refused("unknown_set", f"the pool holds no set of {source} in the form {form[:64]}")
        return _staged(known.manifest, begun, 0)

    async def begin(self, request: Deposit) -> Pledge:
        """Room for a set, zeroed. Raises Refused: `bad_layout`, `bad_source`, `over_budget`, `no_room`."""
        begun = time.monotonic()
        check_layout(request)
        origin = await origin_of(request.source, request.form)
        ticket = self._residency.admit(sum(request.segments), await self._stagings.room())
        self._stagings.way.enter()
        try:
            covered = [(tensor.segment, tensor.offset, tensor.size_bytes) for tensor in request.tensors]
            draft = await self._stagings.begin(request.segments, covered, device=request.device)
        except BaseException:
            self._stagings.way.leave()
            self._residency.settle(ticket)
            raise
        pledge = Pledge(request, origin, draft, ticket, begun, Digests(draft, request.tensors))
        try:
            await asyncio.to_thread(_allocate, draft)
        except OSError as error:
            await self.end(pledge)
            code = "no_room" if error.errno in _NO_ROOM else "failed"
            need = sum(request.segments)
            raise Refused(code, f"no memory for the deposit of {written(need)}: {error}", need_bytes=need) from error
        except BaseException:
            await self.end(pledge)
            raise
        lay_ready = sum(spare.size for spare in draft.spares.values())
        log.info("room_given", extra={"ms": (time.monotonic() - begun) * 1000, "lay_ready_bytes": lay_ready})
        return pledge

    async def seal(self, pledge: Pledge) -> tuple[Manifest, Staged]:
        """The bytes are there: digest them, publish the set. Raises Cancelled, OSError."""
        request, draft = pledge.request, pledge.draft
        pledge.digests.begin(len(request.tensors))
        tensors = await asyncio.to_thread(pledge.digests.result)
        digest = native_digest(request.segments, request.host_segments, tensors)
        made = Manifest(
            weight_set=weight_set_id(digest, [tensor.digest for tensor in tensors]), layout_digest=digest,
            segments=request.segments, tensors=tensors, origins=(pledge.origin,), host_segments=request.host_segments,
        )  # fmt: skip
        kept = await self._stagings.keep(draft, made)
        return kept, _staged(kept, pledge.begun, pledge.digests.progress.done_bytes)

    async def end(self, pledge: Pledge) -> None:
        """However it ended. Twice is fine."""
        if not pledge.ended:
            pledge.ended = True
            self._stagings.way.leave()
        await asyncio.to_thread(pledge.digests.close)
        self._residency.settle(pledge.ticket)
        await self._stagings.end(pledge.draft)


async def origin_of(source: str, form: str) -> Origin:
    """Raises Refused (`bad_source`)."""
    try:
        found = await asyncio.to_thread(read_source, source)
    except BadSource as error:
        raise Refused("bad_source", str(error)) from error
    return Origin(path=found.path, files=found.files, form=form)


def check_layout(request: Deposit) -> None:
    """Every number of it is distrusted. Raises Refused (`bad_layout`)."""
    sizes = request.segments
    if not sizes or any(size < PAGE or size % PAGE for size in sizes) or not 0 <= request.host_segments <= len(sizes):
        raise Refused("bad_layout", f"segments of {sizes[:4]}... bytes; each is a positive multiple of {PAGE}")
    names = set()
    for tensor in request.tensors:
        inside = 0 <= tensor.segment < len(sizes) and 0 <= tensor.offset <= sizes[tensor.segment] - tensor.size_bytes
        if not inside or tensor.size_bytes < 0 or tensor.name in names:
            raise Refused("bad_layout", f"tensor {tensor.name[:100]!r} lies outside its segment, or stands there twice")
        names.add(tensor.name)


def _allocate(draft: Draft) -> None:
    """Zeroing is what takes the time, and threads share it."""
    with ThreadPoolExecutor(READERS, "pool-room") as threads:
        list(threads.map(draft.allocate, range(len(draft.sizes))))


class Digests:
    """Of a draft's tensors, begun while later ones are still being written."""

    def __init__(self, draft: Draft, tensors: tuple[Tensor, ...]) -> None:
        self.progress = Progress()
        self.progress.total_bytes = sum(tensor.size_bytes for tensor in tensors)
        self._draft, self._tensors = draft, tensors
        self._threads = ThreadPoolExecutor(DIGESTERS, "pool-digest", initializer=yield_to_copies)
        self._own = threading.local()
        self._begun: list[Future[Tensor]] = []

    def begin(self, count: int) -> None:
        """The first so many are written. Fewer than before is fine."""
        for tensor in self._tensors[len(self._begun) : max(count, 0)]:
            self._begun.append(self._threads.submit(self._digested, tensor))

    def result(self) -> tuple[Tensor, ...]:
        """All of them. Raises Cancelled, OSError."""
        return tuple(future.result() for future in self._begun)

    def close(self) -> None:
        """Returns once nobody reads the draft any more. Twice is fine."""
        self.progress.cancel()
        self._threads.shutdown(cancel_futures=True)

    def _digested(self, tensor: Tensor) -> Tensor:
        large = tensor.size_bytes >= LARGE_BYTES
        buffer = self._buffer(LARGE_PIECE if large else DIGEST_BYTES)[: max(tensor.size_bytes, 1)]
        fd, threads = self._draft.fds[tensor.segment], LARGE_THREADS if large else 1
        return msgspec.structs.replace(tensor, digest=digest_of(fd, tensor, buffer, self.progress, threads=threads))

    def _buffer(self, size: int) -> memoryview:
        """A thread's own, for all of its tensors: to make one takes milliseconds, and the interpreter waits for it."""
        there: memoryview = getattr(self._own, "buffer", memoryview(b""))
        if len(there) < size:
            there = self._own.buffer = memoryview(bytearray(size))
        return there[:size]


def _staged(manifest: Manifest, begun: float, read_bytes: int) -> Staged:
    took_ms = round((time.monotonic() - begun) * 1000)
    return Staged(weight_set=manifest.weight_set, size_bytes=manifest.size_bytes, took_ms=took_ms, read_bytes=read_bytes)
