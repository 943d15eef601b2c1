"""`images`: skeletons on the nodes' disks."""

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from compose.cli.options import api, as_json, echo_json, lines, table
from compose.cli.show import ago
from controlplane.quantities import human_bytes

if TYPE_CHECKING:
    from compose.client import Client


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
        unsaved = [] if json else [line for node in client.get("api", "nodes") for line in node.get("unsaved", ())]
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
    for line in unsaved:
        click.echo(line)


@images.command()
@click.argument("image")
@as_json
@click.pass_obj
def inspect(data: Path, image: str, json: bool) -> None:
    """Show all that is known of an image."""
    with api(data) as client:
        one: dict[str, Any] = client.get("api", "images", image)
    if json:
        echo_json(one)
        return
    lines({
        "image": one["image"], "node": one["node"], "state": _stands(one), "reason": _reason(one),
        "configuration": one["configuration"], "models": ", ".join(one["models"]), "size": _size(one),
        "made": _ago(one["made_ms"]), "used": _ago(one["used_ms"]), "uses": str(one["uses"]),
        "proof": one["proof"], "saved to it": ", ".join(one["saved"]),
    })  # fmt: skip


def _size(one: dict[str, Any]) -> str:
    zeros = f", and {human_bytes(one['zero_bytes'])} of zeros in memory" if one["zero_bytes"] else ""
    return f"{human_bytes(one['size_bytes'])} on disk{zeros}"


def _order(name: str, send: "Callable[[Client, str], Any]", told: Callable[[str, str], str], text: str) -> None:
    """A command about one image. send: asks for it; told: image and what the plane said of it -> what people read."""

    @images.command(name, help=text)
    @click.argument("image")
    @as_json
    @click.pass_obj
    def command(data: Path, image: str, json: bool) -> None:
        with api(data) as client:
            answer = send(client, image)
        if json:
            echo_json(answer)
        else:
            click.echo(told(image, str(answer.get("message") or "")))


_order(
    "verify", lambda client, image: client.post("api", "images", image, "verify"), lambda image, said: f"{image}: {said}",
    "Compare an image with its digests and with the machine of today.",
)  # fmt: skip
_order(
    "rebuild", lambda client, image: client.post("api", "images", image, "rebuild"),
    lambda image, said: f"{image} is not used any more; {said or 'a new one is made at the next save'}",
    "Never use an image again and forget its failure: a new one is made when that disturbs nobody.",
)  # fmt: skip
_order(
    "pin", lambda client, image: client.post("api", "images", image, "pin"), lambda image, _: f"{image} stays",
    "Keep an image whatever the quota says.",
)  # fmt: skip
_order(
    "unpin", lambda client, image: client.delete("api", "images", image, "pin"), lambda image, said: said or f"{image} may go",
    "Let an image go again when room is needed.",
)  # fmt: skip
_order(
    "rm", lambda client, image: client.delete("api", "images", image), lambda image, said: said or f"removed {image}",
    "Remove an image: instances that were saved to it start cold.",
)  # fmt: skip


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
