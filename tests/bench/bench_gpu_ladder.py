"""The lower rungs on a GPU: `python -m tests.bench.bench_gpu_ladder --shape 8b --out FILE --criu PATH [--cycles 3]`.

A pool daemon, a holder in its namespaces, a vLLM engine in it, step processes and CRIU, driven as the worker does it, and no
plane: checkpoint and back, saved and back, from one image several times, beside the warmest cold start. Greedy tokens are
compared after every way up. `--engine fake` runs the same on a machine without a GPU, over the driver's twin.
"""

import argparse
import asyncio
import itertools
import json
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from compose.bench.shapes import SHAPES
from tests.bench.laddernotes import ms, open_files
from tests.bench.lowerrungs import DOWN, UP
from tests.bench.restoreways import RestoreWays
from worker import processes
from worker.cuda.operation import state_of


class Bench(RestoreWays):
    """What else is asked of them: where time goes, whether anything grows, what a failure leaves."""

    async def anatomy(self) -> Any:
        """Where CRIU's time goes: one restore that it talks about."""
        real = self.options.criu
        await self._leave()
        talkative = self.work / "criu-v4"
        talkative.write_text(f'#!/bin/sh\nexec {real} "$@" -v4\n')
        talkative.chmod(0o700)
        self.options.criu = str(talkative)
        try:
            row = await self._restore(7)
        finally:
            self.options.criu = real
        assert self.room is not None
        found: list[tuple[float, str]] = []
        log = self.room.directory.path / "restore.log"
        shutil.copy(log, Path(self.options.out).with_suffix(".criu.log"))
        for line in log.read_text(errors="replace").splitlines():
            if line.startswith("("):
                found.append((float(line[1:].partition(")")[0]), line[10:110]))
        gaps = sorted(((b[0] - a[0], a[1], b[1]) for a, b in itertools.pairwise(found)), reverse=True)[:14]
        return {"restore": row, "last_s": found[-1][0] if found else 0, "gaps": [(round(gap, 3), a, b) for gap, a, b in gaps]}

    async def endurance(self) -> Any:
        """Sleep, checkpoint and disk by turns: four prompts with one long beginning answer the same, and nothing grows."""
        rows = []
        beginning = tuple(range(100, 1124))
        prompts = [(*beginning, *range(200 + 50 * n, 232 + 50 * n)) for n in range(4)]
        for number in range(self.options.round_trips):
            assert self.room is not None
            if number % 3 == 2:
                row: dict[str, Any] = {"dump": await self._dump(self.room)}
                await asyncio.to_thread(self._publish, row)
                await self.room.close()
                row |= await self._revive(40 + number)
            elif number % 3 == 1:
                await self.room.link.park(deadline_s=20)
                await self.operate(self.room, DOWN)
                row = await self._ascend(self.room)
            else:
                row = await self.room.up(self.weight_set)
            said = [(await self.room.port.generate(24, prompt))[0] for prompt in prompts]
            same = said == self.known.setdefault("prefix", said)
            await self.room.down()
            pid = self.room.pid
            rows.append({
                "kind": ("sleep", "checkpoint", "saved")[number % 3], "same_tokens": same,
                "rss": processes.private_bytes(pid), "device": self.used(), "files": sum(open_files(pid).values()),
                "threads": len(list(Path(f"/proc/{pid}/task").iterdir())),
                "image_bytes": row.get("dump", {}).get("image_bytes"),
                "shm": sum(file.stat().st_size for file in Path("/dev/shm").rglob("*") if file.is_file()),
            })  # fmt: skip
        return rows

    async def poisoned(self) -> Any:
        """No room for a restore: it fails for good; from the image the engine comes back all the same."""
        room = self.room
        assert room is not None
        if not self.device:
            return {}
        await room.link.park(deadline_s=20)
        await self.operate(room, DOWN)
        hog = subprocess.Popen(
            [
                sys.executable, "-c",
                "import sys, torch; free, _ = torch.cuda.mem_get_info()\n"
                "kept = torch.empty(free - (700 << 20), dtype=torch.uint8, device='cuda')\n"
                "print('held', flush=True); sys.stdin.read()",
            ],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE,
        )  # fmt: skip
        assert hog.stdout is not None
        await asyncio.to_thread(hog.stdout.readline)
        row: dict[str, Any] = {"device_full": self.used()}
        try:
            row["restore"] = str(await self.operate(room, UP))
        except Exception as error:
            row["restore"] = f"{getattr(error, 'code', '')}: {error}"
        try:
            row["state"] = str(await state_of(self.theatre, room.pid))
        except Exception as error:
            row["state"] = f"{getattr(error, 'code', '')}: {error}"
        hog.kill()
        hog.wait()
        try:
            row["restore_again"] = str(await self.operate(room, UP))
        except Exception as error:
            row["restore_again"] = f"{getattr(error, 'code', '')}: {error}"
        begun = time.monotonic()
        await room.link.kill(0)
        row["killed_ms"] = ms(begun)
        await room.close()
        row["device_after_kill"] = self.used()
        row["from_image"] = await self._restore(8)
        return row


