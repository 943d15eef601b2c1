"""Islands of devices that reach one another."""

from worker.islands import islands


def test_pairs_make_islands_and_what_joins_them_makes_one() -> None:
    pairs = {("a", "c"), ("b", "d"), ("d", "e")}
    found = islands("abcdef", lambda one, other: (one, other) in pairs)
    assert found == {"a": "a", "c": "a", "b": "b", "d": "b", "e": "b"}


def test_a_switch_makes_one_of_all_and_without_links_there_is_none() -> None:
    assert set(islands("abcd", lambda one, other: True).values()) == {"a"}
    assert islands("abcd", lambda one, other: False) == {}
