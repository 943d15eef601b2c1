"""Deciders for tests: each is a process of its own with a log of its own, forked from one that has imported what they need.

That is most of what a decider's start takes. `python -m tests.deciders DESCRIPTOR` is the program; it ends with who asks.
"""

import asyncio
import atexit
import contextlib
import os
import signal
import socket
import sys
from functools import cache
from pathlib import Path

import msgspec

WORDS = 4096
"""A request is two paths."""


class Decider:
    """As `python -m controlplane.decider --data DIR` is. Attributes: pid."""

    def __init__(self, pid: int, descriptor: int) -> None:
        """descriptor: a pidfd, so nothing ever reaches another process of this pid."""
        self.pid, self._descriptor = pid, descriptor

    def kill(self) -> None:
        signal.pidfd_send_signal(self._descriptor, signal.SIGKILL)

    def terminate(self) -> None:
        """In order; nothing, if it has ended."""
        signal.pidfd_send_signal(self._descriptor, signal.SIGTERM)

    async def wait(self) -> None:
        """Until it has ended."""
        loop, ended = asyncio.get_running_loop(), asyncio.Event()
        loop.add_reader(self._descriptor, ended.set)
        try:
            await ended.wait()
        finally:
            loop.remove_reader(self._descriptor)

    def __del__(self) -> None:
        os.close(self._descriptor)


def start(data: str, log: Path) -> Decider:
    """Start one on a plane's directory; what it says is added to `log`."""
    channel = _program()
    channel.send(msgspec.json.encode((data, str(log))))
    pid, (descriptor, *_), _, _ = socket.recv_fds(channel, 32, 1)
    return Decider(int(pid), descriptor)


@cache
def _program() -> socket.socket:
    """The way to the program, which is started with its first child and ended with this process."""
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    theirs.set_inheritable(True)
    argv = [sys.executable, "-m", "tests.deciders", str(theirs.fileno())]
    program = os.posix_spawn(sys.executable, argv, os.environ)
    theirs.close()

    def end() -> None:
        ours.close()
        os.waitpid(program, 0)

    atexit.register(end)
    return ours


def _serve(channel: socket.socket) -> None:
    """Fork for each request; return in a child that is to be a decider, with its arguments in `sys.argv`."""
    while request := channel.recv(WORDS):
        data, log = msgspec.json.decode(request, type=tuple[str, str])
        with contextlib.suppress(ChildProcessError):
            while os.waitpid(-1, os.WNOHANG)[0]:  # those who have ended
                pass
        if pid := os.fork():
            descriptor = os.pidfd_open(pid)  # it has not been waited for: it is this one
            socket.send_fds(channel, [str(pid).encode()], [descriptor])
            os.close(descriptor)
            continue
        channel.close()
        opened = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
        os.dup2(opened, sys.stderr.fileno())
        os.close(opened)
        sys.argv = ["controlplane.decider", "--data", data]
        return
    sys.exit()


if __name__ == "__main__":
    from controlplane import decider

    _serve(socket.socket(fileno=int(sys.argv[1])))
    decider.main()
