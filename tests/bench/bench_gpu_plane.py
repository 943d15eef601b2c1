"""A whole plane on one GPU: two siblings and a small model whose slots are more than it has, asked over REST while they swap.

`python -m tests.bench.bench_gpu_plane --shape 8b --small 1.5b --work DIR --json FILE [--requests 200]`

Every request must end; each greedy answer must be a fresh vLLM's on that model, one request at a time (each engine has one at a
time here, too: in a batch bf16 breaks ties another way); nothing may fail; at the end the plane's ledger must be the driver's.
`--standin`: on a played GPU with tiny models, to try this program itself.
"""

import argparse
import asyncio
import json
import os
import random
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path
from typing import Any

import asyncpg
import httpx
import msgspec

from controlplane.bus import Bus
from controlplane.envelope import Recorded
from controlplane.fleet import Fleet
from controlplane.log.postgres import COLUMNS, recorded
from controlplane.parties import DECIDER
from controlplane.rungs import Rung
from controlplane.subjects import NodeBeat
from tests.planeprocesses import PlaneProcesses

TOKENS = 24
PROMPTS = 6
"""Different ones of each model; answers come round again after swaps."""
BESIDE = 2
"""Callers, each with one request at a time: with one for each model, those that are up would be through first."""
SWAP_S = 240.0
"""Of a request that waits for its model, behind the cold starts of the others."""
SLACK_BYTES = 64 << 20
"""Between what a sleeper was measured to use when it fell asleep and what it uses at the end."""
BEGUN = time.monotonic()


def say(*words: object) -> None:
    print(f"[{time.monotonic() - BEGUN:6.1f}]", *words, flush=True)


# ---- models -------------------------------------------------------------------------------------------------------


def made(work: Path, shape: str, name: str, seed: int) -> Path:
    """A checkpoint with random weights and a tokenizer that loses nothing: an answer's text tells its ids."""
    from compose.bench.checkpoints import make

    directory = make(work / name, shape, seed)
    config = json.loads((directory / "config.json").read_text())
    end = int(config["vocab_size"]) - 1
    (directory / "config.json").write_text(json.dumps(config | {"eos_token_id": end}))
    (directory / "generation_config.json").write_text(json.dumps({"eos_token_id": end}))
    wide_tokenizer(directory, end)
    return directory


