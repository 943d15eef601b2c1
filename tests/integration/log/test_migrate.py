"""A database that a plane is given and may not set up: said to the person who gave it."""

import asyncpg
import pytest

from compose.embedded.postgres import OWNER, EmbeddedPostgres
from compose.refusal import EnvironmentRefusal
from compose.up import migrate


async def test_a_role_that_may_not_make_tables_is_refused_with_what_to_do(postgres_server: EmbeddedPostgres) -> None:
    admin = await asyncpg.connect(postgres_server.url_of("postgres", OWNER))
    await admin.execute("create database bare")
    try:
        with pytest.raises(EnvironmentRefusal, match="permission denied") as caught:
            await migrate(postgres_server.url_of("bare"))
        assert caught.value.code == "not_migrated"
        assert "create" in caught.value.cure
    finally:
        await admin.execute("drop database bare")
        await admin.close()
