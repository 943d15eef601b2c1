"""Callers of a plane under test, over REST."""

import asyncio
import random
import time
from collections.abc import Callable
from typing import Any

import httpx

from tests.bench.planemodels import PROMPTS, TOKENS, prompts_of

BESIDE = 2
"""Callers, each with one request at a time: with one for each model, those that are up would be through first."""
SWAP_S = 240.0
"""Of a request that waits for its model, behind the cold starts of the others."""


class Asked:
    """What was asked over REST, and what was said. `say` is told what was not answered."""

    def __init__(self, client: httpx.AsyncClient, say: Callable[..., None]) -> None:
        self._client, self._say = client, say
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
            self._say("not answered:", row)
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
