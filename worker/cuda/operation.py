"""The worker's side of a step process: begin one, let it work, end it when it outlasts its time."""

import asyncio
import contextlib
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Final

import msgspec

from worker.cuda.step import Said
from worker.failure import StepFailed

READY_S: Final = 20.0
"""Python, the driver's library and its start: 0.2 s on one GPU, some seconds with eight on a busy machine."""
STATE_S: Final = 20.0
END_S: Final = 2.0
"""After SIGKILL. One that hangs in the kernel beyond that is left to it: it holds nothing of ours."""


class Theatre(msgspec.Struct, frozen=True):
    """Which surgeon is asked. `twin`: the directory of the driver's twin; None: the driver itself."""

    twin: Path | None = None
    fault: str = ""
    """What the twin is told to do wrong."""

    def argv(self) -> list[str]:
        return ["--twin", str(self.twin), "--fault", self.fault] if self.twin is not None else []


class Operation:
    """One step process on the processes of one instance. Use it once."""

    def __init__(self, process: asyncio.subprocess.Process, verbs: Sequence[str]) -> None:
        self._process, self._verbs = process, verbs

    @property
    def pid(self) -> int:
        return self._process.pid

    @staticmethod
    async def prepare(theatre: Theatre, verbs: Sequence[str], *, devices: Mapping[str, str] | None = None) -> "Operation":
        """Start it and have it get ready, so that only the calls themselves are left. Raises StepFailed (`cuda_not_supported`).

        devices: see `Surgeon.restore`.
        """
        argv = [sys.executable, "-P", "-m", "worker.cuda.step", "--await", *theatre.argv()]
        argv += [text for old, new in (devices or {}).items() for text in ("--map", f"{old}={new}")]
        process = await asyncio.create_subprocess_exec(
            *argv, *verbs, stdin=asyncio.subprocess.PIPE, stdout=asyncio.subprocess.PIPE, start_new_session=True
        )
        operation = Operation(process, verbs)
        try:
            async with asyncio.timeout(READY_S):
                await operation._line()
        except TimeoutError:
            await operation.end()
            raise StepFailed("step_deadline", f"the driver was not ready within {READY_S:g} s") from None
        except BaseException:
            await operation.end()
            raise
        return operation

    async def carry_out(self, pids: Sequence[int], deadline_s: float) -> list[Said]:
        """Let it work on these processes (pids as this process sees them), until its last call has returned. Its own end, with
        the driver's, takes a while more: `end` is the caller's to call, when there is time.

        Raises StepFailed: the driver's code, or `step_deadline`, after which only asking tells the state.
        """
        said: list[Said] = []
        try:
            await self._heard(said, pids, deadline_s)
        except BaseException:
            await self.end()
            raise
        return said

    async def _heard(self, said: list[Said], pids: Sequence[int], deadline_s: float) -> None:
        try:
            async with asyncio.timeout(deadline_s):
                assert self._process.stdin is not None
                self._process.stdin.write((" ".join(map(str, pids)) + "\n").encode())
                await self._process.stdin.drain()
                while len(said) < len(self._verbs) * len(pids):
                    if (line := await self._line()) is None:
                        raise StepFailed("cuda_failed", "the step process ended before its last call")
                    said.append(line)
        except TimeoutError:
            doing = self._verbs[min(len(said) // max(1, len(pids)), len(self._verbs) - 1)]
            raise StepFailed("step_deadline", f"CUDA {doing} did not end within {deadline_s:g} s") from None
        except (BrokenPipeError, ConnectionResetError):
            raise StepFailed("cuda_failed", "the step process ended before it began") from None

    async def end(self) -> None:
        """Kill it if it still runs, and reap it. A readied one that is not used any more does nothing."""
        self.kill()
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(END_S):
                await self._process.wait()

    def kill(self) -> None:
        """Without waiting for its end; the loop reaps it."""
        if self._process.stdin is not None:
            self._process.stdin.close()
        with contextlib.suppress(ProcessLookupError):
            if self._process.returncode is None:
                self._process.kill()

    async def _line(self) -> Said | None:
        assert self._process.stdout is not None
        if not (line := await self._process.stdout.readline()):
            if (status := await self._process.wait()) != 0:
                raise StepFailed("cuda_failed", f"the step process ended with status {status}")
            return None
        said = msgspec.json.decode(line, type=Said)
        if said.code:
            raise StepFailed(said.code, said.message)
        return said


def not_wanted(readying: "asyncio.Task[Operation]") -> None:
    """Let go of a step process that is getting ready, or is ready. Nothing is waited for."""
    readying.cancel()
    readying.add_done_callback(_stood_down)


def _stood_down(readying: "asyncio.Task[Operation]") -> None:
    if not readying.cancelled() and readying.exception() is None:
        readying.result().kill()


async def operate(
    theatre: Theatre, pids: Sequence[int], verbs: Sequence[str], *, deadline_s: float, devices: Mapping[str, str] | None = None
) -> list[Said]:
    """Get ready and do it at once. Raises StepFailed."""
    operation = await Operation.prepare(theatre, verbs, devices=devices)
    said = await operation.carry_out(pids, deadline_s)
    await operation.end()
    return said
