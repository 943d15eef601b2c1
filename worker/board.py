"""What the worker is doing within its steps, for those who watch. Not stored anywhere; the latest counts."""

import asyncio

from controlplane.subjects import Progress


class Board:
    """The latest progress per subject, of steps that may run side by side. `changed` is set by every change; whoever shows it
    clears that first."""

    def __init__(self) -> None:
        self._shown: dict[str, dict[str, Progress]] = {}
        self.changed = asyncio.Event()

    def show(self, subject: str, step: str, done: int = 0, total: int = 0, unit: str = "bytes") -> None:
        steps = self._shown.setdefault(subject, {})
        steps.pop(step, None)  # the latest comes last
        steps[step] = Progress(subject=subject, step=step, done=done, total=total, unit=unit)
        self.changed.set()

    def clear(self, subject: str, step: str | None = None) -> None:
        """One step is over, and others of the subject show again; None: all are."""
        steps = self._shown.get(subject, {})
        gone = steps.pop(step, None) if step is not None else self._shown.pop(subject, None)
        if not steps:
            self._shown.pop(subject, None)
        if gone is not None:
            self.changed.set()

    @property
    def shown(self) -> tuple[Progress, ...]:
        return tuple(list(steps.values())[-1] for steps in self._shown.values() if steps)
