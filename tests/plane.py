"""A whole plane for tests: real servers, real processes, fake or real engines, in a directory of its own under /tmp."""

import asyncio
import contextlib
import json
import signal
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Mapping
from typing import Any

import asyncpg
import httpx
import openai
import pytest

from compose.process import Identity
from compose.supervisor import read_states
from controlplane.bus import Bus
from controlplane.envelope import Recorded
from controlplane.fleet import Fleet, Instance
from controlplane.log.postgres import COLUMNS, recorded
from controlplane.parties import DECIDER
from controlplane.rungs import Activity, Rung
from tests.planeprocesses import PlaneProcesses

STEP_S = 60.0
"""Deadline of one wait; generous, as CI has two cores."""
INSPECTED_S = 150.0
"""Each is opened by a process of its own, one after the other."""
ANSWER_S = 90.0

NODE = """
[node]
pool_bytes = "256MiB"
devices = [{ name = "cpu0", bytes = "64MiB" }, { name = "cpu1", bytes = "64MiB" }]
"""


def fake(
    name: str, *, share: object = 1, idle: str = '{ sleep = "never", cold = "never" }', extra: str = "", **arguments: object
) -> str:
    """A `[[model]]` table with a fake engine that is quick unless told otherwise."""
    given = {"weight_bytes": 1 << 20, "kv_bytes": 1 << 20, "skeleton_bytes": 1 << 20, **arguments}
    inline = ", ".join(f"{key} = {json.dumps(value)}" for key, value in given.items())
    return (
        f'\n[[model]]\nname = "{name}"\nsource = "fake:{name}"\nengine = "fake"\nshare = {json.dumps(share)}\n'
        f"idle = {idle}\narguments = {{ {inline} }}\n{extra}\n"
    )


