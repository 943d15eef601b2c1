"""Zeros are looked for while CRIU still writes: one thread that follows it through its files of pages.

CRIU appends to them, one page after the other, with one thread, which takes longer than to look. So when a dump is over nearly
all of it has been looked at, or a part where others keep all processors busy; `lift` looks at the rest. Nothing is written, and
no disk is asked: all is in the page cache.
"""

import contextlib
import os
import threading
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Final, Self

from worker.images import zeros
from worker.images.holes import Extent
from worker.images.zeros import Seen

POLL_S: Final = 0.02
NICENESS: Final = 5
"""Where there are few cores CRIU goes first."""


class Ahead:
    """Of one dump, into `directory`. It is looked at until this is left."""

    def __init__(self, directory: Path) -> None:
        self._directory, self._enough = directory, threading.Event()
        self._zeros, self._until, self._inodes = dict[str, list[Extent]](), dict[str, int](), dict[str, int]()
        self._thread = ThreadPoolExecutor(1, "zeros-ahead", _make_way)
        """Not one of those that all share: a dump takes seconds, and some tens on a slow disk."""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._enough.set()
        self._thread.shutdown(wait=False)

    def begin(self) -> Future[None]:
        """What comes ends well or with OSError: what has been written can't be read."""
        return self._thread.submit(self._follow)

    def seen(self, name: str) -> Seen:
        """What is known of a file; nothing, unless it is the one that was looked at. Nobody may follow any more.

        Raises OSError.
        """
        if (until := self._until.get(name, 0)) == 0:
            return zeros.NOT_SEEN
        there = (self._directory / name).stat()
        if there.st_ino != self._inodes[name] or there.st_size < until:
            return zeros.NOT_SEEN  # a page taken for zeros would be lost without a word
        return Seen(until, tuple(zeros.joined(self._zeros[name])))

    def _follow(self) -> None:
        files = dict[Path, int]()
        with contextlib.ExitStack() as opened:
            while not self._enough.is_set():
                for path in self._directory.glob("pages-*.img"):
                    if path not in files:
                        files[path] = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
                        opened.callback(os.close, files[path])
                        self._inodes[path.name] = os.fstat(files[path]).st_ino
                if not sum([self._look(path, descriptor) for path, descriptor in files.items()]):
                    self._enough.wait(POLL_S)

    def _look(self, path: Path, descriptor: int) -> int:
        """At what has been added; bytes. A part of it is left for later: what was written last is nobody's to read yet."""
        begun = at = self._until.setdefault(path.name, 0)
        found = self._zeros.setdefault(path.name, [])
        while at + zeros.PIECE + zeros.PART <= os.fstat(descriptor).st_size and not self._enough.is_set():
            found += zeros.in_part(descriptor, path, Extent(at, zeros.PIECE))
            at = self._until[path.name] = at + zeros.PIECE
        return at - begun


def _make_way() -> None:
    thread = threading.get_native_id()
    with contextlib.suppress(PermissionError):  # a sandbox may forbid it, and CRIU has to share its core then
        os.setpriority(os.PRIO_PROCESS, thread, max(os.getpriority(os.PRIO_PROCESS, thread), NICENESS))
