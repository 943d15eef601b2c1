"""Every figure of the plane beside its yardstick: `python -m tests.bench [NAME ...] [--models DIR]`; one table in Markdown.

Names: log, fold, past, start, web, live, up, swap; without one, all of them, which takes some ten minutes. Nothing is
asserted: a figure means something beside its yardstick alone. `--models`: a finished demonstration's `models/demo`, for swap.
"""

import argparse
import asyncio
import os
import platform
import sys
from collections.abc import Awaitable, Callable, Mapping
from importlib.metadata import version
from pathlib import Path

from tests.bench import bench_history, bench_live, bench_log, bench_swap, bench_up, bench_web
from tests.bench.figures import Row, Table, markdown

Bench = Callable[[], Awaitable[list[Table]]]


def benches(models: Path | None) -> Mapping[str, Bench]:
    return {
        "log": bench_log.measure,
        "web": bench_web.measure,
        "swap": lambda: bench_swap.measure(*(("--models", str(models)) if models else ())),
        "fold": lambda: bench_history.measure("fold"),
        "past": lambda: bench_history.measure("past"),
        "start": lambda: bench_history.measure("start"),
        "live": bench_live.measure,
        "up": bench_up.measure,
    }


def machine() -> str:
    parts = ("litestar", "nats-py", "asyncpg", "uvloop", "torch", "transformers")
    versions = ", ".join(f"{name} {version(name)}" for name in parts)
    load = ", ".join(f"{one:.1f}" for one in os.getloadavg())
    return f"{os.cpu_count()} cores, {platform.platform()}, Python {platform.python_version()}, {versions}; load {load}"


async def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.bench", description=__doc__)
    known = benches(None)
    parser.add_argument("names", nargs="*", metavar="NAME", help=", ".join(known))
    parser.add_argument("--models", type=Path, help="a finished demonstration's models/demo")
    given = parser.parse_args()
    if unknown := set(given.names) - known.keys():
        parser.error(f"no bench is called {', '.join(sorted(unknown))}; there are {', '.join(known)}")
    rows, failed = list[Row](), list[str]()
    print(machine())
    for name, bench in benches(given.models).items():
        if given.names and name not in given.names:
            continue
        try:
            for table in await bench():
                rows += table.rows
        except Exception as error:  # the others' figures are worth having all the same
            failed.append(f"{name}: {error!r}"[:2000])
    print(f"\n{machine()}\n\n{markdown(rows)}")
    for one in failed:
        print(f"failed: {one}", file=sys.stderr)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(asyncio.run(main()))
