"""`bench`: figures of this machine, each beside its yardstick. No plane is needed, none is touched."""

from typing import Final

from compose.cli.commands import Commands

BENCHES: Final = {
    "ladder": ("compose.bench.ladder", "How long every way up to a first answer takes, and every way down."),
    "swap": ("compose.bench.swap", "What it costs to swap a model in and out, step by step."),
    "move": ("compose.bench.move", "What it costs to take a live engine from one GPU to another."),
}
"""Name -> (module that has a command of that name, what it says in the list)."""

bench = Commands("bench", BENCHES, help="Measure this machine: figures beside their yardsticks.")
