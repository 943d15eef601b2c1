"""`requests` and `events`: what has happened."""

import time
from collections.abc import Mapping
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import click
import msgspec

from compose.cli.options import api, as_json, echo_json, echo_line, table

if TYPE_CHECKING:
    from compose.client import Client

FOLLOW_S: Final = 0.3


@click.command()
@click.option("--model", help="Of this model only.")
@click.option("--limit", type=click.IntRange(1, 1000), default=20, show_default=True)
@as_json
@click.pass_obj
def requests(data: Path, model: str | None, limit: int, json: bool) -> None:
    """Show requests: the open ones, then those that have ended, newest first."""
    with api(data) as client:
        found = client.get("api", "requests", model=model, limit=limit)
    if json:
        echo_json(found)
        return
    rows = [
        [
            one["request"], one["model"], one["state"], clock(one["accepted_ms"]), seconds(one["queued_ms"]),
            seconds(one["first_token_ms"]), seconds(one["took_ms"]), _tokens(one),
            one["finish_reason"] or one["code"] or one["reason"] or _by(one),
        ]
        for one in found
    ]  # fmt: skip
    names = ("request", "model", "state", "at", "queued", "first token", "took", "tokens", "why")
    table(*names, rows=rows, empty=f"no requests of a model called {model}" if model else "no requests yet")


def _tokens(one: dict[str, Any]) -> str:
    return "?" if one["prompt_tokens"] is None else f"{one['prompt_tokens']}+{one['completion_tokens']}"


def _by(one: dict[str, Any]) -> str:
    return f"by {one['by']} while {one['phase']}" if one["by"] else ""


@click.command()
@click.option("--follow", "-f", is_flag=True, help="Go on with what happens, until Ctrl-C.")
@click.option("--after", type=click.IntRange(0), help="Only events after this position.")
@click.option("--stream", help="Only of this stream, e.g. model:NAME or device:cpu0.")
@click.option("--type", "kind", help="Only of this type, e.g. InstanceUp.")
@click.option("--limit", type=click.IntRange(1, 1000), default=30, show_default=True)
@as_json
@click.pass_obj
def events(  # noqa: PLR0917 (click passes them by name)
    data: Path, follow: bool, after: int | None, stream: str | None, kind: str | None, limit: int, json: bool
) -> None:
    """Show the log of events in words, oldest first; --json has all of each, with --follow one document a line."""
    with api(data) as client:
        query = {"stream": stream, "type": kind}
        if after is None:
            found = sorted(client.get("api", "events", limit=limit, **query), key=lambda one: int(one["position"]))
        else:
            found = client.get("api", "events", after=after, limit=limit, **query)
        if json and not follow:
            echo_json(found)
            return
        position = after or 0
        devices = {} if json else _devices(client)
        while True:
            for one in found:
                position = max(position, one["position"])
                if json:
                    echo_line(one)
                else:
                    click.echo(event_line(one, devices))
            if not follow:
                if not found:
                    click.echo("no such events")
                return
            if len(found) < limit:
                time.sleep(FOLLOW_S)
            found = client.get("api", "events", after=position, limit=limit, **query)


def _devices(client: "Client") -> dict[str, str]:
    """Their names: people know no ids."""
    from web.views.devicenames import names  # noqa: PLC0415 (as all of web: for this command alone)

    return dict(names((one["device"], one["node"], one["name"]) for one in client.get("api", "devices")))


def event_line(one: dict[str, Any], devices: Mapping[str, str]) -> str:
    """Its time is UTC's, and can be given to `--at` as it is written."""
    at = datetime.fromisoformat(one["at"]).astimezone(UTC)
    return f"{one['position']:>7} {at:%Y-%m-%dT%H:%M:%S.%f}"[:-3] + f"Z  {one['type']:<20} {_said(one, devices)}"


def _said(one: dict[str, Any], devices: Mapping[str, str]) -> str:
    """What the page says of it too; of a type that only a newer release knows, its fields."""
    from controlplane.envelope import decode_event  # noqa: PLC0415 (with all events: for this command alone)
    from controlplane.upcast import UnknownEvent  # noqa: PLC0415
    from web.views.devicenames import stream_words, told  # noqa: PLC0415

    data = msgspec.json.encode(one["data"])
    try:
        return told(decode_event(one["type"], one["v"], data.decode()), devices)
    except (UnknownEvent, msgspec.DecodeError):
        return f"{stream_words(one['stream'], devices)} {data.decode()}"


def clock(at_ms: int | None) -> str:
    return "" if at_ms is None else f"{datetime.fromtimestamp(at_ms / 1000).astimezone():%H:%M:%S}"


def seconds(took_ms: int | None) -> str:
    return "" if took_ms is None else f"{took_ms / 1000:.2f} s"
