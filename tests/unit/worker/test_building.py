"""What a build does in threads is over before its draft goes, however the build ends."""

import asyncio
import errno
import os
import threading
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import asynccontextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from tests.unit.worker.test_image_store import MADE, drafted
from worker.failure import StepFailed
from worker.holdermessages import Held
from worker.images import building, bulk, facts
from worker.images.beside import Beside
from worker.images.bulk import Lifted
from worker.images.manifest import Manifest
from worker.images.store import Store
from worker.moves import Goal
from worker.parts import Parts
from worker.processes import Process


class Disk(Store):
    """It is slow to sync, and says what a sync has met."""

    def __init__(self, root: Path) -> None:
        super().__init__(root)
        self.begun, self.go, self.met = threading.Event(), threading.Event(), list[str]()

    def sync(self, image: str) -> None:
        self.wait()
        self.met.append("draft" if (self.root / f"{image}.draft").is_dir() else "nothing")

    def wait(self) -> None:
        self.begun.set()
        assert self.go.wait(60)


def building_of(
    disk: Disk, monkeypatch: pytest.MonkeyPatch, prove: Callable[..., Any], failed: list[object] | None = None
) -> Coroutine[Any, Any, tuple[int, str]]:
    """A build whose dump and restore are played."""
    made = drafted(disk, "pages")
    (disk.root / "img_a.draft").rename(disk.root / f"{made.fingerprint.image}.draft")

    async def dumped(*_: Any) -> Any:
        held: Any = SimpleNamespace(inner_pid=made.pid, park_in=made.place)
        return building.Dumped(held, (), None, disk.root / f"{made.fingerprint.image}.draft", Lifted())

    @asynccontextmanager
    async def returned(*_: Any) -> AsyncIterator[None]:
        yield None

    for name, step in (("_dumped", dumped), ("returned", returned), ("prove", prove)):
        monkeypatch.setattr(building, name, step)
    monkeypatch.setattr(building, "stays_unsaved", lambda _: False)
    cabinet = SimpleNamespace(
        store=disk, publish=disk.publish, fail=lambda *told, **__: failed.append(told) if failed is not None else None
    )
    local: Any = SimpleNamespace(site=SimpleNamespace(images=cabinet), record=SimpleNamespace(skeleton_bytes=1, ranks=()))
    wanted: Any = SimpleNamespace(configuration="cfg_a", directive=None)
    return building._built(local, Goal("m", 1), wanted, made.fingerprint, Parts())


async def at_work_still(task: "asyncio.Task[Any]") -> None:
    """However long a thread is at work, and however often it is cancelled, a build has not ended."""
    for _ in range(3):
        done, _ = await asyncio.wait([task], timeout=0.1)
        assert not done
        task.cancel()
    done, _ = await asyncio.wait([task], timeout=0.1)
    assert not done


@pytest.mark.parametrize("how", ["cancelled", "its proof fails", "its proof fails, and it is cancelled"])
async def test_a_build_that_ends_early_waits_for_its_threads_before_its_draft_goes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, how: str
) -> None:
    disk, proved, failed = Disk(tmp_path / "images"), asyncio.Event(), list[object]()

    async def prove(*_: Any, **__: Any) -> str:
        proved.set()
        if how != "cancelled":
            raise StepFailed("restore_failed", "criu ended with status 1")
        return "same_tokens"

    task = asyncio.create_task(building_of(disk, monkeypatch, prove, failed))
    async with asyncio.timeout(30):
        await proved.wait()
        assert await asyncio.to_thread(disk.begun.wait, 30)
    if how == "cancelled":
        task.cancel()
    if how != "its proof fails":
        await at_work_still(task)
    done, _ = await asyncio.wait([task], timeout=0.2)
    assert not done
    disk.go.set()
    await asyncio.wait([task], timeout=30)
    assert isinstance(task.exception(), StepFailed) if how == "its proof fails" else task.cancelled()
    assert bool(failed) is (how == "its proof fails")
    assert disk.met == ["draft"]
    assert list(disk.root.iterdir()) == []