class PlaneUnderTest(PlaneProcesses):
    """Asks it, waits for it, hurts it. `start` returns when web is ready; `finish` ends it and says what was wrong."""

    def rest(self) -> httpx.AsyncClient:
        headers = {"Authorization": f"Bearer {self.token}"}
        return httpx.AsyncClient(base_url=self.url, headers=headers, timeout=STEP_S, trust_env=False)

    def openai(self, *, retries: int = 0) -> openai.AsyncOpenAI:
        transport = httpx.AsyncClient(timeout=ANSWER_S, trust_env=False)
        return openai.AsyncOpenAI(base_url=f"{self.url}/v1", api_key=self.token, max_retries=retries, http_client=transport)

    async def chat(self, model: str, text: str = "hello", **options: Any) -> str:
        """One chat completion; returns its text. Raises openai.APIError."""
        async with self.openai() as client:
            answer = await client.chat.completions.create(model=model, messages=[{"role": "user", "content": text}], **options)
            return answer.choices[0].message.content or ""

    async def fleet(self) -> Fleet:
        """The decider's state."""
        async with self.bus() as bus:
            return await bus.state(timeout_s=STEP_S)

    @contextlib.asynccontextmanager
    async def bus(self) -> AsyncIterator[Bus]:
        bus = await Bus.connect(self.plane, "test", DECIDER)
        try:
            yield bus
        finally:
            await bus.close()

    async def events(self, *types: str, after: int = 0) -> list[Recorded]:
        """The log as Postgres has it, after that position; of these types, or all."""
        connection = await asyncpg.connect(self.plane.postgres_url)
        try:
            rows = await connection.fetch(f"select {COLUMNS} from event where position > $1 order by position", after)
        finally:
            await connection.close()
        return [one for one in map(recorded, rows) if not types or one.type in types]

    async def seen(self) -> None:
        """Wait until web has seen all that the decider knows now: its view, and so all that it shows, lags behind."""
        position = (await self.fleet()).position
        async with self.rest() as http:

            async def so_far() -> bool:
                return (await http.get("/readyz", params={"after": position})).status_code == 200

            await self.until(so_far, f"web has seen event {position}")

    async def head(self) -> int:
        events = await self.events()
        return events[-1].position if events else 0

    async def until(self, condition: Callable[[], Awaitable[Any]], what: str, deadline_s: float = STEP_S) -> Any:
        """Wait until `condition` gives something true, and return that. Raises AssertionError with the logs' ends."""
        until = time.monotonic() + deadline_s
        while not (found := await condition()):
            if time.monotonic() > until:
                raise AssertionError(f"not within {deadline_s:g} s: {what}\n{self.words()}")
            await asyncio.sleep(0.02)
        return found

    async def until_fleet(self, condition: Callable[[Fleet], Any], what: str, deadline_s: float = STEP_S) -> Any:
        """`until`, asked of the decider's state over one connection; a decider that is away is waited for."""
        async with self.bus() as bus:

            async def asked() -> Any:
                try:
                    return condition(await bus.state(timeout_s=1))
                except Exception as error:  # away, for now
                    if "Refused" not in type(error).__name__:
                        raise
                    return None

            return await self.until(asked, what, deadline_s)

    async def serving(self, model: str, deadline_s: float = STEP_S) -> Instance:
        """Wait until an instance is up and settled with `model`."""
        found: Instance = await self.until_fleet(lambda fleet: up_with(fleet, model), f"{model} is up", deadline_s)
        return found

    async def inspected(self, *models: str) -> None:
        """Wait until a node knows what these models need."""

        def known(fleet: Fleet) -> bool:
            found = [fleet.models.get(name) for name in models]
            return all(model is not None and (model.facts is not None or model.rejection is not None) for model in found)

        await self.until_fleet(known, f"{', '.join(models)} inspected", INSPECTED_S)

    # -- hurting it

    def child(self, name: str) -> Identity:
        """A child of `up` by name: postgres, nats, pool, decider, worker, web. One that is just being started is waited for."""
        until = time.monotonic() + STEP_S
        while (identity := self._running_child(name)) is None:
            assert time.monotonic() < until, f"{name} is not running"
            time.sleep(0.02)
        return identity

    def _running_child(self, name: str) -> Identity | None:
        pid = next(state.pid for state in read_states(self.data) if state.name == name)
        return None if pid is None else Identity.of(pid)

    def part(self, instance: str, name: str) -> Identity:
        """A process of an instance: holder, engine, frontend."""
        record = json.loads((self.data / "run" / "inst" / instance / "instance.json").read_text())
        identity = Identity.of(record[name]["pid"])
        assert identity is not None, f"{name} of {instance} is not running"
        return identity

    def kill(self, victim: Identity, number: signal.Signals = signal.SIGKILL) -> None:
        victim.send(number)


def up_with(fleet: Fleet, model: str) -> Instance | None:
    return next((one for one in fleet.instances.values() if is_up(one, model)), None)


def is_up(instance: Instance, model: str) -> bool:
    return instance.rung is Rung.UP and instance.model == model and instance.activity is Activity.SETTLED


def grants_overlap(events: list[Recorded]) -> bool:
    """Whether two grants ever held one cell at one time, from the events alone."""
    held: dict[int, set[tuple[str, int]]] = {}
    for one in events:
        event: Any = one.event
        if one.type == "GrantGiven":
            cells = {(event.device, cell) for cell in range(event.offset, event.offset + event.cells)}
            if any(cells & other for other in held.values()):
                return True
            held[one.position] = cells
        elif one.type == "GrantReturned":
            del held[event.grant]
    return False


@contextlib.contextmanager
def running(settings: str, *options: str, environment: Mapping[str, str] | None = None) -> Iterator[PlaneUnderTest]:
    """A plane for the length of a block."""
    plane = PlaneUnderTest(settings, environment=environment)
    try:
        plane.start(*options)
        yield plane
    except pytest.skip.Exception:
        plane.finish()
        raise
    except BaseException:
        plane._remove(keep=True)
        raise
    plane.finish()
