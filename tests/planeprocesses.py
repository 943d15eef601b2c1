"""The processes of a plane under test, in a directory of its own under /tmp: started, killed, ended, searched for orphans."""

import contextlib
import http.client
import os
import signal
import subprocess
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from compose.remains import belonging
from controlplane.plane import Plane
from tests import leftovers
from tests.poolroom import forget

START_S = 90.0


class PlaneProcesses:
    """`start` returns when web is ready; `finish` ends it and says what was wrong: orphans, an unclean audit."""

    def __init__(self, settings: str, *, environment: Mapping[str, str] | None = None, user: int | None = None) -> None:
        """user: uid (and gid) to run it as, if not ours."""
        self.data = leftovers.directory()
        self.settings_file = self.data / "settings.toml"
        self.settings_file.write_text(settings)
        self._environment = dict(environment or {})
        self._as: dict[str, Any] = {}
        if user is not None:
            self._as = {"user": user, "group": user, "extra_groups": []}
            for path in (self.data, self.settings_file):
                os.chown(path, user, user)
        self._up: subprocess.Popen[bytes] | None = None
        self._seen = 0

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
            self._up = subprocess.Popen(argv, stdin=subprocess.DEVNULL, stdout=out, stderr=out, env=environment, **self._as)

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

    @property
    def up_pid(self) -> int:
        assert self._up is not None
        return self._up.pid

    def kill_up(self) -> None:
        """`kill -9` of `up` itself."""
        assert self._up is not None
        self._up.kill()
        self._up.wait()

    def down(self, deadline_s: float = 90) -> int:
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
        if keep or os.environ.get("KEEP_PLANES"):
            forget(self.data / "run" / "pool")
            leftovers.keep(self.data)  # its logs tell more than an assertion
        else:
            leftovers.remove(self.data)

    def words(self) -> str:
        """The ends of all logs."""
        files = [self.data / "up.out", *sorted((self.data / "logs").glob("*.log"))]
        shown = [file for file in files if file.exists() and file.stem != "nats"]
        return "\n".join(f"--- {file.name}\n{file.read_text(errors='replace')[-1000:]}" for file in shown)

    @property
    def plane(self) -> Plane:
        return Plane.read(self.data)

    @property
    def url(self) -> str:
        return self.plane.web_url

    @property
    def token(self) -> str:
        return (self.data / "secrets" / "admin-token").read_text().strip()

    def cli(self, *arguments: str, deadline_s: float = 90) -> subprocess.CompletedProcess[str]:
        argv = [sys.executable, "-m", "compose", "--data", str(self.data), *arguments]
        return subprocess.run(argv, capture_output=True, text=True, timeout=deadline_s, check=False, **self._as)


def _command_line(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
    except OSError:
        return "gone"
