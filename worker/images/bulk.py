"""The bulk of an image's memory, taken out of CRIU's hands: one thread of it fills page after page, and all else waits.

After a dump (`lift`) most pages of plain memory leave CRIU's lists; their bytes stay where they are, in a file that has another
name now; long runs of zeros (`zeros.py`) are not to stay there (`hollow`). At a restore CRIU makes that memory, empty, and
everything else; then, while the process stands still, it runs `refill.py`, which fills it in several threads. What the process
finds is the same to the byte.
"""

import bisect
import os
import struct
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Final

import structlog
from msgspec import Struct

from worker.images import records, refill, zeros
from worker.images.holes import Extent, punch
from worker.images.pages import PAGE, Pages, Run, copied
from worker.images.records import RecordsUnknown

LEAST_BYTES: Final = 512 << 20
"""Less than this is not worth a process of its own: with two threads some 450 MB took as long either way."""
# What CRIU writes: fields by their numbers (mm_entry, core_entry, thread_core_entry, file_entry), what a mapping is by CRIU's
# bits and by mmap(2)'s flags (NORESERVE: malloc's arenas), seals.
_VMAS, _THREAD_CORE, _RSEQ, _MEMFD = 14, 5, 15, 20
_HEAP, _PLAIN, _SHARED = 1 << 5, 1 << 0 | 1 << 9, 1 << 0 | 1 << 7 | 1 << 14
_WRITE, _PRIVATE, _ANONYMOUS, _NORESERVE = 0x2, 0x02, 0x20, 0x4000
_MAP_SHARED, _SEALED = 0x1, 0x08 | 0x10

log = structlog.get_logger("images")


class Place(Struct, frozen=True):
    """Memory of the process's own, of no file, which it can write to."""

    start: int
    end: int


class Area(Struct, frozen=True):
    """Where a process sees memory that others could share: from `at` on in area number `shared`."""

    start: int
    end: int
    shared: int
    at: int


class Lifted(Struct, frozen=True):
    """What was taken out of CRIU's hands."""

    size: int = 0
    """Bytes of memory; 0: it was left as it is."""
    kept: tuple[Extent, ...] = ()
    """Where in `bulk-PID.img` is what CRIU has a copy of."""
    zeros: tuple[Extent, ...] = ()
    """Where in it zeros are that the map tells of."""


class _Lift(Struct, frozen=True):
    """All that is to be done to a dump, decided before any of it is touched."""

    own: Pages
    kept: list[Run]
    shared: list[Pages]
    """Of areas."""
    bulk: list[Run]

    def carry_out(self, directory: Path, pid: int) -> Lifted:
        """Raises OSError: the dump is neither the one nor the other then, and good for nothing."""
        store = directory / f"bulk-{pid}.img"
        self.own.bytes_in.rename(store)
        self.own.keep(self.kept, store)
        with store.open("ab") as target:
            for pages in self.shared:
                whole = pages.bytes_in.with_suffix(".whole")
                pages.bytes_in.rename(whole)
                with whole.open("rb") as source:
                    copied(source, 0, pages.size, target)
                pages.keep([Run(pages.runs[0].start, PAGE, 0)], whole)  # a list of no page at all would be new to CRIU
                whole.unlink()
        holes = zeros.find(store, self.bulk)
        (directory / f"bulk-{pid}.map").write_bytes(table(*zeros.apart(self.bulk, holes)))
        kept = tuple(Extent(run.offset, run.size) for run in self.kept)
        return Lifted(sum(run.size for run in self.bulk), kept, tuple(holes))


def lift(directory: Path, pid: int, work: Path) -> Lifted:
    """Take the bulk of process `pid` out of a fresh dump. Raises OSError.

    It is left where a refill would not work (a script in `work`, an instance's directory, must run), and where it is not as
    expected: CRIU restores it as ever.
    """
    if os.statvfs(work).f_flag & os.ST_NOEXEC or not refill.possible():
        return Lifted()
    try:
        planned = _planned(directory, pid)
    except (RecordsUnknown, FileNotFoundError, KeyError, ValueError) as unknown:
        log.warning("image_left_whole", directory=str(directory), reason=repr(unknown))
        return Lifted()
    return Lifted() if planned is None else planned.carry_out(directory, pid)


def hollow(directory: Path, pid: int, lifted: Lifted) -> int:
    """Take what need not be there off the disk; bytes of zeros that are gone from it (0: it has no holes). Raises OSError.

    The sooner the less is written at all. A restore may be under way meanwhile: it reads nothing of that.
    """
    if not lifted.size:
        return 0
    store = directory / f"bulk-{pid}.img"
    punch(store, lifted.kept)
    return punch(store, lifted.zeros)


def _planned(directory: Path, pid: int) -> _Lift | None:
    """None: there is too little of it."""
    own = Pages.read(directory / f"pagemap-{pid}.img")
    if own.size < LEAST_BYTES:
        return None
    places = list(memory(directory / f"mm-{pid}.img"))
    bulk, kept = divide(own.runs, places, sorted(set(areas_of_threads(directory))))
    if sum(run.size for run in bulk) < LEAST_BYTES or not kept:
        return None
    areas, end = list[Pages](), own.size
    for area in shared(directory, pid):
        pages = Pages.read(directory / f"pagemap-shmem-{area.shared}.img")
        if seen := shown(area, pages.runs, end):
            bulk += seen
            areas.append(pages)
            end += pages.size
    return _Lift(own, kept, areas, bulk)


