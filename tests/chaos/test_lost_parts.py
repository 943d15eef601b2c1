"""Parts of a plane that are there and do nothing any more: `up` finds them, kills them and starts them again."""

import json
import signal

from compose.supervisor import read_states
from tests.plane import NODE, fake, running

MODEL = "m"
FROZEN_S = 5.0
ENVIRONMENT = {"ENGINEHOUSE_PATIENCE": json.dumps({"every": 0.5, "answer": 1, "frozen": FROZEN_S})}
ASKED = {"postgres", "nats", "web", "pool"}
"""Without the bus."""
FOUND_S = 90.0
"""The bus first, then what is asked over it; and two busy cores."""


async def test_what_is_stopped_is_shown_killed_and_started_again_and_nothing_is_lost_by_it() -> None:
    with running(NODE + fake(MODEL), environment=ENVIRONMENT) as plane:
        expected, before = await plane.chat(MODEL), await plane.head()
        for name in (one.name for one in read_states(plane.data)):
            plane.kill(plane.child(name), signal.SIGSTOP)

        shown: set[str] = set()

        async def silent() -> bool:
            shown.update(one.name for one in read_states(plane.data) if one.state == "silent")
            return shown >= ASKED

        await plane.until(silent, "those that can be asked are shown as silent")

        async def back() -> bool:
            return all(one.state == "ready" and one.restarts for one in read_states(plane.data))

        async def ready() -> bool:
            return plane._is_ready()

        await plane.until(back, "all are killed and started again", FOUND_S)
        await plane.until(ready, "web is ready")
        assert await plane.chat(MODEL) == expected
        assert await plane.head() > before
        exits = {one.name: one.last_exit for one in read_states(plane.data)}
        assert all(exits[name].endswith("was stopped") for name in ASKED), exits
        assert "gave no answer" in plane.cli("doctor").stdout
