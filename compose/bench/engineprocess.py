"""One engine process, driven over its two wires the way a holder and a frontend do."""

import os
import socket
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final, NamedTuple

import msgspec

from compose.bench.load import PROMPT
from worker.engines.messages import (
    Ack,
    Connected,
    ControlCommand,
    ControlReply,
    Ended,
    EngineToFrontend,
    Fault,
    Sampling,
    Submit,
    Tokens,
)
from worker.engines.wire import Frames, decoder, pack, receive, send

START_S: Final = 300.0
ANSWER_S: Final = 180.0


class EngineFailed(Exception):
    """It did not start, went away, or answered with a fault; the message has the end of its log."""


class Generated(NamedTuple):
    ids: tuple[int, ...]
    first_ms: float
    whole_ms: float


class EngineProcess:
    """`device`: a GPU's UUID, or empty. `ready_s`: from the start of the process to its first word."""

    def __init__(
        self,
        directory: Path,
        engine: str,
        source: Path,
        device: str,
        arguments: dict[str, Any],
        *,
        bare: bool = False,
        artefacts: Path | None = None,
    ) -> None:
        directory.mkdir(parents=True, exist_ok=True)
        self.log = directory / "engine.log"
        listeners = [_listener(directory / f"{name}.sock") for name in ("control", "tokens")]
        argv = [sys.executable, "-m", "worker.engines.process", "--instance-dir", str(directory), "--engine", engine]
        argv += ["--source", str(source), "--arguments", msgspec.json.encode(arguments).decode()]
        kept = ["--artefacts", str(artefacts)] if artefacts else []
        begun = time.monotonic()
        with self.log.open("wb") as log:
            self.process = subprocess.Popen(
                argv + ["--device", device] * bool(device) + ["--bare"] * bare + kept,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
            )
        self._sockets: list[socket.socket] = []
        try:
            for listener in listeners:
                self._sockets.append(self._accept(listener))
        except BaseException:
            self.end()
            raise
        finally:
            for listener in listeners:
                listener.close()
        self.ready_s = time.monotonic() - begun
        self._control, self._tokens = self._sockets
        self._replies, self._words = decoder(ControlReply), decoder(EngineToFrontend)
        self._frames, self._number = Frames(), 0

    def _accept(self, listener: socket.socket) -> socket.socket:
        ends = time.monotonic() + START_S
        while True:
            try:
                return listener.accept()[0]
            except TimeoutError:
                if self.process.poll() is not None or time.monotonic() > ends:
                    raise EngineFailed(f"the engine did not start: {self.said()}") from None

    def said(self) -> str:
        """The end of its log."""
        return self.log.read_text(encoding="utf-8", errors="replace")[-6000:]

    def tell(self, command: ControlCommand) -> Any:
        """Its reply. Raises EngineFailed."""
        self._control.settimeout(ANSWER_S)
        try:
            send(self._control, command)
            reply = receive(self._control, self._replies)
        except Exception as error:
            raise EngineFailed(f"no answer to {type(command).__name__}: {error!r}; {self.said()}") from error
        if isinstance(reply, Fault):
            raise EngineFailed(f"{reply.code}: {reply.message}")
        return reply

    def timed(self, command: ControlCommand) -> tuple[Any, float]:
        """The reply, and milliseconds as its caller sees them."""
        begun = time.monotonic()
        reply = self.tell(command)
        return reply, (time.monotonic() - begun) * 1000

    def generate(self, tokens: int, prompt: tuple[int, ...] = PROMPT) -> Generated:
        """Greedily, whatever ends a text."""
        return self.generate_all([prompt], tokens)[0]

    def generate_all(self, prompts: Sequence[tuple[int, ...]], tokens: int) -> list[Generated]:
        """All at once. Raises EngineFailed."""
        begun = time.monotonic()
        names = [f"request-{self._number + nth}" for nth in range(len(prompts))]
        self._number += len(prompts)
        sampling = Sampling(max_tokens=tokens, temperature=0, ignore_eos=True)
        # In one go: of small messages a socket with a deadline takes some forty until its other end has read them, and an
        # engine reads once a step.
        submits = (Submit(request=name, prompt=prompt, sampling=sampling) for name, prompt in zip(names, prompts, strict=True))
        self._tokens.sendall(b"".join(map(pack, submits)))
        ids: dict[str, list[int]] = {name: [] for name in names}
        first: dict[str, float] = {}
        ended: dict[str, float] = {}
        while len(ended) < len(names):
            for word in self._heard():
                match word:
                    case Tokens():
                        now = (time.monotonic() - begun) * 1000
                        for request, more in zip(word.requests, word.ids, strict=True):
                            first.setdefault(request, now)
                            ids[request].extend(more)
                    case Ended(request=request, reason=reason, count=count, message=message):
                        if reason != "length":
                            raise EngineFailed(f"{request} ended with {reason}: {message}")
                        ended[request] = (time.monotonic() - begun) * 1000
                        send(self._tokens, Ack(request=request, count=count, ended=True))
                    case Connected():
                        pass
        return [Generated(tuple(ids[name]), first[name], ended[name]) for name in names]

    def _heard(self) -> list[Any]:
        self._tokens.settimeout(ANSWER_S)
        try:
            data = self._tokens.recv(1 << 20)
        except OSError as error:
            raise EngineFailed(f"no tokens: {error!r}; {self.said()}") from error
        if not data:
            raise EngineFailed(f"the engine went away: {self.said()}")
        return [self._words.decode(body) for body in self._frames.feed(data)]

    def end(self) -> None:
        """Twice is fine."""
        for sock in self._sockets:
            sock.close()
        self.process.terminate()
        try:
            self.process.wait(20)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait(20)


def _listener(path: Path) -> socket.socket:
    path.unlink(missing_ok=True)
    listener = socket.socket(socket.AF_UNIX)
    listener.bind(os.fspath(path))
    listener.listen(1)
    listener.settimeout(0.5)
    return listener
