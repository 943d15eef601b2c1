"""The commands of `enginehouse`, each imported when it is asked for, so that none pays for another's imports."""

import importlib
import json
import os
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Final

import click

from compose.directory import default
from compose.nursery import Nursery
from compose.refusal import ApiRefused, EnvironmentRefusal

COMMANDS: Final = {
    "up": ("compose.cli.running", "Start a plane and keep it running until Ctrl-C."),
    "down": ("compose.cli.running", "End a plane and all that belongs to it."),
    "login": ("compose.cli.running", "Print a link that logs one browser in."),
    "status": ("compose.cli.show", "Show what runs, where, and how much room is left."),
    "models": ("compose.cli.models", "List, add and remove models."),
    "load": ("compose.cli.operations", "Bring a model up."),
    "sleep": ("compose.cli.operations", "Take a model off its device; its engine stays."),
    "checkpoint": ("compose.cli.operations", "Take a model's engines off their device; their processes stay."),
    "save": ("compose.cli.operations", "Take a model's engines to disk."),
    "move": ("compose.cli.operations", "Bring what serves a model to another device."),
    "stop": ("compose.cli.operations", "End the engines that serve a model."),
    "images": ("compose.cli.images", "List, check and remove engines on disk."),
    "retry": ("compose.cli.operations", "End a model's back-off and try again now."),
    "requests": ("compose.cli.history", "Show requests, newest first."),
    "events": ("compose.cli.history", "Show the log of events, or follow it."),
    "audit": ("compose.cli.audit", "Check the log against itself, the stream and the live state."),
    "bench": ("compose.cli.bench", "Measure this machine: figures beside their yardsticks."),
    "doctor": ("compose.cli.doctor", "Check whether this machine can run a plane."),
    "token": ("compose.cli.tokens", "Issue, list and revoke API tokens."),
}
NURSERY: Final = "nursery"
"""Where the context keeps it for `up`."""
REFUSED: Final = 1
ENVIRONMENT: Final = 2


class Commands(click.Group):
    """A group whose commands are imported when they are asked for. places: name -> (module, what the list says of it);
    everywhere: an option that each of them takes as well, and each of theirs."""

    def __init__(
        self, name: str, places: Mapping[str, tuple[str, str]], everywhere: click.Option | None = None, **others: Any
    ) -> None:
        super().__init__(name, **others)
        self._places, self._everywhere = places, everywhere

    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(self._places)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        if cmd_name not in self._places:
            return None
        command = getattr(importlib.import_module(self._places[cmd_name][0]), cmd_name)
        assert isinstance(command, click.Command)
        if self._everywhere is not None:
            _give(command, self._everywhere)
        return command

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        with formatter.section("Commands"):
            formatter.write_dl([(name, text) for name, (_, text) in self._places.items()])


def _give(command: click.Command, option: click.Option) -> None:
    """Let a command and those below it take `option`; once, as they are imported once."""
    if option not in command.params:
        command.params.append(option)
    for below in command.commands.values() if isinstance(command, click.Group) else ():
        _give(below, option)


def _absolute(data: Path) -> Path:
    """As the plane's processes were told it."""
    return Path(os.path.abspath(data.expanduser()))


def _said_later(context: click.Context, _: click.Parameter, data: Path | None) -> None:
    if data is not None:
        context.obj = _absolute(data)


class _Directory(click.Path):
    """Not an empty word, which a variable that is not set leaves: that would be wherever one happens to stand."""

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        if not str(value):
            self.fail("It is empty: name a directory.", param, ctx)
        return super().convert(value, param, ctx)


DATA: Final[dict[str, Any]] = {
    "type": _Directory(path_type=Path, readable=False), "help": "Data directory; $ENGINEHOUSE_DATA names it too.",
}  # fmt: skip
"""People write `--data` before a command and after it; what is said last counts."""


@click.group(
    cls=Commands, places=COMMANDS, everywhere=click.Option(["--data"], callback=_said_later, expose_value=False, **DATA),
    context_settings={"help_option_names": ["-h", "--help"]},
)  # fmt: skip
@click.version_option(package_name="enginehouse", message="%(version)s")
@click.option("--data", **DATA)
@click.pass_context
def enginehouse(context: click.Context, data: Path | None) -> None:
    """Many language models share a few devices.

    Exit codes: 0 done; 1 refused or failed; 2 wrong usage, or something in the way on this machine.
    """
    context.meta[NURSERY] = context.obj
    context.obj = _absolute(data or default())


def run(argv: Sequence[str] | None, nursery: Nursery | None) -> None:
    """Run the command line and exit (see `main`). nursery: for `up`, if that is what is asked for."""
    as_json = "--json" in (sys.argv if argv is None else argv)
    try:
        enginehouse(argv, standalone_mode=True, prog_name="enginehouse", obj=nursery)
    except EnvironmentRefusal as refusal:
        _fail(ENVIRONMENT, refusal.code, refusal.message, refusal.cure, as_json=as_json)
    except ApiRefused as refusal:
        after = f"Try again in {refusal.retry_after_s:g} s." if refusal.retry_after_s else ""
        message = refusal.message if as_json else f"{refusal.message} [{refusal.code}]"
        _fail(REFUSED, refusal.code, message, after, as_json=as_json)


def _fail(status: int, code: str, message: str, cure: str, *, as_json: bool) -> None:
    if as_json:
        click.echo(json.dumps({"code": code, "message": message, "cure": cure}), err=True)
    else:
        click.echo(f"enginehouse: {message} {cure}".rstrip(), err=True)
    sys.exit(status)
