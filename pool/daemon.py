"""`python -m pool.daemon --socket PATH --directory DIR --budget BYTES`: the one process of a node that owns weight sets.

Ends in order on SIGTERM and SIGINT; the sets stay for the next daemon unless `--forget`.
Exit status 2: it could not start, and says why; 3: the directory of its segments was removed, and whoever keeps it running
starts it again.
"""

import argparse
import asyncio
import contextlib
import fcntl
import logging
import os
import resource
import signal
import socket
import sys
from collections.abc import Iterator, Sequence
from datetime import UTC, datetime
from pathlib import Path

import msgspec

from pool.arena import Arena
from pool.gpu import Gpu
from pool.pace import BESIDE_DECODING
from pool.place import LOCK, SHARED_MEMORY, PlaceRefused, claim, place, sweep
from pool.residency import Residency
from pool.server import Server
from pool.topology import NO_TOPOLOGY, Topology

SOCKET_PATH_LIMIT = 107
"""Bytes in a unix socket's address on Linux."""
_OWN_FIELDS = frozenset(vars(logging.makeLogRecord({}))) | {"message", "asctime", "taskName"}
SWITCH_S = 0.0005
"""For so long a thread that computes keeps the interpreter from one that comes back from the driver, as a copy's does some five
times a segment: at Python's own 5 ms a hundred calls of 1 ms beside one busy thread took 1.24 s, at this 0.28."""
PLACE_LOST = 3
"""Exit status."""
LEAST_SHARE = 0.1
"""Of a link's rate, for a copy beside a neighbour: 16 GB take 3 s then."""
log = logging.getLogger("pool")


class CannotStart(Exception):
    """The message is for the person who started the daemon."""


class Lines(logging.Formatter):
    """One JSON object a line, as the plane's other processes write."""

    def format(self, record: logging.LogRecord) -> str:
        fields = {name: value for name, value in vars(record).items() if name not in _OWN_FIELDS}
        line = {
            "event": record.getMessage(),
            "level": record.levelname.lower(),
            "logger": record.name,
            "timestamp": datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds"),
            **fields,
        }
        if record.exc_info:
            line["exception"] = self.formatException(record.exc_info)
        return msgspec.json.encode(line, enc_hook=repr).decode()


def main(arguments: list[str] | None = None) -> int:
    options = _options(arguments)
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(Lines())
    logging.basicConfig(level=logging.INFO, handlers=[handler])
    os.umask(0o077)
    sys.setswitchinterval(SWITCH_S)
    _many_files()
    try:
        directory = _directory(options.directory)
        with _only_one(directory), _listening(options.socket) as listener:
            root = place(directory, options.budget, shared_memory=SHARED_MEMORY if options.shared_memory else None)
            with claim(root, directory):
                if removed := sweep():
                    log.info("orphans_removed", extra={"places": removed})
                if asyncio.run(_run(listener, root, options)):
                    return PLACE_LOST
    except (CannotStart, PlaceRefused, OSError) as error:
        log.error("cannot_start", extra={"why": str(error)})
        return 2
    return 0


