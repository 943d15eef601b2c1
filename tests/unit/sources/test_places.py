"""A prepared source appears whole or not at all."""

from pathlib import Path

import pytest

from worker.sources.places import made, name_of, sweep


def test_made_directories_appear_whole(tmp_path: Path) -> None:
    target = tmp_path / "models" / "a"
    with made(target) as draft:
        (draft / "x").write_text("x")
        assert not target.exists()
    assert (target / "x").read_text() == "x"
    assert list(target.parent.iterdir()) == [target]


def test_two_who_make_one_at_once_are_not_in_each_others_way_and_the_first_counts(tmp_path: Path) -> None:
    target = tmp_path / "models" / "a"
    with made(target) as late:
        (late / "x").write_text("late")
        with made(target) as early:
            (early / "x").write_text("early")
        opened = (target / "x").open()
    with opened:
        assert opened.read() == (target / "x").read_text() == "early"
    assert list(target.parent.iterdir()) == [target]


def test_a_failure_leaves_nothing(tmp_path: Path) -> None:
    target = tmp_path / "models" / "a"

    def fail() -> None:
        with made(target) as draft:
            (draft / "x").write_text("x")
            raise RuntimeError("half way")

    with pytest.raises(RuntimeError, match="half"):
        fail()
    assert list(target.parent.iterdir()) == []


def test_what_a_death_left_is_swept_at_the_next_start(tmp_path: Path) -> None:
    (tmp_path / "models" / "demo" / ".draft-a-17").mkdir(parents=True)
    (tmp_path / "models" / ".draft-b-17").mkdir()
    (tmp_path / "models" / "kept").mkdir()
    assert sorted(sweep(tmp_path)) == [".draft-a-17", ".draft-b-17"]
    assert sorted(path.name for path in (tmp_path / "models").iterdir()) == ["demo", "kept"]


def test_names_are_digits_whatever_the_caller_wrote() -> None:
    assert name_of("../../etc", "x") != name_of("../../etc/x")
    assert set(name_of("../../etc")) <= set("0123456789abcdef")
