"""Printing figures beside their yardsticks."""

import statistics
from collections.abc import Sequence


class Table:
    """Rows of (what, p50, p99 or one figure, goal). Milliseconds unless the row says otherwise."""

    def __init__(self, title: str) -> None:
        self._title, self._rows = title, list[tuple[str, str, str]]()

    def timed(self, what: str, seconds: Sequence[float], goal: str = "") -> float:
        """Add a row of times; return their median in milliseconds."""
        ordered = sorted(seconds)
        p50, p99 = statistics.median(ordered) * 1000, ordered[min(len(ordered) - 1, int(len(ordered) * 0.99))] * 1000
        self._rows.append((what, f"p50 {p50:8.3f} ms   p99 {p99:8.3f} ms   n {len(ordered)}", goal))
        return p50

    def figure(self, what: str, figure: str, goal: str = "") -> None:
        self._rows.append((what, figure, goal))

    def show(self) -> None:
        wide = max(len(what) for what, _, _ in self._rows)
        far = max(len(figure) for _, figure, _ in self._rows)
        print(f"\n## {self._title}")
        for what, figure, goal in self._rows:
            print(f"{what:<{wide}}   {figure:<{far}}   {goal}".rstrip(), flush=True)
