"""The supervisor: a plane's child processes, started together, restarted one by one, stopped in order."""

import asyncio
import contextlib
import os
import shutil
from collections.abc import Callable, Collection, Sequence
from pathlib import Path
from typing import Final

import msgspec
import structlog

from compose.child import Child, ChildSpec, left_over
from compose.childstate import ChildState
from compose.nursery import Nursery
from compose.process import end
from compose.serverchild import Server, ServerChild

FILE: Final = "run/children.json"
LOG_LIMIT_BYTES: Final = 16 << 20
"""Two of these per child are kept: the current file and the one before."""
LOG_CHECK_S: Final = 5.0

log = structlog.get_logger("supervisor")


class Supervisor:
    """Children by name, in the order in which they were added; they stop in the opposite order."""

    def __init__(self, data: Path, nursery: Nursery | None = None, say: Callable[[str], None] | None = None) -> None:
        """say: told of a child that ends by itself, and of its return."""
        self.data = data
        self._nursery, self._say = nursery, say
        self._away: set[str] = set()
        self.children: dict[str, Child | ServerChild] = {}
        for folder in ("logs", "run", "run/pids"):
            (data / folder).mkdir(mode=0o700, exist_ok=True)
        self._housekeeping: asyncio.Task[None] | None = None

    def add(self, spec: ChildSpec) -> Child:
        """Start a child and keep it running."""
        child = Child(spec, self.data, self._write, self._nursery)
        self.children[spec.name] = child
        child.start()
        if self._housekeeping is None:
            self._housekeeping = asyncio.create_task(self._keep_logs_small(), name="logs")
        return child

    def serve(self, name: str, server: Server) -> ServerChild:
        """Take charge of an embedded server; its `start` starts it and keeps it running."""
        child = self.children[name] = ServerChild(name, server, self._write)
        return child

    async def stop(self, names: Sequence[str] | None = None) -> None:
        """Stop these children, or all, each before the one added earlier."""
        for name in reversed([n for n in self.children if names is None or n in names]):
            try:
                if not await self.children[name].stop():
                    log.warning("child_killed", child=name)
            except Exception as error:  # it hangs in the kernel, or no descriptor is left: the others have to end all the same
                log.error("child_not_ended", child=name, error=repr(error))
        if names is None and self._housekeeping is not None:
            self._housekeeping.cancel()
            await asyncio.gather(self._housekeeping, return_exceptions=True)

    async def end_left_over(self, *, but: Collection[str], deadline_s: float = 8.0) -> None:
        """End what an `up` that was killed has left running, but for the children of these names, which are adopted."""
        files = [path for path in (self.data / "run" / "pids").glob("*.json") if path.stem not in but]
        left = [process for path in files if (process := left_over(path)) is not None]
        if left:
            log.info("left_over", pids=[process.pid for process in left])
            await end(left, deadline_s=deadline_s)

    @property
    def states(self) -> list[ChildState]:
        return [child.state for child in self.children.values()]

    def _write(self) -> None:
        self._tell()
        try:
            write_states(self.data, self.states)
        except OSError as error:  # a full disk: what `status` shows is old, and the children are kept all the same
            log.error("states_not_written", error=str(error))

    def _tell(self) -> None:
        """Once for an end; one that comes before it was ready again is no news."""
        if self._say is None:
            return
        with contextlib.suppress(OSError, ValueError):  # nobody listens any more: its keeping goes on
            for one in self.states:
                if one.state == "waiting" and one.name not in self._away:
                    self._away.add(one.name)
                    self._say(f"{one.name} has ended ({one.last_exit}) and is started again; see logs/{one.name}.log")
                elif one.state == "ready" and one.name in self._away:
                    self._away.remove(one.name)
                    self._say(f"{one.name} is ready again")

    async def _keep_logs_small(self) -> None:
        while True:
            await asyncio.sleep(LOG_CHECK_S)
            for path in [*(self.data / "logs").glob("*.log"), *(self.data / "run" / "inst").glob("*/*.log")]:
                try:
                    bound(path, LOG_LIMIT_BYTES)
                except Exception as error:  # a disk that is full for a while must not be the end of what keeps it from that
                    log.error("log_not_bounded", path=str(path), reason=repr(error), again_s=LOG_CHECK_S)


def bound(path: Path, limit_bytes: int) -> None:
    """Keep a log that has passed the limit as `<name>.1` and empty it.

    Its writers append through a descriptor of their own, and may outlive us: so the file is copied, then cut in place.
    """
    try:
        if path.stat().st_size > limit_bytes:
            shutil.copyfile(path, path.with_name(f"{path.name}.1"))
            os.truncate(path, 0)
    except FileNotFoundError:  # its instance has ended
        return


def write_states(data: Path, states: list[ChildState]) -> None:
    fresh = data / f"{FILE}.new"
    fresh.write_bytes(msgspec.json.encode(states))
    fresh.replace(data / FILE)


def read_states(data: Path) -> list[ChildState]:
    """What the last `up` wrote of its children; empty when nothing has been started there."""
    try:
        return msgspec.json.decode((data / FILE).read_bytes(), type=list[ChildState])
    except FileNotFoundError:
        return []
