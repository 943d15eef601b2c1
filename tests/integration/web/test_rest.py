"""The plane's REST API."""

import asyncio
import json
from typing import Any

import pytest

from tests.integration.web.house import DEADLINE_S, House, until


async def test_a_model_is_registered_loaded_put_to_sleep_and_retired(house: House) -> None:
    get, post = house.client.get, house.client.post
    made = await post("/api/models", json={"name": "alpha", "source": "fake:alpha", "engine": "fake"})
    assert made.status_code == 202, made.text
    seen = await get(f"/api/models/alpha?after={made.json()['position']}")
    assert seen.json()["state"] in ("uninspected", "cold")
    await until(lambda: house.services.view.fleet.models["alpha"].facts)
    loading = await post("/api/models/alpha/load")
    assert loading.status_code == 202
    operation = loading.json()["operation"]
    assert loading.headers["location"].startswith(f"/api/operations/{operation}")
    done = (await get(loading.headers["location"] + "&wait=10")).json()
    assert (done["state"], done["kind"], done["model"], done["actor"]) == ("succeeded", "load", "alpha", "operator:test")
    assert (await get("/api/models/alpha")).json()["state"] == "up"
    (instance,) = (await get("/api/instances")).json()
    assert (instance["rung"], instance["activity"], instance["model"]) == ("up", "settled", "alpha")
    assert (await get(f"/api/instances/{instance['instance']}")).json() == instance
    (device,) = (await get("/api/devices")).json()
    assert device["free_cells"] < 8
    assert device["grants"][0]["model"] == "alpha"
    assert (await get("/api/nodes/n1")).json()["devices"] == ["dev0"]
    assert (await get("/api/weights")).json()[0]["models"] == ["alpha"]
    asleep = await post("/api/models/alpha/sleep")
    assert asleep.status_code == 202, asleep.text
    await get(asleep.headers["location"] + "&wait=10")
    assert (await get("/api/models/alpha")).json()["state"] == "sleep"
    revised = await house.client.put("/api/models/alpha", json={"source": "fake:alpha", "engine": "fake", "note": "hi"})
    assert revised.status_code == 202, revised.text
    assert (await get(f"/api/models/alpha?after={revised.json()['position']}")).json()["spec"]["note"] == "hi"
    retired = await house.client.delete("/api/models/alpha")
    assert (await get(f"/api/models/alpha?after={retired.json()['position']}")).json()["retired"]
    assert [m["id"] for m in (await get("/v1/models")).json()["data"]] == []
    kinds = [operation["kind"] for operation in (await get("/api/operations")).json()]
    assert {"load", "sleep"} <= set(kinds)


async def test_a_body_of_brackets_is_the_callers_fault(house: House) -> None:
    response = await house.client.post("/api/models", content=b'{"name": ' + b"[" * 100_000)
    assert (response.status_code, response.json()["code"]) == (400, "invalid")


@pytest.mark.parametrize(
    ("fields", "code"),
    [
        ({"name": "..", "source": "fake:x", "engine": "fake"}, "invalid"),
        ({"name": "a", "source": "/srv/a", "engine": "vllm"}, "not_available"),
        ({"name": "a", "source": "/srv/a", "engine": "vllm", "arguments": {"tensor_parallel_size": 2}}, "invalid"),
        ({"name": "a", "source": "fake:x", "engine": "fake", "priority": 1}, "not_available"),
        ({"name": "a"}, "invalid"), ({}, "invalid"),
    ],
)  # fmt: skip
async def test_a_bad_spec_is_400_with_code_message_and_details(house: House, fields: dict[str, Any], code: str) -> None:
    response = await house.client.post("/api/models", json=fields)
    assert response.status_code == 400, response.text
    assert set(response.json()) == {"code", "message", "details"}
    assert response.json()["code"] == code


async def test_a_devices_events_are_asked_for_by_its_name_too_and_have_its_id(house: House) -> None:
    device = (await house.client.get("/api/devices")).json()[0]
    by_name, by_id = [
        (await house.client.get("/api/events", params={"stream": f"device:{one}"})).json()
        for one in (device["name"], device["device"])
    ]
    assert by_name == by_id and by_name[-1]["type"] == "DeviceDeclared"
    assert {one["stream"] for one in by_name} == {f"device:{device['device']}"} != {f"device:{device['name']}"}


