"""An image's bytes are compared once a climb, early, and again when that was long ago or another image's."""

from pathlib import Path

import pytest
from msgspec.structs import replace

from worker.images import reading
from worker.images.fingerprint import Fingerprint
from worker.images.reading import Reading
from worker.images.store import ImageBroken, Manifest, Store

MADE = Fingerprint(
    configuration="cfg_1", engine="fake", python="3", torch="", kernel="6", libc="2", criu="4", cpu="one", namespaces="apart",
    node="n1",
)  # fmt: skip


def image(store: Store, text: str) -> Manifest:
    (store.draft("img_a") / "pages-1.img").write_text(text)
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
