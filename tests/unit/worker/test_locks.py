"""Locks of cells."""

import os
import stat
from pathlib import Path

import pytest

from worker import gpulocks
from worker.locks import CellConflict, Claim, Locks, Share


def test_a_taken_cell_is_refused_and_the_error_names_its_holder(tmp_path: Path) -> None:
    locks = Locks(tmp_path / "locks")
    cells = locks.take([Share("dev", (2, 3), 7)], instance="ins_a")
    with pytest.raises(CellConflict) as caught:
        locks.take([Share("dev", (1, 2), 8)], instance="ins_b")
    assert caught.value.code == "cell_locked"
    assert caught.value.claim == Claim(7, "ins_a")
    assert "ins_a" in str(caught.value)
    assert locks.holder("dev", 1) is None, "the cell taken before the conflict was given back"
    cells.close()
    locks.take([Share("dev", (1, 2), 8)], instance="ins_b").close()


def test_an_older_grant_is_fenced_off_even_when_the_cell_is_free(tmp_path: Path) -> None:
    locks = Locks(tmp_path)
    locks.take([Share("dev", (0,), 9)], instance="ins_a").close()
    with pytest.raises(CellConflict) as caught:
        locks.take([Share("dev", (0,), 8)], instance="ins_b")
    assert caught.value.code == "cell_fenced"


def test_a_handed_on_descriptor_keeps_the_lock(tmp_path: Path) -> None:
    locks = Locks(tmp_path)
    cells = locks.take([Share("dev", (0,), 1)], instance="ins_a")
    copy = os.dup(cells.descriptors[0])
    cells.close()
    assert locks.holder("dev", 0) == Claim(1, "ins_a")
    os.close(copy)
    assert locks.holder("dev", 0) is None


def test_a_device_name_can_not_leave_the_directory(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="no device"):
        Locks(tmp_path).take([Share("../x", (0,), 1)], instance="i")


def test_two_planes_share_a_gpus_locks_and_their_numbers_do_not_compare(tmp_path: Path) -> None:
    shared, word = gpulocks.place(tmp_path)
    assert (stat.S_IMODE(shared.stat().st_mode), word) == (0o1777, "")
    one, other = (Locks(tmp_path / name, plane=name, gpus={"GPU-1"}, of_machine=shared) for name in ("a", "b"))
    cells = one.take([Share("GPU-1", (0,), 900)], instance="ins_a")
    with pytest.raises(CellConflict, match="another plane on this machine"):
        other.take([Share("GPU-1", (0,), 5)], instance="ins_b")
    cells.close()
    other.take([Share("GPU-1", (0,), 5)], instance="ins_b").close()
    assert stat.S_IMODE((shared / "GPU-1.0").stat().st_mode) == 0o666, "another user's plane can lock it as well"
    one.take([Share("cpu0", (0,), 1)], instance="ins_a").close()
    other.take([Share("cpu0", (0,), 1)], instance="ins_b").close()
    assert (tmp_path / "a" / "cpu0.0").exists() and (tmp_path / "b" / "cpu0.0").exists()


def test_where_the_machines_directory_can_not_be_used_it_is_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "enginehouse").write_text("no directory")
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path / "run"))
    chosen, word = gpulocks.place(tmp_path)
    assert chosen == tmp_path / "run" / "enginehouse-locks"
    assert "other users" in word


def test_a_gang_gets_the_cells_of_all_its_devices_or_none(tmp_path: Path) -> None:
    locks = Locks(tmp_path)
    other = locks.take([Share("b", (7,), 3)], instance="ins_b")
    pair = [Share(device, tuple(range(8)), grant) for grant, device in ((8, "b"), (9, "a"))]
    with pytest.raises(CellConflict, match="cell 7 of device b"):
        locks.take(pair, instance="ins_a")
    assert locks.holder("a", 0) is None, "what it had of the other device is free again"
    other.close()
    cells = locks.take(pair, instance="ins_a")
    assert [locks.holder(device, 0) for device in "ab"] == [Claim(9, "ins_a"), Claim(8, "ins_a")]
    cells.close()
