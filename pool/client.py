"""Talking to the pool daemon: `PoolClient` for whoever orders weight sets, `attach` for an engine that maps one."""

import asyncio
import contextlib
import os
import select
import socket
import threading
from collections.abc import AsyncIterator, Callable
from typing import Self, TypeVar

import msgspec

from pool.messages import (
    Attach,
    Attached,
    Deposit,
    Describe,
    Described,
    Drop,
    Filled,
    Find,
    Refusal,
    Release,
    Released,
    Reply,
    Request,
    Room,
    Seal,
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
FILL_S = 60.0
"""Of a set on its way to a GPU, other copies before it included: 60 GiB take 1.2 s by a link of its own, 8 s unpinned."""
ROOM_S = 120.0
"""Zeroed memory comes at 2 to 10 GiB/s."""

T = TypeVar("T", bound=msgspec.Struct)
_replies: msgspec.msgpack.Decoder[Reply] = msgspec.msgpack.Decoder(Reply)


class PoolRefused(Exception):
    """The daemon's typed no; `code` as in `Refusal`."""

    def __init__(self, refusal: Refusal) -> None:
        super().__init__(f"{refusal.code}: {refusal.message}")
        self.code = refusal.code
        self.message = refusal.message
        self.need_bytes = refusal.need_bytes
        self.free_bytes = refusal.free_bytes


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
                word = _expect(Staging, reply)
                if progress is not None:
                    progress(word)

    async def attach(self, weight_set: str, *, deadline_s: float = ANSWER_S) -> tuple[Attached, list[int]]:
        """What is in the set and one read-only descriptor per segment, the caller's to close."""
        async with self._conversation(Attach(weight_set=weight_set)), asyncio.timeout(deadline_s):
            attached = _expect(Attached, await self._receive())
            return attached, await self._channel.receive_fds(len(attached.segments))

    async def drop(self, weight_set: str, *, deadline_s: float = ANSWER_S) -> Described:
        """Free a set; answers with what the pool holds then."""
        async with self._conversation(Drop(weight_set=weight_set)), asyncio.timeout(deadline_s):
            return _expect(Described, await self._receive())

    async def verify(self, weight_set: str) -> Verified:
        async with self._conversation(Verify(weight_set=weight_set)):
            while True:
                async with asyncio.timeout(SILENCE_S):
                    reply = await self._receive()
                if not isinstance(reply, Staging):
                    return _expect(Verified, reply)

    async def describe(self, *, deadline_s: float = ANSWER_S) -> Described:
        async with self._conversation(Describe()), asyncio.timeout(deadline_s):
            return _expect(Described, await self._receive())

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
        reply = await self._channel.receive(_replies, REPLY_LIMIT, ANSWER_S)
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
        """Read-only, one a segment."""
        self.refused: PoolRefused | None = None
        """Why a restarted daemon did not take the reference back; what is mapped stays good."""
        self._path = path
        self._channel = channel
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
        self._end_thread()
        self._channel.close()
        self._bell.close()
        self._ear.close()
        self.close_fds()

    def _end_thread(self) -> None:
        self._closed.set()
        with contextlib.suppress(OSError):
            self._bell.send(b"\0")
        self._thread.join(ANSWER_S)

    def _stay(self) -> None:
        while not self._closed.is_set():
            # Nothing is ever sent here without being asked for: this returns when the daemon is gone, or we are.
            waiting = select.poll()
            waiting.register(self._channel.sock, select.POLLIN)
            waiting.register(self._ear, select.POLLIN)
            waiting.poll()
            while not self._closed.is_set() and not self._again():
                self._closed.wait(RETRY_S)
            if self.refused is not None:
                return

    def _again(self) -> bool:
        try:
            channel, _, fds = _ask(self._path, self.attached.weight_set, ANSWER_S)
        except PoolRefused as refused:
            self.refused = refused
            return True
        except OSError:
            return False
        close_all(fds)
        self._channel.close()
        self._channel = channel
        if self._closed.is_set():  # `close` may have shut the old channel down meanwhile
            channel.close()
        return True


class DeviceAttachment(Attachment):
    """A set that is on a GPU for this process. `fds`: device memory, then the host segments. A restarted daemon gets the host
    set's reference back; of the device's memory it knows nothing, and that lives as long as this process maps it.
    """

    def __init__(self, path: str, channel: Channel, attached: Attached, fds: list[int]) -> None:
        self.filled: Filled | None = None
        super().__init__(path, channel, attached, fds)

    def release(self, *, deadline_s: float = FILL_S) -> Released | None:
        """Give it back and hear that the memory is free; None if the daemon has died meanwhile. Unmap first."""
        self._end_thread()
        try:
            self._channel.send(Release(weight_set=self.attached.weight_set, device=self.attached.device), deadline_s)
            return _expect(Released, self._channel.receive(_replies, deadline_s))
        except (OSError, PoolRefused):
            return None
        finally:
            self.close()


def attach_device(
    path: str | os.PathLike[str], weight_set: str, device: str, map_them: Callable[[Attached, list[int]], None]
) -> DeviceAttachment:
    """Blocking: have a set on a GPU. `map_them` gets its descriptors while the bytes still travel; it must not use them yet.

    Raises PoolRefused (`device_full` with both numbers, ...), OSError, and what `map_them` raises; what that has mapped is
    the caller's to unmap.
    """
    channel, attached, fds = _ask(os.fspath(path), weight_set, FILL_S, device)
    try:
        map_them(attached, fds)
        filled = _expect(Filled, channel.receive(_replies, FILL_S))
    except BaseException:
        close_all(fds)
        channel.close()
        raise
    attachment = DeviceAttachment(os.fspath(path), channel, attached, fds)
    attachment.filled = filled
    return attachment


def deposit(path: str | os.PathLike[str], request: Deposit, write: Callable[[list[int]], None]) -> Staged:
    """Blocking: bring a set in an engine's own layout. `write` fills the segments. Raises PoolRefused, OSError."""
    channel = Channel.connect(os.fspath(path), ANSWER_S)
    try:
        channel.send(request, ANSWER_S)
        _expect(Room, channel.receive(_replies, ROOM_S))
        fds = channel.receive_fds(len(request.segments), ANSWER_S)
        try:
            write(fds)
        finally:
            close_all(fds)
        channel.send(Seal(), ANSWER_S)
        while True:
            reply = channel.receive(_replies, SILENCE_S)
            if not isinstance(reply, Staging):
                return _expect(Staged, reply)
    finally:
        channel.close()


def find(path: str | os.PathLike[str], source: str, form: str) -> str | None:
    """Blocking: the weight set of these files in this form, if the pool has it. Raises OSError, PoolRefused (`bad_source`)."""
    channel = Channel.connect(os.fspath(path), ANSWER_S)
    try:
        channel.send(Find(source=source, form=form), ANSWER_S)
        return _expect(Staged, channel.receive(_replies, ANSWER_S)).weight_set
    except PoolRefused as refused:
        if refused.code != "unknown_set":
            raise
        return None
    finally:
        channel.close()


def attach(path: str | os.PathLike[str], weight_set: str, *, deadline_s: float = ANSWER_S) -> Attachment:
    """Blocking: reference a set and receive its descriptors. Raises PoolRefused, OSError (TimeoutError, no daemon)."""
    channel, attached, fds = _ask(os.fspath(path), weight_set, deadline_s)
    return Attachment(os.fspath(path), channel, attached, fds)


def _ask(path: str, weight_set: str, deadline_s: float, device: str | None = None) -> tuple[Channel, Attached, list[int]]:
    channel = Channel.connect(path, deadline_s)
    try:
        channel.send(Attach(weight_set=weight_set, device=device), deadline_s)
        attached = _expect(Attached, channel.receive(_replies, deadline_s))
        return channel, attached, channel.receive_fds(len(attached.segments), deadline_s)
    except BaseException:
        channel.close()
        raise


def _expect(kind: type[T], reply: Reply) -> T:
    if isinstance(reply, Refusal):
        raise PoolRefused(reply)
    if not isinstance(reply, kind):
        raise WireBroken(f"{type(reply).__name__} where {kind.__name__} was due")
    return reply
