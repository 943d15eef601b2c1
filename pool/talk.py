"""The daemon's side of a conversation: nothing is sent to a client that does not take it, and long work is talked about."""

import asyncio
from typing import TypeVar

import msgspec

from pool.messages import Attached, Staging
from pool.stage import Progress
from pool.wire import AsyncChannel, WireBroken, close_all

WORD_S = 0.25
"""Between two words on long work: a page shows progress at this pace, and clients take ten seconds of silence for a hang."""
SEND_S = 10.0
"""A client that does not take its answer for so long is let go."""

T = TypeVar("T")


async def send(channel: AsyncChannel, message: msgspec.Struct) -> None:
    async with asyncio.timeout(SEND_S):
        await channel.send(message)


async def hand_over(channel: AsyncChannel, attached: Attached, fds: list[int]) -> None:
    """The descriptors are closed here, whatever happens."""
    try:
        await send(channel, attached)
        async with asyncio.timeout(SEND_S):
            await channel.send_fds(fds)
    finally:
        close_all(fds)


async def talking(channel: AsyncChannel, work: asyncio.Future[T], progress: Progress) -> T:
    """The work's result, with words on its progress meanwhile. Raises WireBroken once the client has gone."""
    gone: asyncio.Future[None] = asyncio.create_task(channel.gone())
    try:
        while not work.done():
            await send(channel, Staging(done_bytes=progress.done_bytes, total_bytes=progress.total_bytes))
            await asyncio.wait((work, gone), timeout=WORD_S, return_when=asyncio.FIRST_COMPLETED)
            if gone.done() and not work.done():
                raise WireBroken("the client left before the end")
        return work.result()
    finally:
        gone.cancel()
        await asyncio.wait([gone])  # it has to take its hands off the socket before anybody reads there
