"""`models`: list, add, remove."""

import tomllib
from pathlib import Path
from typing import Any

import click

from compose.cli.options import api, as_json, echo_json, table
from compose.cli.show import echo_past, living, model_row, moment, with_past, with_retired
from controlplane.quantities import human_bytes


@click.group(invoke_without_command=True)
@with_retired
@with_past
@as_json
@click.pass_context
def models(context: click.Context, every: bool, at: str | None, json: bool) -> None:
    """List, add and remove models."""
    if context.invoked_subcommand is None:
        _list(context.obj, every, at, json)
    elif at is not None or every:
        raise click.UsageError("--at and --all are for lists: write `models --at WHEN` or `models list --at WHEN`")


@models.command("list")
@with_retired
@with_past
@as_json
@click.pass_obj
def list_(data: Path, every: bool, at: str | None, json: bool) -> None:
    """List models with their state."""
    _list(data, every, at, json)


def _list(data: Path, every: bool, at: str | None, json: bool) -> None:
    with api(data) as client:
        past = moment(client, at) if at is not None else None
        found = living(client.get("api", "models", at=past["position"] if past else None), every)
    if json:
        echo_json({"past": past, "models": found} if past else found)
        return
    if past:
        echo_past(past)
    rows = []
    for one in found:
        facts = one["facts"] or {}
        name, state, waiting, running, note = model_row(one)
        aliases = ", ".join(one["spec"].get("aliases", ()))
        weights = human_bytes(facts["weight_bytes"]) if facts else "?"
        rows.append([name, aliases, state, one["spec"].get("engine", "transformers"), weights, waiting, running, note])
    table("model", "aliases", "state", "engine", "weights", "waiting", "running", "note", rows=rows, empty="no models")


@models.command()
@click.argument("name", required=False)
@click.option("--source", help="hf:ORG/NAME@COMMIT, a directory or a GGUF file.")
@click.option("--engine", help="vllm, transformers or fake.")
@click.option("--share", help="auto, 1/8, 1/4, 1/2 or 1 of one device, or gpus=2: whole devices.")
@click.option("--argument", "arguments", multiple=True, metavar="KEY=VALUE", help="An engine argument; may be repeated.")
@click.option("--alias", "aliases", multiple=True, help="Another name; may be repeated.")
@click.option(
    "--file", type=click.Path(path_type=Path, exists=True, dir_okay=False), help="TOML file with the model's fields instead."
)
@as_json
@click.pass_obj
def add(data: Path, /, name: str | None, file: Path | None, arguments: tuple[str, ...], json: bool, **given: Any) -> None:
    """Register a model."""
    try:
        fields: dict[str, Any] = tomllib.loads(file.read_text()) if file else {}
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise click.BadParameter(f"{file} is not TOML: {error}", param_hint="--file") from error
    fields |= {key: value for key, value in given.items() if value}
    if str(fields.get("share", "")).startswith("gpus="):
        fields["share"] = {"gpus": _value(fields["share"].removeprefix("gpus="))}
    if name:
        fields["name"] = name
    if arguments:
        fields["arguments"] = {key: _value(text) for key, _, text in (pair.partition("=") for pair in arguments)}
    with api(data) as client:
        answer = client.post("api", "models", body=fields)
    if json:
        echo_json(answer)
    else:
        click.echo(f"registered {fields.get('name')}")


@models.command()
@click.argument("name")
@as_json
@click.pass_obj
def rm(data: Path, name: str, json: bool) -> None:
    """Retire a model: running requests finish, new ones are refused."""
    with api(data) as client:
        answer = client.delete("api", "models", name)
    if json:
        echo_json(answer)
    else:
        click.echo(f"retired {name}")
        if answer.get("message"):
            click.echo(answer["message"], err=True)


def _value(text: str) -> object:
    """A number or a truth value if the text is one in TOML, else the text."""
    try:
        return tomllib.loads(f"value = {text}")["value"]
    except tomllib.TOMLDecodeError:
        return text
