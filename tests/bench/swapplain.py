"""Plain vLLM, in a process of its own: `python -m tests.bench.swapplain MODEL RESULT CYCLES ARGUMENTS LEVELS`."""

import json
import os
import statistics
import sys
import time
from pathlib import Path
from typing import Any

from tests.bench.swapengine import PROMPT
from worker.engines.vllm_arguments import ENVIRONMENT, engine_arguments


def main() -> None:
    model, result, cycles, arguments, levels = sys.argv[1:6]
    os.environ.update(ENVIRONMENT)
    os.environ.setdefault("VLLM_USE_FLASHINFER_SAMPLER", "0")
    begun = time.monotonic()
    import torch
    from vllm import LLM, SamplingParams

    imported = time.monotonic()
    chosen = engine_arguments(Path(model), json.loads(arguments), bare=False)
    llm = LLM(**chosen)
    rows: dict[str, Any] = {"import_s": imported - begun, "start_s": time.monotonic() - imported}

    def generate(prompts: list[tuple[int, ...]], tokens: int) -> list[list[int]]:
        sampling = SamplingParams(max_tokens=tokens, temperature=0, ignore_eos=True, detokenize=False)
        asked = [{"prompt_token_ids": list(prompt)} for prompt in prompts]
        return [list(one.outputs[0].token_ids) for one in llm.generate(asked, sampling, use_tqdm=False)]

    def timed(call: Any, *given: Any) -> float:
        torch.cuda.synchronize()
        at = time.monotonic()
        call(*given)
        torch.cuda.synchronize()
        return (time.monotonic() - at) * 1000

    def warm_first() -> float:
        return statistics.median(timed(generate, [PROMPT], 1) for _ in range(5))

    rows["tokens"] = generate([PROMPT], 64)[0]
    for _ in range(2):
        generate([PROMPT], 64)
    rows["first_token_ms"] = warm_first()
    if "t" in levels:
        prompts = [(5 + number, 7, 9) for number in range(256)]
        rows["throughput"] = [256 * 256 / (timed(generate, prompts, 256) / 1000) for _ in range(3)]
    for level in (1, 2):
        if str(level) not in levels:
            continue
        found = []
        for _ in range(int(cycles) + 1):
            asleep = timed(llm.sleep, level)
            if level == 1:
                awake = timed(llm.wake_up)
            else:
                awake = timed(llm.wake_up, ["weights"]) + timed(llm.collective_rpc, "reload_weights")
                awake += timed(llm.wake_up, ["kv_cache"])
            first = timed(generate, [PROMPT], 1)
            found.append({"sleep_ms": asleep, "wake_ms": awake, "first_token_ms": first})
        rows[f"level{level}"] = found
        rows[f"level{level}_same_tokens"] = generate([PROMPT], 64)[0] == rows["tokens"]
    Path(result).write_text(json.dumps(rows))
    os._exit(0)


if __name__ == "__main__":
    main()
