"""Talking to the pool daemon: `PoolClient` for whoever orders weight sets, `attach` for an engine that maps one."""

import asyncio
import contextlib
import os
import select
import socket
import threading
from collections.abc import AsyncIterator, Callable, Mapping
from typing import Self, TypeVar

import msgspec

from pool.blocks import Groups
from pool.described import Described
from pool.messages import (
    PLACE_LOST,
    Attach,
    Attached,
    Describe,
    Drop,
    Find,
    Refusal,
    Reply,
    Request,
    Stage,
    Staged,
    Staging,
    Verified,
    Verify,
)
from pool.wire import REPLY_LIMIT, AsyncChannel, Channel, WireBroken, close_all

ANSWER_S = 5.0
"""Deadline of an answer that needs no reading of weights."""
SILENCE_S = 10.0
"""The daemon reports on a staging or a check at least every second: ten without a word is a hang."""
RETRY_S = 0.1

T = TypeVar("T", bound=msgspec.Struct)
replies: msgspec.msgpack.Decoder[Reply] = msgspec.msgpack.Decoder(Reply)


class PoolRefused(Exception):
    """The daemon's typed no; `code` as in `Refusal`."""

    def __init__(self, refusal: Refusal) -> None:
        super().__init__(f"{refusal.code}: {refusal.message}")
        self.code = refusal.code
        self.message = refusal.message
        self.need_bytes = refusal.need_bytes
        self.free_bytes = refusal.free_bytes


class PoolEnds(ConnectionError):
    """The daemon has lost its memory and makes way for another one: as good as dead, and the message says why."""


class PoolClient:
    """One connection; its calls take turns. TimeoutError and ConnectionError close it: connect again.

    A set attached here stays referenced until `close` (or the death of this process).
    """

    def __init__(self, channel: AsyncChannel) -> None:
        self._channel = channel
        self._turn = asyncio.Lock()

    @classmethod
    async def connect(cls, path: str | os.PathLike[str], *, deadline_s: float = ANSWER_S) -> Self:
        """Raises OSError (FileNotFoundError, ConnectionRefusedError: no daemon) or TimeoutError."""
        async with asyncio.timeout(deadline_s):
            return cls(await AsyncChannel.connect(os.fspath(path)))

    async def stage(self, source: str | os.PathLike[str], progress: Callable[[Staging], None] | None = None) -> Staged:
        """Bring the safetensors files of a directory into the pool; cancelling this call cancels the staging."""
        async with self._conversation(Stage(source=os.fspath(source))):
            while True:
                async with asyncio.timeout(SILENCE_S):
                    reply = await self._receive()
                if isinstance(reply, Staged):
                    return reply
                word = expect(Staging, reply)
                if progress is not None:
                    progress(word)

    async def find(self, source: str | os.PathLike[str], form: str, *, deadline_s: float = ANSWER_S) -> Staged | None:
        """The set of exactly these files that an engine has brought in this form; None: the pool has none."""
        async with self._conversation(Find(source=os.fspath(source), form=form)), asyncio.timeout(deadline_s):
            try:
                return expect(Staged, await self._receive())
            except PoolRefused as refused:
                if refused.code != "unknown_set":
                    raise
                return None

    async def attach(self, weight_set: str, *, deadline_s: float = ANSWER_S) -> tuple[Attached, list[int]]:
        """What is in the set and one read-only descriptor per segment, the caller's to close."""
        async with self._conversation(Attach(weight_set=weight_set)), asyncio.timeout(deadline_s):
            attached = expect(Attached, await self._receive())
            return attached, await self._channel.receive_fds(len(attached.segments))

    async def drop(self, weight_set: str, *, deadline_s: float = ANSWER_S) -> Described:
        """Free a set; answers with what the pool holds then."""
        async with self._conversation(Drop(weight_set=weight_set)), asyncio.timeout(deadline_s):
            return expect(Described, await self._receive())

    async def verify(self, weight_set: str) -> Verified:
        async with self._conversation(Verify(weight_set=weight_set)):
            while True:
                async with asyncio.timeout(SILENCE_S):
                    reply = await self._receive()
                if not isinstance(reply, Staging):
                    return expect(Verified, reply)

    async def describe(self, *, deadline_s: float = ANSWER_S) -> Described:
        async with self._conversation(Describe()), asyncio.timeout(deadline_s):
            return expect(Described, await self._receive())

    async def close(self) -> None:
        self._channel.close()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    @contextlib.asynccontextmanager
    async def _conversation(self, request: Request) -> AsyncIterator[None]:
        async with self._turn:
            try:
                async with asyncio.timeout(ANSWER_S):
                    await self._channel.send(request)
                yield
            except PoolRefused:
                raise
            except BaseException:  # an answer left half-read would be taken for the next one's
                self._channel.close()
                raise

    async def _receive(self) -> Reply:
        reply = await self._channel.receive(replies, REPLY_LIMIT, ANSWER_S)
        if reply is None:
            raise WireBroken("the pool daemon closed the connection")
        return reply


