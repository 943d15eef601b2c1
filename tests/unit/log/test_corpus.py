"""What was once written stays readable: one stored sample per event type and version, kept for ever.

A new type or version needs a sample: write the event's JSON once, commit it, and never change it again.
"""

from pathlib import Path
from typing import Any

import msgspec
import pytest

from controlplane import upcast
from controlplane.envelope import decode_event, encode_event, from_wire, to_wire
from controlplane.events import BY_NAME, NodeFellSilent

CORPUS = Path(__file__).parents[2] / "corpus"
SAMPLES = sorted(CORPUS.glob("*.json"))


@pytest.mark.parametrize("name", BY_NAME)
def test_every_event_type_has_a_sample_of_every_version(name: str) -> None:
    for v in range(1, BY_NAME[name].V + 1):
        assert (CORPUS / f"{name}.v{v}.json").exists(), "store one sample; see the top of this file"


@pytest.mark.parametrize("sample", SAMPLES, ids=lambda path: path.stem)
def test_a_stored_event_reads_as_it_was_written(sample: Path) -> None:
    stored = msgspec.json.decode(sample.read_bytes())
    recorded = from_wire(sample.read_bytes())
    assert recorded.stream == stored["stream"]
    assert from_wire(to_wire(recorded)) == recorded
    if (stored["type"], stored["v"]) == (recorded.type, recorded.event.V):
        now = msgspec.json.decode(encode_event(recorded.event))
        assert kept(stored["data"], now), "a field was lost or changed"


def kept(stored: Any, now: Any) -> bool:
    """Whether all that was stored is there still; fields with a default may have come to it, however deep inside."""
    if isinstance(stored, dict):
        return isinstance(now, dict) and all(name in now and kept(value, now[name]) for name, value in stored.items())
    if isinstance(stored, list):
        return isinstance(now, list) and len(stored) == len(now) and all(map(kept, stored, now))
    return bool(stored == now)


def test_an_old_version_reads_as_the_new_one_step_by_step(monkeypatch: pytest.MonkeyPatch) -> None:
    """A fabricated past: `NodeWentQuiet` v1 had a `host`, v2 a `machine`; v3 is today's NodeFellSilent."""

    def first(data: dict[str, Any]) -> tuple[str, dict[str, Any]]:
        return "NodeWentQuiet", {"machine": data["host"]}

    def second(data: dict[str, Any]) -> tuple[str, dict[str, Any]]:
        return "NodeFellSilent", {"node": data["machine"]}

    monkeypatch.setattr(NodeFellSilent, "V", 3)
    monkeypatch.setitem(upcast.UPCASTERS, ("NodeWentQuiet", 1), first)
    monkeypatch.setitem(upcast.UPCASTERS, ("NodeWentQuiet", 2), second)
    assert decode_event("NodeWentQuiet", 1, b'{"host": "n1"}') == NodeFellSilent(node="n1")
    assert decode_event("NodeWentQuiet", 2, '{"machine": "n1"}') == NodeFellSilent(node="n1")


@pytest.mark.parametrize(("name", "v"), [("NodeFellSilent", 2), ("NodeFellSilent", 0), ("NeverHeardOf", 1)])
def test_an_event_of_a_newer_release_is_refused(name: str, v: int) -> None:
    with pytest.raises(upcast.UnknownEvent, match=f"{name} v{v}"):
        decode_event(name, v, b'{"node": "n1"}')
