"""The facts of this machine that a fingerprint is made of, read from where they are."""

import contextlib
import functools
import os
import platform
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Final

from blake3 import blake3

import pool
import worker.engines
from worker import gpus
from worker.images import bulk, holes, pages, records, refill, zeros
from worker.images.criu import Criu
from worker.images.fingerprint import Fingerprint, MappedFile
from worker.versions import release

LIBRARIES: Final = {
    "transformers": ("transformers", "numpy"), "fake": ("numpy",), "vllm": ("vllm", "triton", "cuda-bindings", "numpy"),
}  # fmt: skip
LAYING_OUT: Final = (bulk, holes, pages, records, refill, zeros)
ON_GPU: Final = frozenset({"vllm"})
_NONE: Final = "none"
_NOTE_LIMIT: Final = 64 * 1024
"""The note with the build-id stands near the beginning of a library."""


def fingerprint(configuration: str, engine: str, node: str, criu: Criu, *, apart: bool, code: str = "") -> Fingerprint:
    """Of an engine as it would be started now. `code`: if not by what this process runs."""
    versions = " ".join(f"{name}-{release(name) or _NONE}" for name in LIBRARIES.get(engine, ()))
    return Fingerprint(
        configuration=configuration, engine=f"{engine} {versions} {code or our_code()}".replace("  ", " "),
        python=f"{sys.version} {sys.executable}", torch=(release("torch") or _NONE) if engine != "fake" else "",
        kernel=f"{os.uname().release} {os.uname().version}", libc=" ".join(platform.libc_ver()), criu=criu.version,
        cpu=processor(), **(_of_gpus() if engine in ON_GPU else {}), namespaces="apart" if apart else "shared", node=node,
    )  # fmt: skip


@functools.cache
def _of_gpus() -> dict[str, str]:
    there = gpus.gpus()
    names = " and ".join(sorted({gpu.name for gpu in there}))
    return {"driver": gpus.driver_version(), "cuda": gpus.cuda_version(), "gpu": f"{names}, {len(there)} of them"}


def code_on_disk() -> str:
    """A digest of the packages of ours that run inside an engine, for an image of other code would speak another wire, and of
    what lays out the bulk of its memory: code that knows nothing of it would bring back an engine with pages of zeros.

    As an engine that starts now reads it: the files may be newer than what this process runs.
    """
    digest = blake3()
    inside = [path for package in (worker.engines, pool) for path in sorted(Path(package.__path__[0]).glob("*.py"))]
    for path in (*inside, *(Path(str(module.__file__)) for module in LAYING_OUT)):
        digest.update(path.name.encode())
        digest.update(path.read_bytes())
    return digest.hexdigest(length=8)


our_code: Final = functools.cache(code_on_disk)
"""As it was when this process first asked: at its start (`Cabinet`)."""


@functools.cache
def processor() -> str:
    """Model and flags: code in an image was chosen for them."""
    wanted = {"model name", "flags", "Features", "CPU part"}
    lines = Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace").partition("\n\n")[0].splitlines()
    found = {key.strip(): value.strip() for key, _, value in (line.partition(":") for line in lines) if key.strip() in wanted}
    flags = found.get("flags") or found.get("Features", "")
    return f"{found.get('model name', platform.machine())} {blake3(flags.encode()).hexdigest(length=6)}"


def gpu_files(pid: int) -> tuple[str, ...]:
    """Files of the GPU's driver that a process has open: with one of them it can't be written to disk.

    Raises FileNotFoundError when it is gone.
    """
    found = set()
    for entry in Path(f"/proc/{pid}/fd").iterdir():
        with contextlib.suppress(OSError):
            found.add(os.readlink(entry))
    return tuple(sorted(name for name in found if name.startswith("/dev/nvidia")))


def mapped_paths(pid: int) -> list[str]:
    """Every file that a process has mapped, in order. Raises FileNotFoundError, ProcessLookupError when it is gone."""
    paths = set()
    for line in Path(f"/proc/{pid}/maps").read_text(encoding="utf-8", errors="replace").splitlines():
        fields = line.split(maxsplit=5)
        if len(fields) == 6 and fields[5].startswith("/") and not fields[5].endswith(" (deleted)"):
            paths.add(fields[5])
    return sorted(paths)


def mapped_files(paths: Iterable[str]) -> tuple[MappedFile, ...]:
    """Those of them that there are."""
    return tuple(known for path in paths if (known := mapped_file(path)) is not None)


def mapped_file(path: str) -> MappedFile | None:
    """A file as it is today; None: it is gone."""
    try:
        found = os.stat(path)
        version = (found.st_dev, found.st_ino, found.st_size, found.st_mtime_ns, found.st_ctime_ns)
        return MappedFile(path, found.st_size, _build_id(path, version))
    except OSError:
        return None


@functools.lru_cache(maxsize=8192)
def _build_id(path: str, version: tuple[int, ...]) -> str:
    """The GNU build-id note (name size 4, type 3, `GNU`), if there is one. Read once for each `version` of the file: an engine
    maps hundreds, and each climb looks at all. Raises OSError."""
    with open(path, "rb") as file:
        head = file.read(_NOTE_LIMIT)
    at = head.find(b"\x04\x00\x00\x00\x14\x00\x00\x00\x03\x00\x00\x00GNU\x00") if head.startswith(b"\x7fELF") else -1
    return head[at + 16 : at + 36].hex() if at >= 0 else ""
