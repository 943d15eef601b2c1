"""The web process as a whole: what ends it."""

import asyncio
import socket

import pytest
from msgspec.structs import replace

from controlplane.bus import Bus
from controlplane.plane import Plane
from controlplane.refusal import Code, Refused
from web.server import NotFollowing, serve


def plane() -> Plane:
    return Plane(data="/nowhere", postgres_url="postgresql://u@/d?host=/nowhere", nats_url="nats://127.0.0.1:1", cookie_key="k")


async def test_a_process_that_no_longer_follows_the_plane_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    """It would answer for ever that it is not ready, and nobody would start another."""

    async def refuse(self: Bus, plane: Plane, *, deadline_s: float | None) -> None:
        raise Refused(Code.UNAVAILABLE, "authorization violation")

    monkeypatch.setattr(Bus, "open", refuse)
    async with asyncio.timeout(40):
        with pytest.raises(NotFollowing, match="authorization violation"):
            await serve(plane(), asyncio.Event())


async def test_one_whose_bus_was_closed_for_good_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    async def open_and_lose(self: Bus, plane: Plane, *, deadline_s: float | None) -> None:
        self.closed.set()

    monkeypatch.setattr(Bus, "open", open_and_lose)
    async with asyncio.timeout(40):
        with pytest.raises(NotFollowing, match="closed for good"):
            await serve(plane(), asyncio.Event())


async def test_an_address_that_is_taken_is_said() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        here = replace(plane(), web_port=taken.getsockname()[1])
        with pytest.raises(OSError, match="in use"):
            await serve(here, asyncio.Event())


async def test_one_that_never_found_its_bus_ends_in_order() -> None:
    stop = asyncio.Event()
    serving = asyncio.create_task(serve(plane(), stop, lambda services, port: stop.set()))
    async with asyncio.timeout(40):
        await serving
