"""A swap's figures as tables: each beside its goal, which follows from the bytes and the bus of the same run."""

import statistics
from collections.abc import Iterator
from typing import Any, Final

from rich.console import Console
from rich.table import Table

from compose.bench.holdings import WHAT, grown
from compose.bench.rows import Row

STEPS: Final = {
    "attach_ms": "attach", "copy_ms": "  of it the copy", "wake_ms": "wake",
    "first_token_added_ms": "first token over a warm one", "up_ms": "up, all together",
    "drain_ms": "drain", "sleep_ms": "sleep", "detach_ms": "detach, memory free again", "cycle_ms": "cycle, all together",
}  # fmt: skip
CYCLE_MS, SWITCH_MS, RESIDENT_MS, OVER_COPY = 120, 80, 80, 1.08
"""What a cycle, a switch, and a switch between sets that are there may take beside the copy; the copy itself by this factor."""
GANG_OVER_COPY, GANG_MS = 1.10, 250
"""The same of a gang's cycle."""


def same_tokens(rows: Row) -> bool:
    """Whether no comparison of any part failed."""
    return all(_truths(part) for part in rows["parts"].values())


def _truths(of: Any) -> bool:
    match of:
        case dict():
            return all(value is not False if name.startswith("same_tokens") else _truths(value) for name, value in of.items())
        case list():
            return all(map(_truths, of))
        case _:
            return True


def show(rows: Row) -> None:
    parts = {name: part for name, part in rows["parts"].items() if "failed" not in part}
    console = Console(width=200, highlight=False, markup=False)
    versions = ", ".join(f"{name} {rows[name]}" for name in ("vllm", "torch", "driver") if rows[name])
    console.print(f"{rows['shape']} on {rows['device']} ({rows['gpus']} GPU): {versions}; {rows['date']}")
    for name, part in parts.items():
        if name.startswith("cycles"):
            table = Table(name, "median", "least", "most", box=None, pad_edge=False, header_style="bold")
            for key, what in STEPS.items():
                middle, least, most = part["median"][key]
                table.add_row(what, f"{middle:.1f} ms", f"{least:.1f}", f"{most:.1f}")
            console.print(table)
    table = Table("figure", "measured", "beside it", box=None, pad_edge=False, header_style="bold")
    for row in _figures(rows, parts):
        table.add_row(*row)
    console.print(table)
    console.print(f"greedy tokens the same everywhere: {'yes' if same_tokens(rows) else 'NO'}")


def _figures(rows: Row, parts: dict[str, Row]) -> Iterator[tuple[str, str, str]]:
    bus = parts["bus"]["bytes_per_s"][0] if "bus" in parts else 0.0
    cycle = parts.get("cycles a", {}).get("median", {})
    if "start" in parts:
        yield "start of a skeleton with its weights", f"{parts['start']['start_s']:.1f} s", ""
    if bus and cycle:
        size, ranks = cycle["bytes_copied"][0], rows.get("ranks", 1)
        links = rows.get("gpus", 1)  # those of helpers, or of the ranks
        reach = parts["bus"].get("links_bytes_per_s", [bus * links])[0]
        floor_ms = size / reach * 1000
        over, added_ms = (OVER_COPY, CYCLE_MS) if ranks == 1 else (GANG_OVER_COPY, GANG_MS)
        rate = size / cycle["copy_ms"][0] * 1000 if cycle["copy_ms"][0] else 0
        yield "bus", f"{bus / 1e9:.1f} GB/s", "from pinned memory, same run"
        yield (
            "copy in a cycle",
            f"{rate / 1e9:.1f} GB/s",
            f"{rate / reach:.1%} of the bus" + (f", {links} links" if links > 1 else ""),
        )
        goal = f"goal {over * floor_ms + added_ms:.0f} ms, {size / 1e9:.2f} GB"
        yield "up: from the command to the first token", f"{cycle['up_ms'][0]:.0f} ms", goal
        yield "cycle: up, and down right before it", f"{cycle['cycle_ms'][0]:.0f} ms", "the same goal"
        if "graphs" in cycle:
            yield (
                "CUDA graphs captured again",
                f"{cycle['graphs_again'][2]:.0f}",
                f"of {cycle['graphs'][0]:.0f}, over all cycles",
            )
        if "switches" in parts:
            yield "switch", _switch(parts["switches"]), f"goal {OVER_COPY * floor_ms + SWITCH_MS:.0f} ms"
    elif "switches" in parts:
        yield "switch", _switch(parts["switches"]), ""
    if "switches, both resident" in parts:
        yield "switch, both resident", _switch(parts["switches, both resident"]), f"goal {RESIDENT_MS} ms"
    for name, part in parts.items():
        if name.startswith("cycles"):
            yield from _growth(name, part.get("rows", [])[1:])
    for level in (1, 2):
        if (plain := parts.get(f"plain vLLM, level {level}")) and cycle:
            theirs = plain["median"]["cycle_ms"][0]
            yield f"plain vLLM, level {level}", f"{theirs:.0f} ms", f"{theirs / cycle['cycle_ms'][0]:.1f} x ours"
    yield from _speeds(parts.get("throughput"))
    if "newcomer" in parts:
        one = parts["newcomer"]
        beside = f"its weights are there: {one['bytes_copied']} bytes copied, attach {one['attach_ms']:.0f} ms"
        yield "start of a second engine", f"{one['start_s']:.1f} s", beside
    if "artefacts" in parts:
        starts = parts["artefacts"]["start_s"]
        beside = f"{starts['without']:.1f} s without what an earlier start has worked out"
        yield "start that finds artefacts", f"{starts['with']:.1f} s", beside
    if "plain vLLM" in parts:
        yield "start of plain vLLM", f"{parts['plain vLLM']['start_s']:.1f} s", "reads its weights"


def _growth(name: str, rows: list[Row]) -> Iterator[tuple[str, str, str]]:
    beside = f"since a quarter of {len(rows)} cycles"
    for who in ("engine", "daemon"):
        if rows and f"{who}_fds" in rows[0]:
            counts = (f"{grown(rows, f'{who}_{key}'):+d} {what}" for key, what in WHAT.items())
            yield f"{name}: {who}, grown by", ", ".join(counts), beside
    if rows and "device_bytes_asleep" in rows[0]:
        more, first = grown(rows, "device_bytes_asleep"), rows[0]["device_bytes_asleep"]
        yield f"{name}: device, asleep", f"{more:+d} bytes", f"{beside}; {first} after the first"


def _speeds(found: Row | None) -> Iterator[tuple[str, str, str]]:
    for key, what in (("many", "tokens/s, many sequences"), ("one", "tokens/s, one sequence")):
        if found is not None:
            mine, theirs = statistics.median(found[key]), found[f"plain_{key}"]
            other = statistics.median(theirs) if theirs else 0
            beside = f"{mine / other:.1%} of plain vLLM's {other:.0f}, its core in a process of its own" if other else ""
            yield what, f"{mine:.0f}", beside


def _switch(part: Row) -> str:
    middle = part["median"]
    return f"{middle['switch_ms'][0]:.0f} ms, first token over a warm one {middle['first_token_added_ms'][0]:.0f} ms"
