"""A TCP port that is kept for a server until it listens there, and while it is away. A number that was merely found to be free
may be anybody's by the time its server has started."""

import os
import socket
import weakref
from types import TracebackType
from typing import Self


class Reservation:
    """A socket that is bound and does not listen. The kernel then gives the port to nobody else, but to a server that asks for
    it by number and reuses addresses, as all of ours do.

    Attributes: port.
    """

    def __init__(self, host: str, port: int = 0) -> None:
        """Keep `port`, 0: any that is free. Raises OSError: somebody has it, or the address is not this machine's."""
        with socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET, socket.SOCK_STREAM) as sock:
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            sock.bind((host, port))
            self.port: int = sock.getsockname()[1]
            self.close = weakref.finalize(self, os.close, sock.detach())

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.close()