def _many_files() -> None:
    """Each segment, and each block on a device, is a descriptor: a few sets of 150 are more than the usual 1,024."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != hard:
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))


def _options(arguments: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m pool.daemon", description=__doc__)
    parser.add_argument("--socket", type=Path, required=True)
    parser.add_argument(
        "--directory", type=Path, required=True, help="for the lock, and for segments if /dev/shm lacks the room"
    )
    parser.add_argument("--budget", type=int, required=True, help="bytes of weight sets at most")
    parser.add_argument("--ready", type=int, help="bytes of memory that lie ready for the next set (a quarter of the budget)")
    parser.add_argument("--forget", action="store_true", help="free all sets at the end")
    parser.add_argument("--gpus", action="store_true", help="hold sets on this machine's GPUs, too")
    parser.add_argument(
        "--beside-decoding", type=_share, default=BESIDE_DECODING, metavar="SHARE",
        help="of a link's rate that a copy takes while another engine decodes on its device (%(default)s; 1: all of it)",
    )  # fmt: skip
    parser.add_argument("--no-helpers", dest="helpers", action="store_false", help="fill a GPU over its own link alone")
    parser.add_argument("--no-shared-memory", dest="shared_memory", action="store_false", help="keep segments in the directory")
    return parser.parse_args(arguments)


def _share(text: str) -> float:
    if not (share := float(text)) >= LEAST_SHARE:  # also what is no number
        raise argparse.ArgumentTypeError(f"{text} of a link's rate is less than {LEAST_SHARE}: a wake would hardly move")
    return share


async def _run(listener: socket.socket, root: Path, options: argparse.Namespace) -> bool:
    """Until it is told to end, or its place is lost: True."""
    stop = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stop.set)
    gpus, topology = _gpus(helpers=options.helpers) if options.gpus else ((), NO_TOPOLOGY)
    arena = Arena(root, topology)
    ready_bytes = options.budget // 4 if options.ready is None else options.ready
    share, helpers = options.beside_decoding, options.helpers
    server = Server(arena, Residency(options.budget), gpus, topology, ready_bytes=ready_bytes, helpers=helpers, share=share)
    server.adopt()
    serving = asyncio.create_task(server.serve(listener))
    log.info(
        "ready",
        extra={
            "socket": str(options.socket),
            "segments": str(root),
            "budget_bytes": options.budget,
            "memory_nodes": [node.number for node in arena.nodes.nodes()],
            "placement": arena.nodes.state,
        },
    )
    stopping, losing = asyncio.create_task(stop.wait()), asyncio.create_task(server.loss.known())
    await asyncio.wait([serving, stopping, losing], return_when=asyncio.FIRST_COMPLETED)
    lost = losing.done()
    stopping.cancel()
    losing.cancel()
    serving.cancel()
    with contextlib.suppress(asyncio.CancelledError):
        await serving
    await server.close()
    if options.forget and not arena.lost:
        arena.forget()
    arena.close()
    log.info("ended", extra={"forgot": options.forget})
    return lost


def _gpus(*, helpers: bool) -> tuple[Sequence[Gpu], Topology]:
    try:
        from pool.cuda import devices  # noqa: PLC0415 - nodes without a device have no such library
    except ImportError as error:
        raise CannotStart(f"--gpus needs cuda-python (pip install cuda-bindings): {error}") from error
    try:
        found, topology = devices()
    except RuntimeError as error:  # the bindings' own, where there is no driver
        raise CannotStart(f"--gpus needs a driver: {error}") from error
    log.info("topology", extra={"places": topology.places, "peers": sorted(topology.peers), "helpers": helpers})
    return found, topology if helpers else msgspec.structs.replace(topology, peers=frozenset())


def _directory(path: Path) -> Path:
    path.mkdir(mode=0o700, parents=True, exist_ok=True)
    state = path.stat()
    if state.st_uid != os.geteuid() or state.st_mode & 0o077:
        raise CannotStart(f"{path} must belong to user {os.geteuid()} with mode 0700 (chmod 700 {path})")
    return path.resolve()


@contextlib.contextmanager
def _only_one(directory: Path) -> Iterator[None]:
    fd = os.open(directory / LOCK, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            holder = os.pread(fd, 20, 0).decode(errors="replace").strip() or "of unknown id"
            raise CannotStart(f"the pool daemon {holder} holds {directory}: end it, or name another directory") from None
        os.ftruncate(fd, 0)
        os.pwrite(fd, str(os.getpid()).encode(), 0)
        yield
    finally:
        os.close(fd)


@contextlib.contextmanager
def _listening(path: Path) -> Iterator[socket.socket]:
    if len(os.fsencode(path)) > SOCKET_PATH_LIMIT:
        raise CannotStart(f"{path} has {len(os.fsencode(path))} bytes, a socket's path {SOCKET_PATH_LIMIT} at most")
    path.unlink(missing_ok=True)  # of a dead daemon: a living one would hold the lock
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as listener:
        listener.setblocking(False)
        listener.bind(str(path))
        listener.listen(128)
        try:
            yield listener
        finally:
            path.unlink(missing_ok=True)


if __name__ == "__main__":
    sys.exit(main())
