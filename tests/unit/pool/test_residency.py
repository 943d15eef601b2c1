"""The pool's books: budget, holders, corrupt sets. No files."""

import pytest

from pool.manifest import Manifest, Origin
from pool.residency import Refused, Residency

WHERE = Origin(path="/models/a", files=())


def manifest(name: str = "ws_a", size: int = 100, origin: Origin = WHERE) -> Manifest:
    return Manifest(weight_set=name, layout_digest="", segments=(size,), tensors=(), origins=(origin,))


def refused(code: str) -> pytest.RaisesExc[Refused]:
    return pytest.raises(Refused, check=lambda error: error.refusal.code == code)


def test_stagings_under_way_count_against_the_budget() -> None:
    books = Residency(250)
    ticket = books.admit(100, 1000)
    books.add(manifest())
    with refused("over_budget") as caught:
        books.admit(51, 1000)
    assert (caught.value.refusal.need_bytes, caught.value.refusal.free_bytes) == (51, 50)
    books.settle(ticket)
    books.settle(ticket)
    books.settle(books.admit(150, 150))
    with refused("no_room") as caught:
        books.admit(150, 149)
    assert (caught.value.refusal.need_bytes, caught.value.refusal.free_bytes) == (150, 149)
    assert books.used_bytes == 100


def test_a_lowered_budget_refuses_without_nonsense() -> None:
    books = Residency(50)
    books.add(manifest())
    with refused("over_budget") as caught:
        books.admit(1, 1000)
    assert caught.value.refusal.free_bytes == 0


def test_holders_keep_a_set() -> None:
    books = Residency(1000)
    books.add(manifest())
    books.hold("ws_a")
    books.hold("ws_a")
    assert not books.release("ws_a")
    with refused("in_use"):
        books.leave("ws_a")
    assert not books.release("ws_a")
    books.leave("ws_a")
    with refused("unknown_set"):
        books.hold("ws_a")
    with refused("in_use"):  # it may stay yet, and who asks for it to go must not be told that it has gone
        books.leave("ws_a")
    books.remove("ws_a")
    with refused("unknown_set"):
        books.leave("ws_a")
    assert books.describe(1).sets == ()
    assert books.describe(1).dropped == ()


def test_a_drop_that_finds_a_process_lets_the_set_stay() -> None:
    books = Residency(1000)
    books.add(manifest())
    books.leave("ws_a")
    assert books.stay("ws_a", "is mapped").refusal.code == "in_use"
    books.hold("ws_a")


def test_staging_its_source_again_keeps_a_set_that_was_about_to_go() -> None:
    books = Residency(1000)
    books.add(manifest())
    leaving = books.leave("ws_a")
    assert books.by_origin(WHERE) is leaving
    assert not leaving.leaving


def test_a_corrupt_set_goes_with_its_last_holder() -> None:
    books = Residency(1000)
    books.add(manifest())
    books.hold("ws_a")
    assert not books.condemn("ws_a", ("w",), books.edition("ws_a"))
    with refused("corrupt"):
        books.hold("ws_a")
    assert books.by_origin(WHERE) is None
    assert books.release("ws_a")
    books.remove("ws_a")
    with refused("corrupt"):
        books.hold("ws_a")
    books.add(manifest())
    assert books.hold("ws_a")
    assert books.describe(1).dropped == ()


def test_a_sound_copy_takes_the_place_of_a_corrupt_one_and_keeps_its_holders() -> None:
    books = Residency(1000)
    books.add(manifest())
    books.hold("ws_a")
    books.condemn("ws_a", ("w",), books.edition("ws_a"))
    books.add(manifest())
    assert books.sets["ws_a"].holders == 1
    assert not books.release("ws_a")


def test_one_set_of_several_origins() -> None:
    books = Residency(1000)
    books.add(manifest())
    other = Origin(path="/models/b", files=())
    assert books.add_origin("ws_a", other).origins == (WHERE, other)
    assert books.add_origin("ws_a", other).origins == (WHERE, other)
    assert books.by_origin(other) is books.by_origin(WHERE)


def test_only_the_last_corrupt_sets_are_remembered() -> None:
    books = Residency(10**9)
    for number in range(150):
        books.add(manifest(f"ws_{number}"))
        assert books.condemn(f"ws_{number}", ("w",), books.edition(f"ws_{number}"))
        books.remove(f"ws_{number}")
    assert len(books.dropped) == 100
    assert "ws_149" in books.dropped
    assert not books.condemn("ws_0", ("w",), books.edition("ws_0"))
