"""The main journey, on a whole plane with fake engines: three models on two devices that cannot hold them all."""

import asyncio
import json
import sys
from importlib.metadata import version

import httpx
import openai
import pytest

from controlplane.rungs import Rung
from tests.plane import STEP_S, PlaneUnderTest

ANSWER = "You said: "


async def test_models_that_do_not_fit_together_swap_and_answer_as_before(plane: PlaneUnderTest) -> None:
    first = {name: await plane.chat(name, f"to {name}") for name in ("alpha", "beta", "gamma")}
    again = {name: await plane.chat(name, f"to {name}") for name in ("alpha", "beta", "gamma")}
    assert first == again
    assert all(ANSWER in text and f"to {name}" in text for name, text in first.items())
    fleet = await plane.fleet()
    assert sum(instance.rung is Rung.UP for instance in fleet.instances.values()) <= 2
    directed = [event.event for event in await plane.events("InstanceDirected")]
    assert any(getattr(event, "victim_of", None) for event in directed), "somebody had to leave"


async def test_models_are_listed_with_the_openai_client(plane: PlaneUnderTest) -> None:
    async with plane.openai() as client:
        assert [model.id async for model in client.models.list()] == ["alpha", "beta", "gamma"]


async def test_a_stream_comes_in_pieces_and_ends_with_usage(plane: PlaneUnderTest) -> None:
    async with plane.openai() as client:
        stream = await client.chat.completions.create(
            model="gamma", messages=[{"role": "user", "content": "piece by piece, " * 20}], stream=True,
            stream_options={"include_usage": True},
        )  # fmt: skip
        chunks = [chunk async for chunk in stream]
    text = "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices)
    assert text.startswith(ANSWER) and "piece by piece" in text
    assert sum(bool(chunk.choices and chunk.choices[0].delta.content) for chunk in chunks) > 3
    assert chunks[-1].usage is not None and chunks[-1].usage.completion_tokens >= len(text)


async def test_c31_a_stream_is_the_answer_in_one_piece_wherever_a_character_is_cut(plane: PlaneUnderTest) -> None:
    """The fake engine's tokens are bytes; the last lengths end within the emoji."""
    prompt = "Kůň ไทย 漢字 👩🏽"
    whole = len((ANSWER + prompt).encode())
    async with plane.openai() as client:
        for tokens in (whole + 9, whole, *range(whole - 7, whole)):
            asked = {"model": "alpha", "prompt": prompt, "max_tokens": tokens}
            one = (await client.completions.create(**asked)).choices[0].text  # type: ignore[call-overload]
            chunks = [chunk async for chunk in await client.completions.create(**asked, stream=True)]  # type: ignore[call-overload]
            pieces = [chunk.choices[0].text for chunk in chunks if chunk.choices]
            assert "".join(pieces) == one == (ANSWER + prompt).encode()[:tokens].decode(errors="replace")
            assert not any("\ufffd" in piece for piece in pieces[:-2]), "nothing broken before its end"


async def test_completions_answer_too(plane: PlaneUnderTest) -> None:
    async with plane.openai() as client:
        answer = await client.completions.create(model="alpha", prompt="plain", max_tokens=8)
    assert answer.choices[0].text == (ANSWER + "plain")[:8]
    assert answer.choices[0].finish_reason == "length"


async def test_an_unknown_model_is_named_with_its_neighbour(plane: PlaneUnderTest) -> None:
    with pytest.raises(openai.NotFoundError, match="did you mean 'alpha'"):
        await plane.chat("alpa")


@pytest.mark.parametrize("name", ["..", "a/../b", "x" * 300, "modèle", "a\x00b", "a\nb"])
async def test_a_name_that_is_no_name_is_refused(plane: PlaneUnderTest, name: str) -> None:
    """N28."""
    with pytest.raises((openai.NotFoundError, openai.BadRequestError)):
        await plane.chat(name)
    async with plane.rest() as http:
        answer = await http.post("/api/models", json={"name": name, "source": "fake:", "engine": "fake"})
        assert answer.status_code == 400
        assert answer.json()["code"] == "invalid"
        loading = await http.post(f"/api/models/{httpx.QueryParams({'': name}).__str__()[1:]}/load")
        assert loading.status_code in (400, 404, 405)