@pytest.mark.parametrize("step", ["publish", "discard"])
async def test_nobody_else_has_the_draft_while_it_is_published_or_removed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, step: str
) -> None:
    disk, met = Disk(tmp_path / "images"), list[list[str]]()
    works: Any = getattr(disk, step)

    def slow(what: Any) -> Any:
        disk.wait()
        met.append(sorted(path.name for path in disk.root.iterdir()))
        return works(what)

    async def prove(*_: Any, **__: Any) -> str:
        if step == "discard":
            raise StepFailed("restore_failed", "criu ended with status 1")
        return "same_tokens"

    monkeypatch.setattr(disk, "sync", lambda _: None)
    monkeypatch.setattr(disk, step, slow)
    task = asyncio.create_task(building_of(disk, monkeypatch, prove))
    assert await asyncio.to_thread(disk.begun.wait, 30)
    await at_work_still(task)
    disk.go.set()
    await asyncio.wait([task], timeout=30)
    assert task.cancelled()
    [draft] = met[0]
    assert draft.endswith(".draft"), "it was there when the step began to work"
    assert [path.name for path in disk.root.iterdir()] == ([draft.removesuffix(".draft")] if step == "publish" else [])


@pytest.mark.parametrize(
    ("code", "blamed"),
    [
        ("unknown_set", False),
        ("device_full", False),
        ("pool", False),
        ("no_space", False),
        ("over_quota", False),
        ("restore_failed", True),
    ],
)
async def test_an_image_is_blamed_for_what_it_is_itself_only(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, code: str, blamed: bool
) -> None:
    disk, failed = Disk(tmp_path / "images"), list[object]()
    disk.go.set()

    async def prove(*_: Any, **__: Any) -> str:
        raise StepFailed(code, "it came to nothing")

    with pytest.raises(StepFailed, match="came to nothing"):
        await building_of(disk, monkeypatch, prove, failed)
    assert bool(failed) is blamed
    assert list(disk.root.iterdir()) == []


@pytest.mark.parametrize(("number", "blamed"), [(errno.ENOSPC, False), (errno.EDQUOT, False), (errno.EIO, True)])
@pytest.mark.parametrize("where", ["sync", "hollow"])
async def test_a_disk_that_runs_full_after_the_dump_is_not_the_images_fault(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int, blamed: bool, where: str
) -> None:
    disk, failed = Disk(tmp_path / "images"), list[object]()
    disk.go.set()

    async def prove(*_: Any, **__: Any) -> str:
        return "same_tokens"

    def full(*_: Any) -> int:
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(*((disk, "sync") if where == "sync" else (bulk, "hollow")), full)
    with pytest.raises(StepFailed, match=os.strerror(number)) as said:
        await building_of(disk, monkeypatch, prove, failed)
    assert said.value.code == "image_failed", "the engine is not there any more"
    assert bool(failed) is blamed
    assert list(disk.root.iterdir()) == []


class Slow(Disk):
    """It is slow to write the manifest of what it is to publish."""

    def publish(self, manifest: Manifest) -> Manifest:
        self.begun.set()
        assert self.go.wait(60)
        return super().publish(manifest)

    def sync(self, image: str) -> None:
        """Nothing is slow but what is above."""


@pytest.mark.parametrize("times", [1, 2])
async def test_a_build_that_is_cancelled_while_it_is_published_leaves_a_whole_image(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, times: int
) -> None:
    disk = Slow(tmp_path / "images")

    async def prove(*_: Any, **__: Any) -> str:
        return "same_tokens"

    task = asyncio.create_task(building_of(disk, monkeypatch, prove))
    assert await asyncio.to_thread(disk.begun.wait, 30)
    for _ in range(times):  # its deadline passes, and then the worker ends
        task.cancel()
        done, _ = await asyncio.wait([task], timeout=0.2)
        assert not done, "a thread is at work still"
    disk.go.set()
    await asyncio.wait([task], timeout=30)
    assert task.cancelled()
    (image,) = disk.images()
    disk.verify(disk.read(image))


def dumping(draft: Path, monkeypatch: pytest.MonkeyPatch, dump: Callable[[], Any]) -> Coroutine[Any, Any, building.Dumped]:
    """A dump by a holder that is played; `dump` is what CRIU does."""
    held: Any = SimpleNamespace(engine=SimpleNamespace(pid=os.getpid()), exit=None, inner_pid=1001, park_in="/")

    async def ask() -> Any:
        return held

    async def dumps(*_: Any, **__: Any) -> Any:
        return dump()

    monkeypatch.setattr(building.checkpoint, "theatre", lambda _: None)
    cabinet = SimpleNamespace(
        store=SimpleNamespace(draft=lambda _: draft, root=draft.parent, discard=lambda _: None),
        make_room=lambda _: None,
        criu=SimpleNamespace(path="criu"),
    )
    local: Any = SimpleNamespace(
        site=SimpleNamespace(images=cabinet, deadlines=SimpleNamespace(build=60.0)),
        record=SimpleNamespace(skeleton_bytes=1, ranks=()),
        holder=SimpleNamespace(ask=ask, dump=dumps),
        unwatch=lambda _: None,
        instance="inst_a",
        directory=SimpleNamespace(path=draft.parent),
    )
    wanted: Any = SimpleNamespace(configuration="cfg_a", directive=None)

    async def dumped() -> building.Dumped:
        async with Beside(Parts()) as beside:
            return await building._dumped(local, "img_a", wanted, beside)

    return dumped()


