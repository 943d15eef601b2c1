"""An image's bytes are compared once a climb, early, and again when that was long ago or another image's."""

import asyncio
import errno
import sys
import threading
from pathlib import Path
from types import ModuleType

import pytest
from msgspec.structs import replace

from worker.images import bulk, facts, reading
from worker.images import manifest as manifests
from worker.images.beside import to_its_end
from worker.images.fingerprint import Fingerprint
from worker.images.manifest import ImageBroken, Manifest
from worker.images.reading import Reading
from worker.images.store import Store

MADE = Fingerprint(
    configuration="cfg_1", engine="fake", python="3", torch="", kernel="6", libc="2", criu="4", cpu="one", namespaces="apart",
    node="n1",
)  # fmt: skip


def image(store: Store, text: str) -> Manifest:
    draft = store.draft("img_a")
    (draft / "core-1.img").write_text("orders")
    (draft / "pages-1.img").write_text(text)
    return store.publish(
        Manifest(
            image="img_a", fingerprint=MADE, mapped=(), files=(), pid=1001, place="/", skeleton_bytes=1, made_ms=1, proof=""
        )
    )


async def test_it_serves_the_same_image_for_a_moment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store = Store(tmp_path)
    manifest = image(store, "whole")
    begun = Reading(store, manifest)
    assert begun.serves(store.read("img_a"))
    assert not begun.serves(replace(manifest, made_ms=2))
    await begun.done()
    monkeypatch.setattr(reading, "FRESH_S", 0.0)
    assert not begun.serves(manifest)


async def test_a_wrong_byte_is_told_to_whoever_waits_for_it(tmp_path: Path) -> None:
    store = Store(tmp_path)
    manifest = image(store, "whole")
    (tmp_path / "img_a" / "pages-1.img").write_text("whale")
    with pytest.raises(ImageBroken) as broken:
        await Reading(store, manifest).done()
    assert broken.value.code == "image_corrupt"


async def test_what_criu_goes_by_is_told_without_waiting_for_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store, go_on, digest = Store(tmp_path), threading.Event(), manifests.digest
    manifest = image(store, "whole")

    def slow(path: Path) -> str:
        assert path.name != "pages-1.img" or go_on.wait(30)
        return digest(path)

    monkeypatch.setattr(manifests, "digest", slow)
    begun = Reading(store, manifest)
    await begun.orders()
    (tmp_path / "img_a" / "pages-1.img").write_text("whale")
    go_on.set()
    with pytest.raises(ImageBroken, match=r"pages-1\.img"):
        await begun.done()
    (tmp_path / "img_a" / "pages-1.img").write_text("cut")
    with pytest.raises(ImageBroken) as broken:
        await Reading(store, manifest).orders()
    assert broken.value.code == "image_truncated"


async def test_a_file_that_can_t_be_read_is_a_broken_image(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def failing(path: Path) -> str:
        raise OSError(errno.EIO, "Input/output error", str(path))

    store = Store(tmp_path)
    manifest = image(store, "whole")
    monkeypatch.setattr(manifests, "digest", failing)
    with pytest.raises(ImageBroken, match="Input/output error") as broken:
        await Reading(store, manifest).done()
    assert broken.value.code == "image_unreadable"


def test_a_file_is_as_it_is_now_however_often_it_was_looked_at(tmp_path: Path) -> None:
    library, note = tmp_path / "lib.so", b"\x04\x00\x00\x00\x14\x00\x00\x00\x03\x00\x00\x00GNU\x00"
    for byte in (b"a", b"b"):
        (tmp_path / "new.so").write_bytes(b"\x7fELF" + note + byte * 20)
        (tmp_path / "new.so").replace(library)
        for _ in range(2):
            known = facts.mapped_file(str(library))
            assert known is not None and known.mark == byte.hex() * 20
    library.unlink()
    assert facts.mapped_file(str(library)) is None


async def test_what_a_thread_does_to_a_draft_has_ended_when_its_step_has() -> None:
    """Else it would go on in the next draft of that image, which has the same name."""
    begun, go_on, ended = threading.Event(), threading.Event(), threading.Event()

    def work() -> None:
        begun.set()
        go_on.wait(30)
        ended.set()

    step = asyncio.create_task(to_its_end(work))
    assert await asyncio.to_thread(begun.wait, 30)
    for _ in range(3):
        step.cancel()
        done, _ = await asyncio.wait({step}, timeout=0.05)
        assert not done
    go_on.set()
    with pytest.raises(asyncio.CancelledError):
        await step
    assert ended.is_set()


def test_other_code_that_lays_out_memory_makes_other_images(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An older worker, too, must not take one for its own: it would bring back pages of zeros."""
    laid_out = {Path(str(module.__file__)).name: tmp_path / Path(str(module.__file__)).name for module in facts.LAYING_OUT}
    assert {"bulk.py", "refill.py"} <= set(laid_out)
    for module in facts.LAYING_OUT:
        own = Path(str(module.__file__))
        laid_out[own.name].write_bytes(own.read_bytes() + b"# another\n")
        facts.our_code.cache_clear()
        before = facts.our_code()
        with monkeypatch.context() as other:
            other.setattr(module, "__file__", str(laid_out[own.name]))
            facts.our_code.cache_clear()
            assert facts.our_code() != before
    facts.our_code.cache_clear()


def test_what_an_engine_reads_at_its_start_is_not_what_this_process_has_read(monkeypatch: pytest.MonkeyPatch) -> None:
    before = facts.our_code()
    assert facts.code_on_disk() == before
    monkeypatch.setattr(facts, "LAYING_OUT", ())
    assert (facts.our_code(), facts.code_on_disk() != before) == (before, True)


def test_nothing_that_lays_out_memory_is_left_out() -> None:
    """Whatever `bulk` takes from these packages, directly or not, but the code that starts CRIU."""
    reached, left = {bulk.__name__}, [bulk.__name__]
    while left:
        for value in vars(sys.modules[left.pop()]).values():
            name = str(value.__name__ if isinstance(value, ModuleType) else getattr(value, "__module__", ""))
            if name.startswith("worker.images.") and name not in reached:
                reached.add(name)
                left.append(name)
    assert reached - {"worker.images.criu"} == {module.__name__ for module in facts.LAYING_OUT}
