"""Parts of the plane go away and come back: what the web process says meanwhile, and that nothing is lost."""

import asyncio
import signal
import sys
import time
from collections.abc import AsyncIterator
from pathlib import Path

import httpx
import msgspec
import openai
import pytest

from compose.embedded.nats import EmbeddedNats
from controlplane.plane import Plane
from controlplane.reservation import Reservation
from tests.integration.web.house import DEADLINE_S, REPOSITORY, STOP_S, House, opened, until
from web.tokens import new_token


@pytest.fixture
async def nats(server_directory: Path) -> AsyncIterator[EmbeddedNats]:
    """A server of one's own, to be stopped and started."""
    server = EmbeddedNats(server_directory / f"own{time.monotonic_ns()}")
    await server.start()
    yield server
    await server.stop()


@pytest.fixture
async def own(plane: Plane, nats: EmbeddedNats) -> AsyncIterator[House]:
    async with opened(msgspec.structs.replace(plane, nats_url=nats.url, nats_token=nats.token)) as house:
        yield house


async def test_a_running_stream_outlives_nats_and_new_requests_are_503_meanwhile(own: House, nats: EmbeddedNats) -> None:
    await own.register("alpha")
    await own.chat()
    await until(lambda: not own.services.view.fleet.requests)
    own.node.script.gate.clear()
    call = asyncio.create_task(own.chat(stream=True))
    await until(lambda: own.node.frontend.running)
    stream = await call
    await nats.stop()
    await until(lambda: not own.services.view.synced)
    ready = await own.client.get("/readyz")
    assert (ready.status_code, ready.headers["retry-after"]) == (503, "1")
    assert ready.json()["reasons"] == ["NATS does not answer"]
    assert (await own.client.get("/livez")).status_code == 200
    assert (await own.client.get("/v1/models")).status_code == 200
    with pytest.raises(openai.APIStatusError) as caught:
        await own.chat()
    assert caught.value.status_code == 503
    assert caught.value.response.headers["retry-after"]
    own.node.script.gate.set()
    assert "".join([c.choices[0].delta.content or "" async for c in stream]) == "one two three"
    await nats.start()
    await until(lambda: _ready(own))
    await until(lambda: len(own.services.gateway.ends) == 0)
    await until(lambda: not own.services.view.fleet.requests)
    assert (await own.chat()).choices[0].message.content == "one two three"
    await until(lambda: not own.services.view.fleet.requests)
    await own.ended_once()


async def test_a_queued_request_outlives_a_restart_of_nats(own: House, nats: EmbeddedNats) -> None:
    await own.register("alpha")
    own.node.climb.clear()
    call = asyncio.create_task(own.chat())
    await until(lambda: own.services.view.fleet.requests)
    await nats.stop()
    await until(lambda: not own.services.view.synced)
    await nats.start()
    own.node.climb.set()
    assert (await call).choices[0].message.content == "one two three"
    await own.settled("RequestFinished")


async def test_a_web_process_that_starts_first_becomes_ready_by_itself(plane: Plane, nats: EmbeddedNats) -> None:
    await nats.stop()
    kept = Reservation("127.0.0.1")
    plane = msgspec.structs.replace(plane, nats_url=nats.url, nats_token=nats.token, web_port=kept.port)
    plane.write()
    token = await new_token(plane.postgres_url, "early")
    with (Path(plane.data) / "web.log").open("ab") as log:
        web = await asyncio.create_subprocess_exec(
            sys.executable, "-m", "web.server", "--data", plane.data, cwd=REPOSITORY, stderr=log
        )
        decider = None
        try:
            headers = {"authorization": f"Bearer {token}"}
            async with httpx.AsyncClient(
                base_url=f"http://127.0.0.1:{plane.web_port}", timeout=DEADLINE_S, headers=headers
            ) as client:
                await until(lambda: _status(client, "/livez", 200))
                assert (await client.get("/readyz")).json()["reasons"][0] == "NATS does not answer"
                body = {"model": "a", "prompt": "x"}
                for response in (await client.post("/v1/completions", json=body), await client.get("/api/models")):
                    assert response.status_code == 503, response.text
                    assert response.headers["retry-after"]
                await nats.start()
                decider = await asyncio.create_subprocess_exec(
                    sys.executable, "-m", "controlplane.decider", "--data", plane.data, cwd=REPOSITORY, stderr=log
                )
                await until(lambda: _status(client, "/readyz", 200))
                assert (await client.post("/v1/completions", json=body)).status_code == 404
                async with client.stream("GET", "/api/events/follow?after=0") as stream:
                    assert stream.status_code == 200
                    begun = time.monotonic()
                    web.send_signal(signal.SIGTERM)
                    assert await web.wait() == 0
                    assert time.monotonic() - begun < STOP_S
        finally:
            for process in (web, decider):
                if process is not None and process.returncode is None:
                    process.kill()
                    await process.wait()