async def test_why_a_dump_failed_is_said_also_when_its_directory_has_gone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    draft = tmp_path / "img_a.draft"
    draft.mkdir()

    def dump() -> None:
        draft.rmdir()
        raise StepFailed("dump_failed", "criu ended with status 1")

    with pytest.raises(StepFailed, match="criu ended with status 1"):
        await dumping(draft, monkeypatch, dump)


@pytest.mark.parametrize(
    ("code", "why"),
    [
        ("dump_failed", "criu ended with status 1: write: No space left on device"),
        ("dump_failed", "criu ended with status 1: write: Disk quota exceeded"),
        ("no_space", "/run/release.new can't be written"),
    ],
)
async def test_a_dump_that_the_disk_did_not_take_is_said_to_be_that(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, code: str, why: str
) -> None:
    def dump() -> None:
        raise StepFailed(code, why)

    with pytest.raises(StepFailed, match="ran full") as said:
        await dumping(tmp_path, monkeypatch, dump)
    assert said.value.code == "no_space"


async def test_an_engine_that_has_ended_is_no_fault_of_the_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def gone(pid: int) -> list[str]:
        raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), f"/proc/{pid}/maps")

    monkeypatch.setattr(building.facts, "mapped_paths", gone)
    with pytest.raises(StepFailed) as said:
        await dumping(tmp_path, monkeypatch, lambda: None)
    assert said.value.code == "engine_died"


@pytest.mark.parametrize(("number", "blamed"), [(errno.ENOSPC, False), (errno.EDQUOT, False), (errno.EIO, True)])
async def test_a_disk_that_runs_full_while_the_bulk_is_lifted_is_not_the_images_fault_and_ends_the_instance(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int, blamed: bool
) -> None:
    disk, failed, unwatched, lifted = Disk(tmp_path / "images"), list[object](), list[str](), list[Path]()
    engine = Process(os.getpid(), 1, "boot")

    async def ask() -> Held:
        return Held(pid=1, engine=engine, exit=None, connected=False, grant=None, inner_pid=7, park_in="/park")

    async def dump(_criu: Path, draft: Path, *, deadline_s: float) -> Held:
        (draft / "pages-1.img").write_bytes(b"pages")
        return await ask()

    def full(draft: Path, *_: Any) -> Lifted:
        lifted.append(*draft.iterdir())
        raise OSError(number, os.strerror(number), str(draft))

    monkeypatch.setattr(facts, "mapped_paths", lambda _: ())
    monkeypatch.setattr(bulk, "lift", full)
    monkeypatch.setattr(building, "stays_unsaved", lambda _: True)
    cabinet = SimpleNamespace(
        store=disk,
        make_room=lambda _: None,
        criu=SimpleNamespace(path=Path("criu")),
        fail=lambda *told, **__: failed.append(told),
    )
    local: Any = SimpleNamespace(
        site=SimpleNamespace(images=cabinet, deadlines=SimpleNamespace(build=60.0)),
        record=SimpleNamespace(skeleton_bytes=1, ranks=()),
        holder=SimpleNamespace(ask=ask, dump=dump), directory=SimpleNamespace(read=lambda: None, path=tmp_path),
        unwatch=unwatched.append, watched=lambda role: role not in unwatched,
    )  # fmt: skip
    wanted: Any = SimpleNamespace(configuration="cfg_a", directive=None)
    with pytest.raises(StepFailed, match=f"the image can't be written: .*{os.strerror(number)}") as said:
        await building._built(local, Goal("m", 1), wanted, MADE, Parts())
    assert [path.name for path in lifted] == ["pages-1.img"], "it was written"
    assert said.value.code == "image_failed", "the engine is not there any more: that it was to stay changes nothing"
    assert bool(failed) is blamed
    assert list(disk.root.iterdir()) == []
