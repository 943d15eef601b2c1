"""The engine's process: `python -m worker.engines.process --instance-dir D --engine E --source S --arguments JSON`.

One thread, one loop: orders of the holder, traffic with the frontend, a step of the engine, and again. The process
listens on nothing. It ends when it is told to, or when its holder (its parent) is dead.
"""

import argparse
import os
import selectors
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Final, assert_never

import msgspec

from worker import tether
from worker.engines.interface import Engine, EngineFault
from worker.engines.kinds import make
from worker.engines.link import RETRY_S, Link
from worker.engines.messages import (
    Abort,
    Ack,
    Attach,
    Check,
    Checked,
    ControlCommand,
    ControlReply,
    Detach,
    Drain,
    Fault,
    FrontendToEngine,
    Health,
    Moved,
    Park,
    Shutdown,
    Sleep,
    Stage,
    Submit,
    Wake,
)  # fmt: skip
from worker.engines.outbox import Outbox
from worker.engines.parking import await_release, forget, leave_streams, take_streams
from worker.engines.wire import decoder

PARENT_S: Final = 0.5
"""How often it looks whether its parent is still there, when nothing else wakes it."""

HOLDER_S: Final = 10.0
"""A living holder takes a connection at once. Without one for so long there is none, whatever the parent's pid says."""


class Process:
    """The loop. `parent` is the holder's pid."""

    def __init__(self, instance: Path, engine: Engine, parent: int) -> None:
        self._engine, self._parent = engine, parent
        self._selector = selectors.DefaultSelector()
        self._control: Link[ControlCommand] = Link(instance / "control.sock", decoder(ControlCommand), self._selector)
        self._tokens: Link[FrontendToEngine] = Link(instance / "tokens.sock", decoder(FrontendToEngine), self._selector)
        self._outbox = Outbox()
        self._drain_until: float | None = None
        self._drain_from = 0.0
        self._step_at: float | None = None
        self._ended = False
        self._held_at = time.monotonic()
        self._park_in: Path | None = None

    def end(self) -> None:
        self._ended = True

    def run(self) -> None:
        """Work until the end."""
        while not self._ended:
            self._control.connect()
            if self._tokens.connect():
                for message in self._outbox.greeting(os.getpid()):
                    self._tokens.send(message)
            ready = [key.data for key, _ in self._selector.select(self._timeout_s())]
            if self._control in ready:
                self._hear_holder()
            if self._tokens in ready:
                self._hear_frontend()
            self._step()
            self._settle_drain()
            self._tokens.flush()
            self._control.flush()
            if self._park_in is not None:
                self._park(self._park_in)
            self._look_for_holder()

    def _look_for_holder(self) -> None:
        if self._control.up:
            self._held_at = time.monotonic()
        elif os.getppid() != self._parent or time.monotonic() - self._held_at > HOLDER_S:
            self._ended = True

    def _timeout_s(self) -> float:
        now = time.monotonic()
        waits = [PARENT_S if self._control.up and self._tokens.up else RETRY_S]
        if self._step_at is not None:
            waits.append(self._step_at - now)
        if self._drain_until is not None:
            waits.append(self._drain_until - now)
        return max(0.0, min(waits))

    def _hear_holder(self) -> None:
        for command in self._control.receive():
            started = time.monotonic()
            reply: ControlReply | None
            try:
                reply = self._obey(command)
            except EngineFault as fault:
                reply = Fault(code=fault.code, message=fault.message, fatal=fault.fatal)
                self._ended = self._ended or fault.fatal
            if reply is not None:
                if not isinstance(reply, Checked | Fault):
                    reply = msgspec.structs.replace(reply, took_ms=(time.monotonic() - started) * 1000)
                self._control.send(reply)

    def _obey(self, command: ControlCommand) -> ControlReply | None:
        """Carry out one order; None: it is answered later."""
        match command:
            case Attach(pool_socket=pool_socket, weight_set=weight_set):
                self._engine.attach(pool_socket, weight_set)
            case Detach():
                self._engine.detach()
            case Wake(model=model):
                self._engine.wake(model)
            case Sleep():
                self._engine.sleep()
            case Drain(deadline_ms=deadline_ms):
                self._drain_from = time.monotonic()
                self._drain_until = self._drain_from + deadline_ms / 1000
                return None
            case Stage(pool_socket=pool_socket, source=source, form=form):
                return self._engine.stage(pool_socket, source, form)
            case Check(prompt=prompt, tokens=tokens):
                return Checked(ids=self._engine.check(prompt, tokens))
            case Health():
                pass
            case Park(place=place):
                self._engine.scrub()
                self._outbox.clear()
                self._park_in = Path(place)
            case Moved(device=device):
                self._engine.moved(device)
            case Shutdown():
                self._ended = True
            case _:
                assert_never(command)
        return self._engine.state()

    def _park(self, place: Path) -> None:
        """Let go of everything that belongs to this instance; come back as the engine of the one that the release names."""
        self._park_in = self._drain_until = self._step_at = None
        self._tokens.move(place / "nowhere")
        leave_streams()
        forget()
        self._control.move(place / "nowhere")  # last: its end tells the holder that this process may be written to disk
        if (instance := await_release(place, lambda: self._ended)) is None:
            self._ended = True
            return
        self._parent, self._held_at = os.getppid(), time.monotonic()
        tether.die_with(self._parent)
        take_streams(instance / "engine.log")
        self._engine.revived()
        self._control.move(instance / "control.sock")
        self._tokens.move(instance / "tokens.sock")

    def _settle_drain(self) -> None:
        if self._drain_until is None:
            return
        if running := self._engine.running():
            if time.monotonic() < self._drain_until:
                return
            waited_ms = round((self._drain_until - self._drain_from) * 1000)
            self._control.send(Fault(code="drain_timeout", message=f"{running} requests still run after {waited_ms} ms"))
        else:
            took_ms = (time.monotonic() - self._drain_from) * 1000
            self._control.send(msgspec.structs.replace(self._engine.state(), took_ms=took_ms))
        self._drain_until = None

    def _hear_frontend(self) -> None:
        for message in self._tokens.receive():
            match message:
                case Submit(request=request, prompt=prompt, sampling=sampling):
                    if request in self._outbox:
                        continue  # sent again after a reconnection
                    self._outbox.open(request)
                    try:
                        self._engine.submit(request, prompt, sampling)
                        self._step_at = 0.0
                    except EngineFault as fault:
                        self._ended = self._ended or fault.fatal
                        self._tokens.send(self._outbox.end(request, "failed", f"{fault.code}: {fault.message}"))
                case Abort(request=request):
                    self._engine.abort(request)
                    self._tokens.send(self._outbox.end(request, "aborted"))
                case Ack():
                    self._outbox.acknowledge(message)
                case _:
                    assert_never(message)

    def _step(self) -> None:
        if self._step_at is None or time.monotonic() < self._step_at:
            return
        stepped = self._engine.step()
        for message in self._outbox.add(stepped.outputs):
            self._tokens.send(message)
        self._step_at = None if stepped.wait_s is None else time.monotonic() + stepped.wait_s


