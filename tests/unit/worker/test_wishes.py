"""What people want of a node's images is carried out, in whatever order they say it and whatever the disk does."""

import asyncio
import threading
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import pytest
from immutables import Map
from msgspec.structs import replace

from controlplane.commands import ReportImageRemoved
from controlplane.events import NodeLimits
from tests.unit.worker.test_worth import written
from worker.desired import Desired, Wish
from worker.images import wishes
from worker.images.cabinet import Cabinet
from worker.images.wishes import Wishes

LEAVING = Wish(leaving=("somebody", "operator"))


class House:
    """A cabinet with image `img_1`, and what is wanted of it."""

    def __init__(self, data: Path) -> None:
        self.reports: list[Any] = []
        self.cabinet = Cabinet(data, "n1", self.reports.append, None)
        written(self.cabinet.store, "img_1", "cfg_a", 10, 1)
        self.desired = Desired(node="n1")
        self.wishes = Wishes(self.cabinet, lambda: self.desired)

    def want(self, wish: Wish) -> None:
        self.desired = replace(self.desired, images=Map({"img_1": wish}))
        self.wishes.follow()

    async def until(self, condition: Callable[[], bool]) -> None:
        async with asyncio.timeout(30):
            while not condition():
                await asyncio.sleep(0.005)

    @property
    def removed(self) -> list[str]:
        return [report.code for report in self.reports if isinstance(report, ReportImageRemoved)]


@pytest.fixture
async def house(tmp_path: Path) -> AsyncIterator[House]:
    made = House(tmp_path)
    yield made
    await made.wishes.close()


async def test_an_image_that_is_dismissed_while_it_goes_to_be_made_anew_leaves_and_is_said_to_have_left(
    house: House, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It once stayed `leaving` until the next event of its node, which may be hours away."""
    goes_on, forget = threading.Event(), house.cabinet.forget

    def slowly(image: str) -> None:
        assert goes_on.wait(30)
        forget(image)

    monkeypatch.setattr(house.cabinet, "forget", slowly)
    house.want(Wish(anew=True))
    house.want(replace(LEAVING, anew=True))  # while the files are still on their way out; no further event comes
    monkeypatch.setattr(house.cabinet, "forget", forget)
    goes_on.set()
    await house.until(lambda: house.removed == ["operator"])
    assert list(house.cabinet.store.images()) == []


@pytest.mark.parametrize("error", [OSError(30, "read-only for a while"), ValueError("a fault of ours")])
async def test_an_image_that_cannot_be_removed_now_is_removed_as_soon_as_it_can(
    house: House, monkeypatch: pytest.MonkeyPatch, error: Exception
) -> None:
    monkeypatch.setattr(wishes, "AGAIN_S", 0.02)
    real, tries = Path.rename, list[Path]()

    def refuses(path: Path, target: Path) -> Path:
        tries.append(path)
        if len(tries) < 3:
            raise error
        return real(path, target)

    monkeypatch.setattr(Path, "rename", refuses)
    house.want(LEAVING)
    await house.until(lambda: house.removed == ["operator"])
    assert len(tries) == 3


async def test_two_who_remove_one_image_at_once_both_succeed(house: House) -> None:
    """The worker's own word (`replaced`) and an operator's meet."""
    await asyncio.gather(*(asyncio.to_thread(house.cabinet.remove, "img_1", code) for code in ("replaced", "operator")))
    await house.until(lambda: len(house.removed) == 2)
    assert list(house.cabinet.store.root.iterdir()) == []


async def test_another_quota_and_other_pins_count_at_once(house: House) -> None:
    for image in ("img_2", "img_3"):
        written(house.cabinet.store, image, f"cfg_{image}", 1000, int(image[-1]))
    size = house.cabinet.store.size_bytes("img_2")
    limits = NodeLimits(image_quota_bytes=size, image_pins=("cfg_img_2",))
    house.desired = replace(house.desired, limits=limits)
    house.wishes.follow()
    await house.until(lambda: len(house.removed) == 2)
    assert house.removed == ["quota", "quota"]
    assert list(house.cabinet.store.images()) == ["img_2"], "the pinned one stays"
    assert house.cabinet.budget.quota_bytes == size


async def test_nothing_is_begun_after_the_end(house: House, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(wishes, "AGAIN_S", 0.0)
    monkeypatch.setattr(house.cabinet.store, "remove", lambda image: (_ for _ in ()).throw(OSError(5, "no")))
    house.want(LEAVING)
    await house.wishes.close()
    assert house.removed == []
