"""What a step was made of."""

import asyncio

import pytest

from worker.parts import Parts


async def test_parts_are_told_as_steps_of_their_own_and_add_up() -> None:
    parts = Parts()
    with parts.of("one"):
        pass
    first = parts.rounded()["one"]
    assert await parts.beside("two", asyncio.sleep(0.01, "found")) == "found"
    with parts.of("one"):
        pass
    assert [step.name for step in parts.named("build")] == ["build.one", "build.two"]
    assert parts.rounded()["one"] >= first
    assert parts.rounded()["two"] >= 9


def test_a_part_that_fails_is_one_too() -> None:
    parts = Parts()
    with pytest.raises(OSError, match="no"), parts.of("dump"):
        raise OSError("no")
    assert [step.name for step in parts.named("build")] == ["build.dump"]
