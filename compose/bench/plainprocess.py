"""Plain vLLM as a process beside, asked by turns with ours."""

import json
import os
import socket
import subprocess
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

from compose.bench.engineprocess import EngineFailed
from compose.bench.rows import Row

ANSWER_S: Final = 600.0
"""Its slowest answer is the first of level 1, which pins as much host memory as there are weights, and its start."""


class PlainProcess:
    """`start_s`: until it could answer."""

    def __init__(self, work: Path, source: Path, device: str, arguments: Mapping[str, Any]) -> None:
        self._log = work / "plain.log"
        ours, theirs = socket.socketpair()
        ours.settimeout(ANSWER_S)
        argv = [sys.executable, "-m", "compose.bench.plain", os.fspath(source), json.dumps(dict(arguments)), device]
        begun = time.monotonic()
        with theirs, self._log.open("wb") as log:
            self.process = subprocess.Popen(
                [*argv, str(theirs.fileno())], stdin=subprocess.DEVNULL, stdout=log, stderr=log, pass_fds=[theirs.fileno()]
            )
        self._sock = ours
        self._lines = ours.makefile("rw", encoding="utf-8")
        try:
            self._answer()
        except BaseException:
            self.end()
            raise
        self.start_s = time.monotonic() - begun

    def ask(self, what: str, **more: int) -> Row:
        """Raises EngineFailed."""
        try:
            print(json.dumps({"ask": what, **more}), file=self._lines, flush=True)
        except OSError as error:
            raise EngineFailed(f"plain vLLM went away ({error}): {self._said()}") from error
        return self._answer()

    def _answer(self) -> Row:
        try:
            line = self._lines.readline()
        except OSError as error:
            raise EngineFailed(f"plain vLLM does not answer ({error}): {self._said()}") from error
        if not line:
            raise EngineFailed(f"plain vLLM went away: {self._said()}")
        row: Row = json.loads(line)
        return row

    def _said(self) -> str:
        return self._log.read_text(encoding="utf-8", errors="replace")[-4000:]

    def end(self) -> None:
        """It ends by itself once nobody asks any more."""
        self._lines.close()
        self._sock.close()
        try:
            self.process.wait(20)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait(20)
