"""How far down the ladder reaches on this machine, and why not further; each line with its cure."""

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Final

from compose.check import Check
from compose.kernelchecks import kernel_checks
from controlplane.plane import Plane
from controlplane.settings import SettingsError, read
from worker import gpus, namespaces
from worker.cuda import able
from worker.images import criu

_INSTALL: Final = "Run compose/install-criu as root: it installs a fit CRIU beside the system's, and replaces nothing."
_DRIVER: Final = f"Checkpoints of CUDA need a driver of {able.DRIVER} or newer, and `pip install 'enginehouse[gpu]'`."
HINDER_SAVED: Final = frozenset({"criu", "kernel", "capabilities", "ptrace"})
"""Names of the lines without which nothing goes to disk."""


def image_checks(data: Path) -> Iterator[Check]:
    """What the lower rungs need, and last what the ladder reaches."""
    lines = [_criu(data), *kernel_checks(gpu=bool(gpus.gpus())), _namespaces(), _cuda()]
    yield from lines
    yield ladder(lines, root=os.geteuid() == 0)


def _criu(data: Path) -> Check:
    path = criu.find(data, _given(data))
    if path is None:
        return Check(name="criu", verdict="note", found="not found", cure=_INSTALL)
    known = criu.probe(path)
    if known.refusal:
        found = f"{known.version or path}: its check says: {known.refusal}"
        return Check(name="criu", verdict="note", found=found, cure=_INSTALL)
    return Check(name="criu", verdict="ok", found=f"{known.version} at {path}: its check is good")


def _given(data: Path) -> str:
    """The CRIU that the settings of the plane here name."""
    try:
        plane = Plane.read(data)
        return read(Path(plane.settings_path)).node.criu if plane.settings_path else plane.criu
    except (FileNotFoundError, SettingsError, ValueError):
        return ""


def _namespaces() -> Check:
    if (why := namespaces.possible()) is None:
        return Check(name="namespaces", verdict="ok", found="engines get pid, mount, network and IPC namespaces of their own")
    return Check(
        name="namespaces", verdict="note", found=f"{why}: one image can be in use by one engine at a time",
        cure="Run as root, or in a container with --privileged.",
    )  # fmt: skip


def _cuda() -> Check:
    """Whether engines can be taken off a GPU and put back."""
    if not gpus.gpus():
        return Check(name="cuda", verdict="ok", found="no GPU, so there is no checkpoint, and none is needed to save an engine")
    shown = f"driver {gpus.driver_version()}, CUDA {gpus.cuda_version()}"
    if why := able.hindrance():
        return Check(name="cuda", verdict="note", found=f"{shown}: {why}", cure=_DRIVER)
    return Check(name="cuda", verdict="ok", found=f"{shown}: engines can be taken off their GPU and put back")


def ladder(lines: list[Check], *, root: bool) -> Check:
    """The rungs that these lines allow, and why not the others."""
    cuda = next(line for line in lines if line.name == "cuda")
    hindered = [line for line in lines if line.verdict != "ok" and line.name in HINDER_SAVED]
    has_gpu = not cuda.found.startswith("no GPU")
    if has_gpu and cuda.verdict != "ok":
        hindered.append(cuda)  # what holds a GPU can't be written to disk
    rungs, missing, cures = ["up", "sleep"], [], []
    if has_gpu and cuda.verdict == "ok":
        rungs.append("checkpoint")
    else:
        missing.append("not checkpoint (cuda)" if has_gpu else "not checkpoint (no CUDA is used)")
    if hindered or not root:
        missing.append(f"not saved ({', '.join(line.name for line in hindered) or 'it needs root'})")
        cures.append(hindered[0].cure if hindered else "Run as root for saved images.")
    else:
        rungs.append("saved")
    rungs.append("cold")
    return Check(
        name="ladder", verdict="note" if cures else "ok", found="; ".join([", ".join(rungs), *missing]), cure=" ".join(cures)
    )
