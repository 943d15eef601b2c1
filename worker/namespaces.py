"""A holder's own view of the machine: pid, mount, network and IPC namespaces, so that every engine lives at the same place.

Inside, the instance's directory is at `PLACE`, /dev/shm is private, and pids begin at 1 (the holder). So an image of an
engine holds nothing about its instance, and copies of one image run side by side. Where the kernel refuses namespaces (no
root, some containers), the holder works without them.
"""

import ctypes
import fcntl
import functools
import os
import socket
import struct
import subprocess
import sys
from pathlib import Path
from typing import Final

PLACE: Final = Path("/run/enginehouse-instance")
"""Where an instance's directory is inside its holder's mount namespace."""
SWITCH: Final = "ENGINEHOUSE_NAMESPACES"
"""`off` in the environment: work without namespaces even where they could be had."""
FIRST_PID: Final = 1000
"""An engine's pids begin behind this, so that a restore's own processes, whose pids begin at 2, never sit on one of them."""

_NEWNS, _NEWIPC, _NEWPID, _NEWNET = 0x00020000, 0x08000000, 0x20000000, 0x40000000
_MS_NOSUID, _MS_NODEV, _MS_NOEXEC, _MS_BIND, _MS_REC, _MS_PRIVATE = 2, 4, 8, 4096, 16384, 1 << 18
_SIOCSIFFLAGS, _SIOCGIFFLAGS, _IFF_UP = 0x8914, 0x8913, 1
_libc = ctypes.CDLL(None, use_errno=True)


def possible() -> str | None:
    """None when this process may make namespaces; else the reason, in words."""
    return f"{SWITCH}=off" if os.environ.get(SWITCH) == "off" else _tried()


@functools.cache
def _tried() -> str | None:
    """Tried in a process of its own: there is no way back, and a fork of one with threads may hang."""
    flags = _NEWPID | _NEWNS | _NEWNET | _NEWIPC
    program = f"import ctypes, sys; c = ctypes.CDLL(None, use_errno=True); sys.exit(c.unshare({flags}) and ctypes.get_errno())"
    try:
        tried = subprocess.run([sys.executable, "-ISc", program], check=False, timeout=10, capture_output=True)
    except (OSError, subprocess.SubprocessError) as error:
        return str(error)
    return None if tried.returncode == 0 else f"unshare: {os.strerror(tried.returncode)}"


def enter(directory: Path) -> bool:
    """Go on as pid 1 of new namespaces with `directory` at `PLACE`; False: that is not possible, and nothing has changed.

    The calling process ends; a child of it returns from here. Raises OSError when the namespaces can't be furnished.
    """
    if os.environ.get(SWITCH) == "off" or _libc.unshare(_NEWPID | _NEWNS | _NEWNET | _NEWIPC) != 0:
        return False
    PLACE.mkdir(mode=0o700, exist_ok=True)  # a point to mount on, the same for all; the mounts themselves are private
    if os.fork() != 0:
        os._exit(0)
    os.setsid()
    _mount("none", "/", "", _MS_REC | _MS_PRIVATE)
    _mount("proc", "/proc", "proc", _MS_NOSUID | _MS_NODEV | _MS_NOEXEC)
    _mount("tmpfs", "/dev/shm", "tmpfs", _MS_NOSUID | _MS_NODEV, "mode=1777")  # noqa: S108 (it is ours alone)
    _mount(str(directory), str(PLACE), "", _MS_BIND)
    _loopback_up()
    # Standard streams that were opened outside would name mounts that are not here.
    with open(os.devnull, "rb") as null:
        os.dup2(null.fileno(), 0)
    return True


def begin_pids_at(number: int) -> None:
    """Let the next process of this pid namespace have at least `number`. Raises OSError."""
    last = Path("/proc/sys/kernel/ns_last_pid")
    if int(last.read_text(encoding="ascii")) < number:
        last.write_text(str(number), encoding="ascii")


def _loopback_up() -> None:
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as sock:
        asked = struct.pack("16sH14x", b"lo", 0)
        flags = struct.unpack("16sH14x", fcntl.ioctl(sock, _SIOCGIFFLAGS, asked))[1]
        fcntl.ioctl(sock, _SIOCSIFFLAGS, struct.pack("16sH14x", b"lo", flags | _IFF_UP))


def _mount(source: str, target: str, kind: str, flags: int, options: str = "") -> None:
    texts = [text.encode() for text in (source, target, kind)]
    _check(f"mount {target}", _libc.mount(*texts, ctypes.c_ulong(flags), options.encode()))


def _check(what: str, result: int) -> None:
    if result != 0:
        error = ctypes.get_errno()
        raise OSError(error, f"{what}: {os.strerror(error)}")
