"""Printing figures beside their yardsticks."""

import statistics
from collections.abc import Sequence
from typing import NamedTuple


class Row(NamedTuple):
    """One line of what the plane promises: what, how much it may be, how much it was, and what that is to be compared with."""

    figure: str
    goal: str
    measured: str
    yardstick: str


class Table:
    """Lines of (what, p50 and p99 or one figure, remark), and the `rows` that go to the report. Milliseconds unless said."""

    def __init__(self, title: str) -> None:
        self._title, self._lines = title, list[tuple[str, str, str]]()
        self.rows: list[Row] = []

    def timed(self, what: str, seconds: Sequence[float], remark: str = "") -> float:
        """Add a line of times; return their median in milliseconds."""
        p50, p99 = median_ms(seconds), percentile_ms(seconds, 0.99)
        self._lines.append((what, f"p50 {p50:8.3f} ms   p99 {p99:8.3f} ms   n {len(seconds)}", remark))
        return p50

    def figure(self, what: str, figure: str, remark: str = "") -> None:
        self._lines.append((what, figure, remark))

    def row(self, figure: str, goal: str, measured: str, yardstick: str) -> None:
        self.rows.append(Row(figure, goal, measured, yardstick))

    def show(self) -> None:
        wide = max(len(what) for what, _, _ in self._lines)
        far = max(len(figure) for _, figure, _ in self._lines)
        print(f"\n## {self._title}")
        for what, figure, remark in self._lines:
            print(f"{what:<{wide}}   {figure:<{far}}   {remark}".rstrip(), flush=True)


def median_ms(seconds: Sequence[float]) -> float:
    return statistics.median(seconds) * 1000


def percentile_ms(seconds: Sequence[float], part: float) -> float:
    ordered = sorted(seconds)
    return ordered[min(len(ordered) - 1, int(len(ordered) * part))] * 1000


def markdown(rows: Sequence[Row]) -> str:
    """One table for all rows."""
    lines = ["| figure | goal | measured | yardstick of the same run |", "|---|---|---|---|"]
    return "\n".join([*lines, *(f"| {row.figure} | {row.goal} | {row.measured} | {row.yardstick} |" for row in rows)])
