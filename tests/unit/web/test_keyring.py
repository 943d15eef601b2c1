"""Tokens while many unknown ones are tried."""

import asyncio
import time
from typing import Any

import pytest

from web import keyring as module
from web.errors import ApiError
from web.keyring import Keyring, _Known
from web.tokens import digest


async def test_a_flood_of_unknown_tokens_holds_up_no_known_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "TTL_S", 0.0)
    monkeypatch.setattr(module, "LOOKUP_S", 4.0)
    ring: Any = Keyring("postgresql://nobody@/none")
    never = asyncio.Event()

    async def look_up(name: str) -> _Known:
        if name != "known":
            await never.wait()
        return _Known(name="ada", scope="admin", stored=digest("secret"), checked_at=time.monotonic())

    monkeypatch.setattr(ring, "_look_up", look_up)
    assert (await ring.identify("eh_known_secret")).name == "ada"
    flood = [asyncio.create_task(ring.identify(f"eh_{number}_x")) for number in range(50)]
    await asyncio.sleep(0)
    async with asyncio.timeout(3.0):
        assert (await ring.identify("eh_known_secret")).name == "ada"
    ends = await asyncio.gather(*flood, return_exceptions=True)
    assert {end.status for end in ends if isinstance(end, ApiError)} == {503}
    assert len(ends) == sum(isinstance(end, ApiError) for end in ends), "all of them within one deadline"
