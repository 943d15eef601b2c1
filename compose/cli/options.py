"""What the commands' options and outputs have in common."""

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import click
import msgspec

if TYPE_CHECKING:
    from compose.client import Client

F = TypeVar("F", bound=Callable[..., Any])


def as_json(command: F) -> F:
    """Option `--json`: the answer as one JSON document on stdout, and nothing else there."""
    return click.option("--json", is_flag=True, help="Answer in JSON.")(command)


def echo_json(value: object) -> None:
    click.echo(msgspec.json.format(msgspec.json.encode(value)))


def echo_line(value: object) -> None:
    """One JSON document on one line, at once: for what goes on."""
    click.echo(msgspec.json.encode(value))
    sys.stdout.flush()


def table(*columns: str, rows: list[list[str]], empty: str) -> None:
    """Print rows under their columns; `empty` when there are none."""
    if not rows:
        click.echo(empty)
        return
    from rich.console import Console  # noqa: PLC0415 (`up` prints no table, and starts sooner without)
    from rich.table import Table  # noqa: PLC0415

    console = Console()
    shown = Table(*columns, box=None, pad_edge=False, header_style="bold")
    for row in rows:
        shown.add_row(*row)
    if not console.is_terminal:
        console.width = 200
    console.print(shown, markup=False, highlight=False)


@contextmanager
def api(data: Path) -> "Iterator[Client]":
    from compose.client import Client  # noqa: PLC0415 (`up` is no client)

    client = Client.of(data)
    try:
        yield client
    finally:
        client.close()
