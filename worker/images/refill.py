"""Brings the bulk of an engine's memory back, in several threads: `python -ISP refill.py DIRECTORY PID STAMP THREADS MARK`.

CRIU runs it while the restored process stands still, and gives the restore up unless it succeeds. It is started between two
steps of a restore, so it imports little, and reads a map that is laid out as the kernel wants it. `MARK` is a file that is
written last: proof that it ran. `STAMP` names the files that CRIU was started with. They are, by `bulk.py`:

  bulk-PID.map: magic, number of vectors, number of pieces, bytes (8 each); vectors (address, length); pieces (first vector,
  how many, where they are in the file one after the other or that they are `ZEROS`, bytes)
  bulk-PID.img: the bytes
"""

import ctypes
import mmap
import os
import sys
import threading

MAGIC = 0x324B4C5542484E45
"""The first eight bytes; the last of them is the version."""
HEAD = 4
PIECE = 4
PIECE_BYTES = 2 << 20
"""Of one piece: a large page, and little enough to stay in a processor's cache between its two copies."""
MOST_VECTORS = 1024
"""The kernel's limit for one call."""
ZEROS = (1 << 64) - 1
"""Where a piece is that is all zeros: nowhere in the file. It is written all the same (design.md says why)."""


class RefillFailed(Exception):
    """With what the kernel said."""


class Table:
    """`bulk-PID.map`, where the kernel can read it; `path` may be a descriptor. Raises OSError, RefillFailed."""

    def __init__(self, path: str | int) -> None:
        with open(path, "rb") as file:
            self._bytes = bytearray(file.read())
        self.words = memoryview(self._bytes).cast("Q")
        if len(self.words) < HEAD or self.words[0] != MAGIC:
            raise RefillFailed(f"the map begins with another number than {MAGIC:#x}")
        _, vectors, self.pieces, self.whole = self.words[:HEAD].tolist()
        self._pieces_at = HEAD + 2 * vectors
        if len(self.words) != (wanted := self._pieces_at + PIECE * self.pieces):
            raise RefillFailed(f"the map has {8 * len(self.words)} bytes, not {8 * wanted}")
        self._address = ctypes.addressof(ctypes.c_char.from_buffer(self._bytes)) + 8 * HEAD

    def piece(self, number: int) -> tuple[int, int, int, int]:
        """Address of its vectors, how many, where its bytes are, how many."""
        at = self._pieces_at + PIECE * number
        first, count, offset, size = self.words[at : at + PIECE].tolist()
        return self._address + 16 * first, count, offset, size


def stamp(listed: os.stat_result, source: os.stat_result) -> str:
    """What tells a map and its bytes from all others.

    The time of the bytes is no part of it: a new image gets its holes while it is proved.
    """
    return f"{listed.st_ino}.{listed.st_mtime_ns}.{listed.st_size}-{source.st_ino}.{source.st_size}"


def refill(directory: str, pid: int, threads: int, expected: str) -> int:
    """Write all pieces into process `pid`; bytes. Raises OSError, RefillFailed.

    `expected`: the files' stamp; an image of the same name may have been put in their place since CRIU began.
    """
    listed = os.open(f"{directory}/bulk-{pid}.map", os.O_RDONLY)
    source = os.open(f"{directory}/bulk-{pid}.img", os.O_RDONLY)
    if (found := stamp(os.fstat(listed), os.fstat(source))) != expected:
        raise RefillFailed(f"bulk-{pid} is {found} now, and was {expected} when the restore began")
    table, write = Table(listed), _writer()
    order, turn = iter(range(table.pieces)), threading.Lock()
    failures, done = list[Exception](), list[int]()
    nothing = mmap.mmap(-1, PIECE_BYTES, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)  # only read: one page of the kernel's
    zeros = ctypes.addressof(ctypes.c_char.from_buffer(nothing))

    def work() -> None:
        room = mmap.mmap(-1, PIECE_BYTES)
        view = memoryview(room)
        filled, local = ctypes.addressof(ctypes.c_char.from_buffer(room)), (ctypes.c_size_t * 2)()
        try:
            while not failures:
                with turn:
                    number = next(order, None)
                if number is None:
                    return
                vectors, count, offset, size = table.piece(number)
                if offset != ZEROS and (got := os.preadv(source, [view[:size]], offset)) != size:
                    raise RefillFailed(f"bulk-{pid}.img gave {got} bytes of {size} at {offset}")
                local[:] = [zeros if offset == ZEROS else filled, size]
                if (written := write(pid, local, 1, vectors, count, 0)) != size:
                    reason = os.strerror(ctypes.get_errno())
                    raise RefillFailed(f"piece {number}: {written} bytes of {size} could be written: {reason}")
                done.append(size)
        except Exception as error:  # whatever it is, it ends the restore
            failures.append(error)

    workers = [threading.Thread(target=work) for _ in range(threads - 1)]
    for worker in workers:
        worker.start()
    work()
    for worker in workers:
        worker.join()
    os.close(source)
    if failures:
        raise RefillFailed(str(failures[0]))
    if sum(done) != table.whole:
        raise RefillFailed(f"{sum(done)} bytes were written, not {table.whole}")
    return table.whole


def possible() -> bool:
    """Whether this machine lets anybody write to a process this way: some containers don't."""
    there, here = ctypes.create_string_buffer(8), ctypes.create_string_buffer(b"written", 8)
    vectors = [(ctypes.c_size_t * 2)(ctypes.addressof(buffer), 8) for buffer in (here, there)]
    return bool(_writer()(os.getpid(), vectors[0], 1, vectors[1], 1, 0) == len(there)) and there.value == b"written"


def _writer() -> "ctypes._NamedFuncPointer":
    write = ctypes.CDLL(None, use_errno=True).process_vm_writev
    write.restype = ctypes.c_ssize_t
    write.argtypes = [ctypes.c_int, ctypes.c_void_p, ctypes.c_ulong, ctypes.c_void_p, ctypes.c_ulong, ctypes.c_ulong]
    return write


if __name__ == "__main__":
    try:
        bytes_written = refill(sys.argv[1], int(sys.argv[2]), int(sys.argv[4]), sys.argv[3])
        with open(sys.argv[5], "w", encoding="ascii") as mark:
            mark.write(str(bytes_written))
    except (OSError, RefillFailed) as failure:
        sys.exit(f"Error: refill: {failure}")
