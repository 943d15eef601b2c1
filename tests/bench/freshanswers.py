"""A vLLM as it is, fresh, one request at a time: `python -m tests.bench.freshanswers MODEL PROMPTS RESULT ARGUMENTS TOKENS`.

PROMPTS: JSON list of lists of ids. RESULT: a file for the ids that follow each. Uses the GPU that CUDA_VISIBLE_DEVICES names.
"""

import json
import os
import sys
from pathlib import Path

from worker.engines.vllm_arguments import ENVIRONMENT, engine_arguments


def main() -> None:
    model, prompts, result, arguments, tokens = sys.argv[1:6]
    os.environ.update(ENVIRONMENT)
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
    os.environ.setdefault("VLLM_USE_FLASHINFER_SAMPLER", "0")
    from vllm import LLM, SamplingParams

    llm = LLM(**engine_arguments(Path(model), json.loads(arguments), bare=False))
    sampling = SamplingParams(max_tokens=int(tokens), temperature=0, detokenize=False)
    answers = []
    for prompt in json.loads(Path(prompts).read_text()):
        (answer,) = llm.generate([{"prompt_token_ids": prompt}], sampling, use_tqdm=False)
        answers.append(list(answer.outputs[0].token_ids))
    Path(result).write_text(json.dumps(answers))
    os._exit(0)


if __name__ == "__main__":
    main()
