"""vLLM as it is: `python -m compose.bench.plain MODEL RESULT CYCLES ARGUMENTS LEVELS DEVICE`, its core in a process of its own.

LEVELS: letters of what is measured: `1` and `2` (cycles of its sleep levels), `t` (tokens/s).
"""

import json
import os
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from compose.bench.engineprocess import PROMPT
from compose.bench.rows import Row, medians
from worker import gpus
from worker.engines.vllm_arguments import ENVIRONMENT, engine_arguments

TOKENS = 64


class Plain:
    def __init__(self, llm: Any, sampling: Callable[..., Any], cycles: int) -> None:
        self.llm, self._sampling, self._cycles = llm, sampling, cycles

    def generate(self, prompts: Sequence[Sequence[int]], tokens: int) -> list[list[int]]:
        sampling = self._sampling(max_tokens=tokens, temperature=0, ignore_eos=True, detokenize=False)
        asked = [{"prompt_token_ids": list(prompt)} for prompt in prompts]
        return [list(one.outputs[0].token_ids) for one in self.llm.generate(asked, sampling, use_tqdm=False)]

    def warm_first_ms(self) -> float:
        return statistics.median(_timed(lambda: self.generate([PROMPT], 1)) for _ in range(5))

    def throughput(self) -> Row:
        from compose.bench.swapparts import MANY, PROMPTS  # noqa: PLC0415

        many = [MANY * MANY * 1000 / _timed(lambda: self.generate(PROMPTS, MANY)) for _ in range(5)]
        return {"many": many, "one": [MANY * 1000 / _timed(lambda: self.generate([PROMPT], MANY)) for _ in range(3)]}

    def level(self, level: int, warm_ms: float) -> Row:
        rows = [self._cycle(level, warm_ms) for _ in range(self._cycles + 1)]
        return {"first": rows[0], "median": medians(rows[1:]), "rows": rows}

    def _cycle(self, level: int, warm_ms: float) -> Row:
        sleep_ms = _timed(lambda: self.llm.sleep(level))
        wake_ms = _timed(self._wake if level == 1 else self._wake_and_load)
        added_ms = max(_timed(lambda: self.generate([PROMPT], 1)) - warm_ms, 0)
        return {"cycle_ms": sleep_ms + wake_ms + added_ms, "sleep_ms": sleep_ms, "wake_ms": wake_ms, "added_ms": added_ms}

    def _wake(self) -> None:
        self.llm.wake_up()

    def _wake_and_load(self) -> None:
        self.llm.wake_up(["weights"])
        self.llm.collective_rpc("reload_weights")
        self.llm.wake_up(["kv_cache"])


def _timed(call: Callable[[], Any]) -> float:
    """Milliseconds. All that is called waits for its device itself."""
    begun = time.monotonic()
    call()
    return (time.monotonic() - begun) * 1000


def main() -> None:
    model, result, cycles, arguments, levels, device = sys.argv[1:7]
    os.environ.update(ENVIRONMENT)
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "1"
    os.environ.setdefault("VLLM_USE_FLASHINFER_SAMPLER", "0")
    os.environ["CUDA_VISIBLE_DEVICES"] = str(next(one.index for one in gpus.gpus() if one.uuid == device))
    begun = time.monotonic()
    from vllm import LLM, SamplingParams  # noqa: PLC0415 - the environment counts when it is imported

    plain = Plain(LLM(**engine_arguments(Path(model), json.loads(arguments), bare=False)), SamplingParams, int(cycles))
    rows: Row = {"start_s": time.monotonic() - begun, "tokens": plain.generate([PROMPT], TOKENS)[0]}
    rows["warm_first_token_ms"] = warm_ms = plain.warm_first_ms()
    if "t" in levels:
        rows["throughput"] = plain.throughput()
    for level in (1, 2):
        if str(level) in levels:
            rows[f"level{level}"] = plain.level(level, warm_ms)
            rows[f"level{level}"]["same_tokens"] = plain.generate([PROMPT], TOKENS)[0] == rows["tokens"]
    Path(result).write_text(json.dumps(rows))
    plain.llm.llm_engine.engine_core.shutdown()
    os._exit(0)


if __name__ == "__main__":
    main()
