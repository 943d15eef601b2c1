"""Who a process of a holder's pid namespace is outside of it: all that is written down or told to others means the outside."""

import os
from pathlib import Path

from msgspec import Struct

from worker import processes
from worker.processes import Process


class Census(Struct, frozen=True):
    """`proc` is a descriptor of the /proc that was there before namespaces were entered."""

    proc: int
    apart: bool = False
    """Whether pids in here differ from those outside."""

    @staticmethod
    def before() -> "Census":
        return Census(os.open("/proc", os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC))

    def inside(self) -> "Census":
        return Census(self.proc, apart=True)

    @property
    def pid(self) -> int:
        """This process's pid outside."""
        return int(os.readlink("self", dir_fd=self.proc))

    @property
    def myself(self) -> Process:
        me = processes.identify(os.getpid())
        assert me is not None
        return Process(self.pid, me.started, me.boot)

    def outside(self, inner: int) -> Process | None:
        """Who that child of ours is to the rest of the machine; None: it is gone."""
        known = processes.identify(inner)
        if known is None or not self.apart:
            return known
        me = self.pid
        for pid in self._read(f"{me}/task/{me}/children").split():
            status = self._read(f"{pid}/status")
            numbers = next((line for line in status.splitlines() if line.startswith("NSpid:")), "").split()
            if numbers and numbers[-1] == str(inner):
                return Process(int(pid), known.started, known.boot)
        return None

    def _read(self, path: str) -> str:
        try:
            return Path(f"/proc/self/fd/{self.proc}/{path}").read_text(encoding="utf-8", errors="replace")
        except (FileNotFoundError, ProcessLookupError):
            return ""
