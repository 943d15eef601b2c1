"""A whole plane on one GPU: two siblings and a small model whose slots are more than it has, asked over REST while they swap.

`python -m tests.bench.bench_gpu_plane --shape 8b --small 1.5b --work DIR --json FILE [--requests 200]`

Every request must end; each greedy answer must be a fresh vLLM's on that model, one request at a time (each engine has one at a
time here, too: in a batch bf16 breaks ties another way); nothing may fail; at the end the plane's ledger must be the driver's.
`--standin`: on a played GPU with tiny models, to try this program itself.
"""

import argparse
import asyncio
import json
import sys
import time
from pathlib import Path
from typing import Any

import httpx

from tests.bench.planecallers import Asked
from tests.bench.planefigures import asleep, figures_of, words
from tests.bench.planemodels import PROMPTS, fresh, made_together, played, settings
from tests.planeprocesses import PlaneProcesses

BEGUN = time.monotonic()


def say(*words: object) -> None:
    print(f"[{time.monotonic() - BEGUN:6.1f}]", *words, flush=True)


async def measured(plane: PlaneProcesses, models: list[str], requests: int, known: dict[str, list[str]]) -> dict[str, Any]:
    headers = {"authorization": f"Bearer {plane.token}"}
    async with httpx.AsyncClient(base_url=plane.url, headers=headers, limits=httpx.Limits(max_connections=100)) as client:
        asked = Asked(client, say)
        for model in models:
            text = await asked.ask(model, 0)
            say(model, "answers:", repr((text or "")[:60]), "in", asked.ended[-1]["took_s"], "s")
        if not known:  # nothing to compare with but their own first answers
            known = {model: [await asked.ask(model, number) or "" for number in range(PROMPTS)] for model in models}
        say("first answers are there; now", requests, "mixed")
        begun = time.monotonic()
        await asked.mixed(models, requests)
        took_s = time.monotonic() - begun
        say(requests, "ended in", round(took_s, 1), "s")
        for model in models:
            said = await asyncio.to_thread(plane.cli, "sleep", model)
            say("sleep", model, said.returncode, said.stdout.strip()[-100:], said.stderr.strip()[-200:])
        if not await asleep(plane):
            say("not all asleep")
        return await figures_of(plane, asked.ended, known, took_s)


def main() -> int:
    parser = argparse.ArgumentParser(prog="tests.bench.bench_gpu_plane")
    parser.add_argument("--shape", default="8b")
    parser.add_argument("--small", default="1.5b")
    parser.add_argument("--work", type=Path, required=True)
    parser.add_argument("--json", type=Path, required=True)
    parser.add_argument("--requests", type=int, default=200)
    parser.add_argument("--pool", default="40GiB")
    parser.add_argument("--kv", default="4GiB")
    parser.add_argument("--shares", help="of a, b and small (1/2,1/2,1/8; played 1/2,1/2,1/4)")
    parser.add_argument("--no-fresh", action="store_true", help="compare with the plane's own first answers only")
    parser.add_argument("--standin", action="store_true")
    parser.add_argument("--logs", type=Path, help="where the ends of the plane's logs go")
    options = parser.parse_args()
    options.work.mkdir(parents=True, exist_ok=True)
    arguments: dict[str, Any] = {"kv_bytes": options.kv, "max_model_len": 1024, "max_num_seqs": 16, "prefix_caching": False}
    environment: dict[str, str] = {}
    if options.standin:
        sources, environment = played(options.work)
        arguments |= {"kv_bytes": "16MiB", "max_model_len": 256}
    else:
        shapes = {"a": (options.shape, 1), "b": (options.shape, 2), "small": (options.small, 3)}
        sources = made_together(options.work, shapes)
    say("models are made")
    known = {}
    if not (options.no_fresh or options.standin):
        from controlplane.arguments import check

        known = fresh(sources, options.work, dict(check("vllm", arguments)), deadline_s=300)
        say("fresh answers are there")
    shares = dict(zip(sources, (options.shares or f"1/2,1/2,{'1/4' if options.standin else '1/8'}").split(","), strict=True))
    pool = "256MiB" if options.standin else options.pool
    plane = PlaneProcesses(settings(sources, shares, arguments, pool), environment=environment)
    figures: dict[str, Any] = {}
    try:
        plane.launch()
        plane.wait_ready(120)
        say("up")
        figures = asyncio.run(measured(plane, list(sources), options.requests, known))
    finally:
        options.json.write_text(json.dumps(figures, indent=1))
        if options.logs is not None:
            options.logs.write_text(words(plane))
        plane.finish()
    say(json.dumps(figures["good"]))
    return 0 if all(figures["good"].values()) else 1


if __name__ == "__main__":
    sys.exit(main())
