"""vLLM as it is, its core in a process of its own: `python -m compose.bench.plain MODEL ARGUMENTS DEVICE DESCRIPTOR`.

Asked over the socket that DESCRIPTOR names, a JSON document a line: `{"ask": "tokens" | "many" | "one" | "level", ...}`; each
is answered by one line. So it can run by turns with what it is compared with. It ends with its asker.
"""

import json
import os
import socket
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from compose.bench.load import MANY, PROMPT, PROMPTS, TOKENS
from compose.bench.rows import Row, medians
from worker.engines.vllm_arguments import ENVIRONMENT, engine_arguments
from worker.engines.vllm_place import ordinals


class Plain:
    """`llm`: vLLM's. `sampling`: its class of sampling parameters."""

    def __init__(self, llm: Any, sampling: Callable[..., Any]) -> None:
        self.llm, self._sampling = llm, sampling

    def answer(self, asked: Row) -> Row:
        match asked:
            case {"ask": "tokens"}:
                return {"ids": self.generate([PROMPT], TOKENS)[0]}
            case {"ask": "many"}:
                return {"tokens_per_s": MANY * MANY * 1000 / _timed(lambda: self.generate(PROMPTS, MANY))}
            case {"ask": "one"}:
                return {"tokens_per_s": MANY * 1000 / _timed(lambda: self.generate([PROMPT], MANY))}
            case {"ask": "level", "level": int(level), "cycles": int(cycles)}:
                return self.level(level, cycles)
            case _:
                raise ValueError(f"asked {asked}")

    def generate(self, prompts: Sequence[Sequence[int]], tokens: int) -> list[list[int]]:
        sampling = self._sampling(max_tokens=tokens, temperature=0, ignore_eos=True, detokenize=False)
        asked = [{"prompt_token_ids": list(prompt)} for prompt in prompts]
        return [list(one.outputs[0].token_ids) for one in self.llm.generate(asked, sampling, use_tqdm=False)]

    def level(self, level: int, cycles: int) -> Row:
        """Cycles of one of its sleep levels, a first one apart, and whether it still says the same."""
        said = self.generate([PROMPT], TOKENS)
        warm_ms = statistics.median(_timed(lambda: self.generate([PROMPT], 1)) for _ in range(5))
        rows = [self._cycle(level, warm_ms) for _ in range(cycles + 1)]
        same = self.generate([PROMPT], TOKENS) == said
        return {"first": rows[0], "median": medians(rows[1:]), "rows": rows, "same_tokens": same}

    def _cycle(self, level: int, warm_ms: float) -> Row:
        sleep_ms = _timed(lambda: self.llm.sleep(level))
        wake_ms = _timed(self.llm.wake_up if level == 1 else self._wake_and_load)
        added_ms = max(_timed(lambda: self.generate([PROMPT], 1)) - warm_ms, 0)
        return {"cycle_ms": sleep_ms + wake_ms + added_ms, "sleep_ms": sleep_ms, "wake_ms": wake_ms, "added_ms": added_ms}

    def _wake_and_load(self) -> None:
        self.llm.wake_up(["weights"])
        self.llm.collective_rpc("reload_weights")
        self.llm.wake_up(["kv_cache"])


def _timed(call: Callable[[], Any]) -> float:
    """Milliseconds. All that is called waits for its device itself."""
    begun = time.monotonic()
    call()
    return (time.monotonic() - begun) * 1000


def _on_gpus(model: Path, arguments: dict[str, Any], device: str) -> dict[str, Any]:
    """Arguments; the environment is set."""
    os.environ.update(ENVIRONMENT)
    os.environ.setdefault("VLLM_USE_FLASHINFER_SAMPLER", "0")
    devices = tuple(device.split(","))
    os.environ["CUDA_VISIBLE_DEVICES"] = ordinals(devices)
    chosen = engine_arguments(model, arguments, bare=False, ranks=len(devices))
    chosen.pop("worker_extension_cls", None)
    return chosen


def _on_cpu(model: Path, arguments: dict[str, Any]) -> dict[str, Any]:
    """Likewise; the worker in the core's process, as on a GPU (by the executor's name it would be one more)."""
    from worker.engines.vllm_cpu import cpu_arguments, prepare  # noqa: PLC0415 - sets the environment first

    prepare()
    from vllm.v1.executor.uniproc_executor import UniProcExecutor  # noqa: PLC0415

    return {**cpu_arguments(model, arguments), "distributed_executor_backend": UniProcExecutor}


def main() -> None:
    model, arguments, device, descriptor = sys.argv[1:5]
    chosen = _on_gpus(Path(model), json.loads(arguments), device) if device else _on_cpu(Path(model), json.loads(arguments))
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "1"
    from vllm import LLM, SamplingParams  # noqa: PLC0415 - the environment counts when it is imported

    plain = Plain(LLM(**chosen), SamplingParams)
    plain.generate([PROMPT], TOKENS)
    with socket.socket(fileno=int(descriptor)) as asker, asker.makefile("rw", encoding="utf-8") as lines:
        print(json.dumps({"ready": True}), file=lines, flush=True)
        for line in lines:
            print(json.dumps(plain.answer(json.loads(line))), file=lines, flush=True)
    plain.llm.llm_engine.engine_core.shutdown()
    os._exit(0)


if __name__ == "__main__":
    main()
