"""`kill -9` of every process of a plane, while a model loads, wakes and streams.

Each time: every request ends, with an answer or a typed error; no event that was acknowledged is lost; no cell has two holders;
the plane comes back by itself. At the end: the audit is clean, and `down` leaves no process.
"""

import asyncio
import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import httpx
import openai
import pytest

from compose.process import Identity
from controlplane.fleet import Fleet, Instance
from controlplane.rungs import Activity, Rung
from tests.plane import NODE, PlaneUnderTest, fake, grants_overlap, running

MODEL = "m"
TEXT = "a stream that must not lose a letter, nor say one twice; " * 2
RECOVERY_S = 80.0
SETTINGS = NODE + fake(MODEL, load_ms=400, wake_ms=300, tokens_per_s=100)

IN_PLANE = ("decider", "web", "worker", "pool", "nats", "postgres")
IN_INSTANCE = ("frontend", "engine", "holder")
UNHURT = ("decider", "worker", "pool", "nats", "postgres", "frontend")
"""A stream that runs outlives the death of these, to the letter."""


@pytest.fixture(scope="module")
def plane() -> Iterator[PlaneUnderTest]:
    with running(SETTINGS) as started:
        yield started


@pytest.mark.parametrize("victim", IN_PLANE + IN_INSTANCE)
async def test_while_loading(plane: PlaneUnderTest, victim: str) -> None:
    await _well(plane)
    await _hurt(plane, victim, _climbing, after="stop")


@pytest.mark.parametrize("victim", IN_PLANE + IN_INSTANCE)
async def test_while_waking(plane: PlaneUnderTest, victim: str) -> None:
    await _well(plane)
    await _hurt(plane, victim, _climbing, after="sleep")


@pytest.mark.parametrize("victim", IN_PLANE + IN_INSTANCE)
async def test_while_streaming(plane: PlaneUnderTest, victim: str) -> None:
    await _well(plane)
    asked = TEXT if victim in UNHURT else TEXT * 3  # what is to be cut must still run then, however busy the machine
    expected = await plane.chat(MODEL, asked)
    text, error = await _hurt(plane, victim, _streaming, asked)
    if victim in UNHURT:
        assert (text, error) == (expected, None)
    else:
        assert expected.startswith(text)
        assert error is not None


async def test_a_killed_up_leaves_engines_that_the_next_one_adopts() -> None:
    plane = PlaneUnderTest(NODE + fake("kept"))
    try:
        plane.start()
        before = await plane.chat("kept", "same")
        instance = await plane.serving("kept")
        kept = [plane.part(instance.instance, name) for name in ("engine", "holder", "frontend")] + [plane.child("pool")]
        gone = [plane.child(name) for name in ("web", "decider", "worker")]
        plane.kill_up()
        for one in gone:
            assert await one.ended(30)
        assert all(one.alive for one in kept)
        plane.start()
        assert await plane.chat("kept", "same") == before
        assert all(one.alive for one in kept)
        assert (await plane.serving("kept")).instance == instance.instance
    except BaseException:
        plane._remove(keep=True)
        raise
    plane.finish()


async def _well(plane: PlaneUnderTest) -> None:
    """Wait until the model answers: what the last test broke has come back."""

    async def answers() -> bool:
        with contextlib.suppress(openai.APIError):
            return bool(await plane.chat(MODEL, "well?"))
        return False

    await plane.until(answers, f"{MODEL} answers again", RECOVERY_S)
    await plane.until_fleet(lambda fleet: not fleet.requests, "no request is left", RECOVERY_S)


async def _hurt(
    plane: PlaneUnderTest, victim: str, moment: Callable[[Instance], bool], asked: str = TEXT, *, after: str = ""
) -> tuple[str, Exception | None]:
    """Ask, wait for the moment, kill, and see that all ends well. Returns what the caller got, and the error if one came.
    after: an operation to begin with."""
    call, got, instance = await _met(plane, moment, asked, after)
    if moment is _streaming:
        async with asyncio.timeout(30):
            while len(got) < 10:
                await asyncio.sleep(0.005)
    before = await plane.events()
    identity = await _find(plane, victim, instance)
    plane.kill(identity)
    assert await identity.ended(30)
    async with asyncio.timeout(RECOVERY_S):
        error = await call
    await _well(plane)
    now = await plane.events()
    assert now[: len(before)] == before, "an acknowledged event is lost or another"
    assert not grants_overlap(now)
    return "".join(got), error


async def _met(
    plane: PlaneUnderTest, moment: Callable[[Instance], bool], asked: str, after: str
) -> tuple["asyncio.Task[Exception | None]", list[str], Instance]:
    """Ask until the moment is met, and return the call, what it gets, and the instance: a short moment may pass between two
    looks on a busy machine."""
    while True:
        if after:
            assert plane.cli(after, MODEL).returncode == 0
        got: list[str] = []
        call = asyncio.create_task(_ask(plane, asked, got))

        def struck(fleet: Fleet, call: "asyncio.Task[Exception | None]" = call) -> Instance | bool:
            return next(filter(moment, fleet.instances.values()), call.done())

        if isinstance(found := await plane.until_fleet(struck, "the moment to strike"), Instance):
            return call, got, found
        assert call.result() is None
        await plane.until_fleet(lambda fleet: not fleet.requests, "no request is left")


async def _ask(plane: PlaneUnderTest, text: str, got: list[str]) -> Exception | None:
    async with plane.openai() as client:
        try:
            stream: Any = await client.chat.completions.create(
                model=MODEL, messages=[{"role": "user", "content": text}], stream=True
            )
            async for chunk in stream:
                if chunk.choices and chunk.choices[0].delta.content:
                    got.append(chunk.choices[0].delta.content)
        except (openai.APIError, httpx.HTTPError) as error:
            return error
    return None


async def _find(plane: PlaneUnderTest, victim: str, instance: Instance) -> Identity:
    if victim in IN_PLANE:
        return plane.child(victim)

    async def running_part() -> Identity | None:
        with contextlib.suppress(FileNotFoundError, KeyError, TypeError, AssertionError):
            return plane.part(instance.instance, victim)
        return None

    found: Identity = await plane.until(running_part, f"there is a {victim}")
    return found


def _climbing(instance: Instance) -> bool:
    return instance.activity is Activity.CLIMBING


def _streaming(instance: Instance) -> bool:
    return instance.rung is Rung.UP and bool(instance.running)
