"""`token`: issue, list and revoke API tokens. Straight in the database: whoever may read the data directory may do this."""

import asyncio
from collections.abc import Coroutine
from pathlib import Path
from typing import Any, Final, TypeVar

import asyncpg
import click

from compose.cli.options import as_json, echo_json, table
from compose.directory import plane_of
from compose.refusal import ApiRefused, EnvironmentRefusal
from web.tokens import SCOPES, Scope, list_tokens, new_token, revoke_token, split

T = TypeVar("T")
NAME_LIMIT: Final = 100


@click.group()
def token() -> None:
    """Issue, list and revoke API tokens."""


@token.command()
@click.argument("name")
@click.option(
    "--scope", type=click.Choice(SCOPES), default="inference", show_default=True, help="admin: everything; inference: /v1."
)
@as_json
@click.pass_obj
def new(data: Path, name: str, scope: Scope, json: bool) -> None:
    """Issue a token. It is shown once and kept nowhere."""
    if not name.strip() or not name.isprintable() or len(name) > NAME_LIMIT:
        raise click.BadParameter(f"a name has 1 to {NAME_LIMIT} printable characters", param_hint="NAME")
    text = _database(new_token(plane_of(data).postgres_url, name, scope))
    if json:
        known, _ = split(text) or ("", "")  # what `revoke` asks for
        echo_json({"id": known, "token": text, "name": name, "scope": scope})
    else:
        click.echo(text)


@token.command("list")
@as_json
@click.pass_obj
def list_(data: Path, json: bool) -> None:
    """List tokens, oldest first."""
    rows = _database(list_tokens(plane_of(data).postgres_url))
    if json:
        echo_json(rows)
        return
    shown = [
        [
            row.id,
            row.name,
            row.scope,
            f"{row.created_at:%Y-%m-%d %H:%M}",
            f"{row.revoked_at:%Y-%m-%d %H:%M}" if row.revoked_at else "",
        ]
        for row in rows
    ]
    table("id", "name", "scope", "created", "revoked", rows=shown, empty="no tokens")


@token.command()
@click.argument("identifier", metavar="ID")
@as_json
@click.pass_obj
def revoke(data: Path, identifier: str, json: bool) -> None:
    """Revoke a token by its id; it stops working within seconds."""
    done = _database(revoke_token(plane_of(data).postgres_url, identifier))
    if not done:
        message = f"there is no valid token {identifier!r}; look at `enginehouse token list`"
        raise ApiRefused(0, "token_unknown", message, None)
    if json:
        echo_json({"id": identifier, "revoked": True})
    else:
        click.echo(f"revoked {identifier}")


def _database(call: Coroutine[Any, Any, T]) -> T:
    try:
        return asyncio.run(call)
    except (OSError, asyncpg.PostgresError) as error:
        raise EnvironmentRefusal("database", f"Postgres does not answer: {error}.", "Is `enginehouse up` running?") from error
