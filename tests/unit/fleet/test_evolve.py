"""The state: folded, cut, stored, and safe against doubled and missing events."""

import random

import pytest

from controlplane.envelope import Recorded, from_wire, to_wire
from controlplane.fleet import Fleet, Gap, dump, evolve, fold, load
from controlplane.simulation import Simulation
from tests.days import simulated


@pytest.fixture(scope="module")
def day() -> Simulation:
    """Some thousand events of a busy fleet."""
    return simulated(seed=7, requests=1200)


class Follower:
    """Applies what is next, drops what it has seen, fetches what is missing."""

    def __init__(self, log: list[Recorded]) -> None:
        self.fleet, self.log, self.gaps = Fleet(), log, 0

    def deliver(self, recorded: Recorded) -> None:
        if recorded.position <= self.fleet.position:
            return
        try:
            self.fleet = evolve(self.fleet, recorded)
        except Gap:
            self.gaps += 1
            self.fleet = fold(self.log[self.fleet.position : recorded.position], self.fleet)


def test_doubled_and_shuffled_delivery_gives_the_live_state(day: Simulation) -> None:  # C47
    rng = random.Random(3)
    follower = Follower(day.log)
    arriving = [r for r in day.log for _ in range(rng.randrange(1, 4))]
    for start in range(0, len(arriving), 20):
        window = arriving[start : start + 20]
        rng.shuffle(window)
        for recorded in window:
            follower.deliver(recorded)
    assert follower.gaps
    assert follower.fleet == fold(day.log) == day.fleet


def test_an_event_that_does_not_follow_is_a_gap(day: Simulation) -> None:  # C47
    some = fold(day.log[:10])
    for wrong in (day.log[9], day.log[11]):
        with pytest.raises(Gap):
            evolve(some, wrong)


def test_a_fold_from_any_snapshot_gives_the_live_state(day: Simulation) -> None:
    for at in range(0, len(day.log), len(day.log) // 13):
        assert fold(day.log[at:], load(dump(fold(day.log[:at])))) == day.fleet


def test_events_survive_the_wire(day: Simulation) -> None:
    for recorded in day.log[:500]:
        assert from_wire(to_wire(recorded)) == recorded


def test_positions_and_versions_have_no_gaps(day: Simulation) -> None:
    assert [r.position for r in day.log] == list(range(1, len(day.log) + 1))
    versions: dict[str, int] = {}
    for recorded in day.log:
        assert recorded.version == versions.get(recorded.stream, 0) + 1, recorded
        versions[recorded.stream] = recorded.version


def test_the_index_of_waiting_requests_is_what_a_scan_finds(day: Simulation) -> None:
    fleet = Fleet()
    for recorded in day.log:
        fleet = evolve(fleet, recorded)
        if recorded.position % 7:
            continue
        waiting: dict[str, list[tuple[int, str]]] = {}
        for request in fleet.requests.values():
            if request.instance is None:
                waiting.setdefault(request.model, []).append((request.order, request.request))
        assert dict(fleet.waiting) == {model: tuple(r for _, r in sorted(found)) for model, found in waiting.items()}
        counts = {i.instance: i.running for i in fleet.instances.values()}
        for request in fleet.requests.values():
            if request.instance in counts and request.lost_ms is None:
                counts[request.instance] -= 1
        assert not any(counts.values())
