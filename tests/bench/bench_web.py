"""What web adds to a token: on a model that is up, asked through web and asked of its frontend directly.

`python -m tests.bench.bench_web [--calls 200] [--tokens 2000] [--streams 8] [--admissions 1500]`. A whole plane with fake
engines; both sides are asked by one aiohttp client in this process. Yardstick of the first token: the frontend without web.
"""

import argparse
import asyncio
import itertools
import os
import sys
import time
from collections.abc import AsyncIterator
from typing import Any

import aiohttp
import msgspec
import psutil

from controlplane.fleet import Instance
from tests.bench.figures import Table
from tests.plane import NODE, PlaneUnderTest, fake, running

SETTINGS = (
    NODE
    + fake("alpha", tokens_per_s=0, context_tokens=100_000, max_num_seqs=64)
    + fake("paced", tokens_per_s=100, context_tokens=100_000, max_num_seqs=64)
)
_numbers = itertools.count()


class Asker:
    """Asks a plane's web and its frontends over one session."""

    def __init__(self, plane: PlaneUnderTest, session: aiohttp.ClientSession) -> None:
        self._plane, self._session = plane, session
        self._token, self._node_token, self._url = plane.token, plane.plane.node_token, plane.url

    async def web(self, model: str, tokens: int) -> AsyncIterator[float]:
        """Yield the time of each piece of text, through web."""
        body = _body(model, tokens)
        headers = {"authorization": f"Bearer {self._token}"}
        async with self._session.post(f"{self._url}/v1/chat/completions", json=body, headers=headers) as response:
            assert response.status == 200, await response.text()
            async for line in response.content:
                if b'"content":"' in line and b'"content":""' not in line:
                    yield time.perf_counter()
                assert b'"error"' not in line, line

    async def frontend(self, instance: Instance, tokens: int) -> AsyncIterator[float]:
        """Yield the time of each piece of text, from the frontend itself."""
        wish = {
            "request": f"req_{next(_numbers)}", "attempt": 1, "model": instance.model, "grant": instance.grant, "kind": "chat",
            "body": _body(instance.model or "", tokens),
        }  # fmt: skip
        headers = {"authorization": f"Bearer {self._node_token}"}
        url, payload = f"{instance.endpoint}/generate", msgspec.json.encode(wish)
        async with self._session.post(url, data=payload, headers=headers) as response:
            assert response.status == 200, await response.text()
            async for line in response.content:
                if line.startswith(b'{"t":"delta"'):
                    yield time.perf_counter()


def _body(model: str, tokens: int) -> dict[str, Any]:
    limits = {"max_tokens": tokens, "min_tokens": tokens, "ignore_eos": True}
    return {"model": model, "messages": [{"role": "user", "content": "hello"}], "stream": True, **limits}


async def _first(times: AsyncIterator[float]) -> float:
    begun = time.perf_counter()
    first = 0.0
    async for at in times:
        first = first or at - begun
    return first


async def _gaps(times: AsyncIterator[float]) -> list[float]:
    seen = [at async for at in times]
    return [later - sooner for sooner, later in itertools.pairwise(seen)]


async def first_token(asker: Asker, instance: Instance, calls: int, table: Table) -> None:
    direct, through = list[float](), list[float]()
    for _ in range(calls):  # by turns: both see the same machine
        direct.append(await _first(asker.frontend(instance, 4)))
        through.append(await _first(asker.web("alpha", 4)))
    yardstick = table.timed("first token, frontend directly", direct)
    web = table.timed("first token, through web", through)
    table.figure("added by web (p50)", f"{web - yardstick:.3f} ms")
    beside = f"the frontend asked directly {yardstick:.2f} ms, through web {web:.2f} ms"
    table.row("first token added on an `up` model, 1 in flight, p50", "< 5 ms", f"{web - yardstick:.2f} ms", beside)


async def cost(plane: PlaneUnderTest, asker: Asker, instance: Instance, sizes: tuple[int, int], table: Table) -> None:
    streams, tokens = sizes
    processes = {"web": psutil.Process(plane.child("web").pid)}
    processes["frontend"] = psutil.Process(plane.part(instance.instance, "frontend").pid)
    before = {name: _cpu(process) for name, process in processes.items()}
    begun = time.perf_counter()
    await asyncio.gather(*(_gaps(asker.web("paced", tokens)) for _ in range(streams)))
    took = time.perf_counter() - begun
    total = streams * tokens
    used = {name: (_cpu(process) - before[name]) / total * 1e6 for name, process in processes.items()}
    for name, micros in used.items():
        table.figure(f"CPU per token, {name}", f"{micros:.0f} us", "")
    together = f"{sum(used.values()):.0f} us"
    table.figure("CPU per token, together", together, f"{streams} streams of {tokens} paced tokens, {total / took:.0f}/s")
    each = ", ".join(f"{name} {micros:.0f} us" for name, micros in used.items())
    beside = f"{each}; {streams} streams at 100 tokens/s each"
    table.row("CPU per token through web and frontend, paced", "(stated)", together, beside)