async def measure(bench: Bench) -> None:
    await bench.phase("models", bench.models)
    await bench.phase("cold_first", bench.start)
    if bench.room is None or not bench.weight_set:
        return
    left_out = bench.options.without.split(",")
    phases = {
        "step_process": bench.step_process, "warm_cycles": bench.warm_cycles, "checkpoint": bench.checkpoints,
        "save": bench.save, "saved": bench.restores, "round_trip": bench.round_trip, "endurance": bench.endurance,
        "poisoned": bench.poisoned, "ways": bench.ways, "anatomy": bench.anatomy,
        "cold_warmest": lambda: bench.start(bare=True),
    }  # fmt: skip
    for name, work in phases.items():
        if name not in left_out:
            await bench.phase(name, work, 120)
    saved = bench.rows.get("saved") or bench.rows.get("ways", {}).get("median", {}).get("as the product does", {})
    up = saved.get("median", saved).get("to_first_token_ms", [0])[0]
    bench.rows["summary"] = {"cold_s": bench.cold, "saved_ms": up, "times": min(bench.cold) * 1000 / up if up else 0}
    print(bench.rows["summary"], flush=True)
    Path(bench.options.out).write_text(json.dumps(bench.rows, indent=1, default=str))


async def measured(bench: Bench) -> None:
    try:
        await measure(bench)
    finally:
        await bench.end()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--shape", default="8b", choices=list(SHAPES))
    parser.add_argument("--engine", default="vllm", choices=("vllm", "fake"))
    parser.add_argument("--out", required=True)
    parser.add_argument("--work", help="keep what is made here; else it stays in a new directory, whose name is told")
    parser.add_argument("--criu", required=True)
    parser.add_argument("--gpu", default="0", help="number on the bus, or UUID")
    parser.add_argument("--cycles", type=int, default=3)
    parser.add_argument("--round-trips", type=int, default=10)
    parser.add_argument("--heavy", type=int, default=0, help="bytes that a fake engine has beside its own")
    parser.add_argument("--without", default="ways,anatomy", help="phases to leave out")
    options = parser.parse_args()
    options.work = options.work or tempfile.mkdtemp(prefix="ehladder-")
    print(options.work, flush=True)
    bench = Bench(options)
    (bench.work / "pool").mkdir(parents=True, exist_ok=True, mode=0o700)
    argv = [sys.executable, "-m", "pool.daemon", "--socket", str(bench.socket), "--directory", str(bench.work / "pool")]
    argv += ["--budget", str((24 if bench.device else 1) << 30), "--forget", *["--gpus"] * bool(bench.device)]
    with (bench.work / "pool.log").open("wb") as log:
        daemon = subprocess.Popen(argv, stderr=log)
    while not bench.socket.exists():
        time.sleep(0.05)
    try:
        asyncio.run(measured(bench))
    finally:
        for file in [*(bench.work / "run" / "inst").glob("*/*.log"), bench.work / "pool.log"]:
            print(f"--- {file}\n{file.read_text(errors='replace')[-2500:]}", flush=True)
        daemon.send_signal(signal.SIGTERM)
        daemon.wait(20)


if __name__ == "__main__":
    main()
