"""A supervised embedded server (Postgres or NATS): like a child, but it knows by itself how to start and stop."""

import asyncio
import contextlib
import signal
import time
from collections.abc import Callable
from typing import Final, Protocol

import structlog

from compose.child import BACK_OFF_S, SEEN_AGAIN_S, STEADY_S
from compose.childstate import ChildState, Shown, ending
from compose.embedded.process import ServerProcess
from compose.embedded.refusal import ServerRefusal

QUIT_S: Final = 3.0
"""For an end at once of a server that does not answer."""

log = structlog.get_logger("supervisor")


class Server(Protocol):
    """What `compose.embedded` offers. `start` returns once it answers and raises ServerRefusal."""

    process: ServerProcess | None

    async def start(self) -> None: ...
    async def answers(self, deadline_s: float) -> bool: ...
    async def exited(self) -> int: ...
    async def stop(self) -> None: ...


class ServerChild(Shown):
    """Keeps one server running until `stop`; `changed` is called whenever `state` is another."""

    def __init__(self, name: str, server: Server, changed: Callable[[], None]) -> None:
        super().__init__(changed)
        self.name = name
        self._server = server
        self._stopping = asyncio.Event()
        self._task: asyncio.Task[None] | None = None

    @property
    def state(self) -> ChildState:
        process = self._server.process
        return ChildState(
            name=self.name, state=self._state, pid=process.pid if process and process.alive else None,
            since_ms=self._since_ms, restarts=self.restarts, last_exit=self._last_exit,
        )  # fmt: skip

    async def start(self) -> None:
        """Start it the first time. Raises ServerRefusal; later failures are tried again and shown."""
        await self._server.start()
        self._enter("ready")
        self._task = asyncio.create_task(self._run(), name=f"server {self.name}")

    async def stop(self) -> bool:
        self._stopping.set()
        await self._server.stop()
        if self._task is not None:
            await self._task
        await self._server.stop()  # it may have been on its way up just then
        self._enter("stopped")
        return True

    async def answers(self, deadline_s: float) -> bool:
        """Whether the server does its work."""
        return await self._server.answers(deadline_s)

    async def give_up(self, verdict: str) -> None:
        """Kill it: at once if it still can (Postgres' sessions end with it then), else by force; it recovers at its start."""
        if (process := self._server.process) is not None:
            self._verdict = verdict
            await process.stop(((signal.SIGQUIT, QUIT_S),))

    async def _end(self) -> str:
        """How it ended, once it has. No fault of looking (descriptors may have run out) is taken for that."""
        while True:
            try:
                code = await self._server.exited()
            except Exception as error:
                log.exception("server_not_seen", server=self.name, again_in_s=SEEN_AGAIN_S)
                if self._stopping.is_set():  # whoever stops it sees to its end
                    return f"its end was not seen: {error!r}"
                await asyncio.sleep(SEEN_AGAIN_S)
            else:
                return self._ended(ending(code))

    async def _run(self) -> None:
        pause, began = BACK_OFF_S[0], time.monotonic()
        shown = ended = await self._end()
        while not self._stopping.is_set():
            self.restarts += 1
            pause = BACK_OFF_S[0] if time.monotonic() - began > STEADY_S else min(pause * 2, BACK_OFF_S[1])
            self._last_exit = shown
            log.warning("server_ended", server=self.name, exit=shown, again_in_s=pause)
            self._enter("waiting")
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(pause):
                    await self._stopping.wait()
                    return
            began = time.monotonic()
            try:
                await self._server.start()
            except Exception as error:  # whatever it is: nobody else starts it again
                expected = isinstance(error, ServerRefusal | OSError)
                shown = f"{ended}; can't be started again: {error if expected else repr(error)}"
                log.error("server_not_starting", server=self.name, reason=str(error), exc_info=None if expected else error)
                continue
            self._last_exit = ended
            self._enter("ready")
            shown = ended = await self._end()
        self._last_exit = shown
