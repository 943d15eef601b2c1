"""Threads of a build. None can be stopped, and none may meet the next draft of its image: whoever leaves waits for them."""

import asyncio
from collections.abc import Callable, Sequence
from typing import Any, Self, TypeVar

from worker.parts import Parts

T = TypeVar("T")


class Beside:
    """What a build does in threads meanwhile; none is at work any more at its end, however it ends.

    Wait for a result through `asyncio.shield`: else a cancellation ends its task, and nobody sees that the thread goes on.
    """

    def __init__(self, parts: Parts) -> None:
        self.parts, self._tasks = parts, list[asyncio.Task[Any]]()

    def begin(self, name: str, work: Callable[[], T], *, after: "asyncio.Task[Any] | None" = None) -> "asyncio.Task[T]":
        """`after`: what must have ended well before."""
        task = asyncio.create_task(self._done(name, work, after))
        self._tasks.append(task)
        return task

    async def _done(self, name: str, work: Callable[[], T], after: "asyncio.Task[Any] | None") -> T:
        if after is not None:
            await asyncio.shield(after)
        return await self.parts.beside(name, asyncio.to_thread(work))

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        """All of it, well or not: whoever needs the one or the other asks for its result."""
        await ended(self._tasks)


async def to_its_end(work: Callable[[], T]) -> T:
    """In a thread; whoever is cancelled, be it twice, waits for it all the same."""
    working = asyncio.create_task(asyncio.to_thread(work))
    await ended([working])
    return working.result()


async def ended(tasks: Sequence[asyncio.Task[Any]]) -> None:
    """All of them, well or not. Who is cancelled meanwhile, however often, waits on, and is told at the end."""
    cancelled: asyncio.CancelledError | None = None
    while left := [task for task in tasks if not task.done()]:
        try:
            await asyncio.wait(left)  # which leaves them alone when it is cancelled; `gather` would cancel them
        except asyncio.CancelledError as told:
            cancelled = told
    for task in tasks:
        _ = task.cancelled() or task.exception()  # seen: nobody else may ask
    if cancelled is not None:
        raise cancelled