async def test_an_idempotency_key_makes_a_repeat_harmless(house: House) -> None:
    await house.register("alpha")
    headers = {"idempotency-key": "once"}
    first = await house.client.post("/api/models/alpha/load", headers=headers)
    again = await house.client.post("/api/models/alpha/load", headers=headers)
    assert first.json() == again.json()
    other = await house.client.post("/api/models/alpha/load", headers={"idempotency-key": "twice"})
    assert other.json()["operation"] != first.json()["operation"]
    asleep = await house.client.post("/api/models/alpha/sleep", headers=headers)
    assert asleep.json()["operation"] != first.json()["operation"], "the key was another command's: it is carried out"
    told = await house.client.get(f"/api/operations/{asleep.json()['operation']}?after={asleep.json()['position']}")
    assert told.json()["kind"] == "sleep"
    assert (await house.client.post("/api/models/alpha/load", headers={"idempotency-key": "x" * 300})).status_code == 400


async def test_lists_of_operations_say_who_asked(house: House) -> None:
    await house.register("alpha")
    loading = await house.client.post("/api/models/alpha/load")
    await house.client.get(loading.headers["location"] + "&wait=10")
    assert [one["actor"] for one in (await house.client.get("/api/operations")).json()] == ["operator:test"]


async def test_operations_are_paged_by_position(house: House) -> None:
    await house.register("alpha")
    asked = []
    for kind in ("load", "sleep", "load"):
        accepted = await house.client.post(f"/api/models/alpha/{kind}")
        await house.client.get(accepted.headers["location"] + "&wait=10")
        asked.insert(0, accepted.json()["operation"])
    first = (await house.client.get("/api/operations?limit=2")).json()
    rest = (await house.client.get(f"/api/operations?limit=2&before={first[-1]['position']}")).json()
    assert [one["operation"] for one in first + rest] == asked


async def test_every_route_that_changes_something_declares_its_idempotency_key(house: House) -> None:
    paths = (await house.client.get("/api/schema/openapi.json")).json()["paths"]
    for path, methods in paths.items():
        for method in methods.keys() & {"post", "put", "delete"}:
            if path.startswith("/api/") and not path.endswith("/verify"):  # which only looks
                headers = [one["name"] for one in methods[method].get("parameters", ()) if one["in"] == "header"]
                assert "Idempotency-Key" in headers, (method, path)


async def test_an_operation_is_waited_for_even_if_the_view_has_not_seen_it_yet(house: House) -> None:
    await house.register("alpha")
    for kind in ("load", "sleep", "load", "sleep"):
        asked = (await house.client.post(f"/api/models/alpha/{kind}")).json()
        told = (await house.client.get(f"/api/operations/{asked['operation']}?wait=10")).json()
        assert (told["kind"], told["state"]) == (kind, "succeeded")


async def test_a_text_that_no_row_can_hold_finds_nothing(house: House) -> None:
    for path in ("/api/events?stream=model:%00", "/api/requests?model=%00"):
        response = await house.client.get(path)
        assert (response.status_code, response.json()) == (200, []), path


async def test_a_missing_body_and_an_endless_duration_are_named(house: House) -> None:
    missing = await house.client.post("/api/models")
    assert (missing.status_code, missing.json()["message"]) == (400, "the request has no body; send JSON")
    for broken in (b"{", b"{]", b'"\xff"'):
        told = await house.client.post("/api/models", content=broken)
        assert told.status_code == 400 and told.json()["message"].startswith("the body is not JSON: "), broken
    fields = {"name": "a", "source": "fake:x", "engine": "fake", "idle": {"sleep": "99999999999999d"}}
    endless = await house.client.post("/api/models", json=fields)
    assert (endless.status_code, endless.json()["details"]["param"]) == (400, "idle.sleep")


