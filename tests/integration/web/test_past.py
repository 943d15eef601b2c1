"""The plane as it was, over REST, on the page and on the command line."""

import asyncio
import json
import re
from typing import Any

import pytest
from click.testing import CliRunner

from compose.cli.commands import enginehouse
from tests.integration.web.house import House, until
from web.tokens import new_token

LISTS = ("nodes", "devices", "models", "instances", "images", "weights")
SINGLE = ("nodes/n1", "devices/cpu0", "models/alpha")


async def lived(house: House) -> dict[str, int]:
    """Have a model come up and go to sleep; the positions of what happened, by type (the last of each)."""
    await house.register("alpha")
    await house.chat()
    asleep = await house.client.post("/api/models/alpha/sleep")
    await house.client.get(asleep.headers["location"] + "&wait=10")
    await house.settled("RequestFinished")
    return {event.type: event.position for event in await house.events()}


async def test_every_read_of_the_fleet_shows_it_as_it_was(house: House) -> None:
    known, get = await lived(house), house.client.get
    for when, state, rung in ((known["InstanceUp"], "up", "up"), (known["InstanceSlept"], "sleep", "sleep")):
        assert (await get(f"/api/models/alpha?at={when}")).json()["state"] == state
        assert [one["rung"] for one in (await get(f"/api/instances?at={when}")).json()] == [rung]
        (name,) = [one["instance"] for one in (await get(f"/api/instances?at={when}")).json()]
        assert (await get(f"/api/instances/{name}?at={when}")).json()["rung"] == rung
    (device,) = (await get(f"/api/devices?at={known['InstanceUp']}")).json()
    assert device["free_cells"] < 8 and device["used_bytes"] is None, "what was measured then is nowhere"
    assert (await get(f"/api/nodes/n1?at={known['InstanceUp']}")).json()["pool_used_bytes"] is None
    before = (await get(f"/api/models?at={known['ModelRegistered'] - 1}")).json()
    assert before == []
    for path in (*LISTS, *SINGLE):
        assert (await get(f"/api/{path}?at={known['InstanceSlept']}")).status_code == 200, path
    unknown = await get(f"/api/models/alpha?at={known['ModelRegistered'] - 1}")
    assert (unknown.status_code, unknown.json()["code"]) == (404, "model_unknown")


async def test_a_time_means_the_last_event_at_or_before_it(house: House) -> None:
    known = await lived(house)
    events = (await house.client.get("/api/events", params={"after": known["InstanceUp"] - 1, "limit": 1})).json()
    moment = (await house.client.get("/api/past", params={"at": events[0]["at"]})).json()
    alike = [e.position for e in await house.events() if e.at_ms == moment["at_ms"]]
    assert moment == {"position": max(alike), "at_ms": moment["at_ms"], "first": 1, "newest": moment["newest"]}
    state = (await house.client.get("/api/models/alpha", params={"at": events[0]["at"]})).json()["state"]
    assert state == "up"
    assert (await house.client.get("/api/past")).json()["newest"] >= known["InstanceSlept"]


@pytest.mark.parametrize(
    ("query", "status", "code", "said"),
    [
        ("at=yesterday", 400, "invalid", "write a position of the log such as 4711"), ("at=", 400, "invalid", "is no moment"),
        ("at=1&after=1", 400, "invalid", "send one of them"), ("at=" + "1" * 101, 400, "invalid", "100"),
        ("at=0", 404, "event_unknown", "the log begins with event 1"), ("at=99999999", 404, "event_unknown", "its newest is "),
        ("at=2001-01-01T00:00Z", 404, "event_unknown", "no event is as old as 2001-01-01 00:00:00.000 UTC"),
    ],
)  # fmt: skip
async def test_a_moment_that_is_none_is_refused_in_words(house: House, query: str, status: int, code: str, said: str) -> None:
    for path in ("nodes", "weights", "models/alpha"):
        answer = await house.client.get(f"/api/{path}?{query}")
        assert (answer.status_code, answer.json()["code"]) == (status, code), answer.text
        assert said in answer.json()["message"]
    if "after" in query:
        return
    page = await house.client.get(f"/past?{query}", headers={"accept": "text/html"})
    assert page.status_code == (200 if query == "at=" else 404 if code == "event_unknown" else 400)
    if query not in ("at=", "at=" + "1" * 101):
        assert said in page.text and code in page.text and ">The newest event</a>" in page.text


async def test_the_schema_says_what_may_be_asked(house: House) -> None:
    paths = (await house.client.get("/api/schema/openapi.json")).json()["paths"]
    for path in (*(f"/api/{name}" for name in LISTS), *(f"/api/{kind}/{{name}}" for kind in LISTS[:5]), "/api/past"):
        (at,) = [p for p in paths[path]["get"]["parameters"] if p["name"] == "at"]
        assert "ISO 8601, UTC" in at["description"] and not at["required"]


async def test_the_page_is_the_past_and_asks_for_what_the_live_page_asks_for(house: House) -> None:
    known = await lived(house)
    page = await house.client.get(f"/past?at={known['InstanceUp']}")
    assert page.status_code == 200
    assert f"as it was after event {known['InstanceUp']}, " in page.text and "hx-sse:connect" not in page.text
    newest = re.search(r"as it was after event (\d+), ", (await house.client.get("/past")).text)
    assert newest is not None and int(newest[1]) >= known["InstanceSlept"]
    caller = await new_token(house.plane.postgres_url, "caller", scope="inference")
    for path in ("/", "/past", "/api/nodes?at=1"):
        assert (await house.client.get(path, headers={"authorization": ""})).status_code == 401
        assert (await house.client.get(path, headers={"authorization": f"Bearer {caller}"})).status_code == 403


async def test_the_command_line_says_that_it_is_the_past(house: House, monkeypatch: pytest.MonkeyPatch) -> None:
    known = await lived(house)
    monkeypatch.setenv("ENGINEHOUSE_URL", house.url)
    monkeypatch.setenv("ENGINEHOUSE_TOKEN", house.token)

    async def said(*words: str) -> Any:
        return await asyncio.to_thread(CliRunner().invoke, enginehouse, words)

    when = str(known["InstanceUp"])
    for command in (("status",), ("models",), ("models", "list")):
        shown = await said(*command, "--at", when)
        assert shown.exit_code == 0 and shown.output.startswith(f"the past, as it was after event {when}, ")
        assert "alpha" in shown.output and "up" in shown.output.split()
        told = json.loads((await said(*command, "--at", when, "--json")).output)
        assert told["past"]["position"] == known["InstanceUp"]
        assert [model["state"] for model in told["models"]] == ["up"]
    for option in (("--at", when), ("--all",)):
        misplaced = await said("models", *option, "list")
        assert misplaced.exit_code == 2 and "models list --at WHEN" in misplaced.output


async def test_without_postgres_the_past_is_unavailable_and_the_present_is_not(
    house: House, monkeypatch: pytest.MonkeyPatch
) -> None:
    await until(lambda: house.services.view.fleet.position)
    monkeypatch.setattr(house.services.history, "_url", "postgresql://nobody@/none?host=/nowhere")
    await house.services.history.close()
    monkeypatch.setattr(house.services.history, "_pool", None)
    answer = await house.client.get("/api/devices?at=1")
    assert (answer.status_code, answer.json()["code"], answer.headers["retry-after"]) == (503, "unavailable", "2")
    page = await house.client.get("/past?at=1")
    assert (page.status_code, page.headers["retry-after"]) == (503, "2")
    assert "the log can&#39;t be read now" in page.text
    assert (await house.client.get("/api/devices")).status_code == 200
