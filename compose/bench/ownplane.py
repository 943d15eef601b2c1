"""A whole plane of a bench's own: started in its own directory, asked over HTTP like any other, ended with all that is its."""

import asyncio
import http.client
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from types import TracebackType
from typing import Any, Final, Self

import msgspec

from compose import remains
from compose.client import Client
from compose.embedded.cluster import Cluster
from compose.login import ADMIN_TOKEN
from compose.refusal import ApiRefused, EnvironmentRefusal
from controlplane.plane import Plane
from pool.place import sweep

READY_S: Final = 120.0
ANSWER_S: Final = 900.0
"""A first cold start of a large model, its weights read from a slow disk."""
POLL_S: Final = 0.02
END_S: Final = 60.0


class Answered(msgspec.Struct, frozen=True):
    """Seconds to the first piece of text and to the end."""

    first_s: float
    all_s: float
    text: str


class OwnPlane:
    """Enter it: it is ready then. `data`: an empty directory with a short name; it is removed at the end,
    unless KEEP_PLANES is set."""

    def __init__(self, data: Path, settings: str) -> None:
        self.data, self._settings = data, settings
        self._up: subprocess.Popen[bytes] | None = None
        self.client: Client

    def __enter__(self) -> Self:
        self.data.mkdir(mode=0o700, parents=True, exist_ok=True)
        file = self.data / "bench.toml"
        file.write_text(self._settings)
        argv = [sys.executable, "-P", "-m", "compose", "--data", str(self.data), "up", "--port", "0", "--settings", str(file)]
        with (self.data / "up.out").open("wb") as out:
            self._up = subprocess.Popen(argv, stdin=subprocess.DEVNULL, stdout=out, stderr=out)
        try:
            self._await_ready()
        except BaseException:
            self._end()
            raise
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self._end()

    def _await_ready(self) -> None:
        ends = time.monotonic() + READY_S
        assert self._up is not None
        while not self._ready():
            if self._up.poll() is not None or time.monotonic() > ends:
                said = (self.data / "up.out").read_text(errors="replace")[-2000:]
                raise EnvironmentRefusal("no_plane", f"No plane came up in {self.data}: {said}", "See `enginehouse doctor`.")
            time.sleep(POLL_S)
        self.client = Client(self._url, self._token)

    def _ready(self) -> bool:
        try:
            plane = Plane.read(self.data)
            connection = http.client.HTTPConnection(plane.web_host, plane.web_port, timeout=2)
            try:
                connection.request("GET", "/readyz")
                return connection.getresponse().status == http.client.OK and bool(self._token)
            finally:
                connection.close()
        except (OSError, http.client.HTTPException):
            return False

    @property
    def _url(self) -> str:
        return f"http://127.0.0.1:{Plane.read(self.data).web_port}"

    @property
    def _token(self) -> str:
        return (self.data / "secrets" / ADMIN_TOKEN).read_text().strip()

    def _end(self) -> None:
        if self._up is not None:
            self._up.send_signal(signal.SIGTERM)
            try:
                self._up.wait(END_S)
            except subprocess.TimeoutExpired:
                self._up.kill()
                self._up.wait()
        asyncio.run(remains.clear(self.data))
        if not os.environ.get("KEEP_PLANES"):
            Cluster.of(self.data).remove()  # root's lies elsewhere
            shutil.rmtree(self.data, ignore_errors=True)
            sweep()  # and the pool's segments, in shared memory

    # ---- what is asked of it ----------------------------------------------------------------------------------

    def inspected(self, model: str) -> None:
        """Wait until the model's source is open. Raises ApiRefused when it can't be used."""
        ends = time.monotonic() + ANSWER_S
        while time.monotonic() < ends:
            known: dict[str, Any] = self.client.get("api", "models", model)
            if (no := known.get("rejection")) is not None:
                raise ApiRefused(0, str(no["code"]), str(no["message"]), None)
            if known.get("facts") is not None:
                return
            time.sleep(POLL_S)
        raise ApiRefused(0, "timeout", f"{model} was not opened within {ANSWER_S:g} s", None)

    def ask(self, model: str, prompt: str, tokens: int) -> Answered:
        """One greedy completion, streamed. Raises ApiRefused; `no_answer` when it has no text."""
        connection = http.client.HTTPConnection("127.0.0.1", Plane.read(self.data).web_port, timeout=ANSWER_S)
        body = {"model": model, "prompt": prompt, "max_tokens": tokens, "temperature": 0, "stream": True}
        headers = {"Authorization": f"Bearer {self._token}", "Content-Type": "application/json"}
        began, first, pieces = time.perf_counter(), 0.0, list[str]()
        try:
            connection.request("POST", "/v1/completions", json.dumps(body), headers)
            response = connection.getresponse()
            if response.status != http.client.OK:
                raise ApiRefused(response.status, str(response.status), response.read()[:1000].decode(errors="replace"), None)
            for line in response:
                if not line.startswith(b"data: {"):
                    continue
                chunk = json.loads(line[6:])
                if "error" in chunk:
                    raise ApiRefused(0, str(chunk["error"].get("code")), str(chunk["error"].get("message")), None)
                if text := "".join(choice.get("text") or "" for choice in chunk.get("choices", [])):
                    first = first or time.perf_counter() - began
                    pieces.append(text)
        finally:
            connection.close()
        if not pieces:
            raise ApiRefused(0, "no_answer", f"{model} answered {prompt!r} with nothing, so nothing can be timed", None)
        return Answered(first, time.perf_counter() - began, "".join(pieces))

    def operate(self, model: str, what: str) -> float:
        """Carry out an operation (`sleep`, `save`, ...); its seconds. Raises ApiRefused."""
        began = time.perf_counter()
        begun = self.client.post("api", "models", model, what)
        ends = time.monotonic() + ANSWER_S
        while time.monotonic() < ends:
            over = self.client.get("api", "operations", begun["operation"], after=begun["position"], wait=20)
            if over["state"] == "failed":
                raise ApiRefused(0, over["code"], f"{what} {model}: {over['message']}", None)
            if over["state"] != "open":
                return time.perf_counter() - began
        raise ApiRefused(0, "timeout", f"{what} {model} did not end within {ANSWER_S:g} s", None)

    def remove_images(self) -> None:
        for image in self.client.get("api", "images"):
            self.client.delete("api", "images", image["image"])

    def events(self, after: int) -> list[dict[str, Any]]:
        """The log from there on."""
        found: list[dict[str, Any]] = []
        while page := self.client.get("api", "events", after=after, limit=1000):
            found += page
            after = page[-1]["position"]
        return found

    def words(self) -> str:
        """The ends of its logs, engines' included."""
        files = [
            *self.data.glob("logs/worker.log"),
            *self.data.glob("run/inst/*/engine.log"),
            *self.data.glob("logs/engines/*"),
        ]
        return "\n".join(f"--- {file.name}\n{file.read_text(errors='replace')[-1500:]}" for file in files)

    def engine_processes(self) -> int:
        """Processes of instances: holders, engines, frontends."""
        mark, found = f"{self.data}/run/inst/".encode(), 0
        for entry in Path("/proc").glob("[0-9]*/cmdline"):
            try:
                found += mark in entry.read_bytes()
            except OSError:
                continue
        return found
