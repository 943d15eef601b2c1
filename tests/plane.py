"""A whole plane for tests: real servers, real processes, fake or real engines, in a directory of its own under /tmp."""

import asyncio
import contextlib
import http.client
import json
import os
import secrets
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import asyncpg
import httpx
import openai

from compose.embedded.cluster import Cluster
from compose.process import Identity
from compose.remains import belonging
from compose.supervisor import read_states
from controlplane.bus import Bus
from controlplane.envelope import Recorded
from controlplane.fleet import Fleet, Instance
from controlplane.log.postgres import COLUMNS, recorded
from controlplane.plane import Plane
from controlplane.rungs import Activity, Rung
from pool.place import place

START_S = 60.0
STEP_S = 30.0
"""Deadline of one wait; generous, as CI has two cores."""

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


class PlaneUnderTest:
    """`start` returns when web is ready; `finish` ends it and says what was wrong: orphans, an unclean audit."""

    def __init__(self, settings: str, *, environment: Mapping[str, str] | None = None) -> None:
        self.data = Path("/tmp") / f"eh-{secrets.token_hex(4)}"
        self.data.mkdir(mode=0o700)
        self.settings_file = self.data / "settings.toml"
        self.settings_file.write_text(settings)
        self._environment = dict(environment or {})
        self._up: subprocess.Popen[bytes] | None = None
        self._seen = 0

    # -- its life

    def start(self, *options: str) -> None:
        """Start `up` and wait until web is ready."""
        self.launch(*options)
        self.wait_ready()

    def launch(self, *options: str) -> None:
        argv = [sys.executable, "-m", "compose", "--data", str(self.data), "up", "--port", "0", *options]
        if "--demo" not in options:
            argv += ["--settings", str(self.settings_file)]
        self._seen = self._times_ready()
        with (self.data / "up.out").open("ab") as out:
            environment = os.environ | self._environment
            self._up = subprocess.Popen(argv, stdin=subprocess.DEVNULL, stdout=out, stderr=out, env=environment)

    def wait_ready(self, deadline_s: float = START_S) -> None:
        until = time.monotonic() + deadline_s
        while self._times_ready() <= self._seen or not self._is_ready():
            assert self._up is not None
            if self._up.poll() is not None:
                raise AssertionError(f"up ended with {self._up.returncode}:\n{self.words()}")
            if time.monotonic() > until:
                raise AssertionError(f"not ready after {deadline_s:g} s:\n{self.words()}")
            time.sleep(0.02)

    def _times_ready(self) -> int:
        out = self.data / "up.out"
        return out.read_text(errors="replace").count("ready in ") if out.exists() else 0

    def _is_ready(self) -> bool:
        try:
            plane = self.plane
        except FileNotFoundError:
            return False
        token = self.data / "secrets" / "admin-token"
        if not token.exists():
            return False
        with contextlib.suppress(OSError, http.client.HTTPException):
            connection = http.client.HTTPConnection(plane.web_host, plane.web_port, timeout=2)
            try:
                connection.request("GET", "/readyz")
                return connection.getresponse().status == 200
            finally:
                connection.close()
        return False

    def kill_up(self) -> None:
        """`kill -9` of `up` itself."""
        assert self._up is not None
        self._up.kill()
        self._up.wait()

    def down(self, deadline_s: float = 40) -> int:
        """SIGTERM to `up`; return its exit code."""
        assert self._up is not None
        if self._up.poll() is None:
            self._up.send_signal(signal.SIGTERM)
        return self._up.wait(deadline_s)

    def finish(self) -> None:
        """Audit, end, and check that nothing is left. Raises AssertionError."""
        wrong: list[str] = []
        try:
            if self._up is not None and self._up.poll() is None:
                audit = self.cli("audit", "--json")
                if audit.returncode != 0:
                    wrong.append(f"audit: {audit.stdout}{audit.stderr}")
                if (code := self.down()) != 0:
                    wrong.append(f"up ended with {code}:\n{self.words()}")
            left = belonging(self.data)
            wrong += [f"orphan {one.pid}: {_command_line(one.pid)}" for one in left]
            for one in left:
                one.send(signal.SIGKILL)
            assert not wrong, "\n".join(wrong)
        finally:
            self._remove(keep=bool(wrong))

    def _remove(self, *, keep: bool) -> None:
        if self._up is not None and self._up.poll() is None:
            self._up.kill()
            self._up.wait()
        for one in belonging(self.data):
            one.send(signal.SIGKILL)
        with contextlib.suppress(FileNotFoundError):
            shutil.rmtree(place(self.data / "run" / "pool", 0), ignore_errors=True)
        if keep or os.environ.get("KEEP_PLANES"):
            return  # its logs tell more than an assertion
        with contextlib.suppress(Exception):
            Cluster.of(self.data).remove()
        shutil.rmtree(self.data, ignore_errors=True)

    def words(self) -> str:
        """The ends of all logs."""
        files = [self.data / "up.out", *sorted((self.data / "logs").glob("*.log"))]
        shown = [file for file in files if file.exists() and file.stem != "nats"]
        return "\n".join(f"--- {file.name}\n{file.read_text(errors='replace')[-1000:]}" for file in shown)

    # -- asking it

    @property
    def plane(self) -> Plane:
        return Plane.read(self.data)

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.plane.web_port}"

    @property
    def token(self) -> str:
        return (self.data / "secrets" / "admin-token").read_text().strip()

    def cli(self, *arguments: str, deadline_s: float = 60) -> subprocess.CompletedProcess[str]:
        argv = [sys.executable, "-m", "compose", "--data", str(self.data), *arguments]
        return subprocess.run(argv, capture_output=True, text=True, timeout=deadline_s, check=False)

    def rest(self) -> httpx.AsyncClient:
        headers = {"Authorization": f"Bearer {self.token}"}
        return httpx.AsyncClient(base_url=self.url, headers=headers, timeout=STEP_S, trust_env=False)

    def openai(self, *, retries: int = 0) -> openai.AsyncOpenAI:
        transport = httpx.AsyncClient(timeout=2 * STEP_S, trust_env=False)
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
        bus = await Bus.connect(self.plane, "test")
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

        await self.until_fleet(known, f"{', '.join(models)} inspected")

    # -- hurting it

    def child(self, name: str) -> Identity:
        """A child of `up` by name: postgres, nats, pool, decider, worker, web."""
        pid = next(state.pid for state in read_states(self.data) if state.name == name)
        assert pid is not None, f"{name} is not running"
        identity = Identity.of(pid)
        assert identity is not None, f"{name} is not running"
        return identity

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


def _command_line(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
    except OSError:
        return "gone"


@contextlib.contextmanager
def running(settings: str, *options: str, environment: Mapping[str, str] | None = None) -> Iterator[PlaneUnderTest]:
    """A plane for the length of a block."""
    plane = PlaneUnderTest(settings, environment=environment)
    try:
        plane.start(*options)
        yield plane
    except BaseException:
        plane._remove(keep=True)
        raise
    plane.finish()
