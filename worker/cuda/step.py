"""One step process: `python -m worker.cuda.step (--pid N ... | --await) [--map OLD=NEW ...] [--twin DIR [--fault F]] VERB ...`.

Verbs are carried out in their order, for every pid before the next verb: a driver call that hangs can't be cancelled, only the
process that made it can be killed. So the worker makes none itself. It prints one JSON line a call, stops at the first failure
(exit status 1), and dies with the worker. With `--await` it gets all ready, says so, and begins when a line with the
pids comes; at the end of its input it ends and has done nothing.
"""

import argparse
import os
import sys
import time
from pathlib import Path
from typing import Final

import msgspec

from worker import tether
from worker.cuda.surgeon import CudaRefused, CudaState, Surgeon

VERBS: Final = ("lock", "checkpoint", "restore", "unlock", "state")
LOCK_MS: Final = 5_000
"""Drained engines lock in a millisecond; what still runs on the GPU then is a step at the most."""


class Said(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """One line of a step process. `code`: it failed. `verb` `ready`: it waits for its line."""

    verb: str
    pid: int = 0
    took_ms: float = 0.0
    state: CudaState | None = None
    """Answer to `state`."""
    code: str = ""
    message: str = ""


def carry_out(surgeon: Surgeon, verb: str, pid: int, devices: dict[str, str]) -> Said:
    """One call. Raises CudaRefused."""
    began, state = time.monotonic(), None
    match verb:
        case "lock":
            surgeon.lock(pid, LOCK_MS)
        case "checkpoint":
            surgeon.checkpoint(pid)
        case "restore":
            surgeon.restore(pid, devices)
        case "unlock":
            surgeon.unlock(pid)
        case "state":
            state = surgeon.state(pid)
        case _:
            raise CudaRefused("cuda_invalid", f"no such verb: {verb}")
    return Said(verb=verb, pid=pid, took_ms=round((time.monotonic() - began) * 1000, 3), state=state)


def _surgeon(twin: Path | None, fault: str) -> Surgeon:
    if twin is not None:
        from worker.cuda.twin import Twin  # noqa: PLC0415

        return Twin(twin, fault)
    from worker.cuda.driver import CudaSurgeon  # noqa: PLC0415 (a node without a GPU has no cuda-bindings)

    return CudaSurgeon()


def _say(said: Said) -> None:
    sys.stdout.write(msgspec.json.encode(said).decode() + "\n")
    sys.stdout.flush()


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="worker.cuda.step")
    parser.add_argument("--pid", type=int, action="append", default=[], dest="pids")
    parser.add_argument("--map", action="append", default=[], metavar="OLD=NEW", help="GPU UUIDs, for a restore")
    parser.add_argument("--await", action="store_true", dest="await_line")
    parser.add_argument("--twin", type=Path)
    parser.add_argument("--fault", default="")
    parser.add_argument("verbs", nargs="+", choices=VERBS)
    options = parser.parse_args(argv)
    tether.die_with(os.getppid())
    devices = dict(pair.split("=", 1) for pair in options.map)
    began, verb, pid = time.monotonic(), "ready", 0
    try:
        surgeon = _surgeon(options.twin, options.fault)
        if options.await_line:
            _say(Said(verb="ready", took_ms=round((time.monotonic() - began) * 1000, 3)))
            if not (line := sys.stdin.readline()):
                return 0
            options.pids = [int(word) for word in line.split()]
        for verb in options.verbs:
            for pid in options.pids:
                _say(carry_out(surgeon, verb, pid, devices))
    except CudaRefused as refused:
        _say(Said(verb=verb, pid=pid, code=refused.code, message=refused.message))
        return 1
    except (ImportError, OSError) as error:
        _say(Said(verb=verb, pid=pid, code="cuda_not_supported" if verb == "ready" else "cuda_failed", message=str(error)))
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
