"""The first API token and the login link: how a person gets in without having set anything up."""

from pathlib import Path
from typing import Final

from compose.directory import Directory
from controlplane.plane import Plane
from web.tokens import issue_login_code, list_tokens, new_token, split

ADMIN_TOKEN: Final = "admin-token"  # noqa: S105 (a file's name)


async def first_token(plane: Plane, directory: Directory) -> None:
    """See to it that `secrets/admin-token` holds a token that is good: the CLI of this machine uses it."""
    path = directory.path / "secrets" / ADMIN_TOKEN
    held = split(path.read_text().strip()) if path.exists() else None
    if held is not None:
        rows = await list_tokens(plane.postgres_url)
        if any(row.id == held[0] and row.revoked_at is None for row in rows):
            return
    directory.keep_secret(ADMIN_TOKEN, await new_token(plane.postgres_url, "this machine"))


def link(plane: Plane) -> str:
    """A link that logs one browser in, once, within ten minutes."""
    return f"{plane.web_url}/login?code={issue_login_code(Path(plane.data))}"
