"""The frontend's end of the token wire: it listens, the engine connects, and again whenever one of the two was away."""

import asyncio
import os
import select
import socket
import struct
from pathlib import Path
from typing import Any, Final, Protocol

import msgspec

from worker.countdown import Countdown
from worker.engines.messages import Connected, Ended, EngineToFrontend, FrontendToEngine, Tokens
from worker.engines.wire import BrokenStream, Frames, decoder, pack

LOST_S: Final = 10.0
"""An engine tries to connect every 50 ms while it lives; one that has not been heard for so long is taken for dead."""
_CREDENTIALS: Final = struct.Struct("3i")


class Listener(Protocol):
    """Who hears an engine."""

    def connected(self, message: Connected) -> None: ...

    def tokens(self, message: Tokens) -> bool:
        """False: ids are missing in between. The connection is cut, so that the engine sends all of them again."""

    def ended(self, message: Ended) -> bool:
        """Likewise."""

    def lost(self) -> None:
        """The engine is dead, and everything that it had sent has been heard."""


class EngineLink:
    """At most one connection; a newer one replaces it."""

    def __init__(self, path: Path, listener: Listener) -> None:
        self._path, self._listener = path, listener
        self._server: asyncio.Server | None = None
        self._connection: _Connection | None = None
        self._pidfd = -1
        self._deadline: Countdown | None = None
        self._dead = False
        """The last engine is, and no other has come."""
        self._bound: tuple[int, int] | None = None
        """Which file the socket is."""

    @property
    def up(self) -> bool:
        return self._connection is not None

    async def listen(self) -> None:
        """Begin; if no engine has come after `LOST_S`, the listener hears that it is lost."""
        self._path.unlink(missing_ok=True)  # of a frontend that was killed: there is one at a time
        self._server = await asyncio.get_running_loop().create_unix_server(lambda: _Connection(self), path=str(self._path))
        self._path.chmod(0o600)
        self._bound = _file(self._path)
        self._await_engine()

    def replaced(self) -> bool:
        """Whether another frontend has the place, or the instance is gone with its directory: no engine comes here any more."""
        return _file(self._path) != self._bound

    async def close(self) -> None:
        if self._server is not None:
            self._server.close()
        if self._connection is not None:
            self._connection.cut()
        self._stop_waiting()
        self._forget_process()

    def send(self, message: FrontendToEngine) -> None:
        """Send, if the engine is there; what it missed is settled when it connects, or when it is taken for dead."""
        if self._connection is not None:
            self._connection.send(message)
        elif self._dead:
            asyncio.get_running_loop().call_soon(self._gone)
        elif self._deadline is None:
            self._await_engine()

    def opened(self, connection: "_Connection", pid: int) -> None:
        """A process has connected; it is watched until it dies."""
        if self._connection is not None:
            self._connection.cut()
        self._stop_waiting()
        self._forget_process()
        self._connection, self._dead = connection, False
        try:
            self._pidfd = os.pidfd_open(pid)
        except ProcessLookupError:
            return  # dead already: its end of the socket is closed, too
        asyncio.get_running_loop().add_reader(self._pidfd, self._died)

    def heard(self, connection: "_Connection", message: EngineToFrontend) -> None:
        match message:
            case Connected():
                self._listener.connected(message)
            case Tokens():
                if not self._listener.tokens(message):
                    connection.cut()
            case Ended():
                if not self._listener.ended(message):
                    connection.cut()

    def closed(self, connection: "_Connection") -> None:
        """A connection is gone; all that came over it has been heard."""
        if connection is not self._connection:
            return
        self._connection = None
        if self._pidfd < 0 or select.select([self._pidfd], [], [], 0)[0]:
            self._gone()
        else:
            self._await_engine()

    def _died(self) -> None:
        asyncio.get_running_loop().remove_reader(self._pidfd)
        if self._connection is None:
            self._gone()  # else when its last bytes have been read: the socket's end comes behind them

    def _gone(self) -> None:
        self._stop_waiting()
        self._forget_process()
        if self._connection is None:
            self._dead = True
            self._listener.lost()

    def _await_engine(self) -> None:
        self._deadline = Countdown(LOST_S, self._gone)

    def _stop_waiting(self) -> None:
        if self._deadline is not None:
            self._deadline.cancel()
            self._deadline = None

    def _forget_process(self) -> None:
        if self._pidfd >= 0:
            asyncio.get_running_loop().remove_reader(self._pidfd)
            os.close(self._pidfd)
            self._pidfd = -1


def _file(path: Path) -> tuple[int, int] | None:
    try:
        status = path.stat()
    except FileNotFoundError:
        return None
    return status.st_dev, status.st_ino


class _Connection(asyncio.Protocol):
    _decode = staticmethod(decoder(EngineToFrontend).decode)

    def __init__(self, link: EngineLink) -> None:
        self._link = link
        self._frames = Frames()
        self._transport: Any = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = transport
        sock = transport.get_extra_info("socket")
        pid, uid, _ = _CREDENTIALS.unpack(sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size))
        if uid != os.getuid():
            self._transport.abort()
            return
        self._link.opened(self, pid)

    def data_received(self, data: bytes) -> None:
        try:
            for body in self._frames.feed(data):
                self._link.heard(self, self._decode(body))
                if self._transport.is_closing():
                    return
        except (BrokenStream, msgspec.MsgspecError):
            self.cut()

    def connection_lost(self, exc: Exception | None) -> None:
        self._link.closed(self)

    def send(self, message: FrontendToEngine) -> None:
        self._transport.write(pack(message))

    def cut(self) -> None:
        self._transport.abort()
