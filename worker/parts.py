"""What a step was made of, for whoever wants to know where its time went."""

import time
from collections.abc import Awaitable, Iterator
from contextlib import contextmanager
from typing import TypeVar

from controlplane.events import Step

T = TypeVar("T")


class Parts:
    """Milliseconds by name, in the order in which the parts ended; parts that ran beside others count in full."""

    def __init__(self) -> None:
        self._taken: dict[str, float] = {}

    @contextmanager
    def of(self, name: str) -> Iterator[None]:
        """Measure a part. One that fails has taken its time, too; what comes again adds to it."""
        began = time.monotonic()
        try:
            yield
        finally:
            self._taken[name] = self._taken.get(name, 0.0) + (time.monotonic() - began) * 1000

    async def beside(self, name: str, work: Awaitable[T]) -> T:
        """Measure what is made a task of."""
        with self.of(name):
            return await work

    def named(self, step: str) -> tuple[Step, ...]:
        """As steps of their own: `build.dump`."""
        return tuple(Step(f"{step}.{name}", ms) for name, ms in self.rounded().items())

    def rounded(self) -> dict[str, float]:
        """Milliseconds."""
        return {name: round(ms, 3) for name, ms in self._taken.items()}
