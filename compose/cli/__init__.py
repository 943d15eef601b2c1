"""The command line: `enginehouse`. Next to nothing is imported here, so that what `up` needs can start at once."""

import contextlib
import gc
import sys
from collections.abc import Sequence

from compose.nursery import Nursery


def main(argv: Sequence[str] | None = None) -> None:
    """Run the command line and exit. What goes wrong is one sentence on stderr, with what to do; JSON if that was asked for."""
    nursery: Nursery | None = None
    if argv is None and _starts(sys.argv[1:]):
        with contextlib.suppress(OSError):  # then all are started as ever
            nursery = Nursery()
        gc.disable()  # until `up` has been imported
    from compose.cli.commands import run  # noqa: PLC0415

    try:
        run(argv, nursery)
    finally:
        if nursery is not None:
            nursery.close()


def _starts(words: list[str]) -> bool:
    """Whether this is `up`, as far as can be seen without reading the options; to be wrong costs a process for a moment."""
    return "up" in words and not {"-h", "--help"} & set(words)
