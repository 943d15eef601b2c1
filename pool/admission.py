"""Who may talk to the daemon: processes of its own user, and so many at once."""

import os
import socket
import struct

from pool.messages import Refusal

CONNECTIONS = 1024
_CREDENTIALS = struct.Struct("3i")


def admission(sock: socket.socket, connections: int) -> Refusal | None:
    """Why this one is sent away (`forbidden`, `failed`); None: it may stay. connections: with this one."""
    _, uid, _ = _credentials(sock)
    if uid not in {os.geteuid(), 0}:
        return Refusal(code="forbidden", message=f"this pool serves user {os.geteuid()}, not {uid}")
    if connections > CONNECTIONS:
        return Refusal(code="failed", message=f"{CONNECTIONS} connections are open: is a client leaking them?")
    return None


def peer(sock: socket.socket) -> int:
    """Id of the process that connected, in this process's namespace; 0: it is not seen from there."""
    return _credentials(sock)[0]


def _credentials(sock: socket.socket) -> tuple[int, int, int]:
    """Process, user, group."""
    pid, uid, gid = _CREDENTIALS.unpack(sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size))
    return pid, uid, gid
