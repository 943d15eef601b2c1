"""How long processes were ready to run and had no processor: what a loaded machine does to them, and no fault of ours.

One that is stopped, or waits for another, is not ready to run: for a silence that comes of that there is no excuse here.
"""

import contextlib
import threading
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Final

STEP_S: Final = 0.1


class Starvation:
    """Of some processes by name. Times are Unix seconds."""

    def __init__(self, pids: Mapping[str, int]) -> None:
        self._pids = dict(pids)
        self._seen: dict[str, list[tuple[float, float]]] = {name: [] for name in pids}

    def look(self) -> None:
        """Take down what the kernel says now."""
        for name, pid in self._pids.items():
            if (waited_s := delay_s(pid)) is not None:
                self._seen[name].append((time.time(), waited_s))

    def of(self, name: str, begin_s: float, end_s: float) -> float:
        """Seconds without a processor from `begin_s` to `end_s`, as finely as it was looked; 0 where that is not known."""
        before = [waited for at, waited in self._seen[name] if at <= begin_s]
        within = [waited for at, waited in self._seen[name] if begin_s <= at <= end_s]
        known = [*before[-1:], *within]
        return known[-1] - known[0] if known else 0.0


@contextlib.contextmanager
def starvation(pids: Mapping[str, int]) -> Iterator[Starvation]:
    """Measured for the length of a block."""
    measured, over = Starvation(pids), threading.Event()

    def look_on() -> None:
        while not over.wait(STEP_S):
            measured.look()

    looking = threading.Thread(target=look_on, name="starvation")
    measured.look()
    looking.start()
    try:
        yield measured
    finally:
        over.set()
        looking.join()
        measured.look()


def delay_s(pid: int) -> float | None:
    """Seconds for which the main thread was ready to run and waited; None: it is gone, or the kernel keeps no such book."""
    try:
        ran_ns, waited_ns, _ = Path(f"/proc/{pid}/schedstat").read_text(encoding="ascii").split()
    except (OSError, ValueError):
        return None
    return int(waited_ns) / 1e9 if int(ran_ns) else None
