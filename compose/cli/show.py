"""`status`: processes of the plane, its devices, its models; or devices and models as they were."""

import contextlib
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import click

from compose.cli.options import F, api, as_json, echo_json, table
from compose.client import elsewhere
from compose.directory import holder
from compose.parts import pool_words
from compose.process import Identity
from compose.refusal import ApiRefused, EnvironmentRefusal
from compose.settingschecks import unapplied
from compose.supervisor import read_states
from controlplane.moments import EXAMPLES, as_it_was
from controlplane.plane import Plane
from controlplane.quantities import human_bytes

if TYPE_CHECKING:
    from compose.client import Client

LOOK_S: Final = 6.0
"""For each answer: who asks what is wrong is not kept waiting by a web process that hangs. `/readyz` itself takes up to 2 s."""


def with_retired(command: F) -> F:
    """Option `--all`."""
    return click.option("--all", "every", is_flag=True, help="Show retired models too.")(command)


def living(models: list[dict[str, Any]], every: bool) -> list[dict[str, Any]]:
    """The models to list: retired ones only where all are asked for."""
    return [one for one in models if every or not one["retired"]]


def with_past(command: F) -> F:
    """Option `--at`."""
    return click.option("--at", metavar="WHEN", help=f"As it was then: {EXAMPLES}.")(command)


def moment(client: "Client", at: str) -> dict[str, Any]:
    """Which past is meant: `position` and `at_ms` of the event that it comes after. Raises ApiRefused."""
    found: dict[str, Any] = client.get("api", "past", at=at)
    return found


def echo_past(past: dict[str, Any]) -> None:
    click.echo(f"the past, {as_it_was(past['position'], past['at_ms'])}\n")


@click.command()
@with_retired
@with_past
@as_json
@click.pass_context
def status(context: click.Context, every: bool, at: str | None, json: bool) -> None:
    """Show what runs, where, and how much room is left; exit code 1 when something is not well."""
    data: Path = context.obj
    if at is not None:
        _past(data, at, every, json)
        return
    away = elsewhere() is not None  # then what runs here is not what was asked about
    held = None if away else holder(data)
    processes = read_states(data) if held is not None else []
    found: dict[str, Any] = {}
    trouble = "" if held is not None or away else f"no `up` runs in {data}: start it, or name the plane's directory with --data"
    with contextlib.ExitStack() as stack:
        try:
            client = stack.enter_context(api(data, LOOK_S))
            found = {name: client.get("api", name) for name in ("devices", "models", "nodes")}
            found["models"] = living(found["models"], every)
            # Refused when something behind web does not answer, whatever its process looks like.
            trouble = trouble or client.get("readyz").get("unseen", "")
        except (EnvironmentRefusal, ApiRefused) as refusal:
            trouble = trouble or str(refusal)
    if held is not None and (why := unapplied(data)):
        trouble = trouble or f"settings not applied: {why}"
    ill = [one for one in processes if one.state != "ready"]
    if json:
        echo_json({"up": held, "trouble": trouble, "processes": processes, **found})
    else:
        if held is not None:
            click.echo(f"up: pid {held.process.pid} since {held.since}, data in {data}")
            _processes(processes)
        if found:
            _devices(found["devices"], found["nodes"])
            click.echo(f"pool: {pool_words(Plane.read(data))}\n" if held is not None else "")
            _models(found["models"])
        if trouble:
            click.echo(trouble, err=True)
    if trouble or ill:
        context.exit(1)


def _past(data: Path, at: str, every: bool, json: bool) -> None:
    """What the log knows of it: neither processes nor what was measured."""
    with api(data) as client:
        past = moment(client, at)
        found = {name: client.get("api", name, at=past["position"]) for name in ("devices", "models", "nodes")}
    found["models"] = living(found["models"], every)
    if json:
        echo_json({"past": past, **found})
        return
    echo_past(past)
    _devices(found["devices"], found["nodes"])
    click.echo()
    _models(found["models"])


def _models(models: list[dict[str, Any]]) -> None:
    rows = [model_row(one) for one in models]
    table("model", "state", "waiting", "running", "note", rows=rows, empty="no models")


def _processes(processes: list[Any]) -> None:
    rows = []
    for one in processes:
        alive = one.pid is not None and Identity.of(one.pid) is not None
        state = one.state if alive or one.pid is None else "gone"
        exit_ = one.last_exit if one.restarts else ""
        rows.append([one.name, state, str(one.pid or ""), ago(one.since_ms), str(one.restarts), exit_])
    table("process", "state", "pid", "for", "restarts", "last exit", rows=rows, empty="no processes")
    click.echo()


def _devices(devices: list[dict[str, Any]], nodes: list[dict[str, Any]]) -> None:
    rows = []
    for one in devices:
        cells = ["."] * one["cells"]
        for grant in one["grants"]:
            begin = grant["offset"]
            cells[begin : begin + grant["cells"]] = ["#"] * grant["cells"]
        holders = ", ".join(grant["model"] or grant["instance"] for grant in one["grants"])
        rows.append([one["name"], "".join(cells), human_bytes(one["size_bytes"]), _bytes(one["used_bytes"]), holders])
    table("device", "cells", "size", "used", "holds", rows=rows, empty="no devices")
    for one in devices:
        for other in one["foreign"]:
            name = f" ({other['name']})" if other["name"] else ""
            click.echo(f"{one['name']}: pid {other['pid']}{name}, not this plane's, has {human_bytes(other['size_bytes'])}")
    for node in nodes:
        pool = f"{_bytes(node['pool_used_bytes'])} of {human_bytes(node['pool_budget_bytes'])}"
        state = "heard" if node["heard"] else "has left" if node["left"] else "SILENT"
        click.echo(f"node {node['node']}: {state}, pool {pool}")
        for note in node.get("notes", ()):
            click.echo(f"node {node['node']}: {note}")


def model_row(one: dict[str, Any]) -> list[str]:
    """A row of a table of models."""
    note = one["spec"].get("note", "")
    if one["error"]:
        note = one_line(one["why"] or str(one["error"].get("message", one["error"])))
    elif one["progress"]:
        note = progress_text(one["progress"])
    return [one["model"], one["words"], str(one["queued"]), str(one["running"]), note]


def one_line(text: str) -> str:
    """A message in a cell of a table: of several lines (the end of a log) the first and the last."""
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    return text if len(lines) < 2 else f"{lines[0]} ... {lines[-1]}"


def progress_text(progress: dict[str, Any]) -> str:
    if not progress["total"]:
        return str(progress["step"])
    return f"{progress['step']} {100 * progress['done'] // progress['total']} %"


def ago(since_ms: int) -> str:
    """How long ago, in one unit."""
    seconds = max(0, time.time_ns() // 1_000_000 - since_ms) // 1000
    for size, unit in ((86_400, "d"), (3600, "h"), (60, "min")):
        if seconds >= 2 * size:
            return f"{seconds // size} {unit}"
    return f"{seconds} s"


def _bytes(size: int | None) -> str:
    return "?" if size is None else human_bytes(size)
