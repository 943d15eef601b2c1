"""One engine process, driven over its two wires the way a holder and a frontend do."""

import os
import socket
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import msgspec

from worker.engines.messages import (
    Ack,
    ControlCommand,
    ControlReply,
    Ended,
    EngineToFrontend,
    Fault,
    Sampling,
    Submit,
    Tokens,
)
from worker.engines.wire import Frames, decoder, receive, send

START_S = 240.0
PROMPT = tuple(range(10, 42))


class EngineProcess:
    """`ready_s`: from the start of the process to its first word."""

    def __init__(self, directory: Path, source: Path, device: str, arguments: dict[str, Any], *, bare: bool = False) -> None:
        directory.mkdir(parents=True, exist_ok=True)
        listeners = {}
        for name in ("control", "tokens"):
            (directory / f"{name}.sock").unlink(missing_ok=True)
            listeners[name] = socket.socket(socket.AF_UNIX)
            listeners[name].bind(str(directory / f"{name}.sock"))
            listeners[name].listen(1)
            listeners[name].settimeout(1.0)
        self.log = directory / "engine.log"
        begun = time.monotonic()
        with self.log.open("wb") as log:
            argv = [sys.executable, "-m", "worker.engines.process", "--instance-dir", str(directory), "--engine", "vllm"]
            argv += ["--source", str(source), "--arguments", msgspec.json.encode(arguments).decode(), "--device", device]
            self.process = subprocess.Popen(argv + ["--bare"] * bare, stdout=log, stderr=log, env=dict(os.environ))
        self._control = self._accept(listeners["control"])
        self._tokens = self._accept(listeners["tokens"])
        self.ready_s = time.monotonic() - begun
        self._replies = decoder(ControlReply)
        self._words = decoder(EngineToFrontend)
        self._frames = Frames()
        self._pending: list[Any] = []
        self._number = 0

    def _accept(self, listener: socket.socket) -> socket.socket:
        ends = time.monotonic() + START_S
        while True:
            try:
                return listener.accept()[0]
            except TimeoutError:
                if self.process.poll() is not None or time.monotonic() > ends:
                    raise RuntimeError(f"the engine did not start: {self.log.read_text()[-6000:]}") from None

    def tell(self, command: ControlCommand, deadline_s: float = 120.0) -> Any:
        """Its reply. Raises RuntimeError for a fault."""
        self._control.settimeout(deadline_s)
        send(self._control, command)
        reply = receive(self._control, self._replies)
        if isinstance(reply, Fault):
            raise RuntimeError(f"{reply.code}: {reply.message}")
        return reply

    def timed(self, command: ControlCommand) -> tuple[Any, float]:
        """The reply, and milliseconds as its caller sees them."""
        begun = time.monotonic()
        reply = self.tell(command)
        return reply, (time.monotonic() - begun) * 1000

    def generate(self, tokens: int, prompt: tuple[int, ...] = PROMPT) -> tuple[tuple[int, ...], float, float]:
        """Greedy ids, milliseconds to the first, milliseconds in all."""
        ((ids, first, whole),) = self.generate_all([prompt], tokens)
        return ids, first, whole

    def generate_all(self, prompts: list[tuple[int, ...]], tokens: int) -> list[tuple[tuple[int, ...], float, float]]:
        begun = time.monotonic()
        names = []
        for prompt in prompts:
            self._number += 1
            names.append(f"request-{self._number}")
            send(
                self._tokens,
                Submit(
                    request=names[-1], prompt=prompt,
                    sampling=Sampling(max_tokens=tokens, temperature=0, ignore_eos=True),
                ),
            )  # fmt: skip
        ids: dict[str, list[int]] = {name: [] for name in names}
        first: dict[str, float] = {}
        ended: dict[str, float] = {}
        while len(ended) < len(names):
            match self._next():
                case Tokens(request=request, ids=more) if request in ids:
                    first.setdefault(request, (time.monotonic() - begun) * 1000)
                    ids[request].extend(more)
                case Ended(request=request, reason=reason, count=count, message=message):
                    if reason != "length":
                        raise RuntimeError(f"{request} ended with {reason}: {message}")
                    ended[request] = (time.monotonic() - begun) * 1000
                    send(self._tokens, Ack(request=request, count=count, ended=True))
                case _:
                    pass
        return [(tuple(ids[name]), first[name], ended[name]) for name in names]

    def _next(self) -> Any:
        self._tokens.settimeout(120.0)
        while not self._pending:
            data = self._tokens.recv(1 << 20)
            if not data:
                raise RuntimeError(f"the engine went away: {self.log.read_text()[-6000:]}")
            self._pending = [self._words.decode(body) for body in self._frames.feed(data)]
        return self._pending.pop(0)

    def end(self) -> None:
        self.process.terminate()
        try:
            self.process.wait(20)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait(20)