def memory(path: Path) -> Iterator[Place]:
    """The places of a process's `mm` that are plain: no stack, nothing locked, nothing that the kernel made."""
    _, (mm,) = records.read(path)
    for value in records.messages(mm, _VMAS):
        vma = records.numbers(value)
        kind, flags = vma[7] & ~_HEAP, vma[6] & ~_NORESERVE
        if (kind, flags) == (_PLAIN, _PRIVATE | _ANONYMOUS) and vma[5] & _WRITE:
            yield Place(vma[1], vma[2])


def shared(directory: Path, pid: int) -> list[Area]:
    """Shared memory of no file that the process can write to, each area once."""
    _, files = records.read(directory / "files.img")
    inodes = {records.numbers(file)[2]: records.numbers(memfd)[5] for file in files for memfd in records.messages(file, _MEMFD)}
    if not inodes:
        return []
    _, entries = records.read(directory / "memfd.img")
    known = {one[7]: one for one in map(records.numbers, entries)}
    _, (mm,) = records.read(directory / f"mm-{pid}.img")
    found: dict[int, Area] = {}
    for vma in map(records.numbers, records.messages(mm, _VMAS)):
        if vma[7] == _SHARED and vma[6] == _MAP_SHARED and vma[5] & _WRITE:
            memfd = known[inodes[vma[4]]]
            if not memfd[6] & _SEALED and (directory / f"pagemap-shmem-{memfd[5]}.img").is_file():
                found.setdefault(memfd[5], Area(vma[1], vma[2], memfd[5], vma[3]))
    return list(found.values())


def shown(area: Area, runs: list[Run], moved_by: int) -> list[Run]:
    """Runs of a shared area as the process sees them, their bytes `moved_by` further on; none if it does not see them all."""
    if any(run.start < area.at or run.start + run.size > area.at + area.end - area.start for run in runs):
        return []
    return [Run(area.start + run.start - area.at, run.size, run.offset + moved_by) for run in runs]


def divide(runs: list[Run], places: list[Place], not_these: list[int]) -> tuple[list[Run], list[Run]]:
    """What is bulk, and what stays: what lies in no place, and the pages `not_these`, the kernel's to write. All is sorted."""
    bulk, kept, at = list[Run](), list[Run](), 0
    for run in runs:
        here, end = run.start, run.start + run.size
        while here < end:
            while at < len(places) and places[at].end <= here:
                at += 1
            place = places[at] if at < len(places) else None
            into, until = kept, end
            if place is not None and place.start <= here:
                into, until = bulk, min(end, place.end)
                spared = bisect.bisect_left(not_these, here)
                if spared < len(not_these) and (page := not_these[spared]) < until:
                    into, until = (kept, page + PAGE) if page == here else (bulk, page)
            elif place is not None:
                until = min(end, place.start)
            into.append(Run(here, until - here, run.offset + here - run.start))
            here = until
    return bulk, kept


def table(bulk: list[Run], nothing: Sequence[Run] = ()) -> bytes:
    """`bulk-PID.map`, see `refill.py`; `nothing`: what is all zeros.

    No piece goes across a boundary of large pages that it could end at.
    """
    vectors, pieces = list[int](), list[list[int]]()
    for run, is_zeros in (*((run, False) for run in bulk), *((run, True) for run in nothing)):
        start, offset, left = run.start, refill.ZEROS if is_zeros else run.offset, run.size
        while left:
            size = min(left, refill.PIECE_BYTES - start % refill.PIECE_BYTES)
            last = pieces[-1] if pieces else [0, refill.MOST_VECTORS, 0, 0]
            follows = last[2] == offset if is_zeros else last[2] + last[3] == offset
            if follows and last[3] + size <= refill.PIECE_BYTES and last[1] < refill.MOST_VECTORS:
                last[1] += 1
                last[3] += size
            else:
                pieces.append([len(vectors) // 2, 1, offset, size])
            vectors += [start, size]
            start, offset, left = start + size, offset if is_zeros else offset + size, left - size
    whole = sum(run.size for run in (*bulk, *nothing))
    words = [refill.MAGIC, len(vectors) // 2, len(pieces), whole, *vectors, *(word for piece in pieces for word in piece)]
    return struct.pack(f"<{len(words)}Q", *words)


def areas_of_threads(directory: Path) -> Iterator[int]:
    """Pages that the kernel writes to as long as a thread lives (rseq): by the time of the refill it has begun to."""
    for path in directory.glob("core-*.img"):
        _, (core, *_) = records.read(path)
        for thread in records.messages(core, _THREAD_CORE):
            for rseq in records.messages(thread, _RSEQ):
                area = records.numbers(rseq)
                yield from range(area[1] // PAGE * PAGE, area[1] + area[2], PAGE)
