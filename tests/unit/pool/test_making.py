"""How much memory is made before the first byte leaves."""

import pytest

from pool.making import BESIDE_S, LEAST_S, MOST_S, Making, ahead

MIB = 1 << 20


def finished(sizes: list[int], rate: float, early: int, beside_s: float, alone_s: float = 0.2e-3) -> float:
    """Seconds until the last byte has arrived, by going through it step by step."""
    at = made = early * alone_s
    for number, size in enumerate(sizes):
        if number >= early:
            made += beside_s
        at = max(at, made) + size / rate
    return at


@pytest.mark.parametrize(
    ("sizes", "rate"),
    [
        ([100 * MIB] * 149, 54e9),  # one link hides it all
        ([100 * MIB] * 155, 100e9),  # two links don't
        ([50 * MIB] * 149, 54e9),  # a rank of two
        ([300 * MIB] * 4 + [2 * MIB] * 60, 54e9),  # small ones behind
        ([2 * MIB] * 40, 54e9),
    ],
)
def test_no_other_number_finishes_sooner(sizes: list[int], rate: float) -> None:
    early = ahead(sizes, rate, BESIDE_S)
    best = min(finished(sizes, rate, other, BESIDE_S) for other in range(1, len(sizes) + 1))
    assert finished(sizes, rate, early, BESIDE_S) <= best + BESIDE_S


def test_a_link_that_hides_it_begins_with_the_first() -> None:
    assert ahead([100 * MIB] * 149, 54e9, BESIDE_S) == 1
    assert ahead([], 54e9, BESIDE_S) == 0


def test_what_was_seen_is_believed_little_by_little_and_within_bounds() -> None:
    making = Making()
    for _ in range(40):
        making.saw(1, 100, 100 * 0.4e-3)
    assert making.beside_s == pytest.approx(0.4e-3, rel=0.01)
    making.saw(1, 100, 60.0)
    assert making.beside_s <= 0.4e-3 + (MOST_S - 0.4e-3) / 3, "one stall is not the rule"
    before = making.beside_s
    making.saw(3, 0, 0.0)
    assert making.beside_s == before, "a small set tells nothing"
    for _ in range(200):
        making.saw(100, 0, 0.0)
    assert making.beside_s == LEAST_S, "what can't be seen any more is put to the test again"