async def unpaced(plane: PlaneUnderTest, asker: Asker, instance: Instance, sizes: tuple[int, int], table: Table) -> None:
    streams, tokens = sizes
    web = psutil.Process(plane.child("web").pid)
    frontend = psutil.Process(plane.part(instance.instance, "frontend").pid)
    before, begun = _cpu(web) + _cpu(frontend), time.perf_counter()
    await asyncio.gather(*(_gaps(asker.web("alpha", tokens)) for _ in range(streams)))
    micros = (_cpu(web) + _cpu(frontend) - before) / (streams * tokens) * 1e6
    rate = streams * tokens / (time.perf_counter() - begun)
    table.figure("CPU per token, unpaced, web + frontend", f"{micros:.0f} us", f"{streams} streams, {rate:.0f} tokens/s")


async def gaps(asker: Asker, instance: Instance, sizes: tuple[int, int], table: Table) -> None:
    streams, tokens = sizes
    direct = await asyncio.gather(*(_gaps(asker.frontend(instance, tokens)) for _ in range(streams)))
    through = await asyncio.gather(*(_gaps(asker.web("paced", tokens)) for _ in range(streams)))
    flat = [sorted(itertools.chain(*gaps)) for gaps in (direct, through)]
    table.timed(f"gap between tokens, frontend directly, {streams} streams at 100/s", flat[0])
    table.timed("gap between tokens, through web", flat[1])
    p99 = [each[int(len(each) * 0.99)] * 1000 for each in flat]
    table.figure("p99 gap added by web", f"{p99[1] - p99[0]:.3f} ms", "")
    beside = f"the frontend asked directly {p99[0]:.2f} ms, through web {p99[1]:.2f} ms"
    table.row("p99 gap between tokens added by web", "(stated)", f"{p99[1] - p99[0]:.2f} ms", beside)


async def admissions(asker: Asker, instance: Instance, number: int, table: Table) -> None:
    at_once = asyncio.Semaphore(16)

    async def one() -> None:
        async with at_once:
            await _first(asker.web("alpha", 1))

    begun = time.perf_counter()
    await asyncio.gather(*(one() for _ in range(number)))
    rate = number / (time.perf_counter() - begun)
    table.figure("requests admitted, answered and ended", f"{rate:.0f}/s", "16 in flight, 1 token each")
    alone = await _directly(asker, instance, number)
    beside = f"the frontend alone, without web, log and bus: {alone:.0f}/s; {os.cpu_count()} cores, the asker's share included"
    table.row("whole plane: requests admitted, answered and ended", ">= 300/s", f"{rate:.0f}/s", beside)


async def _directly(asker: Asker, instance: Instance, number: int) -> float:
    at_once = asyncio.Semaphore(16)

    async def one() -> None:
        async with at_once:
            await _first(asker.frontend(instance, 1))

    begun = time.perf_counter()
    await asyncio.gather(*(one() for _ in range(number)))
    return number / (time.perf_counter() - begun)


def _cpu(process: psutil.Process) -> float:
    times = process.cpu_times()
    return times.user + times.system


async def measured(plane: PlaneUnderTest, options: argparse.Namespace) -> Table:
    table = Table("web: what it adds to a token")
    connector = aiohttp.TCPConnector(limit=0)
    async with aiohttp.ClientSession(connector=connector, read_bufsize=1 << 20) as session:
        asker = Asker(plane, session)
        for model in ("alpha", "paced"):
            await _first(asker.web(model, 1))
        fast, paced = await plane.serving("alpha"), await plane.serving("paced")
        for _ in range(20):
            await _first(asker.web("alpha", 4))
        await first_token(asker, fast, options.calls, table)
        await gaps(asker, paced, (options.streams, 300), table)
        await cost(plane, asker, paced, (options.streams, 500), table)
        await unpaced(plane, asker, fast, (options.streams, options.tokens), table)
        await admissions(asker, fast, options.admissions, table)
    table.show()
    return table


def options(*argv: str) -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    parser.add_argument("--calls", type=int, default=200)
    parser.add_argument("--tokens", type=int, default=2000)
    parser.add_argument("--streams", type=int, default=8)
    parser.add_argument("--admissions", type=int, default=1500)
    return parser.parse_args(argv)


async def measure(*argv: str) -> list[Table]:
    with running(SETTINGS) as plane:
        return [await measured(plane, options(*argv))]


if __name__ == "__main__":
    asyncio.run(measure(*sys.argv[1:]))
