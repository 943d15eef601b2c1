"""What an earlier worker left, when it goes just as it is looked at."""

import asyncio
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from worker import processes
from worker.adoption import adopt
from worker.holderlink import HolderGone
from worker.local import LocalInstance
from worker.service import Status


async def test_a_frontend_that_dies_with_its_answer_on_the_way_is_found_to_be_gone(tmp_path: Path) -> None:
    site: Any = SimpleNamespace(instances=tmp_path, plane=None, caller=None)
    local = LocalInstance(site, "ins_1", lambda: None)
    local.directory.create("cfg_1")
    frontend = processes.spawn(["sleep", "600"], log=tmp_path / "log", directory=tmp_path)
    local.directory.edit(frontend=frontend, port=1)

    async def status(port: int, **_: object) -> Status:
        assert await processes.end(frontend, grace_s=0)
        for _round in range(20):  # whoever watches it hears of it
            await asyncio.sleep(0)
        return Status()

    async def nobody(**_: object) -> None:
        raise HolderGone("it is not there")

    service, holder = SimpleNamespace(status=status), SimpleNamespace(ask=nobody)
    local.frontend, local.holder = service, holder  # type: ignore[assignment]
    await adopt(local)
    async with asyncio.timeout(10):
        while local.seen.frontend:
            await asyncio.sleep(0)
    local.forget()
