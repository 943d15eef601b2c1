"""The directory of an instance, `run/inst/<id>/`: what must be known of its processes after the worker's death.

`instance.json` has two writers, the worker and the holder; each edits it under a lock of the directory and
replaces the file whole, so a reader never sees half of it.
"""

import fcntl
import os
import re
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
from msgspec.structs import replace

from worker import processes
from worker.images.fingerprint import Fingerprint
from worker.processes import Process

_NAME = re.compile(r"[A-Za-z0-9_]{1,64}")
_SOCKET_LIMIT = 107
"""sun_path of Linux holds 108 bytes, one of them the final zero."""
_KEPT_LOGS = 20
"""Engine logs that outlive their instance; each is bounded by the holder."""


class Exit(msgspec.Struct, frozen=True):
    """How an engine ended: exit status, or minus the signal's number."""

    status: int
    at_ms: int
    """Unix milliseconds."""


class Record(msgspec.Struct, frozen=True, kw_only=True):
    """`instance.json`. The holder writes `holder`, `warden`, `engine` and `exit`; the worker the rest."""

    instance: str
    configuration: str
    kind: str = ""
    """The engine's name, as in a model's spec."""
    started: Fingerprint | None = None
    """What its process was started with, before it was in any image; None: nobody wrote it down."""
    holder: Process | None = None
    warden: Process | None = None
    """Who ends what is left once the holder has ended, where no namespace does; it ends itself then."""
    engine: Process | None = None
    exit: Exit | None = None
    frontend: Process | None = None
    port: int = 0
    """The frontend's; kept when it is started again."""
    device: str | None = None
    """Where its memory counts; kept while it sleeps."""
    ranks: tuple[str, ...] = ()
    """Of a gang: its devices, in order of rank, `device` the first."""
    woken: tuple[str, int] | None = None
    """Model and revision for which the engine was last woken."""
    checked: bool = False
    """Whether this engine process has given a known answer since it started."""
    checked_sets: tuple[str, ...] = ()
    """With which weights it has."""
    pretends: bool = False
    """Whether the engine only pretends to hold a GPU: its driver is the twin, which does `fault` wrong."""
    fault: str = ""
    left_device: str | None = None
    """The GPU that a checkpointed engine was on."""
    unproven: str | None = None
    """The image that the engine came from, until its first known answer was right."""
    unread: bool = False
    """Whether that image's memory is still being compared with its digest: till then the engine is not released."""
    members: tuple[Process, ...] = ()
    """Of a gang: its ranks' processes, in order of rank. They live and die with `engine`, which is another one."""
    skeleton_bytes: int = 0
    """Private bytes of the engine when it connected, weights of its own left out: nothing mapped, no KV."""

    @property
    def devices(self) -> tuple[str, ...]:
        return self.ranks or ((self.device,) if self.device else ())


class InstanceDir:
    """One instance's directory. Paths are built from a checked id, never from a caller's text."""

    def __init__(self, root: Path, instance: str) -> None:
        """`root` is `DIR/run/inst`. Raises ValueError for an id that is no plain name or a path too long for a socket."""
        if not _NAME.fullmatch(instance):
            raise ValueError(f"{instance!r} is no instance id")
        self.instance = instance
        self.path = root / instance
        if len(os.fsencode(self.path / "control.sock")) > _SOCKET_LIMIT:
            raise ValueError(f"{self.path} is too long for a unix socket ({_SOCKET_LIMIT} bytes): use a shorter data directory")

    @property
    def holder_socket(self) -> Path:
        return self.path / "holder.sock"

    @property
    def control_socket(self) -> Path:
        return self.path / "control.sock"

    @property
    def engine_log(self) -> Path:
        return self.path / "engine.log"

    def log(self, name: str) -> Path:
        """Where process `name` (`holder`, `frontend`) writes."""
        return self.path / f"{name}.log"

    def create(self, configuration: str) -> Record:
        """Make the directory (0700) and its record; an existing one is kept as it is."""
        self.path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        self.path.mkdir(mode=0o700, exist_ok=True)
        return self.read() or self._write(Record(instance=self.instance, configuration=configuration))

    def read(self) -> Record | None:
        """The record, or None when there is none: no directory, its creation was cut short, or a power cut left rubbish."""
        try:
            return msgspec.json.decode((self.path / "instance.json").read_bytes(), type=Record)
        except (FileNotFoundError, msgspec.DecodeError):
            return None

    def edit(self, **changes: Any) -> Record:
        """Change fields of the record, atomically and under the directory's lock. Raises FileNotFoundError when it is gone."""
        descriptor = os.open(self.path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX)
            record = self.read()
            if record is None:
                raise FileNotFoundError(self.path / "instance.json")
            return self._write(replace(record, **changes))
        finally:
            os.close(descriptor)

    def _write(self, record: Record) -> Record:
        # No fsync: after a power cut the boot id differs and nothing in here counts any more.
        draft = self.path / f"instance.json.{os.getpid()}"
        descriptor = os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o600)
        with os.fdopen(descriptor, "wb") as file:
            file.write(msgspec.json.encode(record))
        draft.replace(self.path / "instance.json")
        return record

    def last_words(self, limit: int = 500) -> str:
        """The last line of the engine's log that says something, for a message: of a traceback, the error. Empty: none does."""
        try:
            with self.engine_log.open("rb") as file:
                file.seek(max(0, os.fstat(file.fileno()).st_size - 16_384))
                text = file.read().decode("utf-8", "replace")
        except FileNotFoundError:
            return ""
        return next((line.strip()[:limit] for line in reversed(text.splitlines()) if line.strip()), "")

    def cut_log(self, limit: int) -> None:
        """Keep only the end of an engine log longer than `limit` bytes. Its writers append, so cutting it is safe."""
        try:
            if self.engine_log.stat().st_size <= limit:
                return
            with self.engine_log.open("r+b") as file:
                file.seek(-limit // 2, os.SEEK_END)
                tail = file.read()
                file.truncate(0)
                file.seek(0)
                file.write(b"[cut]\n" + tail)
        except FileNotFoundError:
            return

    def keep_log(self, place: Path) -> None:
        """Move `engine.log` to `place`, another disk maybe, where only the newest few are kept. Raises OSError."""
        if not self.engine_log.exists():
            return
        place.mkdir(mode=0o700, parents=True, exist_ok=True)
        shutil.move(self.engine_log, place / f"{self.instance}.log")
        kept = sorted(place.glob("*.log"), key=lambda path: path.stat().st_mtime)
        for old in kept[:-_KEPT_LOGS]:
            old.unlink(missing_ok=True)

    def remove(self) -> None:
        """Delete the directory. Raises OSError."""
        shutil.rmtree(self.path, ignore_errors=False) if self.path.exists() else None


def listing(root: Path) -> Iterator[InstanceDir]:
    """Every instance directory below `DIR/run/inst`, in order of name."""
    if root.is_dir():
        yield from (
            InstanceDir(root, path.name) for path in sorted(root.iterdir()) if path.is_dir() and _NAME.fullmatch(path.name)
        )


def living(record: Record) -> dict[str, Process]:
    """Those of the record's processes that are really there, by role: `holder`, `engine`, `frontend`."""
    named = {"holder": record.holder, "engine": record.engine, "frontend": record.frontend}
    return {role: process for role, process in named.items() if process is not None and processes.alive(process)}