class Attachment:
    """A set that this process maps. It is referenced until `close`, also across a restart of the daemon.

    The mapping outlives the daemon by itself; a thread only tells the next daemon that the set is in use.
    """

    def __init__(self, path: str, channel: Channel, attached: Attached, fds: list[int]) -> None:
        self.attached = attached
        self.fds = fds
        """Read-only, one a segment; of device memory one a block."""
        self.refused: PoolRefused | None = None
        """Why a restarted daemon did not take the reference back; what is mapped stays good."""
        self._path = path
        self.channel = channel
        self._closed = threading.Event()
        self._bell, self._ear = socket.socketpair()
        self._thread = threading.Thread(target=self._stay, name="pool-attachment", daemon=True)
        self._thread.start()

    def close_fds(self) -> None:
        """They are of no use once mapped."""
        close_all(self.fds)
        self.fds = []

    def close(self) -> None:
        """Give the reference back: unmap first. Twice is fine."""
        self.end_thread()
        self.channel.close()
        self._bell.close()
        self._ear.close()
        self.close_fds()

    def end_thread(self) -> None:
        """The channel is the caller's from now on."""
        self._closed.set()
        with contextlib.suppress(OSError):
            self._bell.send(b"\0")
        self._thread.join(ANSWER_S)

    def _stay(self) -> None:
        while not self._closed.is_set():
            # Nothing is ever sent here without being asked for: this returns when the daemon is gone, or we are.
            waiting = select.poll()
            waiting.register(self.channel.sock, select.POLLIN)
            waiting.register(self._ear, select.POLLIN)
            waiting.poll()
            while not self._closed.is_set() and not self._again():
                self._closed.wait(RETRY_S)
            if self.refused is not None:
                return

    def _again(self) -> bool:
        try:
            channel, _, fds = ask(
                self._path, self.attached.weight_set, ANSWER_S, left_on=self.attached.device, left=self.attached.copies
            )
        except PoolRefused as refused:
            self.refused = refused
            return True
        except OSError:
            return False
        close_all(fds)
        self.channel.close()
        self.channel = channel
        if self._closed.is_set():  # `close` may have shut the old channel down meanwhile
            channel.close()
        return True


def attach(path: str | os.PathLike[str], weight_set: str, *, deadline_s: float = ANSWER_S) -> Attachment:
    """Blocking: reference a set and receive its descriptors. Raises PoolRefused, OSError (TimeoutError, no daemon)."""
    channel, attached, fds = ask(os.fspath(path), weight_set, deadline_s)
    return Attachment(os.fspath(path), channel, attached, fds)


def ask(
    path: str,
    weight_set: str,
    deadline_s: float,
    device: str | None = None,
    left_on: str | None = None,
    *,
    left: Mapping[str, int] | None = None,
    beside: tuple[str, ...] = (),
    neighbours: Groups = (),
) -> tuple[Channel, Attached, list[int]]:
    channel = Channel.connect(path, deadline_s)
    try:
        request = Attach(
            weight_set=weight_set, device=device, left_on=left_on, left=dict(left or {}), beside=beside, neighbours=neighbours
        )
        channel.send(request, deadline_s)
        attached = expect(Attached, channel.receive(replies, deadline_s))
        return channel, attached, channel.receive_fds(attached.descriptors, deadline_s)
    except BaseException:
        channel.close()
        raise


def expect(kind: type[T], reply: Reply) -> T:
    if isinstance(reply, Refusal):
        raise PoolEnds(reply.message) if reply.code == PLACE_LOST else PoolRefused(reply)
    if not isinstance(reply, kind):
        raise WireBroken(f"{type(reply).__name__} where {kind.__name__} was due")
    return reply
