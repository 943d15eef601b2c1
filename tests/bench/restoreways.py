"""Several ways back from one image by turns: what each thing that might make it quicker is worth."""

import contextlib
import itertools
import os
import shutil
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from compose.bench.rows import medians
from tests.bench.bench_restore import cat_ms, copy_ms
from tests.bench.laddernotes import contents, kinds
from tests.bench.lowerrungs import LowerRungs
from worker.holderlink import HolderGone
from worker.images import bulk, records

TURNS_S = 85.0
"""No way is begun after this; an 8B takes some 4 s a time."""
LARGE = Path("/sys/kernel/mm/transparent_hugepage/enabled")


class RestoreWays(LowerRungs):
    """The image as CRIU wrote it is kept beside the one that is published; both have the same bytes on disk."""

    whole = False
    """Whether CRIU is to do it all."""

    @property
    def image(self) -> Path:
        return self.work / "whole" if self.whole else super().image

    def keep(self, draft: Path, pid: int) -> dict[str, Any]:
        if "ways" in self.options.without.split(","):
            return {}
        kept = self.work / "whole"
        shutil.rmtree(kept, ignore_errors=True)
        kept.mkdir()
        for path in draft.iterdir():
            os.link(path, kept / path.name)  # the bulk goes on to another name there; these names keep what was written
        try:
            return {"contents": contents(kept, pid)}
        except (IndexError, KeyError, records.RecordsUnknown) as unknown:  # nothing else waits for it
            return {"contents": repr(unknown)}

    def hollow(self, draft: Path, pid: int, lifted: bulk.Lifted) -> int:
        """What is kept beside it would have the holes, too."""
        return super().hollow(draft, pid, lifted) if "ways" in self.options.without.split(",") else 0

    async def ways(self) -> Any:
        """From the image to a caller's first token, by turns."""
        await self._leave()
        cores = len(os.sched_getaffinity(0))
        ways: dict[str, tuple[bool, int, bool]] = {"criu alone": (True, 0, False), "as the product does": (False, 0, False)}
        for threads in (1, 4, 8, 32):  # sixteen is what the product takes where it can
            if threads <= max(4, cores):
                ways[f"{threads} threads"] = (False, threads, False)
        if os.access(LARGE, os.W_OK):
            ways |= {"large pages": (False, 0, True), "criu alone, large pages": (True, 0, True)}
        image, numbers, rows = self.work / "whole", itertools.count(100), {name: list[dict[str, Any]]() for name in ways}
        same = {"cat_ms": [cat_ms(image) for _ in range(3)], "copy_ms": [copy_ms(image) for _ in range(3)]}
        found = {"rows": rows, "same_bytes": same, "large_pages_were": LARGE.read_text().strip()}
        self.rows["ways_so_far"] = found  # what there is when the phase's time is up
        ends = time.monotonic() + TURNS_S
        for _ in range(self.options.cycles):
            for name, (self.whole, threads, large) in ways.items():
                if time.monotonic() > ends:
                    break
                with self._threads(threads), large_pages(large):
                    row = await self._restore(next(numbers))
                assert self.room is not None
                row["large_bytes"] = sum(kind["large"] for kind in kinds(self.room.pid).values())
                rows[name].append(row)
                short = {key: row[key] for key in ("criu_restore_ms", "to_first_token_ms", "same_tokens", "large_bytes")}
                print(f"  {name}: {short}", flush=True)
                await self._leave()
        self.whole = False
        await self._restore(next(numbers))
        del self.rows["ways_so_far"]
        return {"median": {name: medians(rows[name]) for name in ways}, **found}

    async def _leave(self) -> None:
        with contextlib.suppress(HolderGone):
            if self.room is not None:
                await self.room.link.kill(0)
                await self.room.close()

    @contextlib.contextmanager
    def _threads(self, number: int) -> Iterator[None]:
        """As many threads as said, 0: as many as the product takes."""
        real = self.options.criu
        if number:
            other = self.work / "criu-threads"
            other.write_text(
                '#!/bin/sh\nwork=; for word in "$@"; do [ "$before" = -W ] && work=$word; before=$word; done\n'
                f'[ -f "$work/refill.sh" ] && sed -i \'s/ [0-9]* \\([^ ]*refilled\\)$/ {number} \\1/\' "$work/refill.sh"\n'
                f'exec {real} "$@"\n'
            )
            other.chmod(0o700)
            self.options.criu = str(other)
        try:
            yield
        finally:
            self.options.criu = real


@contextlib.contextmanager
def large_pages(wanted: bool) -> Iterator[None]:
    """For everybody, where the machine lets us."""
    was = LARGE.read_text().partition("[")[2].partition("]")[0]
    if wanted:
        LARGE.write_text("always")
    try:
        yield
    finally:
        if wanted:
            LARGE.write_text(was)
