"""The CUDA driver's twin for engines that only pretend to hold a GPU (`fake`): all paths, faults included, without one.

A locked process is marked, a checkpointed one is stopped (SIGSTOP): like a process without its GPU it answers nobody, can be
written to disk and killed. What is true of a process is kept beside it, in the twin's directory, by pid and start time; one
that is stopped and of which nothing is known has come from an image, so it is checkpointed.

Faults are told as `what` or `what:times`: `lock_hangs`, `checkpoint_hangs`, `restore_hangs`, `checkpoint_fails`,
`restore_fails` (poisons, as a real one's out of memory does).
"""

import os
import signal
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Final

from worker.cuda.surgeon import CudaRefused, CudaState

FAULTS: Final = ("lock_hangs", "checkpoint_hangs", "restore_hangs", "checkpoint_fails", "restore_fails")
STOPPED_S: Final = 2.0


class Twin:
    """`directory`: where it keeps its notes, the same for all its calls."""

    def __init__(self, directory: Path, fault: str = "") -> None:
        self._directory = directory
        self._what, _, times = fault.partition(":")
        self._times = int(times) if times else None
        directory.mkdir(mode=0o700, parents=True, exist_ok=True)

    def lock(self, pid: int, timeout_ms: int) -> None:
        self._expect(pid, CudaState.RUNNING)
        self._hang("lock_hangs")
        self._note(pid, CudaState.LOCKED)

    def checkpoint(self, pid: int) -> None:
        self._expect(pid, CudaState.LOCKED)
        self._hang("checkpoint_hangs")
        if self._fails("checkpoint_fails"):
            raise CudaRefused("cuda_failed", "checkpoint: told to fail")
        os.kill(pid, signal.SIGSTOP)
        ends = time.monotonic() + STOPPED_S
        while _letter(pid) not in "tT":
            if time.monotonic() > ends:
                raise CudaRefused("cuda_failed", f"pid {pid} did not stop within {STOPPED_S:g} s")
            time.sleep(0.001)
        self._note(pid, CudaState.CHECKPOINTED)

    def restore(self, pid: int, devices: Mapping[str, str]) -> None:
        if len(set(devices.values())) != len(devices):
            raise CudaRefused("cuda_invalid", f"restore: {dict(devices)} is no bijection")
        self._expect(pid, CudaState.CHECKPOINTED)
        self._hang("restore_hangs")
        if self._fails("restore_fails"):
            self._note(pid, CudaState.FAILED)
            raise CudaRefused("cuda_out_of_memory", "restore: told to fail")
        self._note(pid, CudaState.LOCKED)

    def unlock(self, pid: int) -> None:
        self._expect(pid, CudaState.LOCKED)
        self._note(pid, CudaState.RUNNING)
        os.kill(pid, signal.SIGCONT)

    def state(self, pid: int) -> CudaState:
        if (letter := _letter(pid)) in "ZX":
            return CudaState.NONE
        try:
            return CudaState(self._file(pid).read_text(encoding="ascii"))
        except FileNotFoundError:
            return CudaState.CHECKPOINTED if letter in "tT" else CudaState.RUNNING

    def _expect(self, pid: int, wanted: CudaState) -> None:
        if (found := self.state(pid)) is not wanted:
            code = "cuda_invalid" if found is CudaState.NONE else "cuda_illegal_state"
            raise CudaRefused(code, f"pid {pid} is {found}, not {wanted}")

    def _note(self, pid: int, state: CudaState) -> None:
        file = self._file(pid)
        draft = file.with_suffix(f".{os.getpid()}")
        draft.write_text(state, encoding="ascii")
        draft.replace(file)

    def _file(self, pid: int) -> Path:
        fields = _fields(pid)
        return self._directory / f"{pid}-{fields[19] if fields else 0}"

    def _hang(self, what: str) -> None:
        if self._fails(what):
            while True:
                time.sleep(1)

    def _fails(self, what: str) -> bool:
        """Whether this is to go wrong now; counted over all processes."""
        if self._what != what:
            return False
        if self._times is None:
            return True
        counter = self._directory / f"failed-{what}"
        done = len(counter.read_bytes()) if counter.exists() else 0
        if done >= self._times:
            return False
        with counter.open("ab") as file:
            file.write(b".")
        return True


def _fields(pid: int) -> list[str]:
    try:
        text = Path(f"/proc/{pid}/stat").read_text(encoding="ascii", errors="replace")
    except (FileNotFoundError, ProcessLookupError):
        return []
    return text[text.rindex(")") + 2 :].split()


def _letter(pid: int) -> str:
    """The kernel's letter for the process's state; `X`: it is gone."""
    return (_fields(pid) or ["X"])[0]