async def test_operators_put_to_sleep_stop_and_load(plane: PlaneUnderTest) -> None:
    await plane.chat("alpha")
    before = await plane.serving("alpha")
    slept = plane.cli("sleep", "alpha", "--json")
    assert (slept.returncode, json.loads(slept.stdout)["state"]) == (0, "succeeded"), slept.stderr
    assert (await plane.fleet()).instances[before.instance].rung is Rung.SLEEP
    loaded = plane.cli("load", "alpha", "--json")
    assert (loaded.returncode, json.loads(loaded.stdout)["state"]) == (0, "succeeded"), loaded.stderr
    assert (await plane.serving("alpha")).pid == before.pid, "the same engine, woken"
    stopped = plane.cli("stop", "alpha")
    assert stopped.returncode == 0 and "done" in stopped.stdout, stopped.stderr
    assert stopped.stderr == "", "no bar is drawn where nobody looks"
    assert before.instance not in (await plane.fleet()).instances
    assert "nothing had failed" in plane.cli("retry", "alpha").stdout
    assert ANSWER in await plane.chat("alpha")


async def test_the_command_line_shows_what_is_there(plane: PlaneUnderTest) -> None:
    await plane.chat("alpha", "for the history")
    await plane.seen()
    status = plane.cli("status")
    assert status.returncode == 0, status.stderr
    assert all(word in status.stdout for word in ("postgres", "nats", "decider", "worker", "web", "pool", "cpu0", "alpha"))
    (node,) = json.loads(plane.cli("status", "--json").stdout)["nodes"]
    assert node["version"] == version("enginehouse")
    models = json.loads(plane.cli("models", "--json").stdout)
    assert [one["model"] for one in models] == ["alpha", "beta", "gamma"]
    assert "alpha" in plane.cli("requests").stdout
    events = json.loads(plane.cli("events", "--after", "0", "--limit", "1000", "--json").stdout)
    assert [one["position"] for one in events] == list(range(1, len(events) + 1))
    unknown = plane.cli("load", "nothing")
    assert unknown.returncode == 1 and "nothing" in unknown.stderr
    assert plane.cli("nonsense").returncode == 2


async def test_events_are_followed_live(plane: PlaneUnderTest) -> None:
    head = await plane.head()
    argv = ("-m", "compose", "--data", str(plane.data), "events", "--follow", "--after", str(head), "--json")
    follower = await asyncio.create_subprocess_exec(sys.executable, *argv, stdout=asyncio.subprocess.PIPE)
    try:
        await plane.chat("alpha", "seen by a follower")
        assert follower.stdout is not None
        async with asyncio.timeout(STEP_S):
            while json.loads(await follower.stdout.readline())["type"] != "RequestFinished":
                pass
    finally:
        follower.kill()
        await follower.wait()


async def test_nothing_is_open_to_strangers(plane: PlaneUnderTest) -> None:
    async with httpx.AsyncClient(base_url=plane.url, trust_env=False) as http:
        for path in ("/api/models", "/v1/models", "/api/events", "/metrics"):
            assert (await http.get(path)).status_code == 401, path
        assert (await http.get("/livez")).status_code == 200
        wrong = {"Authorization": "Bearer eh_x_y"}
        assert (await http.get("/api/models", headers=wrong)).status_code == 401


async def test_the_log_is_clean(plane: PlaneUnderTest) -> None:
    audit = plane.cli("audit")
    assert audit.returncode == 0, audit.stdout + audit.stderr


async def test_models_are_added_and_removed_from_the_command_line(plane: PlaneUnderTest) -> None:
    sizes = ("--argument", "weight_bytes=1048576", "--argument", "skeleton_bytes=1048576")
    options = ("--source", "fake:extra", "--engine", "fake", "--share", "1/8", "--alias", "more", *sizes)
    added = plane.cli("models", "add", "extra", *options)
    assert added.returncode == 0, added.stderr
    assert "user: hello" in await plane.chat("more")
    again = plane.cli("models", "add", "extra", *options)
    assert again.returncode == 1 and "model_exists" in again.stderr
    wrong = plane.cli("models", "add", "other", "--source", "fake:", "--engine", "fake", "--argument", "weight_byte=1")
    assert wrong.returncode == 1 and "weight_bytes" in wrong.stderr
    assert plane.cli("models", "rm", "extra").returncode == 0
    with pytest.raises(openai.NotFoundError):
        await plane.chat("extra")