async def test_without_postgres_a_token_is_503_never_401(house: House, monkeypatch: pytest.MonkeyPatch) -> None:
    gone = "postgresql://nobody@/none?host=/tmp/no-such-directory"
    monkeypatch.setattr(house.services.keyring, "_url", gone)
    response = await house.client.get("/v1/models", headers={"authorization": "Bearer eh_aaaa_bbbb"})
    assert response.status_code == 401  # the pool is there already: the real database says no
    monkeypatch.setattr(house.services.keyring, "_pool", None)
    response = await house.client.get("/v1/models", headers={"authorization": "Bearer eh_aaaa_bbbb"})
    assert (response.status_code, response.headers["retry-after"]) == (503, "2")
    assert (await house.client.get("/v1/models")).status_code == 200


async def test_who_waits_for_an_event_is_told_when_it_is_seen(house: House) -> None:
    await house.register("awaited")
    seen = house.services.view.fleet.position
    assert (await house.client.get(f"/readyz?after={seen}")).status_code == 200
    later = await house.client.get("/readyz?after=4000000000")
    assert later.status_code == 503 and later.json()["ready"] is False
    assert later.json()["reasons"] == [f"the view is at event {house.services.view.fleet.position}, and not yet at 4000000000"]
    assert (await house.client.get("/readyz")).json()["ready"] is True
    assert (await house.client.get("/readyz?after=-1")).status_code == 400


async def test_it_is_not_ready_before_the_settings_of_this_start_are_seen(house: House) -> None:
    """Who waits for it asks for a model of the settings at once."""
    due = house.services.plane.settings_due
    due.parent.mkdir(exist_ok=True)
    due.touch()
    try:
        early = await house.client.get("/readyz")
        assert early.status_code == 503 and early.json()["reasons"] == ["the settings are being applied"]
        assert (await house.client.get("/readyz?after=0")).status_code == 200, "who names an event waits for that one"
    finally:
        due.unlink()
    assert (await house.client.get("/readyz")).status_code == 200


async def _ready(house: House) -> bool:
    return (await house.client.get("/readyz")).status_code == 200


async def _status(client: httpx.AsyncClient, path: str, status: int) -> bool:
    try:
        return (await client.get(path)).status_code == status
    except httpx.TransportError:
        return False


async def test_who_shows_an_old_state_while_the_log_goes_on_serves_and_says_so(
    house: House, monkeypatch: pytest.MonkeyPatch
) -> None:
    await house.register("written")
    seen = house.services.view.fleet.position
    assert 0 < house.services.bus.answered <= seen

    async def unseen() -> str:
        answered = await house.client.get("/readyz")
        assert answered.status_code == 200
        return str(answered.json()["unseen"])

    assert await unseen() == ""
    monkeypatch.setattr(house.services.bus, "answered", seen + 1)
    await until(unseen)
    assert (await unseen()).startswith(f"what is shown is of event {seen}, and event {seen + 1} was written since")
    first = house.services.view.behind_s
    await until(lambda: house.services.view.behind_s > first + 0.05)
    monkeypatch.setattr(house.services.bus, "answered", seen + 2)
    assert house.services.view.behind_s > first, "of the event that is missing longest"
    monkeypatch.setattr(house.services.bus, "answered", seen)

    async def shown() -> bool:
        return await unseen() == ""

    await until(shown)
