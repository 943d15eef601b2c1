"""What the command line says when something is in the way: one sentence, or one JSON document, never a traceback."""

import http.server
import json
import os
import tempfile
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import click
import pytest

from compose.childstate import ChildState
from compose.cli import main
from compose.cli.commands import enginehouse
from compose.cli.history import event_line
from compose.cli.options import table
from compose.cli.show import living, one_line
from compose.client import Client
from compose.directory import Directory
from compose.supervisor import write_states
from controlplane.plane import Plane


def ran(*argv: str) -> int:
    with pytest.raises(SystemExit) as ended:
        main(argv)
    return int(ended.value.code or 0)


@pytest.fixture(autouse=True)
def no_plane_elsewhere(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("ENGINEHOUSE_DATA", "ENGINEHOUSE_URL", "ENGINEHOUSE_TOKEN"):
        monkeypatch.delenv(name, raising=False)


COMMANDS = (["models"], ["load", "a"], ["requests"], ["events"], ["audit"], ["token", "list"], ["login"])


@pytest.mark.parametrize("command", COMMANDS)
def test_without_a_plane_every_command_says_so_in_words_and_in_json(
    command: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert ran("--data", str(tmp_path / "d"), *command) == 2
    said = capsys.readouterr()
    assert said.out == "" and said.err.startswith("enginehouse: No plane ") and "enginehouse up" in said.err
    assert ran("--data", str(tmp_path / "d"), *command, "--json") == 2
    said = capsys.readouterr()
    assert said.out == "" and json.loads(said.err)["code"] in ("no_plane", "not_running")


@pytest.mark.parametrize("command", [*COMMANDS, ["status"], ["down"]])
def test_another_users_directory_is_named_as_such(
    command: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """As root meets no closed door, the door is played."""

    def closed(self: Path) -> Any:
        raise PermissionError(13, "Permission denied", str(self))

    monkeypatch.setattr(Path, "read_bytes", closed)
    assert ran("--data", str(tmp_path), *command) == 2
    assert "may not be read by user" in capsys.readouterr().err


@pytest.mark.parametrize("name", ["", " ", "a\nb", "x" * 101])
def test_a_token_needs_a_name_to_be_told_by(name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert ran("--data", str(tmp_path), "token", "new", name) == 2
    assert "printable characters" in capsys.readouterr().err


def test_events_are_told_in_words_and_strange_ones_with_their_fields() -> None:
    one = {"position": 7, "at": "2026-11-29T13:20:01.301Z", "stream": "grant:3", "type": "GrantReturned", "v": 1,
           "data": {"node": "n1", "device": "d", "instance": "ins_1", "grant": 3}}  # fmt: skip
    assert event_line(one, {}) == "      7 2026-11-29T13:20:01.301Z  GrantReturned        ins_1 gave back grant 3"
    assert event_line(one, {"d": "cpu0"}).endswith("GrantReturned        cpu0: ins_1 gave back grant 3")
    strange = event_line({**one, "type": "GrantLent", "data": {"to": "you"}}, {})
    assert strange.endswith('GrantLent            grant:3 {"to":"you"}')


def test_retired_models_are_listed_on_demand_only() -> None:
    models = [{"model": "a", "retired": False}, {"model": "b", "retired": True}]
    assert (living(models, every=False), living(models, every=True)) == (models[:1], models)


def test_the_end_of_a_log_stays_in_its_line_of_a_table() -> None:
    assert (
        one_line("it ended; its log ends:\n  File x\n    ^^^\nValueError: no\n") == "it ended; its log ends: ... ValueError: no"
    )
    assert one_line("one line") == "one line"


def commands(group: click.Group, *path: str) -> Iterator[tuple[tuple[str, ...], click.Command]]:
    context = click.Context(group)
    for name in group.list_commands(context):
        command = group.get_command(context, name)
        assert command is not None
        yield (*path, name), command
        if isinstance(command, click.Group):
            yield from commands(command, *path, name)


def test_every_command_answers_in_json_and_takes_the_directory_after_its_name_too() -> None:
    found = dict(commands(enginehouse))
    assert {("up",), ("images", "pin"), ("token", "revoke"), ("models", "list")} <= found.keys()
    for path, command in found.items():
        options = {option for parameter in command.params for option in parameter.opts}
        runs = not isinstance(command, click.Group) or command.invoke_without_command
        assert "--json" in options or path == ("up",) or not runs, path
        assert "--data" in options or (path[0] == "bench" and len(path) > 1), path


def test_the_directory_that_is_said_last_counts(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    later = str(tmp_path / "later")
    for argv in (["models", "list", "--data", later], ["models", "--data", later, "list"], ["models", "--data", later]):
        assert ran("--data", str(tmp_path / "before"), *argv) == 2
        assert later in capsys.readouterr().err


def test_who_asks_in_another_directory_is_told_how_to_name_the_right_one(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("ENGINEHOUSE_URL", raising=False)
    assert ran("--data", str(tmp_path), "status") == 1
    said = capsys.readouterr().err
    assert f"no `up` runs in {tmp_path}" in said and "--data" in said


def test_of_a_plane_elsewhere_nothing_is_said_about_this_machine(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("ENGINEHOUSE_URL", "http://127.0.0.1:1")
    monkeypatch.setenv("ENGINEHOUSE_TOKEN", "eh_a_b")
    assert ran("--data", str(tmp_path), "status") == 1
    said = capsys.readouterr().err
    assert "http://127.0.0.1:1 does not answer" in said and "no `up` runs" not in said
    assert "ENGINEHOUSE_URL" in said and "enginehouse status" not in said, "that is what was asked"


class Unready(http.server.BaseHTTPRequestHandler):
    """A web process whose decider hangs."""

    def do_GET(self) -> None:
        ready = self.path != "/readyz"
        body = (
            b"[]" if ready else b'{"ready":false,"reasons":["the decider does not answer","the event stream does not answer"]}'
        )
        self.send_response(200 if ready else 503)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *args: object) -> None:
        pass


def test_status_says_what_does_not_answer_though_every_process_is_there(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Unready) as server:
        threading.Thread(target=server.serve_forever).start()
        monkeypatch.setenv("ENGINEHOUSE_URL", f"http://127.0.0.1:{server.server_address[1]}")
        monkeypatch.setenv("ENGINEHOUSE_TOKEN", "eh_a_b")
        try:
            assert ran("--data", str(tmp_path), "status") == 1
        finally:
            server.shutdown()
    said = capsys.readouterr()
    assert "no models" in said.out
    assert "the decider does not answer; the event stream does not answer" in said.err


def test_status_shows_who_is_there_and_does_not_answer(capsys: pytest.CaptureFixture[str]) -> None:
    with tempfile.TemporaryDirectory(prefix="eh-", dir="/tmp") as short, Directory.open(data := Path(short)):
        (data / "run").mkdir(exist_ok=True)
        since_ms = time.time_ns() // 1_000_000 - 42_500
        write_states(data, [ChildState(name="nats", state="silent", pid=os.getpid(), since_ms=since_ms, restarts=0)])
        assert ran("--data", str(data), "status") == 1
    line = next(line for line in capsys.readouterr().out.splitlines() if line.startswith("nats"))
    assert line.split()[:4] == ["nats", "silent", str(os.getpid()), "42"]


def test_names_and_ids_stay_whole_on_a_narrow_terminal(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "40")
    monkeypatch.setenv("TTY_COMPATIBLE", "1")
    name, why = "req_01M8MGVN2CNM4V976TCM0RX2RM", "it waits for a device that three others hold"
    table("request", "model", "why", rows=[[name, "smollm2-harbour", why]], empty="none")
    shown = capsys.readouterr().out
    assert f"{name}  smollm2-harbour  it waits" in shown
    assert "".join(shown.split()).endswith("".join(why.split()))


class Silent:
    """A plane that has nothing to show."""

    def get(self, *path: str, **query: object) -> list[object]:
        return []

    def close(self) -> None: ...


@pytest.mark.parametrize(
    ("command", "said"),
    [
        (["events", "--type", "Nope"], "no such events\n"),
        (["requests"], "no requests yet\n"),
        (["requests", "--model", "nope"], "no requests of a model called nope\n"),
        (["models"], "no models\n"),
        (["images"], "no images\n"),
    ],
)
def test_nothing_to_show_is_said(
    command: list[str], said: str, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Client, "of", staticmethod(lambda data: Silent()))
    assert ran("--data", str(tmp_path), *command) == 0
    assert capsys.readouterr().out == said


@pytest.mark.parametrize("command", [["sleep", "m"], ["move", "m", "--to", "d"]])
@pytest.mark.parametrize("seconds", ["-1", "nan", "inf"])
def test_nobody_waits_less_than_no_time_or_for_ever(
    command: list[str], seconds: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert ran("--data", str(tmp_path), *command, "--timeout", seconds) == 2
    assert "--timeout" in capsys.readouterr().err


@pytest.mark.parametrize("words", [("--data", "", "status"), ("status", "--data", "")])
def test_a_directory_without_a_name_is_not_the_one_that_one_stands_in(
    words: tuple[str, ...], capsys: pytest.CaptureFixture[str]
) -> None:
    assert ran(*words) == 2
    assert "name a directory" in capsys.readouterr().err


def test_a_token_that_is_not_there_is_told_like_any_refusal(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    async def none(url: str, token: str) -> bool:
        return False

    Plane(data=str(tmp_path), postgres_url="", nats_url="", web_port=1).write()
    monkeypatch.setattr("compose.cli.tokens.revoke_token", none)
    assert ran("--data", str(tmp_path), "token", "revoke", "x", "--json") == 1
    assert json.loads(capsys.readouterr().err)["code"] == "token_unknown"
