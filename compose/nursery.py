"""The first children of `up` are forked from a process that has imported what they all need, at the very start.

Four of our processes import mostly the same, and that is most of what a start takes. So `up` starts one program (`embryo`)
before it imports anything itself: it imports the common part and forks the four, which import the rest and wait. When `up`
knows what they are to be it tells them, instead of starting a process. A nursery ends with the start: who dies later is
started as ever, and so is who finds nobody here that answers, for whatever reason.
"""

import contextlib
import ctypes
import os
import socket
import sys
from typing import Final, NamedTuple

NAMES: Final = ("web", "decider", "pool", "worker")
ROOM: Final = " " * 640
"""An argument of `embryo` that is there to be overwritten: a child's command line has to fit into the program's."""
ANSWER_S: Final = 5.0
_PR_SET_CHILD_SUBREAPER: Final = 36
_SIGKILL: Final = 9


class Birth(NamedTuple):
    """What a child is to be; its standard output and error go to the file `log`."""

    argv: list[str]
    environment: dict[str, str]
    log: str
    tie: int | None
    """Signal that it gets when `up` dies; None: it outlives it."""


class Nursery:
    """Made before there are threads and event loops, and closed when all is over."""

    def __init__(self) -> None:
        """Start the program. Raises OSError."""
        pairs = {name: socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET) for name in NAMES}
        self._channels = {name: ours for name, (ours, _) in pairs.items()}
        words = [f"{name}={theirs.fileno()}" for name, (_, theirs) in pairs.items()]
        for _, theirs in pairs.values():
            theirs.set_inheritable(True)
        _adopt_orphans(True)
        argv = [sys.executable, "-P", "-m", "compose.embryo", str(os.getpid()), *words, ROOM]
        self._program: int | None = os.posix_spawn(sys.executable, argv, os.environ, setsid=True)
        for _, theirs in pairs.values():
            theirs.close()

    async def take(self, name: str, birth: Birth) -> int | None:
        """Let the child `name` be born; return its pid (it is our child), None when there is none to be had."""
        import asyncio  # noqa: PLC0415 (this module is imported before everything)
        import json  # noqa: PLC0415

        channel = self._channels.pop(name, None)
        if channel is None:
            return None
        channel.setblocking(False)
        try:
            async with asyncio.timeout(ANSWER_S):
                pid = await asyncio.get_running_loop().sock_recv(channel, 32)
            channel.send(json.dumps(birth._asdict()).encode())
        except OSError:  # a TimeoutError is one
            pid = b""
        channel.close()
        self._end_if_empty()
        return int(pid) if pid else None

    def decline(self, name: str) -> None:
        """The child `name` runs already: let its place go."""
        if (channel := self._channels.pop(name, None)) is None:
            return
        channel.setblocking(False)
        with contextlib.suppress(OSError):  # not yet forked, or not to be
            pid = channel.recv(32)
            if pid:
                os.kill(int(pid), _SIGKILL)
                os.waitpid(int(pid), 0)
        channel.close()
        self._end_if_empty()

    def close(self) -> None:
        """Let go of all that were not born. Nothing is left of them afterwards."""
        for name in tuple(self._channels):
            self.decline(name)
        self._end_if_empty()

    def _end_if_empty(self) -> None:
        if self._program is not None and not self._channels:
            os.kill(self._program, _SIGKILL)  # it has forked all who were wanted
            os.waitpid(self._program, 0)
            self._program = None
            _adopt_orphans(False)


def _adopt_orphans(yes: bool) -> None:
    """Whether processes that are orphaned below us become our children."""
    ctypes.CDLL(None).prctl(_PR_SET_CHILD_SUBREAPER, int(yes), 0, 0, 0)
