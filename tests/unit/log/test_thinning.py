"""Whatever is stored in whatever order: nowhere are there more than APART events between two, and few are kept for it."""

from itertools import accumulate, pairwise

from hypothesis import given
from hypothesis import strategies as st

from controlplane.log.snapshots import EVERY_EVENTS
from controlplane.log.thinning import APART, NEWEST, Place, leaving

places = st.builds(Place, st.integers(1, 20 * APART), st.integers(12, 14))
steps = st.lists(st.one_of(st.integers(1, 300), st.integers(EVERY_EVENTS, EVERY_EVENTS + 500), st.integers(1, APART)))


def kept(stored: set[Place], version: int = 13) -> set[Place]:
    return stored - set(leaving(stored, version))


def row(stored: set[Place], version: int = 13) -> list[int]:
    """Positions that looks fold from: the empty fleet's, and those of that version."""
    return [0, *sorted(place.position for place in stored if place.evolve_version == version)]


@given(st.sets(places, max_size=60))
def test_of_any_set_what_stays_is_near_enough_thin_and_has_the_newest(stored: set[Place]) -> None:
    staying, were = kept(stored), row(stored)
    are = row(staying)
    assert are[1:][-NEWEST:] == were[1:][-NEWEST:]
    for before, after in pairwise(are):
        assert after - before <= APART or (before, after) in set(pairwise(were)), "nothing leaves where it is needed"
    older = are[:-NEWEST]
    for first, third in zip(older, are[2 : len(older)], strict=False):
        assert third - first > APART, "nothing stays that is not needed"


@given(st.sets(places, max_size=60), st.integers(12, 14))
def test_what_stays_once_stays_when_asked_again(stored: set[Place], version: int) -> None:
    staying = kept(stored, version)
    assert leaving(staying, version) == []


@given(steps)
def test_as_a_log_grows_the_bound_holds_at_every_moment(taken_after: list[int]) -> None:
    stored, every = set[Place](), set[Place]()
    for position in accumulate(taken_after):
        place = Place(position, 13)
        every.add(place)
        stored = kept(stored | {place})
        are = row(stored)
        assert max(after - before for before, after in pairwise(are)) <= APART
        assert len(stored) <= 2 * position / APART + 1 + NEWEST
        assert stored == kept(every), "thinned step by step, or all at once"


@given(st.sets(places, max_size=60))
def test_of_other_versions_only_what_is_among_the_newest_of_all_stays(stored: set[Place]) -> None:
    others = {place for place in kept(stored) if place.evolve_version != 13}
    assert others == {place for place in sorted(stored)[-NEWEST:] if place.evolve_version != 13}


def test_a_busy_plane_keeps_one_of_a_hundred_thousand_events_and_an_idle_one_too() -> None:
    busy, idle = set[Place](), set[Place]()
    for position in range(EVERY_EVENTS, 10**6 + 1, EVERY_EVENTS):
        busy = kept(busy | {Place(position, 13)})
    assert row(busy) == [0, *range(100_000, 900_001, 100_000), 960_000, 980_000, 1_000_000]
    for position in range(30, 150_000, 30):
        idle = kept(idle | {Place(position, 13)})
    assert row(idle) == [0, 99_990, 149_910, 149_940, 149_970]
