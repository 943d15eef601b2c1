"""The known answer: what an engine says to a fixed prompt with given weights, compared with what it said before."""

from pathlib import Path

import msgspec
import structlog
from blake3 import blake3

from pool.ranks import JOINT
from worker.engines.messages import Check, Checked
from worker.failure import StepFailed
from worker.local import LocalInstance

PROMPT = tuple(range(1, 9))
"""Ids that every vocabulary has."""
TOKENS = 8

log = structlog.get_logger("check")


async def check(local: LocalInstance) -> str:
    """Compare a short greedy answer with the one on record for these weights. Returns `same_tokens` or `recorded`.

    Raises StepFailed (`check_mismatch`, with both answers).
    """
    command = Check(prompt=PROMPT, tokens=TOKENS)
    reply = await local.ask(command, local.site.deadlines.check)
    assert isinstance(reply, Checked)
    configuration, sets = local.record.configuration, local.record.checked_sets
    attached = local.seen.attached or ""
    name = attached if JOINT not in attached else f"gang_{blake3(attached.encode()).hexdigest(length=16)}"
    file = local.site.data / "models" / "known" / f"{name}.json"
    known = _read(file)
    result = "same_tokens" if configuration in known else "recorded"
    if result == "recorded":
        _write(file, known | {configuration: reply.ids})
    elif known[configuration] != reply.ids:
        raise StepFailed("check_mismatch", f"the engine answered {reply.ids}, it used to answer {known[configuration]}")
    local.directory.edit(checked=True, checked_sets=(*sets, local.seen.attached))
    local.note(checked=True)
    return result


def _read(file: Path) -> dict[str, tuple[int, ...]]:
    try:
        return msgspec.json.decode(file.read_bytes(), type=dict[str, tuple[int, ...]])
    except FileNotFoundError:
        return {}
    except msgspec.MsgspecError as error:  # nothing is synced: a power cut may leave an empty file
        log.warning("known_answers_lost", file=str(file), reason=str(error))
        return {}


def _write(file: Path, known: dict[str, tuple[int, ...]]) -> None:
    file.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    draft = file.with_suffix(".new")
    draft.write_bytes(msgspec.json.encode(known))
    draft.replace(file)
