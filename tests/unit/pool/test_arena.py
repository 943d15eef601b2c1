"""Where segments live, and what in that place is a set."""

import os
import shutil
from pathlib import Path

import pytest

from pool.arena import Arena
from pool.manifest import Manifest, Origin
from pool.place import OWNER, PlaceRefused, abandoned, claim, place, sweep


def publish(arena: Arena, name: str = "ws_a") -> Manifest:
    manifest = Manifest(
        weight_set=name, layout_digest="", segments=(4096, 8192), tensors=(), origins=(Origin(path="/", files=()),)
    )
    draft = arena.begin(manifest.segments, {})
    for number in range(2):
        draft.allocate(number)
    assert draft.missing_bytes == 0
    arena.publish(draft, manifest)
    return manifest


def test_shared_memory_if_the_budget_fits_else_the_disk_and_then_it_stays(tmp_path: Path) -> None:
    directory, shared = tmp_path / "run", tmp_path / "shm"
    directory.mkdir()
    shared.mkdir()
    on_disk = place(directory, 1 << 60, shared_memory=shared)
    assert on_disk == directory / "segments"
    in_memory = place(directory, 1, shared_memory=shared)
    assert in_memory.parent == shared
    assert f"-{os.geteuid()}-" in in_memory.name
    assert in_memory.stat().st_mode & 0o777 == 0o700
    assert place(directory, 1 << 60, shared_memory=shared) == in_memory
    publish(Arena(on_disk))
    assert place(directory, 1, shared_memory=shared) == on_disk


def test_a_place_that_is_not_ours_is_refused(tmp_path: Path) -> None:
    directory, shared = tmp_path / "run", tmp_path / "shm"
    directory.mkdir()
    shared.mkdir()
    place(directory, 1, shared_memory=shared).chmod(0o755)
    with pytest.raises(PlaceRefused, match="mode 0700"):
        place(directory, 1, shared_memory=shared)
    name = next(shared.iterdir())
    name.rmdir()
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir(mode=0o700)
    name.symlink_to(elsewhere)
    with pytest.raises(PlaceRefused):
        place(directory, 1, shared_memory=shared)


def test_only_whole_sets_are_adopted(tmp_path: Path) -> None:
    arena = Arena(tmp_path)
    good, short, renamed, torn = (publish(arena, name) for name in ("ws_good", "ws_short", "ws_renamed", "ws_torn"))
    os.truncate(tmp_path / short.weight_set / "00001.segment", 4096)
    (tmp_path / renamed.weight_set).rename(tmp_path / "ws_other")
    manifest = tmp_path / torn.weight_set / "manifest.json"
    manifest.write_bytes(manifest.read_bytes()[:-20])
    arena.begin((4096,), {}).allocate(0)
    (tmp_path / "stray").write_text("")
    (tmp_path / "link").symlink_to(tmp_path / good.weight_set)
    sound, removed = arena.adopt()
    assert sound == [good]
    assert len(removed) == 6
    assert [path.name for path in tmp_path.iterdir()] == ["ws_good"]


def test_segments_are_sealed_and_opened_for_reading_only(tmp_path: Path) -> None:
    arena = Arena(tmp_path)
    manifest = publish(arena)
    fds = arena.open(manifest)
    assert [os.fstat(fd).st_mode & 0o777 for fd in fds] == [0o400, 0o400]
    with pytest.raises(OSError, match=r"Bad file descriptor|Invalid argument"):
        os.ftruncate(fds[0], 0)
    for fd in fds:
        os.close(fd)


def test_a_draft_that_finds_no_room_is_discarded_whole(tmp_path: Path) -> None:
    arena = Arena(tmp_path)
    draft = arena.begin((4096, 1 << 60), {})
    draft.allocate(0)
    with pytest.raises(OSError, match=r"No space|too large|File too"):
        draft.allocate(1)
    draft.discard()
    assert list(tmp_path.iterdir()) == []


def test_a_place_that_was_removed_is_lost_also_if_there_is_another_one_by_now(tmp_path: Path) -> None:
    """A disk's file system gives the number of the one that was removed to the next one."""
    (root := tmp_path / "segments").mkdir()
    arena = Arena(root)
    assert not arena.lost
    root.rmdir()
    assert arena.lost
    root.mkdir()
    assert arena.lost
    assert not Arena(root).lost


def test_room_is_what_the_host_has() -> None:
    shared = Arena(Path("/dev/shm"))
    before, room, after = os.statvfs("/dev/shm"), shared.room(), os.statvfs("/dev/shm")  # where others come and go
    assert 0 <= room <= max(before.f_bavail, after.f_bavail) * before.f_frsize


def test_a_place_goes_once_its_data_directory_is_gone_and_no_daemon_holds_it(tmp_path: Path) -> None:
    directory, shared = tmp_path / "run", tmp_path / "shm"
    directory.mkdir()
    shared.mkdir()
    foreign = shared / f"enginehouse-{os.geteuid() + 1}-x"
    foreign.mkdir()
    root = place(directory, 1, shared_memory=shared)
    assert sweep(shared) == []  # nobody has said yet whose it is
    (root / OWNER).touch()
    assert sweep(shared) == []  # its daemon has made the file, and is about to lock it
    with claim(root, directory):
        publish(Arena(root))
        assert Arena(root).adopt()[1] == []
        directory.rmdir()
        assert sweep(shared) == []  # its daemon lives
    directory.mkdir()
    assert sweep(shared) == []  # its next daemon may want it
    assert abandoned(shared) == []
    directory.rmdir()
    assert abandoned(shared) == [root]
    assert sweep(shared) == [root.name]
    assert list(shared.iterdir()) == [foreign]


def test_a_place_that_somebody_removes_just_as_its_daemon_ends_is_no_fault(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    root, remove = place(tmp_path, 1, shared_memory=None), shutil.rmtree

    def later_than_another(path: Path) -> None:
        remove(path)
        remove(path)

    monkeypatch.setattr(shutil, "rmtree", later_than_another)
    for _ in range(2):
        with claim(root, tmp_path):
            pass
        assert not root.exists()
        root.mkdir()


def test_a_place_without_sets_goes_with_its_daemon(tmp_path: Path) -> None:
    root = place(tmp_path, 1, shared_memory=None)
    with claim(root, tmp_path):
        assert root.exists()
    assert not root.exists()
