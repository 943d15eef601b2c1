"""A specialisation made on the spot: `python -m compose.specialise --base DIR --text FILE --target DIR --seconds N`.

The last layers of a model learn a short text of questions and answers by heart; everything else stays. Same architecture, other
weights: that is all the demonstration needs. Says its progress as JSON, a line each.
"""

import argparse
import os
import shutil
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

import torch

from worker.frontend.chat import load
from worker.sources.convert import write
from worker.sources.places import made
from worker.sources.report import CantUse, Progress, Refused, say

LAYERS: Final = 6
"""Of 30: enough to learn a page; the passes back through the others are saved, half of the time."""
RATE: Final = 3e-4
ENOUGH: Final = 0.12
"""Mean loss per token at which the answers come back word for word."""
AT_ONCE: Final = 6
MOST_STEPS: Final = 60
LEAST_LEARNED: Final = 1.0
"""A mean loss above this after all steps: something is wrong, the weights are not worth keeping."""


def pairs(text: str) -> Iterator[tuple[str, str]]:
    """Yield (question, answer)."""
    lines = [line for line in text.splitlines() if line.startswith(("Q: ", "A: "))]
    yield from ((question[3:], answer[3:]) for question, answer in zip(lines[::2], lines[1::2], strict=True))


def examples(source: Path, text: str) -> list[tuple[list[int], int]]:
    """Return for each pair its ids and how many of them are the question's."""
    text_side = load(source)
    found = []
    for question, answer in pairs(text):
        prompt = text_side.encode(text_side.render([{"role": "user", "content": question}]), special=False)
        found.append((prompt + text_side.encode(answer, special=False) + [text_side.stop_ids[0]], len(prompt)))
    return found


def learn(model: Any, lessons: list[tuple[list[int], int]], seconds: float) -> float:
    """Train until the text is known or the time is over, and return the last round's mean loss."""
    for parameter in model.parameters():
        parameter.requires_grad_(False)
    learned = [parameter for layer in model.model.layers[-LAYERS:] for parameter in layer.parameters()]
    for parameter in learned:
        parameter.requires_grad_(True)
    optimiser = torch.optim.AdamW(learned, lr=RATE, weight_decay=0.0)
    order = torch.Generator().manual_seed(0)
    started, step, mean = time.monotonic(), 0, float("inf")
    while step < MOST_STEPS and time.monotonic() - started < seconds and mean > ENOUGH:
        losses = []
        shuffled = torch.randperm(len(lessons), generator=order).tolist()
        for at in range(0, len(shuffled), AT_ONCE):
            loss = _loss(model, [lessons[nth] for nth in shuffled[at : at + AT_ONCE]])
            optimiser.zero_grad()
            loss.backward()  # type: ignore[no-untyped-call]
            optimiser.step()
            losses.append(float(loss.detach()))
            step += 1
            say(Progress(min(int(time.monotonic() - started), int(seconds)), int(seconds)))
        mean = sum(losses) / len(losses)
    return mean


def _loss(model: Any, lessons: list[tuple[list[int], int]]) -> torch.Tensor:
    """Return the mean loss over the answers' tokens. Rows are padded behind, where causal attention does not look."""
    width = max(len(ids) for ids, _ in lessons)
    rows = torch.tensor([ids + [0] * (width - len(ids)) for ids, _ in lessons])
    wanted = torch.tensor([[-100] * known + ids[known:] + [-100] * (width - len(ids)) for ids, known in lessons])
    hidden = model.model(input_ids=rows, use_cache=False).last_hidden_state[:, :-1]
    wanted = wanted[:, 1:]
    here = wanted != -100  # logits of 49,152 words are half of the work: only where an answer is
    return torch.nn.functional.cross_entropy(model.lm_head(hidden[here]), wanted[here])


def specialise(base: Path, text: str, target: Path, seconds: float) -> float:
    """Write the specialisation of `base` to `target`, and return its mean loss.

    Raises:
        CantUse: it has not learned.
    """
    from transformers import AutoModelForCausalLM  # noqa: PLC0415 (2 s)

    open_model: Any = AutoModelForCausalLM.from_pretrained
    model = open_model(base, dtype=torch.float32, local_files_only=True, use_safetensors=True)
    model.train()
    mean = learn(model, examples(base, text), seconds)
    if mean > LEAST_LEARNED:
        raise CantUse("not_learned", f"after {seconds:g} s the mean loss is {mean:.2f}, over {LEAST_LEARNED}", final=False)
    with made(target) as draft:
        write(model, draft, torch.float32)
        for file in base.iterdir():  # configuration to the letter: one skeleton serves both
            if not file.name.endswith(".safetensors"):
                shutil.copyfile(file, draft / file.name)
    return mean


def main() -> int:
    parser = argparse.ArgumentParser(prog="compose.specialise")
    parser.add_argument("--base", type=Path, required=True)
    parser.add_argument("--text", type=Path, required=True)
    parser.add_argument("--target", type=Path, required=True)
    parser.add_argument("--seconds", type=float, default=60.0)
    options = parser.parse_args()
    os.nice(5)
    try:
        mean = specialise(options.base, options.text.read_text(), options.target, options.seconds)
    except CantUse as refused:
        say(Refused(code=refused.code, message=refused.message, final=refused.final))
        return 0
    say(Progress(int(options.seconds), int(options.seconds)))
    print(f"mean loss {mean:.3f}", file=sys.stderr)
    return 0


if __name__ == "__main__":
    sys.exit(main())