def wide_tokenizer(directory: Path, end: int) -> None:
    """Ids 0 to 255 are bytes, what is above is a word of its own that no text becomes."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers

    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {letter: number for number, letter in enumerate(letters)}
    vocabulary |= {f"Ġ{number}": number for number in range(len(letters), end)} | {"<|end|>": end}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(["<|end|>"])
    tokenizer.save(str(directory / "tokenizer.json"))
    template = "{% for m in messages %}{{ m['role'] }}: {{ m['content'] }}\n{% endfor %}assistant: "
    (directory / "tokenizer_config.json").write_text(json.dumps({"eos_token": "<|end|>", "chat_template": template}))


def prompts_of(model: str) -> list[str]:
    return [f"{model} was asked, for the {number}th time, what follows from {number * 37}: " for number in range(PROMPTS)]


def settings(sources: dict[str, Path], shares: dict[str, str], arguments: dict[str, Any], pool_bytes: str) -> str:
    inline = ", ".join(f"{key} = {json.dumps(value)}" for key, value in arguments.items())
    tables = [
        f'[[model]]\nname = "{name}"\nsource = "{source}"\nengine = "vllm"\nshare = "{shares[name]}"\n'
        f'idle = {{ sleep = "never", cold = "never" }}\narguments = {{ {inline} }}\n'
        for name, source in sources.items()
    ]
    return f'[node]\npool_bytes = "{pool_bytes}"\n\n' + "\n".join(tables)


def fresh(sources: dict[str, Path], work: Path, arguments: dict[str, Any], *, deadline_s: float) -> dict[str, list[str]]:
    """Answers of a fresh vLLM of each model, all at once on one GPU."""
    from tokenizers import Tokenizer

    running = {}
    for name, source in sources.items():
        tokenizer = Tokenizer.from_file(str(source / "tokenizer.json"))
        prompts = work / f"{name}.prompts.json"
        prompts.write_text(json.dumps([tokenizer.encode(text).ids for text in prompts_of(name)]))
        argv = [sys.executable, "-m", "tests.bench.freshanswers", str(source), str(prompts), str(work / f"{name}.json")]
        log = (work / f"{name}.fresh.log").open("wb")
        running[name] = subprocess.Popen([*argv, json.dumps(arguments), str(TOKENS)], stdout=log, stderr=log)
    answers = {}
    for name, process in running.items():
        if process.wait(deadline_s):
            raise SystemExit(f"{name}: {(work / f'{name}.fresh.log').read_text()[-2000:]}")
        tokenizer = Tokenizer.from_file(str(sources[name] / "tokenizer.json"))
        ids = json.loads((work / f"{name}.json").read_text())
        answers[name] = [str(tokenizer.decode(one, skip_special_tokens=True)) for one in ids]
    return answers


# ---- the plane ----------------------------------------------------------------------------------------------------


class Asked:
    """The plane over REST, and what it said."""

    def __init__(self, plane: PlaneProcesses, client: httpx.AsyncClient) -> None:
        self.plane, self._client = plane, client
        self.ended: list[dict[str, Any]] = []

    async def ask(self, model: str, number: int) -> str | None:
        begun = time.monotonic()
        body = {"model": model, "prompt": prompts_of(model)[number], "max_tokens": TOKENS, "temperature": 0}
        row: dict[str, Any] = {"model": model, "prompt": number}
        try:
            answer = await self._client.post("/v1/completions", json=body, timeout=SWAP_S)
            row |= {"status": answer.status_code}
            if answer.status_code == 200:
                row["text"] = answer.json()["choices"][0]["text"]
            else:
                row["error"] = answer.text[:500]
        except httpx.HTTPError as error:
            row |= {"status": 0, "error": repr(error)}
        row["took_s"] = round(time.monotonic() - begun, 3)
        self.ended.append(row)
        if row["status"] != 200:
            say("not answered:", row)
        return row.get("text")

    async def mixed(self, models: list[str], requests: int) -> None:
        """In an order of chance, a few beside each other, but no two of one model."""
        chance = random.Random(8)
        free = {model: asyncio.Lock() for model in models}
        drawn = iter([(chance.choice(models), chance.randrange(PROMPTS)) for _ in range(requests)])

        async def caller() -> None:
            for model, number in drawn:
                async with free[model]:
                    await self.ask(model, number)

        await asyncio.gather(*(caller() for _ in range(BESIDE)))


async def fleet_of(plane: PlaneProcesses) -> Fleet:
    bus = await Bus.connect(plane.plane, "bench", DECIDER)
    try:
        return await bus.state(timeout_s=30)
    finally:
        await bus.close()


async def beat_of(plane: PlaneProcesses, after_s: float = 2.5) -> NodeBeat:
    bus = await Bus.connect(plane.plane, "bench", DECIDER)
    heard: list[NodeBeat] = []

    async def hear(message: Any) -> None:
        heard.append(msgspec.json.decode(message.data, type=NodeBeat))

    try:
        await bus.nc.subscribe("beat.node.*", cb=hear)
        await asyncio.sleep(after_s)
    finally:
        await bus.close()
    return heard[-1]


async def events_of(plane: PlaneProcesses) -> list[Recorded]:
    connection = await asyncpg.connect(plane.plane.postgres_url)
    try:
        rows = await connection.fetch(f"select {COLUMNS} from event order by position")
    finally:
        await connection.close()
    return [recorded(row) for row in rows]


async def measured(plane: PlaneProcesses, models: list[str], requests: int, known: dict[str, list[str]]) -> dict[str, Any]:
    headers = {"authorization": f"Bearer {plane.token}"}
    async with httpx.AsyncClient(base_url=plane.url, headers=headers, limits=httpx.Limits(max_connections=100)) as client:
        asked = Asked(plane, client)
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
        await _asleep(plane)
        return await _figures(plane, asked, known, took_s)


async def _asleep(plane: PlaneProcesses) -> None:
    until = time.monotonic() + 60
    while not all(one.rung is Rung.SLEEP for one in (await fleet_of(plane)).instances.values()):
        if time.monotonic() > until:
            say("not all asleep")
            return
        await asyncio.sleep(0.2)


async def _figures(plane: PlaneProcesses, asked: Asked, known: dict[str, list[str]], took_s: float) -> dict[str, Any]:
    fleet, beat, events = await fleet_of(plane), await beat_of(plane), await events_of(plane)
    unlike = [row for row in asked.ended if row["status"] == 200 and row["text"] != known[row["model"]][row["prompt"]]]
    ups: list[Any] = [one.event for one in events if one.type == "InstanceUp"]
    asleep = sum(one.bytes_used for one in fleet.instances.values() if one.rung is Rung.SLEEP)
    owners = {device: msgspec.to_builtins(owner) for device, owner in beat.owners.items()}
    skeletons = sum(owner.skeletons for owner in beat.owners.values())
    waits = sorted(row["took_s"] for row in asked.ended)
    figures = {
        "requests": len(asked.ended), "ended_200": sum(row["status"] == 200 for row in asked.ended), "took_s": round(took_s, 1),
        "other_ends": [row for row in asked.ended if row["status"] != 200][:10],
        "unlike": [row | {"known": known[row["model"]][row["prompt"]]} for row in unlike][:10], "unlike_count": len(unlike),
        "failures": [msgspec.to_builtins(one.event) for one in events if one.type in ("InstanceFailed", "ModelSetBack")],
        "events": Counter(one.type for one in events),
        "climbs": [{"model": up.model, "took_ms": up.took_ms, "bytes_mapped": up.bytes_mapped, "bytes_used": up.bytes_used,
                    "check": up.check, "steps": {step.name: round(step.took_ms, 1) for step in up.steps}} for up in ups],
        "wait_s": {"median": waits[len(waits) // 2], "p95": waits[len(waits) * 95 // 100], "most": waits[-1]},
        "fold_asleep_bytes": asleep, "driver_skeleton_bytes": skeletons, "owners": owners, "device_bytes": beat.device_bytes,
        "weights": {one.weight_set: one.size_bytes for one in fleet.weights.values()},
        "instances": {name: {"rung": str(one.rung), "bytes_used": one.bytes_used} for name, one in fleet.instances.items()},
    }  # fmt: skip
    clean = not any(o.kv or o.own_weights or o.pool_sets or o.foreign for o in beat.owners.values())
    figures["good"] = {
        "every request ended": len(asked.ended) == figures["ended_200"],
        "every answer is a fresh one's": not unlike,
        "nothing failed": not figures["failures"],
        "the fold is the driver's": clean and abs(asleep - skeletons) <= SLACK_BYTES,
    }
    return figures


def main() -> int:
    parser = argparse.ArgumentParser(prog="tests.bench.bench_gpu_plane")
    parser.add_argument("--shape", default="8b")
    parser.add_argument("--small", default="1.5b")
    parser.add_argument("--work", type=Path, required=True)
    parser.add_argument("--json", type=Path, required=True)
    parser.add_argument("--requests", type=int, default=200)
    parser.add_argument("--pool", default="40GiB")
    parser.add_argument("--kv", default="4GiB")
    parser.add_argument("--shares", default="1/2,1/2,1/8", help="of a, b and small")
    parser.add_argument("--no-fresh", action="store_true", help="compare with the plane's own first answers only")
    parser.add_argument("--standin", action="store_true")
    parser.add_argument("--logs", type=Path, help="where the ends of the plane's logs go")
    options = parser.parse_args()
    options.work.mkdir(parents=True, exist_ok=True)
    arguments: dict[str, Any] = {"kv_bytes": options.kv, "max_model_len": 1024, "max_num_seqs": 16, "prefix_caching": False}
    environment: dict[str, str] = {}
    if options.standin:
        sources, environment = _played(options.work)
        arguments |= {"kv_bytes": "16MiB", "max_model_len": 256}
    else:
        shapes = {"a": (options.shape, 1), "b": (options.shape, 2), "small": (options.small, 3)}
        sources = {name: made(options.work, shape, name, seed) for name, (shape, seed) in shapes.items()}
    say("models are made")
    known = {}
    if not (options.no_fresh or options.standin):
        from controlplane.arguments import check

        known = fresh(sources, options.work, dict(check("vllm", arguments)), deadline_s=300)
        say("fresh answers are there")
    shares = dict(zip(sources, options.shares.split(","), strict=True))
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
            options.logs.write_text(_words(plane))
        plane.finish()
    say(json.dumps(figures["good"]))
    return 0 if all(figures["good"].values()) else 1


def _words(plane: PlaneProcesses) -> str:
    files = [*sorted((plane.data / "logs").rglob("*.log")), *sorted((plane.data / "run" / "inst").rglob("*.log"))]
    return "\n".join(f"--- {file.relative_to(plane.data)}\n{file.read_text(errors='replace')[-6000:]}" for file in files)


def _played(work: Path) -> tuple[dict[str, Path], dict[str, str]]:
    from tests.standin.install import install
    from tests.tinymodels import tiny

    kinds = {"a": ("llama", 1), "b": ("llama", 2), "small": ("qwen3", 3)}
    sources = {name: work / name for name in kinds}
    for name, (kind, seed) in kinds.items():
        if not sources[name].exists():
            tiny(sources[name], kind, seed)
    return sources, install(work / f"machine-{os.getpid()}", {"GPU-00000000-0000-0000-0000-000000000001": 128 << 20})


if __name__ == "__main__":
    sys.exit(main())
