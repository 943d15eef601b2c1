"""The frontend's end of an engine's token wire: listens, submits prompts, collects ids."""

import asyncio
import contextlib
import time
from pathlib import Path
from typing import Any

from compose.bench.load import PROMPT
from worker.engines.messages import Ack, Ended, EngineToFrontend, Sampling, Submit, Tokens
from worker.engines.wire import Frames, decoder, pack

ANSWER_S = 120.0


class TokenPort:
    """One engine at a time; it may come back after having been parked."""

    def __init__(self) -> None:
        self._writer: asyncio.StreamWriter | None = None
        self._there = asyncio.Event()
        self._words: asyncio.Queue[Any] = asyncio.Queue()
        self._number = 0

    async def listen(self, path: Path) -> asyncio.Server:
        path.unlink(missing_ok=True)
        return await asyncio.start_unix_server(self._met, str(path))

    async def _met(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._writer = writer
        self._there.set()
        frames, words = Frames(), decoder(EngineToFrontend)
        with contextlib.suppress(asyncio.CancelledError, OSError):
            while data := await reader.read(1 << 20):
                for body in frames.feed(data):
                    self._words.put_nowait(words.decode(body))
        if self._writer is writer:
            self._there.clear()
        writer.close()

    async def generate(self, tokens: int, prompt: tuple[int, ...] = PROMPT) -> tuple[tuple[int, ...], float]:
        """Greedy ids, and milliseconds until the first of them."""
        async with asyncio.timeout(ANSWER_S):
            await self._there.wait()
            assert self._writer is not None
            self._number += 1
            name, ids, first, begun = f"request-{self._number}", list[int](), 0.0, time.monotonic()
            sampling = Sampling(max_tokens=tokens, temperature=0, ignore_eos=True)
            self._writer.write(pack(Submit(request=name, prompt=prompt, sampling=sampling)))
            while True:
                match await self._words.get():
                    case Tokens(requests=requests, ids=columns) if name in requests:
                        first = first or (time.monotonic() - begun) * 1000
                        ids.extend(columns[requests.index(name)])
                    case Ended(request=request, reason=reason, count=count, message=message) if request == name:
                        if reason != "length":
                            raise RuntimeError(f"{request} ended with {reason}: {message}")
                        self._writer.write(pack(Ack(request=name, count=count, ended=True)))
                        assert len(ids) == tokens, f"{len(ids)} ids of {tokens}"
                        return tuple(ids), first
                    case _:
                        pass
