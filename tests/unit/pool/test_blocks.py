"""Segments that share an allocation: those that lie side by side, and not too many."""

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pool.blocks import MOST_BYTES, common, cut, fitting, neighbours, others
from pool.habits import REMEMBERED, Habits

GIB = 1 << 30


def test_neighbours_are_found_by_address_whatever_their_numbers() -> None:
    assert neighbours([(100, 10), (80, 20), (0, 5), (110, 1), (6, 4)]) == ((2,), (4,), (1, 0, 3))
    assert neighbours([]) == ()


def test_a_group_is_cut_where_it_grows_too_large_and_a_large_segment_stays_whole() -> None:
    assert cut(((0, 1, 2, 3),), [GIB // 2, GIB // 2, 3 * GIB, 1]) == ((0, 1), (2,), (3,))
    assert cut((), [GIB, 1]) == ((0,), (1,))


@pytest.mark.parametrize("wrong", [((0,),), ((0, 1), (1,)), ((0, 2),), ((0, 1), (2,)), ((0, 1), ())])
def test_every_segment_is_wanted_once(wrong: tuple[tuple[int, ...], ...]) -> None:
    with pytest.raises(ValueError, match="each of 2 segments once"):
        cut(wrong, [1, 1])


def test_an_engine_maps_what_was_made_for_another_as_far_as_its_own_lie_like_that() -> None:
    made = ((0, 1), (2,), (4, 3))
    assert fitting(made, ((0, 1, 2), (4, 3))) == (0, 1, 2)
    assert fitting(made, ((0,), (1, 2), (4, 3))) == (1, 2)
    assert fitting(made, ((3, 4), (2, 0, 1))) == (0, 1)
    assert fitting(made, ()) == (0, 1, 2), "it maps nothing"


def test_what_an_engine_can_not_share_is_made_for_it_side_by_side_where_it_can_be() -> None:
    assert others(((0, 1, 2, 3), (5, 4)), [1] * 6, {2, 5}) == ((0, 1), (3,), (4,))
    assert others(((0, 1), (2,)), [GIB, 1, 1], ()) == ((0,), (1,), (2,))


@given(st.lists(st.tuples(st.integers(1, 3 * GIB), st.booleans()), min_size=1, max_size=30), st.randoms())
def test_what_is_cut_for_an_engine_fits_it(segments: list[tuple[int, bool]], random: object) -> None:
    sizes, places, at = [size for size, _ in segments], [], 0
    for size, gap in segments:
        at += 4096 * gap
        places.append((at, size))
        at += size
    order = list(range(len(sizes)))
    random.shuffle(order)  # type: ignore[attr-defined]
    places, sizes = [places[number] for number in order], [sizes[number] for number in order]
    groups = neighbours(places)
    made = cut(groups, sizes)
    assert fitting(made, groups) == tuple(range(len(made)))
    assert sorted(number for group in made for number in group) == list(range(len(sizes)))
    for group in made:
        assert len(group) == 1 or sum(sizes[number] for number in group) <= MOST_BYTES
        for number, after in itertools.pairwise(group):
            assert places[number][0] + sizes[number] == places[after][0]


def test_what_lies_side_by_side_for_both_fits_both() -> None:
    one, other = ((0, 1, 2), (4, 3), (5,)), ((5, 0, 1), (2, 4, 3))
    assert common(one, other) == ((0, 1), (2,), (4, 3), (5,))
    made = common(one, other)
    assert fitting(made, one) == fitting(made, other) == (0, 1, 2, 3)


def test_what_is_brought_ahead_fits_all_that_came_lately_and_an_odd_one_is_forgotten() -> None:
    habits = Habits()
    assert habits.guess("layout") == ()
    habits.saw("layout", ((0,), (1, 2)))
    habits.saw("layout", ((0, 1, 2),))
    assert habits.guess("layout") == ((0,), (1, 2))
    for _ in range(REMEMBERED):
        habits.saw("layout", ((0, 1, 2),))
    assert habits.guess("layout") == ((0, 1, 2),)
    assert habits.guess("another") == ()
