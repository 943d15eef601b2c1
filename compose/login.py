"""The first API token and the login link: how a person gets in without having set anything up."""

from typing import Final

from compose.directory import Directory
from controlplane.plane import Plane

ADMIN_TOKEN: Final = "admin-token"  # noqa: S105 (a file's name)


async def first_token(plane: Plane, directory: Directory) -> None:
    """See to it that `secrets/admin-token` holds a token that works."""


async def link(plane: Plane) -> str:
    """A link that logs its first reader in, once."""
    return f"http://{plane.web_host}:{plane.web_port}/login"
