"""Locks of cells."""

import os
from pathlib import Path

import pytest

from worker.locks import CellConflict, Claim, Locks


def test_a_taken_cell_is_refused_and_the_error_names_its_holder(tmp_path: Path) -> None:
    locks = Locks(tmp_path / "locks")
    cells = locks.take("dev", [2, 3], grant=7, instance="ins_a")
    with pytest.raises(CellConflict) as caught:
        locks.take("dev", [1, 2], grant=8, instance="ins_b")
    assert caught.value.code == "cell_locked"
    assert caught.value.claim == Claim(7, "ins_a")
    assert "ins_a" in str(caught.value)
    assert locks.holder("dev", 1) is None, "the cell taken before the conflict was given back"
    cells.close()
    locks.take("dev", [1, 2], grant=8, instance="ins_b").close()


def test_an_older_grant_is_fenced_off_even_when_the_cell_is_free(tmp_path: Path) -> None:
    locks = Locks(tmp_path)
    locks.take("dev", [0], grant=9, instance="ins_a").close()
    with pytest.raises(CellConflict) as caught:
        locks.take("dev", [0], grant=8, instance="ins_b")
    assert caught.value.code == "cell_fenced"


def test_a_handed_on_descriptor_keeps_the_lock(tmp_path: Path) -> None:
    locks = Locks(tmp_path)
    cells = locks.take("dev", [0], grant=1, instance="ins_a")
    copy = os.dup(cells.descriptors[0])
    cells.close()
    assert locks.holder("dev", 0) == Claim(1, "ins_a")
    os.close(copy)
    assert locks.holder("dev", 0) is None


def test_a_device_name_can_not_leave_the_directory(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="no device"):
        Locks(tmp_path).take("../x", [0], grant=1, instance="i")
