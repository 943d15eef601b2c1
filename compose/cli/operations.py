"""`load`, `sleep`, `checkpoint`, `save`, `move`, `stop`, `retry`: ask for it, show how far it is, end when it is done."""

import math
import time
from pathlib import Path
from typing import Any, Final

import click
from rich.console import Console
from rich.progress import BarColumn, Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

from compose.cli.options import api, as_json, echo_json
from compose.client import Client
from compose.refusal import ApiRefused
from controlplane.ids import COMMAND, INSTANCE, new

POLL_S: Final = 0.1


class Seconds(click.FloatRange):
    """More than none, and not for ever."""

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        if not math.isfinite(found := super().convert(value, param, ctx)):
            self.fail(f"{value} is no number of seconds that ends.", param, ctx)
        return found


SECONDS: Final = Seconds(min=0, min_open=True)


def _operation(kind: str, text: str) -> click.Command:
    @click.command(kind, help=text)
    @click.argument("model")
    @click.option("--timeout", "timeout_s", type=SECONDS, default=600, show_default=True, help="Seconds to wait for the end.")
    @click.option("--no-wait", is_flag=True, help="Return as soon as it is accepted.")
    @as_json
    @click.pass_obj
    def command(data: Path, model: str, timeout_s: float, no_wait: bool, json: bool) -> None:
        with api(data) as client:
            answer = client.post("api", "models", model, kind, key=new(COMMAND))
            if not no_wait and "operation" in answer:
                answer = _follow(client, answer, f"{kind} {model}", timeout_s, quiet=json)
        _tell(answer, f"{kind} {model}", json=json)

    return command


@click.command()
@click.argument("what", metavar="MODEL|INSTANCE")
@click.option("--to", "device", required=True, metavar="DEVICE", help="Name or id of the device to go to.")
@click.option("--timeout", "timeout_s", type=SECONDS, default=600, show_default=True, help="Seconds to wait for the end.")
@click.option("--no-wait", is_flag=True, help="Return as soon as it is accepted.")
@as_json
@click.pass_obj
def move(data: Path, /, what: str, device: str, *, timeout_s: float, no_wait: bool, json: bool) -> None:
    """Bring what serves a model, or an instance, to another device of its node; requests wait for it meanwhile."""
    kind = "instances" if what.startswith(f"{INSTANCE}_") else "models"
    with api(data) as client:
        answer = client.post("api", kind, what, "move", body={"device": device}, key=new(COMMAND))
        if not no_wait and "operation" in answer:
            answer = _follow(client, answer, f"move {what}", timeout_s, quiet=json)
    _tell(answer, f"move {what}", json=json)


def _tell(answer: dict[str, Any], title: str, *, json: bool) -> None:
    if json:
        echo_json(answer)
    state = answer.get("state")
    if state == "failed":
        raise ApiRefused(0, answer["code"], f"{title}: {answer['message']}", None)
    if not json:
        took = f" in {answer['took_ms'] / 1000:.1f} s" if answer.get("took_ms") else ""
        note = f" ({answer['note']})" if answer.get("note") else ""
        click.echo(f"{title}: {'done' if state == 'succeeded' else 'accepted'}{took}{note}")


def _follow(client: Client, accepted: dict[str, Any], title: str, timeout_s: float, *, quiet: bool) -> dict[str, Any]:
    until = time.monotonic() + timeout_s
    columns = (SpinnerColumn(), TextColumn("{task.description}"), BarColumn(), TimeElapsedColumn())
    console = Console(stderr=True)
    with Progress(*columns, console=console, transient=True, disable=quiet or not console.is_terminal) as bars:
        bar = bars.add_task(title, total=None)
        while True:
            found: dict[str, Any] = client.get("api", "operations", accepted["operation"], after=accepted["position"])
            if found["state"] != "open":
                return found
            if time.monotonic() > until:
                message = f"{title} is not done after {timeout_s:g} s; it goes on (operation {accepted['operation']})"
                raise ApiRefused(0, "timeout", message, None)
            if progress := found["progress"]:
                bars.update(
                    bar, description=f"{title}: {progress['step']}", completed=progress["done"], total=progress["total"] or None
                )
            time.sleep(POLL_S)


load = _operation("load", "Bring a model up: its engine started, its weights mapped.")
sleep = _operation("sleep", "Take a model off its device; its engine stays, so that it comes back quickly.")
checkpoint = _operation(
    "checkpoint", "Take a model's engines off their device altogether: their processes stay, and come back in a second."
)
save = _operation("save", "Take a model's engines to disk: no process is left, and they come back in seconds.")
stop = _operation("stop", "End the engines that serve a model, after the requests that run.")
retry = _operation("retry", "End a model's back-off, or its rejection, and try again now.")
