"""How long `up` takes on an initialised directory without models, beside importing litestar; and what an idle plane costs.

`python -m tests.bench.bench_up [--starts 5] [--idle 30]`. Import time and start are measured by turns.
"""

import argparse
import asyncio
import contextlib
import statistics
import sys
import time
from pathlib import Path

import psutil

from compose.remains import belonging
from tests.bench.figures import Table
from tests.bench.imports import import_s
from tests.plane import NODE, PlaneUnderTest, fake, running

QUIET = {"PYTHONDONTWRITEBYTECODE": ""}
"""Modules keep their bytecode, as those of an installed package do."""


async def start(starts: int) -> Table:
    plane = PlaneUnderTest(NODE, environment=QUIET)
    imports, ups = list[float](), list[float]()
    try:
        plane.start()  # the directory is made
        plane.down()
        for _ in range(starts):
            imports.append(await import_s("litestar", 1))
            began = time.perf_counter()
            plane.start()
            ups.append(time.perf_counter() - began)
            plane.down()
    finally:
        with contextlib.suppress(AssertionError):
            plane.finish()
    table = Table("`up` on an initialised directory, no models")
    yardstick = table.timed("import litestar, process included", imports)
    took = table.timed("up to ready", ups)
    ratio = statistics.median(up / one for up, one in zip(ups, imports, strict=True))
    table.figure("ratio", f"{ratio:.1f} x")
    beside = f"import of litestar {yardstick / 1000:.2f} s (low {min(imports):.2f}), `up` low {min(ups):.2f} s"
    row = "`up` on an initialised directory to ready, no models"
    table.row(row, "<= 3 x import of litestar", f"{ratio:.1f} x ({took / 1000:.2f} s)", beside)
    table.show()
    return table


async def idle(seconds: float) -> Table:
    """Two fake models up, nobody asks: processor time and memory of every process."""
    table = Table(f"an idle plane over {seconds:g} s: processor time, proportional memory")
    settings = NODE + fake("alpha") + fake("beta", kv_bytes=2 << 20)  # two configurations: two instances
    with running(settings, environment=QUIET) as plane:
        for model in ("alpha", "beta"):
            await plane.chat(model, max_tokens=1)
        await asyncio.sleep(8)  # what starts has settled
        processes = {_name(process): process for process in _processes(plane)}
        assert len({process.pid for process in processes.values()}) == len(_processes(plane))
        before, began = {name: _cpu_s(one) for name, one in processes.items()}, time.monotonic()
        switches = {name: sum(one.num_ctx_switches()) for name, one in processes.items()}
        await asyncio.sleep(seconds)
        took = time.monotonic() - began
        used = {name: (_cpu_s(one) - before[name]) / took * 100 for name, one in processes.items()}
        woken = {name: (sum(one.num_ctx_switches()) - switches[name]) / took for name, one in processes.items()}
        memory = {name: one.memory_full_info() for name, one in processes.items()}
    for name in sorted(used, key=lambda name: -used[name]):
        pss, own = memory[name].pss / 2**20, memory[name].uss / 2**20
        table.figure(
            name, f"{used[name]:5.2f} % of a core   PSS {pss:6.1f} MiB   own {own:6.1f} MiB", f"{woken[name]:5.1f} switches/s"
        )
    total = sum(used.values())
    pss = sum(info.pss for info in memory.values()) / 2**20
    table.figure("together", f"{total:5.2f} % of a core   PSS {pss:6.1f} MiB")
    most = max(used, key=lambda name: used[name])
    table.row(
        "idle plane, two models up, all processes", "< 3 % of a core", f"{total:.1f} %", f"most: {most} {used[most]:.1f} %"
    )
    largest = ", ".join(f"{name} {memory[name].pss / 2**20:.0f}" for name in sorted(memory, key=lambda n: -memory[n].pss)[:4])
    table.row("memory of that plane (PSS)", "(stated)", f"{pss:.0f} MiB", f"{len(memory)} processes; largest: {largest} MiB")
    table.show()
    return table


def _processes(plane: PlaneUnderTest) -> list[psutil.Process]:
    up = psutil.Process(plane.child("web").pid).parent()
    assert up is not None
    found = {one.pid: one for one in (up, *up.children(recursive=True))}
    found |= {one.pid: psutil.Process(one.pid) for one in belonging(plane.data)}  # engines have sessions of their own
    return list(found.values())


def _name(process: psutil.Process) -> str:
    argv = process.cmdline()
    if "-m" not in argv:
        return f"{process.name()} {process.pid}"
    module = argv[argv.index("-m") + 1]
    part = next((Path(one).name[-4:] for one in argv if "/run/inst/" in one or one.startswith("ins_")), "")
    return f"{'up' if module == 'compose' else module} {part}".strip()


def _cpu_s(process: psutil.Process) -> float:
    """By the scheduler's clock: ticks of 10 ms are too coarse for the idle."""
    total = 0
    for task in Path(f"/proc/{process.pid}/task").iterdir():
        with contextlib.suppress(OSError):
            total += int((task / "schedstat").read_text().split()[0])
    return total / 1e9


async def measure(*argv: str) -> list[Table]:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--starts", type=int, default=5)
    parser.add_argument("--idle", type=float, default=30)
    options = parser.parse_args(argv)
    return [await start(options.starts), await idle(options.idle)]


if __name__ == "__main__":
    asyncio.run(measure(*sys.argv[1:]))
