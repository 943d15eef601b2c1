"""An instance whose keeper has failed gets another one, however often that takes."""

import asyncio
import os
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from worker import processes, reconcile
from worker.local import LocalInstance
from worker.reconcile import Reconciler


def watches() -> int:
    return sum((task.get_name() or "").startswith("ins_1:") for task in asyncio.all_tasks())


async def test_what_a_look_that_failed_has_begun_to_watch_is_let_go(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    looks, me = list[int](), processes.identify(os.getpid())
    assert me is not None

    async def adopt(local: LocalInstance) -> None:
        looks.append(watches())
        local.watch("holder", me)
        if len(looks) < 4:
            raise OSError("no descriptor is left")

    monkeypatch.setattr(reconcile, "adopt", adopt)
    monkeypatch.setattr(reconcile, "REVIVE_S", 0.01)
    site: Any = SimpleNamespace(instances=tmp_path, plane=None, caller=None)
    reconciler = Reconciler(site, lambda _: None)
    reviving = asyncio.create_task(reconciler._revive("ins_1"))
    async with asyncio.timeout(30):
        await reviving
    assert looks == [0, 0, 0, 0]
    async with asyncio.timeout(30):
        while watches():
            await asyncio.sleep(0.01)  # the plane knows of no such instance, so its keeper ends
    await reconciler.close()
