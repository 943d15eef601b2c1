"""What the commands' options and outputs have in common."""

import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, TypeVar

import click
import msgspec

if TYPE_CHECKING:
    from compose.client import Client

PIPED: Final = 200
"""Width of what no terminal shows."""

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


FOLDED: Final = 24
"""Columns of characters that the last column of a table has at least; then the terminal breaks the lines."""


def table(*columns: str, rows: list[list[str]], empty: str) -> None:
    """Print rows under their columns; `empty` when there are none. Only the last column is folded: ids and names are copied."""
    if not rows:
        click.echo(empty)
        return
    from rich.cells import cell_len  # noqa: PLC0415 (`up` prints no table, and starts sooner without)
    from rich.console import Console  # noqa: PLC0415
    from rich.table import Table  # noqa: PLC0415

    console = Console()
    shown = Table(box=None, pad_edge=False, header_style="bold")
    for name in columns[:-1]:
        shown.add_column(name, no_wrap=True)
    shown.add_column(columns[-1], overflow="fold")
    for row in rows:
        shown.add_row(*row)
    whole = sum(max(map(cell_len, column)) + 2 for column in zip(columns[:-1], *(row[:-1] for row in rows), strict=True))
    console.width = max(console.width if console.is_terminal else PIPED, whole + FOLDED)
    console.print(shown, markup=False, highlight=False, soft_wrap=False, crop=False)


def lines(fields: Mapping[str, str]) -> None:
    """Print what is known of one thing, a field a line; of fields that are empty there is nothing to say."""
    width = max(map(len, fields))
    for name, text in fields.items():
        if text:
            click.echo(f"{name:{width}}  {text}")


@contextmanager
def api(data: Path, timeout_s: float | None = None) -> "Iterator[Client]":
    from compose.client import Client  # noqa: PLC0415 (`up` is no client)

    client = Client.of(data) if timeout_s is None else Client.of(data, timeout_s)
    try:
        yield client
    finally:
        client.close()
