"""`up`, `down`, `login`."""

import asyncio
import contextlib
import time
from pathlib import Path
from typing import Final

import click

from compose import remains
from compose.cli.commands import NURSERY
from compose.cli.options import as_json, echo_json
from compose.directory import holder, plane_of
from compose.embedded.refusal import ServerRefusal
from compose.process import end
from compose.refusal import EnvironmentRefusal
from controlplane import lean
from controlplane.settings import SettingsError

DOWN_S: Final = 60.0
"""The sum of the deadlines with which `up` ends its children and says farewell (47 s), and some more."""


@click.command()
@click.option("--settings", type=click.Path(path_type=Path, dir_okay=False), help="Settings file (TOML); watched for changes.")
@click.option("--host", default="127.0.0.1", show_default=True, help="Address for callers and browsers.")
@click.option("--port", default=8480, show_default=True, type=click.IntRange(0, 65535), help="0: any that is free.")
@click.option("--postgres", "postgres_url", metavar="URL", help="Use this Postgres (15 or newer) instead of starting one.")
@click.option("--nats", "nats_url", metavar="URL", help="Use this NATS (2.12 or newer, JetStream) instead of starting one.")
@click.option("--demo", is_flag=True, help="Prepare and serve three small models on two devices that can't hold them all.")
@click.pass_obj
def up(  # noqa: PLR0917 (click passes them by name)
    data: Path, settings: Path | None, host: str, port: int, postgres_url: str | None, nats_url: str | None, demo: bool
) -> None:
    """Start a plane and keep it running until Ctrl-C."""
    from compose import up as module  # noqa: PLC0415 (the others do without)

    lean.started()
    if demo and settings is not None:
        raise click.UsageError("--demo comes with its own settings; give one of --demo and --settings")
    nursery = click.get_current_context().meta[NURSERY]
    options = module.UpOptions(
        data=data, settings=settings, host=host, port=port, postgres_url=postgres_url, nats_url=nats_url, demo=demo
    )
    try:
        asyncio.run(module.up(options, lambda line: click.echo(line, err=True), nursery))
    except ServerRefusal as refusal:
        raise EnvironmentRefusal(refusal.code, refusal.message, refusal.cure) from refusal
    except SettingsError as error:
        raise EnvironmentRefusal("settings", str(error), "") from error


@click.command()
@as_json
@click.pass_obj
def down(data: Path, json: bool) -> None:
    """End a plane and all that belongs to it."""
    began = time.monotonic()
    held = holder(data)
    killed = False
    if held is not None:
        with contextlib.suppress(KeyboardInterrupt):
            killed = bool(asyncio.run(end([held.process], deadline_s=DOWN_S)))
    left = asyncio.run(remains.clear(data))
    took_s = time.monotonic() - began
    if json:
        echo_json({"up": held.process.pid if held else None, "killed": killed, "left_over": left, "took_s": took_s})
    elif held is None and not left:
        click.echo(f"nothing was running in {data}")
    else:
        click.echo(f"ended in {took_s:.1f} s" + (f"; {left} processes were left over and ended" if left else ""))


@click.command()
@as_json
@click.pass_obj
def login(data: Path, json: bool) -> None:
    """Print a link that logs one browser in."""
    from compose.login import link  # noqa: PLC0415

    if holder(data) is None:
        raise EnvironmentRefusal("not_running", f"No plane runs in {data}.", "Start it with `enginehouse up`.")
    found = link(plane_of(data))
    if json:
        echo_json({"link": found})
    else:
        click.echo(found)
