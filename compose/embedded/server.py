"""What the embedded servers have in common: a process that is started, waited for, and stopped in order."""

import asyncio
import signal
from collections.abc import Awaitable, Callable, Sequence
from types import TracebackType
from typing import ClassVar, Self

from compose.embedded.process import ServerProcess
from compose.embedded.refusal import ServerRefusal


class EmbeddedServer:
    """`async with` gives a server that answers; or `start`, `exited`, `stop` by hand."""

    NAME: ClassVar[str]
    READY_S: ClassVar[float]
    """How long it may take until it answers."""
    STOPS: ClassVar[Sequence[tuple[signal.Signals, float]]]
    """Signals, and the seconds that each is given; then it is killed."""
    process: ServerProcess | None = None

    async def start(self) -> None:
        """Start it and wait until it answers. Raises ServerRefusal."""
        raise NotImplementedError

    async def answers(self, deadline_s: float) -> bool:
        """Whether it does what it is there for. False: not within that time."""
        raise NotImplementedError

    async def stop(self) -> None:
        if self.process is not None:
            await self.process.stop(self.STOPS)

    async def exited(self) -> int:
        """Wait for the end of the server, however it comes."""
        assert self.process is not None, "not started"
        return await self.process.exited()

    async def __aenter__(self) -> Self:
        await self.start()
        return self

    async def __aexit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        await self.stop()

    async def _answering(self, process: ServerProcess, ready: Callable[[ServerProcess], Awaitable[None]]) -> None:
        """Take the process that was just started, and return once `ready` does. Raises ServerRefusal, with its last words."""
        self.process = process
        try:
            async with asyncio.timeout(self.READY_S):
                await ready(process)
        except TimeoutError as error:
            await self.stop()
            message = f"{self.NAME} did not answer within {self.READY_S:g} s: {process.tail()}"
            raise ServerRefusal("not_starting", message, f"See {process.log}.") from error

    def _ended(self, process: ServerProcess) -> ServerRefusal:
        message = f"{self.NAME} ended with status {process.popen.returncode}: {process.tail()}"
        return ServerRefusal("not_starting", message, f"See {process.log}.")
