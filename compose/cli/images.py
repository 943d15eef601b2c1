"""`images`: skeletons on the nodes' disks."""

from pathlib import Path
from typing import Any

import click

from compose.cli.options import api, as_json, echo_json, table
from compose.cli.show import ago
from controlplane.quantities import human_bytes


@click.group(invoke_without_command=True)
@as_json
@click.pass_context
def images(context: click.Context, json: bool) -> None:
    """List, check and remove engines on disk."""
    if context.invoked_subcommand is None:
        _list(context.obj, json)


@images.command("list")
@as_json
@click.pass_obj
def list_(data: Path, json: bool) -> None:
    """List images with their size, age and last use."""
    _list(data, json)


def _list(data: Path, json: bool) -> None:
    with api(data) as client:
        found: list[dict[str, Any]] = client.get("api", "images")
    if json:
        echo_json(found)
        return
    rows = [
        [
            one["image"], one["node"], _stands(one), human_bytes(one["size_bytes"]), _ago(one["made_ms"]), _ago(one["used_ms"]),
            str(one["uses"]), ", ".join(one["models"]), _reason(one),
        ]
        for one in found
    ]  # fmt: skip
    table("image", "node", "state", "size", "made", "used", "uses", "models", "reason", rows=rows, empty="no images")


@images.command()
@click.argument("image")
@click.pass_obj
def inspect(data: Path, image: str) -> None:
    """Show all that is known of an image, as JSON."""
    with api(data) as client:
        echo_json(client.get("api", "images", image))


@images.command()
@click.argument("image")
@as_json
@click.pass_obj
def verify(data: Path, image: str, json: bool) -> None:
    """Compare an image with its digests and with the machine of today."""
    with api(data) as client:
        answer = client.post("api", "images", image, "verify")
    if json:
        echo_json(answer)
    else:
        click.echo(f"{image}: {answer['message']}")


@images.command()
@click.argument("image")
@click.pass_obj
def rebuild(data: Path, image: str) -> None:
    """Never use an image again and forget its failure: a new one is made when that disturbs nobody."""
    with api(data) as client:
        answer = client.post("api", "images", image, "rebuild")
    click.echo(f"{image} is not used any more; {answer['message'] or 'a new one is made at the next save'}")


@images.command()
@click.argument("image")
@click.pass_obj
def pin(data: Path, image: str) -> None:
    """Keep an image whatever the quota says."""
    with api(data) as client:
        client.post("api", "images", image, "pin")
    click.echo(f"{image} stays")


@images.command()
@click.argument("image")
@click.pass_obj
def unpin(data: Path, image: str) -> None:
    """Let an image go again when room is needed."""
    with api(data) as client:
        client.delete("api", "images", image, "pin")
    click.echo(f"{image} may go")


@images.command()
@click.argument("image")
@click.pass_obj
def rm(data: Path, image: str) -> None:
    """Remove an image: instances that were saved to it start cold."""
    with api(data) as client:
        answer = client.delete("api", "images", image)
    click.echo(answer["message"] or f"removed {image}")


@images.command()
@as_json
@click.pass_obj
def gc(data: Path, json: bool) -> None:
    """Remove what is over the quota, least valuable first."""
    with api(data) as client:
        answer = client.post("api", "images", "gc")
    if json:
        echo_json(answer)
    else:
        click.echo(answer["message"] or f"removed {', '.join(answer['images']) or 'nothing'}")


def _stands(one: dict[str, Any]) -> str:
    return f"{one['state']}, pinned" if one["pinned"] else str(one["state"])


def _reason(one: dict[str, Any]) -> str:
    why = f"{one['code']}: {one['message']}" if one["code"] else ""
    return "; ".join(part for part in (why, one["outlook"]) if part)


def _ago(at_ms: int) -> str:
    return f"{ago(at_ms)} ago" if at_ms else "never"
