"""Reading a source into segments: a few threads, each chunk hashed while it is in the cache, no page fault on the way.

Chunks go file -> buffer -> segment with pread and pwrite. Reading straight into a mapping of fresh shared memory saves a copy
but pays a fault and a zeroed page for every 4 KiB, and the hash reads everything from memory again: measured slower.
"""

import os
import threading
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor

from blake3 import blake3

from pool.arena import Draft
from pool.layout import Layout, Placed
from pool.messages import Tensor
from pool.safetensors import BadSource, Source, SourceFile, open_file

CHUNK_BYTES = 1 << 20
"""Fits a core's second-level cache: the hash and the write find it there."""
READERS = max(2, min(8, (os.cpu_count() or 2) // 2))
"""Two saturate memory on small machines; more only take cores from engines."""


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
        with ThreadPoolExecutor(readers + 1, thread_name_prefix="pool-reader") as pool:
            ready = _allocate_ahead(pool, draft)
            work = [pool.submit(_copy_tensor, files, placed, ready, draft, progress) for placed in layout.tensors]
            digests = _results(work, progress.cancel)
            for future in ready:
                future.result()
        for file, fd in zip(source.files, files, strict=True):
            now = os.fstat(fd)
            _unchanged(file, SourceFile(name=file.name, size_bytes=now.st_size, mtime_ns=now.st_mtime_ns))
    finally:
        for fd in files:
            os.close(fd)
    return tuple(_tensor(placed, digest) for placed, digest in zip(layout.tensors, digests, strict=True))


def _unchanged(was: SourceFile, now: SourceFile) -> None:
    if was != now:
        raise BadSource(f"{was.name} changed while it was read")


def _allocate_ahead(pool: ThreadPoolExecutor, draft: Draft) -> list[Future[None]]:
    """One thread takes the memory, segment after segment, ahead of the readers."""
    ready: list[Future[None]] = [Future() for _ in draft.sizes]

    def run() -> None:
        for number, future in enumerate(ready):
            try:
                draft.allocate(number)
            except Exception as error:  # nobody may wait for ever
                for rest in ready[number:]:
                    rest.set_exception(error)
                return
            future.set_result(None)

    pool.submit(run)
    return ready


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


def _copy_tensor(files: list[int], placed: Placed, ready: list[Future[None]], draft: Draft, progress: Progress) -> str:
    ready[placed.segment].result()
    entry, fd, to = placed.entry, files[placed.entry.file], draft.fds[placed.segment]
    buffer = memoryview(bytearray(min(CHUNK_BYTES, entry.size_bytes)))
    digest = blake3()
    for at in range(0, entry.size_bytes, CHUNK_BYTES):
        chunk = buffer[: min(CHUNK_BYTES, entry.size_bytes - at)]
        read_into(fd, chunk, entry.offset + at)
        digest.update(chunk)
        _write(to, chunk, placed.offset + at)
        progress.advance(len(chunk))
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
    buffer = memoryview(bytearray(CHUNK_BYTES))
    bad: list[str] = []
    for tensor in tensors:
        digest = blake3()
        for at in range(0, tensor.size_bytes, CHUNK_BYTES):
            chunk = buffer[: min(CHUNK_BYTES, tensor.size_bytes - at)]
            read_into(fds[tensor.segment], chunk, tensor.offset + at)
            digest.update(chunk)
            progress.advance(len(chunk))
        if digest.hexdigest() != tensor.digest:
            bad.append(tensor.name)
    return tuple(bad)
