"""What the plane is told of an image is in the order in which it happened."""

import asyncio
import errno
import os
import threading
from pathlib import Path
from typing import Any

import pytest

from controlplane.commands import ReportImageBuilt, ReportImageRemoved
from tests.unit.worker.test_image_store import drafted
from worker.images.cabinet import Cabinet
from worker.images.manifest import Manifest


async def test_one_that_is_removed_as_soon_as_it_is_there_was_built_before(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    told: list[Any] = []
    cabinet = Cabinet(tmp_path, "n1", told.append, None)
    publish, removing = cabinet.store.publish, threading.Thread(target=lambda: cabinet.remove("img_a"))

    def and_it_is_removed(manifest: Manifest) -> Manifest:
        whole = publish(manifest)
        removing.start()
        removing.join(0.3)  # it has had the time, unless it has to wait for its turn
        return whole

    monkeypatch.setattr(cabinet.store, "publish", and_it_is_removed)
    await asyncio.to_thread(cabinet.publish, drafted(cabinet.store, "one"))
    await asyncio.to_thread(removing.join)
    await asyncio.sleep(0)
    assert [type(report) for report in told] == [ReportImageBuilt, ReportImageRemoved]
    assert list(cabinet.store.images()) == []


@pytest.mark.parametrize("name", ["manifest.json", "standing.json"])
async def test_a_worker_says_hello_whatever_a_disk_does_not_give(tmp_path: Path, name: str) -> None:
    cabinet = Cabinet(tmp_path, "n1", lambda _: None, None)
    cabinet.store.publish(drafted(cabinet.store, "one"))
    (cabinet.store.path("img_a") / name).unlink(missing_ok=True)
    (cabinet.store.path("img_a") / name).mkdir()
    assert [found.image for found in cabinet.found()] == (["img_a"] if name == "standing.json" else [])


async def test_an_image_is_there_whether_or_not_others_can_be_removed_for_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    told: list[Any] = []
    cabinet = Cabinet(tmp_path, "n1", told.append, None)

    def busy(image: str) -> None:
        raise OSError(errno.EPERM, os.strerror(errno.EPERM), image)

    monkeypatch.setattr(cabinet.store, "remove", busy)
    monkeypatch.setattr(cabinet.budget, "surplus", lambda *, keep: ["img_b"])
    made = await asyncio.to_thread(cabinet.publish, drafted(cabinet.store, "one"))
    await asyncio.sleep(0)
    assert [type(report) for report in told] == [ReportImageBuilt]
    cabinet.store.verify(made)
