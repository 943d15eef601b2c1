"""Who is told that the disk has room by now."""

from pathlib import Path
from typing import Any

import pytest

from controlplane.fleet import Directive
from controlplane.rungs import Rung
from tests.unit.worker.test_image_store import drafted
from worker.desired import Desired, Wanted
from worker.images.cabinet import Cabinet
from worker.images.roomwatch import RoomWatch
from worker.instancedir import InstanceDir

MIB = 1 << 20


class Watched:
    """Sleepers that the disk has no room for. `told`: of whom it was said that there is some, look by look."""

    def __init__(self, root: Path, **skeletons: int) -> None:
        self.cabinet, self.told, self.instances = Cabinet(root, "n1", lambda _: None, None), list[str](), root / "inst"
        self.wanted: dict[str, Wanted] = {}
        for number, (name, size) in enumerate(skeletons.items()):
            kept = InstanceDir(self.instances, name)
            kept.create("cfg")
            kept.edit(skeleton_bytes=size)
            directive = Directive(number=number, rung=Rung.SLEEP, model="a", revision=1, grant=None, code="no_space", at_ms=0)
            self.wanted[name] = Wanted(instance=name, configuration="cfg", directive=directive, answered=True, unsaved=True)

    async def look(self) -> None:
        desired: Any = Desired(node="n1")
        for wanted in self.wanted.values():
            desired = Desired(node="n1", instances=desired.instances.set(wanted.instance, wanted))

        def tell(report: Any) -> None:
            self.told.append(report.instance)

        await RoomWatch(self.cabinet, "n1", self.instances, lambda: desired, tell).look()


async def test_room_is_told_of_the_one_that_needs_least_and_of_no_other_in_the_same_look(tmp_path: Path) -> None:
    watched = Watched(tmp_path, ins_a=64 * MIB, ins_b=16 * MIB, ins_c=32 * MIB)
    watched.cabinet.budget.given_bytes = 1024 * MIB
    watched.cabinet.store.root.mkdir()
    for told in (["ins_b"], ["ins_b", "ins_c"], ["ins_b", "ins_c", "ins_a"]):
        await watched.look()
        assert watched.told == told
        del watched.wanted[told[-1]]
    await watched.look()
    assert len(watched.told) == 3


async def test_a_look_reads_each_image_once_however_many_wait(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    watched = Watched(tmp_path, ins_a=64 * MIB, ins_b=16 * MIB, ins_c=32 * MIB)
    watched.cabinet.budget.given_bytes = MIB
    watched.cabinet.store.publish(drafted(watched.cabinet.store, "one"))
    read, reads = watched.cabinet.store.read, list[str]()

    def counted(image: str) -> Any:
        reads.append(image)
        return read(image)

    monkeypatch.setattr(watched.cabinet.store, "read", counted)
    await watched.look()
    assert (watched.told, reads) == ([], ["img_a"])
