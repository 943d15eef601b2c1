"""A holder that was started before anybody needs one: it has imported all, and waits to be told whose it is.

A start is mostly imports, and every climb of an instance without a process begins with that of its holder. The spare one
belongs to nobody: it reads one line, and ends when its worker does, for then there is nobody left to write it.
"""

import asyncio
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Final

import msgspec

from worker import processes
from worker.processes import Process

REST_S: Final = 2.0
"""From a start on, and from the use of one, until the next is made: a climb has the processors to itself meanwhile."""
ROOM: Final = " " * 640
"""An argument that is there to be overwritten by the command line of the holder that it becomes."""
END_S: Final = 5.0


class Spare:
    """One worker's. `run` keeps one at hand."""

    def __init__(self, data: Path) -> None:
        self._data, self._wanted = data, asyncio.Event()
        self._waiting: tuple[Process, int] | None = None

    async def run(self) -> None:
        """Until cancelled; then there is none any more."""
        try:
            while True:
                await asyncio.sleep(REST_S)
                self._waiting = self._waiting or self._start()
                if self._waiting is not None:
                    self._wanted.clear()
                    await self._wanted.wait()
        finally:
            if self._waiting is not None:
                (process, tell), self._waiting = self._waiting, None
                os.close(tell)
                await processes.end(process, grace_s=0, deadline_s=END_S)

    def take(self, argv: Sequence[str]) -> Process | None:
        """Have it be the holder of command line `argv`; None: there is none, or it has died, or can't be told."""
        if self._waiting is None:
            return None
        try:
            line = msgspec.json.encode(argv) + b"\n"
        except UnicodeEncodeError:  # a path whose bytes are no text
            return None
        (process, tell), self._waiting = self._waiting, None
        self._wanted.set()
        try:
            os.write(tell, line)
        except BrokenPipeError:
            processes.reap(process)
            return None
        finally:
            os.close(tell)
        return process

    def _start(self) -> tuple[Process, int] | None:
        argv = [sys.executable, "-P", "-m", "worker.holder", "--data", str(self._data), "--await", ROOM]
        told, tell = os.pipe()
        try:
            process = processes.spawn(argv, log=Path(os.devnull), directory=Path("/"), stdin=told)
        except OSError:  # no room for it now: a holder is started as ever, and says what is wrong
            os.close(tell)
            return None
        finally:
            os.close(told)
        return process, tell
