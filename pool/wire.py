"""Frames (4-byte little-endian length, msgpack) and descriptors (SCM_RIGHTS) over a unix socket, blocking and asyncio.

A reader never takes more bytes from the socket than the message it waits for has: descriptors ride on single bytes between
frames, and a read that swallowed such a byte would lose them.
"""

import asyncio
import contextlib
import os
import socket
import struct
import time
from collections.abc import Iterable, Sequence
from typing import TypeVar

import msgspec

FDS_PER_MESSAGE = 100
"""The kernel takes 253."""
REPLY_LIMIT = 64 << 20
"""A tensor is described in about 150 bytes: enough for 400,000 of them."""
REQUEST_LIMIT = 16 << 20
"""A deposit describes its tensors."""
_HEAD = struct.Struct("<I")
_FD_BYTE = b"\0"
_RECEIVE_FLAGS = socket.MSG_CMSG_CLOEXEC

T = TypeVar("T")


class WireBroken(ConnectionError):
    """The peer went away or does not speak this wire; the connection is of no use any more."""


def frame(message: msgspec.Struct) -> bytes:
    body = msgspec.msgpack.encode(message)
    return _HEAD.pack(len(body)) + body


def _length(head: bytes, limit: int) -> int:
    size = int(_HEAD.unpack(head)[0])
    if size > limit:
        raise WireBroken(f"a frame of {size} bytes; at most {limit} are taken")
    return size


def _decode(decoder: msgspec.msgpack.Decoder[T], body: bytes) -> T:
    try:
        return decoder.decode(body)
    except msgspec.DecodeError as error:
        raise WireBroken(f"a message that is none: {error}") from error


def _take_fds(sock: socket.socket, fds: list[int]) -> None:
    """One message's descriptors onto `fds`; BlockingIOError and TimeoutError pass through."""
    data, got, flags, _ = socket.recv_fds(sock, 1, FDS_PER_MESSAGE, _RECEIVE_FLAGS)
    fds += got
    if not data:
        raise WireBroken("the peer closed before all descriptors came")
    if flags & socket.MSG_CTRUNC or not got:
        raise WireBroken("descriptors were lost: is this process at its limit of open files (ulimit -n)?")


def close_all(fds: Sequence[int]) -> None:
    for fd in fds:
        os.close(fd)


def copied(fds: Iterable[int]) -> list[int]:
    """Duplicates of all of them, the caller's to close. Raises OSError; then there is none."""
    copies: list[int] = []
    try:
        for fd in fds:
            copies.append(os.dup(fd))
    except OSError:
        close_all(copies)
        raise
    return copies


class Channel:
    """Blocking; each call has a deadline in seconds and raises TimeoutError past it, after which the channel must be closed."""

    def __init__(self, sock: socket.socket) -> None:
        self.sock = sock

    @classmethod
    def connect(cls, path: str, deadline_s: float) -> "Channel":
        sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            sock.settimeout(deadline_s)
            sock.connect(path)
        except BaseException:
            sock.close()
            raise
        return cls(sock)

    def send(self, message: msgspec.Struct, deadline_s: float) -> None:
        self.sock.settimeout(deadline_s)
        self.sock.sendall(frame(message))

    def receive(self, decoder: msgspec.msgpack.Decoder[T], deadline_s: float) -> T:
        end = time.monotonic() + deadline_s
        size = _length(self._exactly(_HEAD.size, end), REPLY_LIMIT)
        return _decode(decoder, self._exactly(size, end))

    def receive_fds(self, count: int, deadline_s: float) -> list[int]:
        end = time.monotonic() + deadline_s
        fds: list[int] = []
        try:
            while len(fds) < count:
                self._wait_until(end)
                _take_fds(self.sock, fds)
            if len(fds) != count:
                raise WireBroken(f"{len(fds)} descriptors came where {count} were due")
        except BaseException:
            close_all(fds)
            raise
        return fds

    def _wait_until(self, end: float) -> None:
        left = end - time.monotonic()
        if left <= 0:
            raise TimeoutError("the peer did not answer in time")
        self.sock.settimeout(left)

    def _exactly(self, size: int, end: float) -> bytes:
        parts: list[bytes] = []
        while size:
            self._wait_until(end)
            part = self.sock.recv(min(size, 1 << 20))
            if not part:
                raise WireBroken("the peer closed the connection")
            parts.append(part)
            size -= len(part)
        return b"".join(parts)

    def close(self) -> None:
        self.sock.close()


class AsyncChannel:
    """The same for asyncio. Deadlines are the caller's (`asyncio.timeout`); after one the channel must be closed."""

    def __init__(self, sock: socket.socket) -> None:
        sock.setblocking(False)
        self.sock = sock

    @classmethod
    async def connect(cls, path: str) -> "AsyncChannel":
        sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        sock.setblocking(False)
        try:
            await asyncio.get_running_loop().sock_connect(sock, path)
        except BaseException:
            sock.close()
            raise
        return cls(sock)

    async def send(self, message: msgspec.Struct) -> None:
        await asyncio.get_running_loop().sock_sendall(self.sock, frame(message))

    async def receive(self, decoder: msgspec.msgpack.Decoder[T], limit: int, body_deadline_s: float) -> T | None:
        """The next message, None if the peer closed between two; once its first byte is here the rest must follow in time."""
        loop = asyncio.get_running_loop()
        first = await loop.sock_recv(self.sock, _HEAD.size)
        if not first:
            return None
        async with asyncio.timeout(body_deadline_s):
            head = first + await self._exactly(_HEAD.size - len(first))
            return _decode(decoder, await self._exactly(_length(head, limit)))

    async def _exactly(self, size: int) -> bytes:
        loop = asyncio.get_running_loop()
        parts: list[bytes] = []
        while size:
            part = await loop.sock_recv(self.sock, min(size, 1 << 20))
            if not part:
                raise WireBroken("the peer closed the connection")
            parts.append(part)
            size -= len(part)
        return b"".join(parts)

    async def send_fds(self, fds: Sequence[int]) -> None:
        for at in range(0, len(fds), FDS_PER_MESSAGE):
            while True:
                try:
                    socket.send_fds(self.sock, [_FD_BYTE], list(fds[at : at + FDS_PER_MESSAGE]))
                    break
                except BlockingIOError:
                    await self._ready(writing=True)

    async def receive_fds(self, count: int) -> list[int]:
        fds: list[int] = []
        try:
            while len(fds) < count:
                try:
                    _take_fds(self.sock, fds)
                except BlockingIOError:
                    await self._ready(writing=False)
            if len(fds) != count:
                raise WireBroken(f"{len(fds)} descriptors came where {count} were due")
        except BaseException:
            close_all(fds)
            raise
        return fds

    async def gone(self) -> None:
        """Return once the peer has closed its end (or has spoken out of turn, which ends the conversation as well)."""
        await self._ready(writing=False)

    def cut(self) -> None:
        """End the conversation for somebody else's task that reads here: it hears the end, and closes. (Closed under its hands,
        it would wait for ever, and so would whoever gets the descriptor's number next.)"""
        with contextlib.suppress(OSError):
            self.sock.shutdown(socket.SHUT_RDWR)

    async def _ready(self, *, writing: bool) -> None:
        loop = asyncio.get_running_loop()
        ready = asyncio.Event()
        add, remove = (loop.add_writer, loop.remove_writer) if writing else (loop.add_reader, loop.remove_reader)
        add(self.sock, ready.set)
        try:
            await ready.wait()
        finally:
            remove(self.sock)

    def close(self) -> None:
        self.sock.close()
