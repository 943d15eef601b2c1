"""When memory of others is worth an event."""

from worker.strangers import LASTS, SETTLES, Strangers

GIB = 1 << 30


def told(size: int = 256 * GIB, **seen: int) -> Strangers:
    found = Strangers(size)
    for _ in range(LASTS):
        found.look({int(pid[1:]): taken for pid, taken in seen.items()})
    assert found.told is not None
    return found


def test_the_first_word_is_said_in_any_case_since_an_earlier_worker_may_have_said_another() -> None:
    found = Strangers(GIB)
    assert [found.look({}) for _ in range(4)] == [False] * (LASTS - 1) + [True, False, False]


def test_what_does_not_last_is_not_said() -> None:
    found = told()
    assert not any(found.look(seen) for seen in ({7: GIB}, {}, {7: GIB}, {}, {8: GIB}, {}))


def test_who_comes_grows_or_goes_is_told_of_once() -> None:
    found = told()
    assert [found.look({7: GIB}) for _ in range(3)] == [False, True, False]
    assert [found.look({7: 3 * GIB}) for _ in range(3)] == [False, True, False]
    assert [found.look({}) for _ in range(3)] == [False, True, False]


def test_noise_is_none() -> None:
    found = told(p7=2 * GIB)
    assert not any(found.look({7: 2 * GIB + some}) for some in (0, GIB, -GIB, GIB) * 10)


def test_memory_that_comes_and_goes_counts_as_taken() -> None:
    found = told(p7=20 * GIB)
    for _ in range(10):
        assert not any(found.look({7: size}) for size in [2 * GIB] * (SETTLES - 1) + [20 * GIB])
    assert [found.look({7: 2 * GIB}) for _ in range(SETTLES)] == [False] * (SETTLES - 1) + [True]
    assert found.told == {7: 2 * GIB}


def test_whoever_found_no_room_need_not_wait() -> None:
    found = told()
    assert found.look({7: GIB}, certain=True)
    assert not found.look({7: GIB}, certain=True), "nothing new"
    assert Strangers(GIB).look({}, certain=True)
