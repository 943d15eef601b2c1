"""Images on disk: none is lost while another takes its place, and what can't be read is an error and no more."""

import errno
import os
import threading
from pathlib import Path

import msgspec
import pytest
from blake3 import blake3

from worker import filedigest as digests
from worker.filedigest import digest, taken_bytes
from worker.images import store as stores
from worker.images.fingerprint import Fingerprint
from worker.images.manifest import ImageBroken, Manifest
from worker.images.store import Standing, Store

MIB = 1 << 20

MADE = Fingerprint(
    configuration="cfg_1", engine="fake", python="3", torch="", kernel="6", libc="2", criu="4", cpu="one", namespaces="apart",
    node="n1",
)  # fmt: skip


class Cut(BaseException):
    """The power goes."""


def drafted(store: Store, text: str) -> Manifest:
    (store.draft("img_a") / "pages-1.img").write_text(text)
    return Manifest(
        image="img_a", fingerprint=MADE, mapped=(), files=(), pid=1001, place="/", skeleton_bytes=1, made_ms=1, proof=""
    )


def whole(store: Store) -> str:
    """What the image has; it is one that may be used."""
    store.verify(store.read("img_a"))
    return (store.path("img_a") / "pages-1.img").read_text()


@pytest.fixture(params=["exchanged", "put aside"])
def store(tmp_path: Path, request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Store:
    if request.param == "put aside":
        monkeypatch.setattr(stores, "exchange", lambda one, other: False)
    return Store(tmp_path / "images")


def test_a_new_image_takes_the_place_of_an_old_one_and_nothing_else_is_left(store: Store) -> None:
    for text in ("old", "new", "newest"):
        store.publish(drafted(store, text))
        assert whole(store) == text
        assert [path.name for path in store.root.iterdir()] == ["img_a"]


def test_wherever_the_power_goes_one_of_the_two_is_there_afterwards(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    """Cut before each step that changes a name or removes one, in turn, until none is left."""
    found, left, names = list[str](), 0, ("rename", "rmtree", "exchange")

    def cutting(real: object) -> object:
        def step(*args: object, **more: object) -> object:
            nonlocal left
            if left == 0:
                raise Cut
            left -= 1
            return real(*args, **more)  # type: ignore[operator]

        return step

    for steps in range(10):
        store.publish(drafted(store, "old"))
        manifest = drafted(store, "new")
        with monkeypatch.context() as cut:
            left = steps
            for owner, name in zip((Path, stores.shutil, stores), names, strict=True):  # type: ignore[attr-defined]
                cut.setattr(owner, name, cutting(getattr(owner, name)))
            try:
                store.publish(manifest)
            except Cut:
                ended = False
            else:
                ended = True
        store.sweep()
        found.append(whole(store))
        assert [path.name for path in store.root.iterdir()] == ["img_a"]
        if ended:
            break
    assert found[0] == "old"
    assert found[-1] == "new"
    assert len(found) > 2
    assert found == sorted(found, reverse=True), "once it is the new one it stays so"


def test_a_place_that_can_t_be_taken_leaves_the_old_image_where_it_was(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store, rename = Store(tmp_path), Path.rename
    store.publish(drafted(store, "old"))
    manifest = drafted(store, "new")

    def failing(self: Path, target: Path) -> Path:
        if self.name == "img_a.draft":
            raise OSError(errno.EIO, "Input/output error")
        return rename(self, target)

    monkeypatch.setattr(stores, "exchange", lambda one, other: False)
    monkeypatch.setattr(Path, "rename", failing)
    with pytest.raises(OSError, match="Input/output"):
        store.publish(manifest)
    assert whole(store) == "old"


def test_an_old_image_that_is_removed_at_that_moment_is_not_missed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store, real = Store(tmp_path), stores.exchange
    store.publish(drafted(store, "old"))
    manifest = drafted(store, "new")

    def late(one: Path, other: Path) -> bool:
        store.remove("img_a")
        return real(one, other)

    monkeypatch.setattr(stores, "exchange", late)
    store.publish(manifest)
    assert whole(store) == "new"


@pytest.mark.parametrize("size", [0, 1, 1000, 4096, 5000, 8192, 40_001])
def test_a_digest_is_that_of_the_whole_file_whatever_its_pieces(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, size: int
) -> None:
    monkeypatch.setattr(digests, "SLICE_BYTES", 1000)
    content = os.urandom(size)
    (tmp_path / "file").write_bytes(content)
    assert digest(tmp_path / "file") == blake3(content).hexdigest()


@pytest.mark.parametrize("size", [3, 5 * digests.SLICE_BYTES])
def test_a_bad_sector_is_a_broken_image_and_not_the_worker_s_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, size: int
) -> None:
    store = Store(tmp_path)
    manifest, preadv = store.publish(drafted(store, "x" * size)), os.preadv

    def bad(descriptor: int, rooms: list[memoryview], offset: int) -> int:
        if offset <= size // 2 < offset + len(rooms[0]):
            raise OSError(errno.EIO, "Input/output error")
        return preadv(descriptor, rooms, offset)

    monkeypatch.setattr(os, "preadv", bad)
    with pytest.raises(ImageBroken, match="Input/output error") as broken:
        store.verify(manifest)
    assert broken.value.code == "image_unreadable"


def test_a_file_that_is_cut_while_it_is_read_is_no_worse(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store, size = Store(tmp_path), 5 * digests.SLICE_BYTES
    manifest, preadv = store.publish(drafted(store, "x" * size)), os.preadv

    def cut(descriptor: int, rooms: list[memoryview], offset: int) -> int:
        os.truncate(store.path("img_a") / "pages-1.img", 5)
        return preadv(descriptor, rooms, offset)

    monkeypatch.setattr(os, "preadv", cut)
    with pytest.raises(ImageBroken, match=r"ends at byte \d+") as broken:
        store.verify(manifest)
    assert broken.value.code == "image_unreadable"


def sparse(path: Path, data: int, hole: int) -> None:
    with path.open("wb") as file:
        file.write(os.urandom(data))
        file.seek(hole, os.SEEK_CUR)
        file.write(os.urandom(data))
        file.seek(hole, os.SEEK_CUR)
        file.truncate()


@pytest.mark.parametrize(("data", "hole"), [(MIB, MIB), (4096, 64 * MIB), (0, MIB), (MIB, 0)])
def test_holes_are_counted_nowhere_and_a_manifest_says_how_long_a_file_is_all_the_same(
    tmp_path: Path, data: int, hole: int
) -> None:
    store = Store(tmp_path)
    manifest = drafted(store, "")
    draft = store.root / "img_a.draft"
    sparse(draft / "bulk-1001.img", data, hole)
    if data and hole and (draft / "bulk-1001.img").stat().st_blocks * 512 >= 2 * (data + hole):
        pytest.skip("this file system has no holes")
    made = store.publish(manifest)
    assert made.size_bytes == 2 * data
    assert [file.size_bytes for file in made.files] == [2 * (data + hole), 0]
    assert 2 * data <= store.size_bytes("img_a") <= 2 * data + 4 * 4096, "the manifest, and a file system's own blocks"
    assert 0 <= taken_bytes(store.root) - store.size_bytes("img_a") <= 4096
    store.verify(store.read("img_a"))


def test_a_manifest_of_before_is_read_and_says_what_it_said(tmp_path: Path) -> None:
    store = Store(tmp_path)
    store.publish(drafted(store, "whole"))
    path = store.path("img_a") / "manifest.json"
    known = msgspec.json.decode(path.read_bytes())
    assert [file.pop("data_bytes") for file in known["files"]] == [5]
    path.write_bytes(msgspec.json.encode(known))
    assert store.read("img_a").size_bytes == 5
    assert whole(store) == "whole"


def test_what_two_instances_find_of_one_image_at_once_both_counts(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    """One comes back well just when the answer of another is found to be wrong."""
    store.publish(drafted(store, "one"))
    other = threading.Thread(target=lambda: store.failed("img_a", "check_mismatch", "another answer", final=True))
    read = store.standing

    def and_the_other_writes(image: str) -> Standing:
        known = read(image)
        if threading.current_thread() is not other:
            monkeypatch.undo()
            other.start()
            other.join(0.3)  # it has had the time, unless it has to wait for its turn
        return known

    monkeypatch.setattr(store, "standing", and_the_other_writes)
    store.used("img_a")
    other.join()
    assert (read("img_a").failed, read("img_a").uses) == ("check_mismatch", 1)


def test_an_image_that_has_failed_for_good_stays_so_whatever_becomes_of_restores_under_way(store: Store) -> None:
    store.publish(drafted(store, "one"))
    store.failed("img_a", "check_mismatch", "another answer", final=True)
    store.used("img_a")
    assert store.failed("img_a", "restore_failed", "criu").failed == "check_mismatch"


def test_a_manifest_that_the_disk_does_not_give_is_a_broken_image(tmp_path: Path) -> None:
    store = Store(tmp_path)
    store.publish(drafted(store, "one"))
    (store.path("img_a") / "manifest.json").unlink()
    (store.path("img_a") / "manifest.json").mkdir()
    with pytest.raises(ImageBroken, match="Is a directory") as broken:
        store.read("img_a")
    assert broken.value.code == "image_unreadable"


def test_a_file_that_can_not_even_be_looked_at_is_a_broken_image(tmp_path: Path) -> None:
    store = Store(tmp_path)
    manifest = store.publish(drafted(store, "one"))
    stores.shutil.rmtree(store.path("img_a"))  # type: ignore[attr-defined]
    store.path("img_a").write_text("no directory any more")
    with pytest.raises(ImageBroken, match="Not a directory") as broken:
        store.verify(manifest)
    assert broken.value.code == "image_unreadable"


@pytest.mark.parametrize("name", ["standing.json", "standing.new"])
def test_what_an_image_has_been_through_is_not_worth_a_climb(tmp_path: Path, name: str) -> None:
    """Where the disk gives or takes no more, an engine that came back from it is there all the same."""
    store = Store(tmp_path)
    store.publish(drafted(store, "one"))
    (store.path("img_a") / name).mkdir()
    store.used("img_a")
    assert store.standing("img_a") == Standing()
    assert store.failed("img_a", "check_mismatch", "another answer", final=True).failed == "check_mismatch"
    assert whole(store) == "one"


def test_what_goes_while_room_is_counted_takes_none(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Another build's draft, say: that is no failure of this one."""
    store, scandir = Store(tmp_path), os.scandir
    store.publish(drafted(store, "one"))

    def going(place: Path) -> object:
        if Path(place).name == "img_a":
            monkeypatch.undo()
            stores.shutil.rmtree(place)  # type: ignore[attr-defined]
        return scandir(place)

    monkeypatch.setattr(os, "scandir", going)
    assert taken_bytes(store.root) == 0
    assert not store.path("img_a").exists(), "it was listed, and then it was gone"


def test_what_can_not_be_counted_is_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def bad(_: Path) -> object:
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    monkeypatch.setattr(os, "scandir", bad)
    with pytest.raises(OSError, match="Input/output error"):
        taken_bytes(tmp_path)
