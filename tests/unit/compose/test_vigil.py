"""When a process that does not answer is lost, by a clock of the test's."""

import itertools

import pytest

from compose.vigil import MISSES, Condition, Patience, Standstill, Vigil, Vitals

LIMITS = Patience(every=10, answer=10, frozen=60, hung=300)


def asked(
    vigil: Vigil, *, began: float, until: float, state: Condition = "waits", load: float = 0.0
) -> tuple[float, str | None]:
    """Miss one question after the other; the verdict and when it came, or None at `until`."""
    for now in itertools.count(began + LIMITS.answer, LIMITS.answer):
        if now > until:
            return until, None
        if (verdict := vigil.missed(now, Vitals(state, load * now))) is not None:
            return now, verdict
    raise AssertionError


def begun(at: float = 0.0) -> Vigil:
    vigil = Vigil(LIMITS, at)
    vigil.answered(at)
    return vigil


@pytest.mark.parametrize(("state", "says"), [("waits", "did nothing"), ("stopped", "was stopped")])
def test_one_that_does_nothing_is_lost_after_a_minute(state: Condition, says: str) -> None:
    at, verdict = asked(begun(), began=0, until=1000, state=state)
    assert at == 60
    assert verdict == f"gave no answer for 60 s, 6 questions, and {says}"


@pytest.mark.parametrize(("state", "load"), [("runs", 0.0), ("disk", 0.0), ("waits", 0.02)])
def test_one_that_is_at_work_or_waits_for_its_turn_has_five(state: Condition, load: float) -> None:
    at, verdict = asked(begun(), began=0, until=1000, state=state, load=load)
    assert at == 300
    assert verdict is not None and verdict.endswith("and worked")


def test_to_have_run_once_while_it_was_silent_is_work() -> None:
    vigil = begun()
    assert vigil.missed(10, Vitals("runs", 0)) is None
    assert asked(vigil, began=10, until=290) == (290, None)


def test_one_that_is_stopped_while_it_works_is_stopped() -> None:
    vigil = begun()
    assert vigil.missed(10, Vitals("runs", 0)) is None
    assert asked(vigil, began=10, until=1000, state="stopped")[0] == 60


def test_an_answer_is_the_end_of_the_matter() -> None:
    vigil = begun()
    assert asked(vigil, began=0, until=50) == (50, None)
    vigil.answered(55)
    assert vigil.silent_s == 0
    assert asked(vigil, began=65, until=110) == (110, None)


def test_what_could_not_be_asked_is_not_held_against_it() -> None:
    vigil = begun()
    assert asked(vigil, began=0, until=50) == (50, None)
    vigil.excused(60)
    assert asked(vigil, began=60, until=110) == (110, None)


@pytest.mark.parametrize("away", [21.0, 60.0, 3600.0])
def test_a_supervisor_that_stood_still_itself_blames_nobody_for_it(away: float) -> None:
    vigil = begun()
    assert asked(vigil, began=0, until=50) == (50, None)
    assert vigil.missed(50 + away + LIMITS.answer, Vitals("waits", 0)) is None
    assert asked(vigil, began=60 + away, until=60 + away + 50) == (110 + away, None), "the full time again"


def test_few_questions_that_took_long_are_no_proof() -> None:
    limits = Patience(every=100, answer=100, frozen=60)
    vigil = Vigil(limits, 0)
    vigil.answered(0)
    verdicts = [vigil.missed(200.0 * n, Vitals("waits", 0)) for n in range(1, MISSES + 1)]
    assert [verdict is not None for verdict in verdicts] == [False, False, True]


def test_one_on_its_way_up_is_not_judged_unless_it_is_stopped() -> None:
    assert asked(Vigil(LIMITS, 0), began=0, until=1000) == (1000, None)
    assert asked(Vigil(LIMITS, 0), began=0, until=1000, state="stopped")[0] == 60


def test_one_that_somebody_looks_into_is_left_alone() -> None:
    vigil = begun()
    assert asked(vigil, began=0, until=1000, state="traced") == (1000, None)
    assert vigil.silent_s == 1000


def test_a_standstill_of_ours_is_known_while_it_lasts_and_to_questions_that_it_has_met() -> None:
    standstill = Standstill(0)
    for second in range(1, 11):
        standstill.tick(second)
    assert not standstill.within(0, 10.9)
    assert standstill.within(10, 22.0), "the tick is yet to come"
    standstill.tick(22.1)
    assert standstill.within(10, 22.2)
    assert standstill.within(22.0, 22.2)
    assert not standstill.within(22.2, 23.0)
