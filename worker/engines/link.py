"""One of an engine's two connections: it connects *out* to a unix socket, without blocking, and again when that drops."""

import selectors
import socket
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final, Generic, TypeVar

import msgspec

from worker.engines.wire import BrokenStream, Frames, pack

RETRY_S: Final = 0.05
READ_BYTES: Final = 256 * 1024

T = TypeVar("T")


class Link(Generic[T]):
    """Messages of type T come in; whatever is sent while it is down is lost (the outbox knows what to send again)."""

    def __init__(self, path: Path, decoder: msgspec.msgpack.Decoder[Any], selector: selectors.BaseSelector) -> None:
        self._path, self._decoder, self._selector = path, decoder, selector
        self._sock: socket.socket | None = None
        self._frames = Frames()
        self._out = bytearray()
        self._retry_at = 0.0
        self._blocked = False
        """The other end has not yet taken all that was sent."""

    @property
    def up(self) -> bool:
        return self._sock is not None

    def connect(self) -> bool:
        """Try, if it is down and time for it; return whether it has just come up."""
        if self._sock is not None or time.monotonic() < self._retry_at:
            return False
        sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            sock.connect(str(self._path))  # a unix socket that listens is connected at once
        except OSError:  # nobody listens (yet): that is what the retry is for
            sock.close()
            self._retry_at = time.monotonic() + RETRY_S
            return False
        sock.setblocking(False)
        self._sock, self._frames, self._out, self._blocked = sock, Frames(), bytearray(), False
        self._selector.register(sock, selectors.EVENT_READ, self)
        return True

    def send(self, message: msgspec.Struct) -> None:
        """Queue one message; `flush` sends."""
        if self._sock is not None:
            self._out += pack(message)

    def flush(self) -> None:
        """Send what the socket takes now."""
        if self._sock is None or not self._out:
            return
        try:
            while self._out:
                sent = self._sock.send(self._out)
                if sent == len(self._out):
                    self._out.clear()
                else:
                    del self._out[:sent]
        except BlockingIOError:
            pass
        except OSError:
            self.close()
            return
        if bool(self._out) != self._blocked:
            self._blocked = bool(self._out)
            self._selector.modify(self._sock, selectors.EVENT_READ | (selectors.EVENT_WRITE if self._out else 0), self)

    def receive(self) -> Iterator[T]:
        """Yield the messages that have arrived; the link is down afterwards if the other end is gone or talks nonsense."""
        if self._sock is None:
            return
        try:
            data = self._sock.recv(READ_BYTES)
        except BlockingIOError:
            return
        except OSError:
            data = b""
        if not data:
            self.close()
            return
        try:
            for body in self._frames.feed(data):
                yield self._decoder.decode(body)
        except (BrokenStream, msgspec.MsgspecError):
            self.close()

    def move(self, path: Path) -> None:
        """Connect to `path` from now on, at once."""
        self.close()
        self._path, self._frames, self._out, self._retry_at = path, Frames(), bytearray(), 0.0

    def close(self) -> None:
        if self._sock is not None:
            self._selector.unregister(self._sock)
            self._sock.close()
            self._sock = None
            self._retry_at = time.monotonic() + RETRY_S
