"""What of the kernel's own and of a process's rights decides how far down the ladder reaches; each line with its cure.

Every function takes what it looks at, so that machines that are not here can be told of in tests.
"""

import gzip
import os
import platform
import resource
from collections.abc import Iterator
from pathlib import Path
from typing import Final

from compose.check import Check
from controlplane.quantities import human_bytes

PROC: Final = Path("/proc")
NEEDED_OPTIONS: Final = ("CHECKPOINT_RESTORE", "NAMESPACES", "PID_NS", "IPC_NS", "NET_NS", "UNIX_DIAG", "INET_DIAG", "FHANDLE")
"""Of the kernel: what CRIU asks of it to write an engine to disk, and what keeps copies of one image apart."""
NEEDED_CAPABILITIES: Final = {21: "SYS_ADMIN", 19: "SYS_PTRACE", 12: "NET_ADMIN"}
"""By their bit, as CRIU and namespaces need them."""
_IPC_LOCK: Final = 14


def kernel_checks(*, gpu: bool, proc: Path = PROC) -> Iterator[Check]:
    yield kernel_options(proc)
    yield capabilities(proc)
    yield ptrace(proc)
    yield memlock(proc, gpu=gpu)
    yield io_uring(proc)
    yield amx(proc)


def kernel_options(proc: Path = PROC, boot: Path = Path("/boot")) -> Check:
    """By the kernel's own list, where it shows one; else by what is there to be seen."""
    release = os.uname().release
    text = _config(proc / "config.gz", boot / f"config-{release}")
    if text is None:
        missing = [name for name, path in (("CHECKPOINT_RESTORE", "sys/kernel/ns_last_pid"), ("PID_NS", "self/ns/pid"),
                                           ("NET_NS", "self/ns/net")) if not (proc / path).exists()]  # fmt: skip
        source = "by what /proc shows"
    else:
        lines = set(text.splitlines())
        missing = [name for name in NEEDED_OPTIONS if not {f"CONFIG_{name}=y", f"CONFIG_{name}=m"} & lines]
        source = "by its configuration"
    if missing:
        cure = f"Run a kernel with {', '.join(f'CONFIG_{name}=y' for name in missing)}; distributions' own have them."
        return Check(name="kernel", verdict="note", found=f"{release} lacks {', '.join(missing)} ({source})", cure=cure)
    return Check(name="kernel", verdict="ok", found=f"{release} has all that saving engines takes ({source})")


def _config(packed: Path, plain: Path) -> str | None:
    try:
        return gzip.decompress(packed.read_bytes()).decode("ascii", "replace")
    except (OSError, EOFError, gzip.BadGzipFile):
        pass
    try:
        return plain.read_text(encoding="ascii", errors="replace")
    except OSError:
        return None


def capabilities(proc: Path = PROC) -> Check:
    held = _held(proc)
    missing = [name for bit, name in NEEDED_CAPABILITIES.items() if not held >> bit & 1]
    if missing:
        cure = f"Run as root; in a container add {' '.join(f'--cap-add={name}' for name in missing)}."
        return Check(name="capabilities", verdict="note", found=f"without {', '.join(missing)}", cure=cure)
    return Check(name="capabilities", verdict="ok", found="all that saving engines takes")


def _held(proc: Path) -> int:
    text = (proc / "self" / "status").read_text(encoding="ascii", errors="replace")
    return int(next(line.split()[1] for line in text.splitlines() if line.startswith("CapEff:")), 16)


def ptrace(proc: Path = PROC) -> Check:
    scope = _word(proc / "sys/kernel/yama/ptrace_scope") or "0"
    if scope == "3":
        cure = "It can be changed at boot only: set kernel.yama.ptrace_scope to 2 or less."
        return Check(name="ptrace", verdict="note", found="ptrace_scope 3: nobody may look into a process", cure=cure)
    return Check(name="ptrace", verdict="ok", found=f"ptrace_scope {scope}")


def memlock(proc: Path = PROC, *, gpu: bool, limit: int | None = None) -> Check:
    """Pinned host memory is what weights travel from. `limit`: bytes a process may lock; -1: any number."""
    soft = resource.getrlimit(resource.RLIMIT_MEMLOCK)[0] if limit is None else limit
    free = soft == resource.RLIM_INFINITY or bool(_held(proc) >> _IPC_LOCK & 1)
    shown = "any number of bytes may be locked" if free else f"{human_bytes(soft)} may be locked"
    if free or not gpu:
        return Check(name="memlock", verdict="ok", found=shown + ("" if gpu else "; nothing is, without a GPU"))
    cure = "Raise the limit: `ulimit -l unlimited`, LimitMEMLOCK=infinity, or docker's --ulimit memlock=-1."
    return Check(name="memlock", verdict="note", found=f"{shown}: the pool can pin no more for its copies", cure=cure)


def io_uring(proc: Path = PROC) -> Check:
    """CRIU can't write a process that holds one. Engines here open none: this says how a foreign library would fare."""
    state = _word(proc / "sys/kernel/io_uring_disabled")
    shown = {None: "no switch in this kernel", "0": "everybody may use it", "1": "a group may use it", "2": "nobody may use it"}
    return Check(name="io_uring", verdict="ok", found=f"{shown.get(state, state)}; engines here don't")


def amx(proc: Path = PROC) -> Check:
    flags = (proc / "cpuinfo").read_text(encoding="utf-8", errors="replace") if platform.machine() == "x86_64" else ""
    found = "asked for again after a restore" if "amx_tile" in flags else "this processor has none"
    return Check(name="amx", verdict="ok", found=found)


def _word(path: Path) -> str | None:
    try:
        return path.read_text(encoding="ascii").strip()
    except OSError:
        return None
