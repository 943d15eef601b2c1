"""API tokens and login codes: issued, listed and revoked here, by the command line and by `up`; checked by the web process.

A token reads `eh_<id>_<secret>`; table `token` holds the SHA-256 of the secret. A login code is for one use within a few
minutes; a file named for its SHA-256 in `<data>/secrets/login` stands for it, and taking the file away uses it up.
"""

import contextlib
import hashlib
import hmac
import os
import secrets
import time
from datetime import datetime
from pathlib import Path
from typing import Final, Literal

import asyncpg
import msgspec

Scope = Literal["admin", "inference"]
SCOPES: Final = ("admin", "inference")
CODE_S: Final = 600
"""A login link is opened right after it was printed; a later one is one `enginehouse login` away."""


class TokenRow(msgspec.Struct, frozen=True, kw_only=True):
    """A token as it may be shown."""

    id: str
    name: str
    scope: Scope
    created_at: datetime
    revoked_at: datetime | None = None


def split(token: str) -> tuple[str, str] | None:
    """(id, secret) of a token's text; None if it isn't one."""
    parts = token.split("_", 2)
    return (parts[1], parts[2]) if len(parts) == 3 and parts[0] == "eh" and parts[1] and parts[2] else None


def digest(secret: str) -> bytes:
    return hashlib.sha256(secret.encode()).digest()


def matches(secret: str, stored: bytes) -> bool:
    """Compare in constant time."""
    return hmac.compare_digest(digest(secret), stored)


async def new_token(postgres_url: str, name: str, scope: Scope = "admin") -> str:
    """Issue a token and return its text, which is kept nowhere. Raises OSError or asyncpg.PostgresError."""
    token, secret = secrets.token_hex(6), secrets.token_urlsafe(32)
    connection = await asyncpg.connect(postgres_url, timeout=5)
    try:
        await connection.execute(
            "insert into token (id, name, hash, scope, created_at) values ($1, $2, $3, $4, now())",
            token, name, digest(secret), scope,
        )  # fmt: skip
    finally:
        await connection.close()
    return f"eh_{token}_{secret}"


async def list_tokens(postgres_url: str) -> list[TokenRow]:
    """All tokens, oldest first, revoked ones too."""
    connection = await asyncpg.connect(postgres_url, timeout=5)
    try:
        rows = await connection.fetch("select id, name, scope, created_at, revoked_at from token order by created_at, id")
    finally:
        await connection.close()
    return [msgspec.convert(dict(row), TokenRow) for row in rows]


async def revoke_token(postgres_url: str, token: str) -> bool:
    """Revoke by id; it stops working within seconds. Return whether there was a valid one."""
    connection = await asyncpg.connect(postgres_url, timeout=5)
    try:
        status: str = await connection.execute(
            "update token set revoked_at = now() where id = $1 and revoked_at is null", token
        )
    finally:
        await connection.close()
    return status.endswith(" 1")


def issue_login_code(data: Path) -> str:
    """Return a code for `GET /login?code=`, good once and for `CODE_S` seconds."""
    code = secrets.token_urlsafe(24)
    folder = _codes(data)
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    os.close(os.open(folder / digest(code).hex(), os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600))
    return code


def use_login_code(data: Path, code: str) -> bool:
    """Use a code up. Return whether it was good."""
    path = _codes(data) / digest(code).hex()
    try:
        age_s = time.time() - path.stat().st_mtime
        path.unlink()
    except FileNotFoundError:
        return False
    return age_s <= CODE_S


def drop_old_codes(data: Path) -> None:
    """Forget codes that were never used."""
    folder = _codes(data)
    if not folder.is_dir():
        return
    for path in folder.iterdir():
        with contextlib.suppress(FileNotFoundError):  # just used
            if time.time() - path.stat().st_mtime > CODE_S:
                path.unlink()


def _codes(data: Path) -> Path:
    return data / "secrets" / "login"
