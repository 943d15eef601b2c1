"""`python -m compose.embryo UP NAME=DESCRIPTOR ...`: the children of `up` before they are born (see `nursery`).

    this program: import what all of them need --> fork each --> end
                                                     └──> import its own --> wait for its birth --> be it

A child that is born is as one that was started: a session, a log and a command line of its own, a child of `up`, ended by its
death. It has no descriptor but its log, and was forked while there was one thread and no event loop.
"""

import contextlib
import importlib
import json
import os
import signal
import socket
import sys
from collections.abc import Iterable
from typing import Final, NoReturn

from compose.nursery import Birth
from compose.process import tether, untether
from controlplane import commandline, lean

SHARED: Final = ("asyncio", "uvloop", "asyncpg", "controlplane.bus", "controlplane.follower", "controlplane.log.snapshots")
PROGRAMS: Final = {"web": "web.server", "pool": "pool.daemon", "worker": "worker.agent", "decider": "controlplane.decider"}
"""In the order in which they are forked: who takes longest first."""
EAGER: Final = frozenset({"web", "decider"})
"""Import their own at once; the others when they are born, by when these two have done so."""


def main() -> None:
    up = int(sys.argv[1])
    tether(up)
    ends = {name: int(number) for name, number in (word.split("=") for word in sys.argv[2:] if "=" in word)}
    _close_all_but(ends.values())
    for module in SHARED:
        importlib.import_module(module)
    for name in [name for name in PROGRAMS if name in ends]:
        if not _fork(up):
            _grow(up, name, ends)
        os.close(ends.pop(name))
    os._exit(0)


def _close_all_but(kept: Iterable[int]) -> None:
    at = 3
    for number in sorted(kept):
        os.closerange(at, number)
        at = number + 1
    os.closerange(at, os.sysconf("SC_OPEN_MAX"))


def _fork(up: int) -> bool:
    """Fork a child of `up`, not of ours: its first parent ends, and `up` takes orphans in. Returns whether this is not it."""
    assert len(os.listdir("/proc/self/task")) == 1, "a lock of another thread would stay locked in a child for ever"
    told, tell = os.pipe()
    first = os.fork()
    if first:
        os.close(told)
        os.waitpid(first, 0)
        os.close(tell)
        return True
    if os.fork():
        os._exit(0)
    os.close(tell)
    os.read(told, 1)  # until the first parent is gone
    os.close(told)
    tether(up)  # ends us if `up` is not our parent now
    os.setsid()
    return False


def _grow(up: int, name: str, ends: dict[str, int]) -> NoReturn:
    for other in ends.values():
        if other != ends[name]:
            os.close(other)
    program = PROGRAMS[name]
    with socket.socket(fileno=ends[name]) as channel, contextlib.suppress(ConnectionError):
        message = b""
        channel.send(str(os.getpid()).encode())
        if name in EAGER:
            importlib.import_module(program)
        message = channel.recv(1 << 20)
    if not message:  # it has no use for us
        os._exit(0)
    _be(Birth(**json.loads(message)), up)
    module = importlib.import_module(program)
    lean.started()
    sys.exit(module.main())


def _be(birth: Birth, up: int) -> None:
    if birth.tie is None:
        untether()
    else:
        tether(up, signal.Signals(birth.tie))
    commandline.show(birth.argv)
    os.umask(0o077)
    os.chdir("/")
    for path, flags, numbers in ((os.devnull, os.O_RDONLY, (0,)), (birth.log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, (1, 2))):
        opened = os.open(path, flags, 0o600)
        for number in numbers:
            os.dup2(opened, number)
        os.close(opened)
    os.environ.clear()
    os.environ.update(birth.environment)
    sys.argv = birth.argv[birth.argv.index("-m") + 1 :]


if __name__ == "__main__":
    main()
