"""Progress for those who watch: steps side by side."""

from worker.board import Board


def test_when_one_of_two_steps_is_over_the_other_shows_again() -> None:
    board = Board()
    board.show("ins_1", "restore")
    board.show("ins_1", "fill", 3, 9)
    assert [(one.step, one.done) for one in board.shown] == [("fill", 3)]
    board.clear("ins_1", "fill")
    assert [one.step for one in board.shown] == ["restore"]
    board.clear("ins_1", "restore")
    assert board.shown == ()


def test_a_subject_is_cleared_as_a_whole() -> None:
    board = Board()
    board.show("model:a", "fetch")
    board.changed.clear()
    board.clear("model:a")
    assert board.changed.is_set()
    assert board.shown == ()
