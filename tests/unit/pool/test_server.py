"""A daemon's sets that come and go at the same moment."""

import asyncio
import os
from pathlib import Path

import numpy as np
import pytest

from pool.arena import Arena, Draft
from pool.manifest import Manifest
from pool.references import References
from pool.residency import Residency
from pool.server import Server
from tests.poolroom import MIB, write_safetensors


async def staged(server: Server, source: Path) -> str:
    staging = server.stagings.join(str(source))
    try:
        return (await staging.task).weight_set
    finally:
        server.stagings.leave(staging)


async def spun() -> None:
    """All that can run in the loop has."""
    for _ in range(20):
        await asyncio.sleep(0)


@pytest.fixture
def source(tmp_path: Path) -> Path:
    made = tmp_path / "source"
    made.mkdir()
    write_safetensors(made / "model.safetensors", {"w": np.arange(4096, dtype=np.uint8)})
    return made


async def test_a_sound_copy_is_not_buried_with_the_corrupt_one_whose_place_it_takes(
    tmp_path: Path, source: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (root := tmp_path / "root").mkdir()
    server, loop = Server(Arena(root), Residency(64 * MIB)), asyncio.get_running_loop()
    name = await staged(server, source)
    engine = References(server.residency, server.devices, server.removals.remove)
    engine.hold(name)
    assert not server.residency.condemn(name, ("w",), server.residency.edition(name)), "it is held"
    publish, leaving = server.arena.publish, list[asyncio.Future[None]]()

    def and_the_last_holder_goes(draft: Draft, of: Manifest) -> None:
        publish(draft, of)
        leaving.append(asyncio.wrap_future(asyncio.run_coroutine_threadsafe(engine.close(), loop), loop=loop))
        asyncio.run_coroutine_threadsafe(spun(), loop).result(30)

    monkeypatch.setattr(server.arena, "publish", and_the_last_holder_goes)
    assert await staged(server, source) == name
    await asyncio.gather(*leaving)
    resident = server.residency.find(name)
    assert (root / name).is_dir()
    for fd in server.arena.open(resident.manifest):
        os.close(fd)


async def test_what_is_found_in_files_that_are_gone_is_not_held_against_those_that_took_their_place(
    tmp_path: Path, source: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A daemon looks through its sets for minutes; somebody may have found it first, and staged the source again."""
    (root := tmp_path / "root").mkdir()
    server, loop = Server(Arena(root), Residency(64 * MIB)), asyncio.get_running_loop()
    name = await staged(server, source)
    manifest = server.residency.find(name).manifest

    async def anew() -> None:
        assert server.residency.condemn(name, ("w",), server.residency.edition(name))
        assert await server.removals.remove(name)
        assert await staged(server, source) == name

    def compared(*_: object) -> tuple[str, ...]:
        asyncio.run_coroutine_threadsafe(anew(), loop).result(30)
        return ("w",)

    monkeypatch.setattr(server.checks, "_compare", compared)
    await server.checks.all([manifest])
    assert not server.residency.find(name).bad
    server.checks.close()


async def test_a_draft_whose_memory_can_not_be_taken_back_is_closed_and_removed_all_the_same(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (root := tmp_path / "root").mkdir()
    server = Server(Arena(root), Residency(64 * MIB))
    draft = await server.stagings.begin((MIB,), ())
    draft.allocate(0)

    async def cut_short(_draft: Draft) -> None:
        raise asyncio.CancelledError

    monkeypatch.setattr(server.ready, "take_back", cut_short)
    with pytest.raises(asyncio.CancelledError):
        await server.stagings.end(draft)
    assert draft.fds == [-1]
    assert not draft.path.exists()
    await server.close()
