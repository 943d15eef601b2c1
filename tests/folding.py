"""What a recorded log means today: the mark by which a changed `evolve` is noticed.

`python -m tests.folding` stores the mark of the code as it is, beside the log (tests/corpus/folded), once EVOLVE_VERSION is
raised. The log itself was recorded once and is never changed; every event's own sample is in tests/corpus.
"""

import hashlib
import json
import sys
from pathlib import Path
from typing import Any

from controlplane.envelope import Recorded, from_wire
from controlplane.fleet import EVOLVE_VERSION, Fleet, dump, evolve

FOLDED = Path(__file__).parent / "corpus" / "folded"
LOG, MARK = FOLDED / "log.jsonl", FOLDED / "mark.json"


def events() -> list[Recorded]:
    return [from_wire(line) for line in LOG.read_bytes().splitlines()]


def mark() -> dict[str, Any]:
    """The version of `evolve`, and a digest over the state after each event of the log."""
    digest, fleet = hashlib.sha256(), Fleet()
    for recorded in events():
        fleet = evolve(fleet, recorded)
        digest.update(json.dumps(json.loads(dump(fleet)), sort_keys=True).encode())
    return {"evolve_version": EVOLVE_VERSION, "digest": digest.hexdigest()}


def stored() -> dict[str, Any]:
    found: dict[str, Any] = json.loads(MARK.read_text())
    return found


def main() -> None:
    now = mark()
    if MARK.exists() and now["digest"] != stored()["digest"] and now["evolve_version"] <= stored()["evolve_version"]:
        sys.exit(f"EVOLVE_VERSION is {EVOLVE_VERSION}, as it was when the log meant something else: raise it first")
    MARK.write_text(json.dumps(now, indent=1) + "\n")


if __name__ == "__main__":
    main()
