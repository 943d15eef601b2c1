"""Disks that are full while a plane works: refusals that say so, nothing acknowledged lost, and all well when there is room.

Each file system is a tmpfs of its own that is shrunk to what it holds, and given room again.
"""

import asyncio
import os
import shutil
import subprocess
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import pytest

from compose.embedded.cluster import Cluster
from tests.plane import NODE, PlaneUnderTest, fake

SETTINGS = NODE + fake("alpha") + fake("beta") + fake("slow", tokens_per_s=30)


class Disk:
    """A tmpfs mounted at `path`."""

    def __init__(self, path: Path) -> None:
        self.path = path
        path.mkdir(parents=True, exist_ok=True)
        made = _mount("-t", "tmpfs", "-o", "size=4G,mode=0700", "none", str(path))
        if made.returncode != 0:
            pytest.skip(f"no tmpfs can be mounted here: {made.stderr.strip()}")

    def fill(self) -> None:
        held = os.statvfs(self.path)
        self._resize(str((held.f_blocks - held.f_bfree) * held.f_frsize))

    def empty(self) -> None:
        self._resize("4G")

    def _resize(self, size: str) -> None:
        _mount("-o", f"remount,size={size}", str(self.path)).check_returncode()

    def remove(self) -> None:
        subprocess.run(["umount", "-l", str(self.path)], check=True)
        shutil.rmtree(self.path, ignore_errors=True)


def _mount(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(["mount", *arguments], capture_output=True, text=True, check=False)


class Callers:
    """Ask for alpha until told to stop. `answered`: how often; `refused`: the bodies of refusals."""

    def __init__(self, plane: PlaneUnderTest) -> None:
        self.plane, self.answered, self.refused = plane, 0, list[dict[str, Any]]()
        self._over, self._asking = asyncio.Event(), asyncio.Event()
        self._asking.set()

    async def ask(self) -> None:
        body = {"model": "alpha", "messages": [{"role": "user", "content": "x" * 2000}]}
        async with self.plane.rest() as client:
            while not self._over.is_set():
                await self._asking.wait()
                answer = await client.post("/v1/chat/completions", json=body)
                if answer.status_code == 200:
                    self.answered += 1
                else:
                    assert (answer.status_code, int(answer.headers["retry-after"]) >= 1) == (503, True), answer.text
                    self.refused.append(answer.json()["error"])
                await asyncio.sleep(0.02)

    def pause(self) -> None:
        self._asking.clear()

    def go_on(self) -> None:
        self._asking.set()

    def stop(self) -> None:
        self._over.set()
        self.go_on()


@pytest.fixture(name="disks")
def _disks() -> Iterator[tuple[PlaneUnderTest, Disk, Disk]]:
    if os.geteuid() != 0:
        pytest.skip("only root mounts file systems")
    plane = PlaneUnderTest("")
    mounted = list[Disk]()
    try:
        mounted.append(Disk(plane.data))
        mounted.append(Disk(Cluster.of(plane.data).home))
        plane.settings_file.write_text(SETTINGS)
        yield plane, mounted[0], mounted[1]
        plane.finish()
    finally:
        plane._remove(keep=True)
        for disk in mounted:
            disk.remove()


@pytest.fixture(name="callers")
async def _callers(disks: tuple[PlaneUnderTest, Disk, Disk]) -> AsyncIterator[Callers]:
    plane, _, _ = disks
    await asyncio.to_thread(plane.start)
    await plane.chat("alpha")
    made = Callers(plane)
    asking = asyncio.create_task(made.ask())
    yield made
    made.stop()
    await asking


async def test_a_full_disk_refuses_and_loses_nothing(disks: tuple[PlaneUnderTest, Disk, Disk], callers: Callers) -> None:
    plane, data, log = disks

    async def more(count: int) -> None:
        """Wait for so many more answers."""
        goal = callers.answered + count

        async def so() -> bool:
            return callers.answered >= goal

        await plane.until(so, f"{count} more answers")

    async def readiness() -> tuple[int, list[str]]:
        async with plane.rest() as client:
            said = await client.get("/readyz")
        return said.status_code, said.json()["reasons"]

    async def streamed() -> str:
        async with plane.openai() as client:
            chat = [{"role": "user", "content": "y" * 30}]
            stream = await client.chat.completions.create(model="slow", messages=chat, stream=True)  # type: ignore[call-overload]
            return "".join([chunk.choices[0].delta.content or "" async for chunk in stream])

    # Postgres' disk: what runs goes on, what comes is refused with the reason.
    await plane.chat("slow", "z", max_tokens=1)
    running = asyncio.create_task(streamed())
    await plane.until_fleet(lambda fleet: any(r.model == "slow" and r.instance for r in fleet.requests.values()), "it streams")
    log.fill()

    async def refused() -> bool:
        return any("disk is full" in error["message"] for error in callers.refused)

    await plane.until(refused, "a refusal")
    assert "y" * 30 in await running
    assert {error["code"] for error in callers.refused} == {"unavailable"}

    async def unready() -> bool:
        status, reasons = await readiness()
        return status == 503 and len(reasons) == 1 and "disk is full" in reasons[0] and "make room for Postgres" in reasons[0]

    await plane.until(unready, "it is not ready, and says that alone as the reason")
    callers.pause()  # nobody writes any more: it finds out by itself
    log.empty()

    async def ready() -> bool:
        return (await readiness())[0] == 200

    await plane.until(ready, "it is ready again")
    callers.go_on()
    await more(5)

    # The data directory's: neither logs nor records of requests nor the bus can be written, and yet callers are served.
    before = len(callers.refused)
    data.fill()
    await more(20)
    assert len(callers.refused) == before
    data.empty()
    assert "hello" in await plane.chat("beta")  # it has to come up: the worker heard of it over a stream made anew

    callers.stop()
    await plane.until_fleet(lambda fleet: not fleet.requests, "every request has ended")
    wanted = callers.answered
    finished = [one.event.request for one in await plane.events("RequestFinished")]
    assert len(finished) == len(set(finished)) >= wanted

    async def clean() -> bool:
        return plane.cli("audit").returncode == 0

    await plane.until(clean, "the stream holds what the table holds")
