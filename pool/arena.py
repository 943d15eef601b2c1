"""The memory: a directory of segment files, one directory a weight set, in shared memory where it has the room."""

import os
import secrets
import shutil
import weakref
from pathlib import Path

from pool import manifest
from pool.huge import allocate
from pool.layout import Gaps
from pool.manifest import Manifest, segment_name
from pool.nodes import Nodes
from pool.place import OWNER, free_bytes
from pool.spares import Spare
from pool.topology import NO_TOPOLOGY, Topology

RESERVE_BYTES = 256 << 20
"""Left to the host when memory is asked for: below this the kernel starts to look for a victim."""
_DRAFT = "draft-"
READY = "ready"
"""Directory of segments without a set."""
_ZEROS = bytes(1 << 20)


class Draft:
    """A weight set in the making. Until `publish` it is a leftover in the eyes of any later daemon."""

    def __init__(self, path: Path, sizes: tuple[int, ...], gaps: Gaps, nodes: Nodes) -> None:
        self.path = path
        self._nodes = nodes
        self.planned: tuple[int | None, ...] = (None,) * len(sizes)
        """Memory node of each segment."""
        self.sizes = sizes
        self.spares: dict[int, Spare] = {}
        """Segment -> memory that lay ready for it."""
        self.fds: list[int] = [-1] * len(sizes)
        self.missing_bytes = sum(sizes)
        """Not yet taken from the host."""
        self._gaps = gaps

    def use(self, spares: dict[int, Spare], planned: tuple[int | None, ...] | None = None) -> None:
        """Before anything is allocated; the draft's from now on."""
        self.spares = spares
        self.planned = planned or self.planned
        self.missing_bytes = sum(size for number, size in enumerate(self.sizes) if number not in spares)

    def allocate(self, number: int) -> None:
        """The segment's memory, its gaps zeroed. Raises OSError (ENOSPC: the host has no more), never a SIGBUS later."""
        if (spare := self.spares.get(number)) is not None:
            self.fds[number] = spare.fd  # first: should it not become that large, it goes back to where it was
            self._nodes.prefer(spare.fd, self.sizes[number], self.planned[number])
            spare.become(self.path / segment_name(number), self.sizes[number])
            for offset, size in self._gaps.get(number, ()) if spare.dirty else ():
                for at in range(offset, offset + size, len(_ZEROS)):
                    os.pwrite(spare.fd, _ZEROS[: offset + size - at], at)
            return
        fd = os.open(self.path / segment_name(number), os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
        self.fds[number] = fd
        self._nodes.prefer(fd, self.sizes[number], self.planned[number])
        allocate(fd, 0, self.sizes[number])
        self.missing_bytes -= self.sizes[number]

    def lies_on(self) -> tuple[int | None, ...]:
        """Memory node of each segment, once all are written; `()` where there is one node, or none is told."""
        return self._nodes.found(self.fds, self.sizes)

    def seal(self) -> None:
        """Nobody writes any more."""
        for fd in self.fds:
            os.fchmod(fd, 0o400)
        self._close()

    def discard(self) -> None:
        self._close()
        shutil.rmtree(self.path)

    def _close(self) -> None:
        for number, fd in enumerate(self.fds):
            if fd >= 0:
                os.close(fd)
                self.fds[number] = -1


class Arena:
    def __init__(self, root: Path, topology: Topology = NO_TOPOLOGY) -> None:
        self.root = root
        self._directory = os.open(root, os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
        """Kept open: else the next directory could have the number of one that was removed, and be taken for it."""
        self._closing = weakref.finalize(self, os.close, self._directory)
        self.nodes = Nodes(topology, in_memory=_is_memory(root))

    def close(self) -> None:
        """Nobody asks whether it is lost any more. Twice is fine."""
        self._closing()

    @property
    def lost(self) -> bool:
        """Whether somebody has removed the directory, or put another one in its place: nothing comes in or is handed out."""
        try:
            return not os.path.samestat(self.root.lstat(), os.fstat(self._directory))
        except (FileNotFoundError, NotADirectoryError):
            return True
        except OSError:  # a host that is short of memory: no word on the directory
            return False

    def room(self) -> int:
        """Bytes that the host can give: file system, memory (if these files are memory), control group."""
        free = free_bytes(self.root)
        if _is_memory(self.root):
            free = min(free, _available(), _group_left()) - RESERVE_BYTES
        return max(free, 0)

    def begin(self, sizes: tuple[int, ...], gaps: Gaps) -> Draft:
        """`gaps`: what no tensor covers."""
        path = self.root / (_DRAFT + secrets.token_hex(8))
        path.mkdir(mode=0o700)
        return Draft(path, sizes, gaps, self.nodes)

    def publish(self, draft: Draft, of: Manifest) -> None:
        draft.seal()
        manifest.write(draft.path, of)
        final = draft.path.parent / of.weight_set
        if not os.path.lexists(final):
            draft.path.rename(final)
            return
        # The manifest in the draft's directory names another directory: a crash before the second rename leaves two leftovers.
        grave = self.bury(of.weight_set)
        draft.path.rename(final)
        shutil.rmtree(grave)

    def rewrite(self, of: Manifest) -> None:
        """Quick: after a power cut it may be gone, and the set with it, which only costs a staging."""
        manifest.write(self.root / of.weight_set, of, durable=False)

    def open(self, of: Manifest) -> list[int]:
        """Read-only descriptors, one a segment, the caller's to close."""
        fds: list[int] = []
        try:
            for number in range(len(of.segments)):
                path = self.root / of.weight_set / segment_name(number)
                fds.append(os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW))
        except OSError:
            for fd in fds:
                os.close(fd)
            raise
        return fds

    def bury(self, weight_set: str) -> Path:
        """Its name goes at once, its memory once the directory that is returned is removed (and nobody maps it)."""
        grave = self.root / (_DRAFT + secrets.token_hex(8))
        (self.root / weight_set).rename(grave)
        return grave

    def adopt(self) -> tuple[list[Manifest], list[str]]:
        """Sets that an earlier daemon left, and the names of what was no set and is removed."""
        sound: list[Manifest] = []
        removed: list[str] = []
        for path in sorted(self.root.iterdir()):
            if path.name in {OWNER, READY}:
                continue
            found = manifest.read(path) if path.is_dir() and not path.is_symlink() else None
            if found is not None:
                sound.append(found)
                continue
            removed.append(path.name)
            shutil.rmtree(path) if path.is_dir() and not path.is_symlink() else path.unlink()
        return sound, removed

    def forget(self) -> None:
        shutil.rmtree(self.root)


def _is_memory(path: Path) -> bool:
    device = path.stat().st_dev
    wanted = f"{os.major(device)}:{os.minor(device)}"
    for line in Path("/proc/self/mountinfo").read_text().splitlines():
        fields = line.split()
        if fields[2] == wanted:
            return fields[fields.index("-") + 1] in {"tmpfs", "ramfs", "hugetlbfs"}
    return False


def _available() -> int:
    for line in Path("/proc/meminfo").read_text().splitlines():
        if line.startswith("MemAvailable:"):
            return int(line.split()[1]) << 10
    raise OSError("/proc/meminfo names no MemAvailable")


def _group_left() -> int:
    """What the control group (version 2) leaves: shared memory counts against it, and past it the kernel kills."""
    unlimited = 1 << 62
    own = next((line[3:] for line in Path("/proc/self/cgroup").read_text().splitlines() if line.startswith("0::")), None)
    if own is None:
        return unlimited
    group = Path("/sys/fs/cgroup") / own.lstrip("/")
    try:
        limit, used = (group / "memory.max").read_text().strip(), (group / "memory.current").read_text()
    except OSError:  # the root group has neither file
        return unlimited
    return unlimited if limit == "max" else max(int(limit) - int(used), 0)
