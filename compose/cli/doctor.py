"""`doctor`: whether this machine can run a plane."""

from pathlib import Path

import click
from rich.console import Console
from rich.text import Text

from compose.checks import checks
from compose.cli.commands import ENVIRONMENT
from compose.cli.options import as_json, echo_json
from compose.directory import holder
from controlplane.plane import Plane

_STYLES = {"ok": "green", "note": "yellow", "bad": "bold red"}


@click.command()
@click.option(
    "--port", type=click.IntRange(1, 65535), help="Port that web is to have.  [default: that of the plane here, or 8480]"
)
@as_json
@click.pass_context
def doctor(context: click.Context, port: int | None, json: bool) -> None:
    """Check whether this machine can run a plane; exit code 2 if not."""
    data: Path = context.obj
    running = holder(data) is not None
    found = list(checks(data, port or (Plane.read(data).web_port if running else 8480), running))
    if json:
        echo_json(found)
    else:
        console = Console(highlight=False)
        for check in found:
            line = Text.assemble((f"{check.verdict:5}", _STYLES[check.verdict]), f"{check.name:14} {check.found}")
            console.print(line, soft_wrap=True)
            for part in check.cure.splitlines():  # a command has lines of its own
                console.print(Text(f"{'':19}{part}", "dim"), soft_wrap=True)
    if any(check.verdict == "bad" for check in found):
        context.exit(ENVIRONMENT)