def main(argv: list[str] | None = None, started: Callable[[], None] = lambda: None) -> int:
    parent = os.getppid()
    parser = argparse.ArgumentParser(prog="worker.engines.process")
    parser.add_argument("--instance-dir", type=Path, required=True)
    parser.add_argument("--engine", required=True)
    parser.add_argument("--source", type=Path, required=True)
    parser.add_argument("--arguments", default="{}")
    parser.add_argument("--device", default="", help="UUID of the GPU, for engines on one; a gang's with commas between")
    parser.add_argument("--ranks", type=int, default=1, help="devices of a gang that needs no GPU")
    parser.add_argument("--bare", action="store_true", help="read no weights: those to be attached are in the pool")
    parser.add_argument("--artefacts", type=Path, help="where what a start works out is kept for the next one")
    options = parser.parse_args(argv)
    arguments = msgspec.json.decode(options.arguments)
    engine = make(
        options.engine, options.source, arguments,
        device=options.device, ranks=options.ranks, bare=options.bare, artefacts=options.artefacts,
    )  # fmt: skip
    process = Process(options.instance_dir, engine, parent)
    signal.signal(signal.SIGTERM, lambda *_: process.end())
    signal.signal(signal.SIGINT, lambda *_: process.end())
    started()
    process.run()
    return 0


if __name__ == "__main__":
    sys.exit(main())
