"""What the worker is doing within its steps, for those who watch. Not stored anywhere; the latest counts."""

import asyncio

from controlplane.subjects import Progress


class Board:
    """The latest progress per subject. `changed` is set by every change; whoever shows it clears that first."""

    def __init__(self) -> None:
        self._shown: dict[str, Progress] = {}
        self.changed = asyncio.Event()

    def show(self, subject: str, step: str, done: int = 0, total: int = 0, unit: str = "bytes") -> None:
        self._shown[subject] = Progress(subject=subject, step=step, done=done, total=total, unit=unit)
        self.changed.set()

    def clear(self, subject: str) -> None:
        if self._shown.pop(subject, None) is not None:
            self.changed.set()

    @property
    def shown(self) -> tuple[Progress, ...]:
        return tuple(self._shown.values())
