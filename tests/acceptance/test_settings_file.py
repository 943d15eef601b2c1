"""C43: a settings file that changes while the plane runs."""

import asyncio
from collections.abc import Callable
from typing import Any

import openai
import pytest

from controlplane.envelope import Recorded
from tests.plane import NODE, PlaneUnderTest, fake


async def applied(plane: PlaneUnderTest, count: int) -> Recorded:
    async def found() -> Recorded | None:
        events = await plane.events("SettingsApplied")
        return events[count - 1] if len(events) >= count else None

    return await plane.until(found, f"settings applied {count} times")  # type: ignore[no-any-return]


async def test_only_what_changed_is_touched(start_plane: Callable[..., PlaneUnderTest]) -> None:
    plane = start_plane(NODE + fake("soft", share=0.5) + fake("hard", share=0.5) + fake("busy", share=0.5, tokens_per_s=40))
    soft = await _up(plane, "soft")
    hard = await _up(plane, "hard")
    busy = asyncio.create_task(plane.chat("busy", "b" * 60))
    await plane.until_fleet(
        lambda fleet: any(r.model == "busy" and r.instance for r in fleet.requests.values()), "busy is busy"
    )
    text = (
        NODE
        + fake("soft", share=0.5, idle='{ sleep = "1h", cold = "never" }')
        + fake("hard", share=0.5, context_tokens=1000)
        + fake("new", share=0.5)
    )
    fresh = plane.data / "fresh.toml"
    fresh.write_text(text)
    fresh.replace(plane.settings_file)
    recorded = await applied(plane, 2)
    await plane.seen()
    event: Any = recorded.event
    assert recorded.actor.startswith("operator:")
    assert (event.added, event.retired, event.unchanged) == (("new",), ("busy",), 0)
    assert {one.model: one.fields for one in event.revised} == {"soft": ("idle",), "hard": ("arguments",)}
    assert "b" * 60 in await busy, "what ran has run to its end"
    fleet = await plane.fleet()
    assert fleet.instances[soft].pid is not None and fleet.models["soft"].spec.idle.sleep_ms == 3_600_000
    assert hard in fleet.instances, "a hard field counts at the next climb"
    with pytest.raises(openai.NotFoundError):
        await plane.chat("busy")
    assert await plane.chat("new")
    assert await plane.chat("hard")
    removed = plane.cli("models", "rm", "new")
    assert (removed.returncode, removed.stdout) == (0, "retired new\n")
    assert "new is in the settings file still, and comes back" in removed.stderr
    plane.settings_file.write_text(text + "# touched\n" + fake("another", share=0.5))
    assert (await applied(plane, 3)).event.added == ("new", "another")  # type: ignore[attr-defined]


async def test_a_broken_file_changes_nothing_and_says_where(start_plane: Callable[..., PlaneUnderTest]) -> None:
    plane = start_plane(NODE + fake("a"))
    position = (await applied(plane, 1)).position
    plane.settings_file.write_text(NODE + fake("a") + "[[model]\n")

    async def told() -> bool:
        return "settings not applied" in (plane.data / "up.out").read_text()

    await plane.until(told, "the mistake is told")
    line = plane.settings_file.read_text().count("\n")
    assert f"settings.toml:{line}" in (plane.data / "up.out").read_text()
    for command in ("status", "doctor"):
        answered = plane.cli(command)
        assert answered.returncode != 0
        assert f"settings.toml:{line}" in answered.stdout + answered.stderr
    assert [event.position for event in await plane.events("SettingsApplied")] == [position]
    assert await plane.chat("a")

    off = '[images]\nquota = "3MiB"\npin = ["a", "late"]\n'
    plane.settings_file.write_text(NODE + "checkpoint_bytes = 4096\n" + off + fake("a"))
    event: Any = (await applied(plane, 2)).event
    await plane.seen()
    assert "not applied" not in plane.cli("status").stderr
    assert event.limits == ("image_quota_bytes", "image_pins", "checkpoint_bytes")
    [changed] = await plane.events("NodeLimitsChanged")
    assert changed.actor.startswith("operator:")
    limits: Any = changed.event
    assert (limits.before.image_quota_bytes, limits.after.image_quota_bytes) == (0, 3 << 20)
    assert (limits.after.image_pins, limits.after.checkpoint_bytes) == (("a", "late"), 4096)

    async def follows() -> bool:
        return '"now": 3145728' in (plane.data / "logs" / "worker.log").read_text()

    await plane.until(follows, "the worker keeps to the quota")
    assert "next start" not in (plane.data / "up.out").read_text()

    said = 'no model and no configuration is called "late", so it pins nothing'

    async def warned() -> bool:
        return said in (plane.data / "up.out").read_text()

    await plane.until(warned, "the pin that pins nothing is told")
    await plane.seen()
    assert said in plane.cli("status").stdout
    assert said in plane.cli("doctor").stdout
    added = plane.cli("models", "add", "late", "--source", "fake:late", "--engine", "fake")
    assert added.returncode == 0, added.stderr

    async def pins() -> bool:
        return said not in plane.cli("status").stdout

    await plane.until(pins, "a name that appears later is taken up")


async def _up(plane: PlaneUnderTest, model: str) -> str:
    await plane.chat(model)
    return (await plane.serving(model)).instance
