"""`bench`: figures of this machine, each beside its yardstick. No plane is needed, none is touched."""

import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Final

import click

from compose.cli.commands import Commands

BENCHES: Final = {
    "ladder": ("compose.bench.ladder", "How long every way up to a first answer takes, and every way down."),
    "swap": ("compose.bench.swap", "What it costs to swap a model in and out, step by step."),
    "move": ("compose.bench.move", "What it costs to take a live engine from one GPU to another."),
}
"""Name -> (module that has a command of that name, what it says in the list)."""
ENDS: Final = (signal.SIGTERM, signal.SIGHUP)


def _end(number: int, frame: FrameType | None) -> None:
    """As Ctrl-C does: through all that ends engines, pools and planes and removes what was made. Once."""
    for one in ENDS:
        signal.signal(one, signal.SIG_IGN)
    sys.exit(128 + number)


@contextmanager
def _ended_tidily() -> Iterator[None]:
    before = {number: signal.getsignal(number) for number in ENDS}
    for number, handler in before.items():
        if handler is not signal.SIG_IGN:  # as under nohup
            signal.signal(number, _end)
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


@click.pass_context
def _begin(context: click.Context) -> None:
    context.with_resource(_ended_tidily())


bench = Commands("bench", BENCHES, callback=_begin, help="Measure this machine: figures beside their yardsticks.")
