"""What is really there, read from the kernel: the bytes that an engine uses, whatever it says itself."""

from pathlib import Path

from msgspec import Struct

from worker import processes

_SHARED = "/dev/shm/enginehouse-"  # noqa: S108 (a prefix to compare with; nothing is made here)
"""Where the pool's segments are, if /dev/shm has the room; else below the data directory."""


class Bytes(Struct, frozen=True):
    """One process's memory on its (declared) device. Foreign memory is no notion there: a share of host memory has none."""

    private: int = 0
    """Anonymous bytes: skeleton and KV."""
    mapped: int = 0
    """Bytes of the pool's segments in its address space."""

    @property
    def used(self) -> int:
        return self.private + self.mapped


def measured(pid: int, data: Path) -> Bytes:
    """Read a process's bytes (about 1 ms for an engine). All zero when it is gone."""
    return Bytes(processes.private_bytes(pid), mapped(pid, data))


def mapped(pid: int, data: Path) -> int:
    """Bytes of pool segments that a process maps; pages that it has not touched count as well."""
    places = (_SHARED, f"{data}/run/pool/")
    try:
        text = Path(f"/proc/{pid}/maps").read_text(encoding="utf-8", errors="replace")
    except (FileNotFoundError, ProcessLookupError, PermissionError):
        return 0
    total = 0
    for line in text.splitlines():
        fields = line.split(maxsplit=5)
        if len(fields) == 6 and fields[5].startswith(places):
            low, _, high = fields[0].partition("-")
            total += int(high, 16) - int(low, 16)
    return total
