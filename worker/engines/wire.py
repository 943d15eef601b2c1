"""Frames between the processes of one node: a 4-byte little-endian length, then msgpack.

Three ways to use them: `pack` and `Frames` know bytes only (for loops of their own), `send` and `receive` block on a
socket, `read` and `write` await asyncio's streams.
"""

import asyncio
import socket
import struct
from collections.abc import Iterator
from typing import Any, Final, TypeVar

import msgspec

LENGTH: Final = struct.Struct("<I")
MOST_BYTES: Final = 64 * 2**20
"""No message comes near: a prompt of 10 million ids takes 50 MB. More is a broken stream, not a message."""

T = TypeVar("T")
_encoder: Final = msgspec.msgpack.Encoder()


class BrokenStream(Exception):
    """The other end sent something that is no frame, or went away in the middle of one."""


def pack(message: msgspec.Struct) -> bytes:
    """Return `message` as one frame."""
    body = _encoder.encode(message)
    return LENGTH.pack(len(body)) + body


class Frames:
    """Cuts a stream of bytes into frames, however it arrives."""

    def __init__(self) -> None:
        self._buffer = bytearray()

    def feed(self, data: bytes) -> Iterator[bytes]:
        """Yield the bodies that `data` completes.

        Raises:
            BrokenStream: a length beyond `MOST_BYTES`.
        """
        self._buffer += data
        start = 0
        try:
            while len(self._buffer) - start >= LENGTH.size:
                (length,) = LENGTH.unpack_from(self._buffer, start)
                if length > MOST_BYTES:
                    raise BrokenStream(f"a frame of {length} bytes, over {MOST_BYTES}")
                end = start + LENGTH.size + length
                if len(self._buffer) < end:
                    break
                body = bytes(self._buffer[start + LENGTH.size : end])
                start = end
                yield body
        finally:
            self._buffer[:start] = bytes(start)  # a deletion alone leaves what was said in memory
            del self._buffer[:start]


def send(sock: socket.socket, message: msgspec.Struct) -> None:
    """Send one frame on a blocking socket."""
    sock.sendall(pack(message))


def receive(sock: socket.socket, decoder: msgspec.msgpack.Decoder[T]) -> T:
    """Return the next message of a blocking socket.

    Raises:
        BrokenStream, TimeoutError (the socket's own), msgspec.ValidationError.
    """
    (length,) = LENGTH.unpack(_exactly(sock, LENGTH.size))
    if length > MOST_BYTES:
        raise BrokenStream(f"a frame of {length} bytes, over {MOST_BYTES}")
    return decoder.decode(_exactly(sock, length))


async def read(reader: asyncio.StreamReader, decoder: msgspec.msgpack.Decoder[T]) -> T | None:
    """Return the next message, None at the orderly end of the stream.

    Raises:
        BrokenStream, ConnectionError, msgspec.ValidationError.
    """
    try:
        (length,) = LENGTH.unpack(await reader.readexactly(LENGTH.size))
        if length > MOST_BYTES:
            raise BrokenStream(f"a frame of {length} bytes, over {MOST_BYTES}")
        return decoder.decode(await reader.readexactly(length))
    except asyncio.IncompleteReadError as error:
        if error.partial:
            raise BrokenStream("the stream ended within a frame") from None
        return None


async def write(writer: asyncio.StreamWriter, message: msgspec.Struct) -> None:
    """Send one frame, waiting while the other end is slow."""
    writer.write(pack(message))
    await writer.drain()


def decoder(union: Any) -> msgspec.msgpack.Decoder[Any]:
    """Return a decoder of `union`, a union of tagged structs (one that mypy can't name as a type)."""
    return msgspec.msgpack.Decoder(union)


def _exactly(sock: socket.socket, size: int) -> bytes:
    parts = bytearray()
    while len(parts) < size:
        part = sock.recv(size - len(parts))
        if not part:
            raise BrokenStream("the stream ended within a frame" if parts else "the stream ended")
        parts += part
    return bytes(parts)
