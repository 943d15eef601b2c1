"""Reading a source into segments: a few threads, each chunk hashed while it is in the cache.

Where a segment lies in huge pages, or is mapped already, chunks are read straight into it: one copy, and hardly a page fault.
In small pages a mapping pays a fault for every 4 KiB, which costs more than the copy it saves (0.45 s a GiB of processor time,
0.25 with the copy, 0.17 in huge pages): there chunks go file -> buffer -> segment.
"""

import os
import threading
from collections.abc import Callable, Iterable
from concurrent.futures import Future, ThreadPoolExecutor

from blake3 import blake3

from pool.arena import Draft
from pool.huge import in_huge_pages
from pool.layout import SEGMENT_BYTES, Layout, Placed
from pool.mapping import map_shared, unmap, window
from pool.messages import Tensor
from pool.safetensors import BadSource, Source, SourceFile, open_file

CHUNK_BYTES = 2 << 20
"""Still in a core's cache when it is hashed, and written where it is; who comes back less often waits less for the
interpreter, also beside many others."""
DIGEST_BYTES = 2 << 20
"""Of what is in memory."""
READERS = max(2, min(12, (os.cpu_count() or 2) * 3 // 4))
"""Each reads and hashes 6 GB/s, of which hashing is two thirds: it takes more of them than a plain copy to saturate memory. Of
more than two cores a quarter is left to engines."""

NICENESS = 5
"""Of threads that hash: for as long as all cores are busy they have a third of what a copy's thread, or an engine's, has."""


def yield_to_copies() -> None:
    """Linux: a thread has a niceness of its own. It is never lowered: the whole daemon may have been told to make way."""
    thread = threading.get_native_id()
    os.setpriority(os.PRIO_PROCESS, thread, max(os.getpriority(os.PRIO_PROCESS, thread), NICENESS))


class Cancelled(Exception):
    """Nobody waits for this staging any more."""


class Progress:
    """Bytes done, for anybody to read; `cancel` makes the readers stop at their next chunk."""

    def __init__(self) -> None:
        self.done_bytes = 0
        self.total_bytes = 0
        self._lock = threading.Lock()
        self._stop = threading.Event()

    def advance(self, size: int) -> None:
        with self._lock:
            self.done_bytes += size
        if self._stop.is_set():
            raise Cancelled

    def cancel(self) -> None:
        self._stop.set()


def copy(source: Source, layout: Layout, draft: Draft, progress: Progress, *, readers: int = READERS) -> tuple[Tensor, ...]:
    """Fill the draft's segments; the tensors with their digests, in the layout's order.

    Raises BadSource (short or changed meanwhile), OSError (no room, bad disk), Cancelled; the draft is then for discarding.
    """
    files: list[int] = []
    try:
        for file in source.files:
            try:
                fd, state = open_file(source.path, file.name)
            except OSError as error:
                raise BadSource(f"{file.name} could be opened a moment ago: {error.strerror}") from error
            files.append(fd)
            _unchanged(file, state)
        order = sorted(range(len(layout.tensors)), key=lambda number: _turn(layout.tensors[number]))
        with Windows(draft) as windows, ThreadPoolExecutor(readers + 1, "pool-reader", yield_to_copies) as pool:
            pool.submit(windows.open, dict.fromkeys(layout.tensors[number].segment for number in order), progress)
            work = [pool.submit(_copy_tensor, files, layout.tensors[number], windows, draft.fds, progress) for number in order]
            digests = dict(zip(order, _results(work, progress.cancel), strict=True))
        for file, fd in zip(source.files, files, strict=True):
            now = os.fstat(fd)
            _unchanged(file, SourceFile(name=file.name, size_bytes=now.st_size, mtime_ns=now.st_mtime_ns))
    finally:
        for fd in files:
            os.close(fd)
    return tuple(_tensor(placed, digests[number]) for number, placed in enumerate(layout.tensors))


def _unchanged(was: SourceFile, now: SourceFile) -> None:
    if was != now:
        raise BadSource(f"{was.name} changed while it was read")


class Windows:
    """A draft's segments as they become there: one thread takes the memory, segment after segment, ahead of the readers."""

    def __init__(self, draft: Draft) -> None:
        self._draft = draft
        self._opened: list[Future[memoryview | None]] = [Future() for _ in draft.sizes]
        self._mapped: list[tuple[int, int]] = []

    def __enter__(self) -> "Windows":
        return self

    def __exit__(self, *_: object) -> None:
        """Nobody reads any more."""
        for address, size in self._mapped:
            unmap(address, size)

    def open(self, order: Iterable[int], progress: Progress) -> None:
        """All of them, the first that are needed first; no more once nobody wants the bytes."""
        try:
            for number in order:
                progress.advance(0)
                self._draft.allocate(number)
                self._opened[number].set_result(self._open(number))
        except Exception as error:  # nobody may wait for ever
            for future in self._opened:
                if not future.done():
                    future.set_exception(error)

    def __getitem__(self, segment: int) -> memoryview | None:
        """Once it is there: its bytes, or None where a mapping does not pay. Raises OSError (no room), Cancelled."""
        return self._opened[segment].result()

    def _open(self, number: int) -> memoryview | None:
        size, spare = self._draft.sizes[number], self._draft.spares.get(number)
        if spare is not None and spare.slab is not None:
            return window(spare.slab.address, size)
        if not in_huge_pages(self._draft.fds[number], size):
            return None
        address = map_shared(os.dup(self._draft.fds[number]), size)
        self._mapped.append((address, size))
        return window(address, size)


def _turn(placed: Placed) -> tuple[int, int, int]:
    """A tensor with a segment of its own begins early: whoever reads it is at it longest. The rest as the memory comes."""
    large = placed.entry.size_bytes if placed.entry.size_bytes > SEGMENT_BYTES else 0
    return -large, placed.segment, placed.offset


def _results(work: list[Future[str]], stop: Callable[[], None]) -> list[str]:
    """All results, or the first failure, once every reader has come to rest."""
    failure: BaseException | None = None
    digests: list[str] = []
    for future in work:
        try:
            digests.append(future.result())
        except Exception as error:
            stop()
            if failure is None or isinstance(failure, Cancelled):
                failure = error
    if failure is not None:
        raise failure
    return digests


def _copy_tensor(files: list[int], placed: Placed, windows: Windows, segments: list[int], progress: Progress) -> str:
    entry, fd, there, digest = placed.entry, files[placed.entry.file], windows[placed.segment], blake3()
    buffer = memoryview(bytearray(min(CHUNK_BYTES, entry.size_bytes) if there is None else 0))
    for at in range(0, entry.size_bytes, CHUNK_BYTES):
        size, to = min(CHUNK_BYTES, entry.size_bytes - at), placed.offset + at
        chunk = buffer[:size] if there is None else there[to : to + size]
        read_into(fd, chunk, entry.offset + at)
        digest.update(chunk)
        if there is None:
            _write(segments[placed.segment], chunk, to)
        progress.advance(size)
    return digest.hexdigest()


def read_into(fd: int, chunk: memoryview, offset: int) -> None:
    """Fill the chunk. Raises BadSource at a premature end."""
    at = 0
    while at < len(chunk):
        got = os.preadv(fd, [chunk[at:]], offset + at)
        if not got:
            raise BadSource(f"a file ends at {offset + at}, {len(chunk) - at} bytes before its tensor does")
        at += got


def _write(fd: int, chunk: memoryview, offset: int) -> None:
    at = 0
    while at < len(chunk):
        at += os.pwrite(fd, chunk[at:], offset + at)


def _tensor(placed: Placed, digest: str) -> Tensor:
    entry = placed.entry
    return Tensor(
        name=entry.name, dtype=entry.dtype, shape=entry.shape, segment=placed.segment, offset=placed.offset,
        size_bytes=entry.size_bytes, digest=digest,
    )  # fmt: skip


def bad_tensors(fds: list[int], tensors: tuple[Tensor, ...], progress: Progress) -> tuple[str, ...]:
    """Names of the tensors whose bytes are not what they were when staged. Raises Cancelled, OSError."""
    buffer = memoryview(bytearray(DIGEST_BYTES))
    return tuple(tensor.name for tensor in tensors if digest_of(fds[tensor.segment], tensor, buffer, progress) != tensor.digest)


def digest_of(fd: int, tensor: Tensor, buffer: memoryview, progress: Progress, *, threads: int = 1) -> str:
    """Of a tensor in its segment. Raises Cancelled, OSError, BadSource (the file is shorter than it was).

    Read through a buffer and not from a mapping: others may write the file, and a mapping of one that was cut is a SIGBUS.
    """
    digest = blake3(max_threads=threads)
    for at in range(0, tensor.size_bytes, len(buffer)):
        chunk = buffer[: min(len(buffer), tensor.size_bytes - at)]
        read_into(fd, chunk, tensor.offset + at)
        digest.update(chunk)
        progress.advance(len(chunk))
    return digest.hexdigest()
