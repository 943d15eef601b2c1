"""Identifiers: a prefix that names the kind, then 26 characters that sort by time.

New ids come from the edges (a gateway, the CLI, the desk). Decisions are pure, so the ids they need are
*derived* from the id of the command that they answer: the same command always yields the same ids.
"""

import os
import time
from typing import Final

_ALPHABET: Final = "0123456789ABCDEFGHJKMNPQRSTVWXYZ"  # Crockford's base 32, the one ULIDs use
_PAIRS: Final = [first + second for first in _ALPHABET for second in _ALPHABET]
_SHIFTS: Final = tuple(range(120, -1, -10))

REQUEST: Final = "req"
COMMAND: Final = "cmd"
OPERATION: Final = "op"
INSTANCE: Final = "ins"
GATEWAY: Final = "gw"
INCARNATION: Final = "inc"


def new(prefix: str) -> str:
    """Return a fresh id: `prefix_` and a ULID (48 bits of milliseconds, 80 random bits)."""
    number = (time.time_ns() // 1_000_000) << 80 | int.from_bytes(os.urandom(10))
    return f"{prefix}_{''.join([_PAIRS[(number >> shift) & 1023] for shift in _SHIFTS])}"


def derived(prefix: str, command: str, nth: int = 0) -> str:
    """Return the id that command `command` gives to the `nth` thing of kind `prefix` that it makes."""
    _, _, tail = command.partition("_")
    return f"{prefix}_{tail or command}" + (f"_{nth}" if nth else "")