async def test_reading_after_a_position_to_come_is_504_with_both(house: House, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("web.rest.asking.AFTER_S", 0.1)
    response = await house.client.get("/api/models?after=100000")
    assert (response.status_code, response.json()["code"]) == (504, "behind")
    assert response.json()["details"]["after"] == 100000
    assert "position" in response.json()["details"]


async def test_what_is_not_there_is_404(house: House) -> None:
    for kind in ("nodes", "devices", "models", "instances", "requests", "operations", "events/999999", "nothing"):
        response = await house.client.get(f"/api/{kind}" if "/" in kind else f"/api/{kind}/none")
        assert response.status_code == 404, (kind, response.text)
        assert response.json()["code"]
    assert (await house.client.delete("/api/requests/none")).status_code == 404
    assert (await house.client.patch("/api/models")).status_code == 405


async def test_requests_are_listed_open_and_ended(house: House) -> None:
    await house.register("alpha")
    await house.chat()
    await until(lambda: not house.services.view.fleet.requests)  # its end goes in a batch, after the answer
    house.node.script.gate.clear()
    call = asyncio.create_task(house.chat())
    await until(lambda: house.node.frontend.running)
    listed = (await house.client.get("/api/requests")).json()
    assert [request["state"] for request in listed] == ["running", "finished"]
    assert listed[1]["completion_tokens"] == 3
    single = (await house.client.get(f"/api/requests/{listed[1]['request']}")).json()
    assert single == listed[1]
    assert len((await house.client.get("/api/requests?state=finished&model=alpha")).json()) == 1
    assert (await house.client.get("/api/requests?state=failed")).json() == []
    assert (await house.client.get("/api/requests?model=beta")).json() == []
    house.node.script.gate.set()
    await call


async def test_events_are_read_by_page_and_followed_without_a_gap(house: House) -> None:
    await house.register("alpha")
    events = (await house.client.get("/api/events?after=0&limit=1000")).json()
    assert [event["position"] for event in events] == list(range(1, len(events) + 1))
    newest = (await house.client.get("/api/events?limit=2")).json()
    assert [event["position"] for event in newest] == [len(events), len(events) - 1]
    registered = (await house.client.get("/api/events?type=ModelRegistered")).json()
    assert registered[0]["data"]["model"] == "alpha"
    assert (await house.client.get("/api/events?stream=model:alpha&after=0")).json()[0] == registered[0]
    assert (await house.client.get(f"/api/events/{registered[0]['position']}")).json() == registered[0]
    positions: list[int] = []
    async with asyncio.timeout(DEADLINE_S), house.client.stream("GET", "/api/events/follow?after=0") as response:
        assert response.headers["content-type"].startswith("text/event-stream")
        call = asyncio.create_task(house.chat())
        async for line in response.aiter_lines():
            if line.startswith("data: "):
                event = json.loads(line[6:])
                positions.append(event["position"])
                if event["type"] == "RequestFinished":
                    break
        await call
    assert positions == list(range(1, len(positions) + 1))
    assert len(positions) > len(events)


async def test_metrics_hold_the_planes_figures_and_paths_by_template(house: House) -> None:
    await house.register("alpha")
    await house.chat()
    await house.settled("RequestFinished")
    await house.client.get("/api/models/alpha")
    await until(lambda: house.services.view.beats)
    text = (await house.client.get("/metrics")).text
    assert 'enginehouse_requests_ended_total{model="alpha",outcome="finished"} 1.0' in text
    assert 'enginehouse_device_cells{device="cpu0",state="granted"}' in text
    assert 'enginehouse_pool_bytes{kind="used",node="n1"}' in text or 'enginehouse_pool_bytes{node="n1",kind="used"}' in text
    assert 'path="/api/models/{name}"' in text
    assert "enginehouse_view_synced 1.0" in text


async def test_the_schema_is_served(house: House) -> None:
    schema = (await house.client.get("/api/schema/openapi.json")).json()
    assert "/v1/chat/completions" in schema["paths"]
    assert "/api/models/{name}/load" in schema["paths"]
    assert schema["paths"]["/v1/chat/completions"]["post"]["requestBody"]["required"]


async def test_what_is_wrong_is_told_with_the_callers_own_names(house: House) -> None:
    tried: list[tuple[str, str, dict[str, str], str | None, str]] = [
        ("GET", "/api/requests?state=x", {}, "state", "'state' can't be 'x'; it can be open, finished, failed, cancelled"),
        ("GET", "/api/events?limit=0", {}, "limit", "'limit' must be a whole number, at least 1"),
        ("GET", "/api/events?limit=many", {}, "limit", "'limit' must be a whole number, not a text"),
        ("GET", "/api/events?after=5&before=10", {}, "before", "send one of them"),
        ("GET", "/api/events?type=InstancUp", {}, "type", "there is no event of type 'InstancUp'; did you mean 'InstanceUp'?"),
        ("GET", "/api/events/follow?type=x", {}, "type", "there is no event of type 'x'; there are ConfigurationFound, "),
        ("GET", "/api/events?stream=modle:a", {}, "stream", "no stream of the kind 'modle'; did you mean 'model'?"),
        ("GET", "/api/events?stream=alpha", {}, "stream", "'alpha' is no stream; write one as KIND:NAME"),
        ("GET", "/api/events?stream=model:", {}, "stream", "'model:' is no stream; write one as KIND:NAME"),
        (
            "POST",
            "/api/models/a/load",
            {"idempotency-key": "x" * 256},
            "Idempotency-Key",
            "'Idempotency-Key' must have at most 255 characters",
        ),
        ("GET", "/api/nope", {}, None, "there is no GET /api/nope; GET /api/schema lists all"),
        ("PATCH", "/api/events", {}, None, "/api/events takes GET, HEAD, OPTIONS, not PATCH"),
        ("POST", "/api/models", {}, None, "the body must be a JSON object, not a list"),
        ("POST", "/api/models/a/move", {}, None, "the body must be a JSON object, not a list"),
    ]
    for method, path, headers, param, message in tried:
        response = await house.client.request(method, path, headers=headers, content=b"[]" if method == "POST" else None)
        assert response.is_client_error, path
        assert response.json()["details"].get("param") == param, path
        assert message in response.json()["message"], path
