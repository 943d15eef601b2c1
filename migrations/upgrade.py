"""Bring a database to the newest revision, in one transaction, whoever else is trying the same."""

import asyncio
from pathlib import Path
from typing import TYPE_CHECKING, Final

import structlog

if TYPE_CHECKING:
    from sqlalchemy import Connection

HERE: Final = Path(__file__).parent
LOCK: Final = 0x656E676D
"""Advisory lock of whoever migrates ("engm"); a second `up` waits and then finds nothing to do."""
log = structlog.get_logger("migrations")


class NewerSchema(Exception):
    """The database was migrated by a newer release than this one. Upgrade the release, or restore a backup."""


class NotMigrated(Exception):
    """The database refused: its role may not do this, most likely. Nothing was changed."""


def revisions() -> list[str]:
    """Every revision of this release, oldest first: the files' leading numbers."""
    return sorted(path.name.partition("_")[0] for path in (HERE / "versions").glob("[0-9]*.py"))


def newest() -> str:
    return revisions()[-1]


async def upgrade(url: str, *, deadline_s: float = 60) -> bool:
    """Migrate the database at `url` (as the owner of its tables). Returns whether there was anything to do.

    Raises NewerSchema, NotMigrated, TimeoutError, or what asyncpg raises when it can't connect.
    """
    async with asyncio.timeout(deadline_s):
        found = await current(url)
        if found == newest():
            return False
        if found is not None and found not in revisions():
            raise NewerSchema(f"the database is at revision {found}, this release knows up to {newest()}; upgrade enginehouse")
        import asyncpg  # noqa: PLC0415 (see `current`)
        from sqlalchemy.exc import SQLAlchemyError  # noqa: PLC0415 (see `current`)
        from sqlalchemy.ext.asyncio import create_async_engine  # noqa: PLC0415

        engine = create_async_engine("postgresql+asyncpg://", async_creator=lambda: asyncpg.connect(url))
        try:
            async with engine.begin() as connection:
                await connection.run_sync(_migrate)
        except (SQLAlchemyError, asyncpg.PostgresError) as error:  # the files' statements go past SQLAlchemy
            raise NotMigrated(str(getattr(error, "orig", None) or error)) from error
        finally:
            await engine.dispose()
    log.info("migrated", was=found, now=newest())
    return True


async def current(url: str) -> str | None:
    """Revision of the database; None: empty. Without Alembic and SQLAlchemy, whose import takes longer than a start may."""
    import asyncpg  # noqa: PLC0415 (`up` starts its children before it needs this)

    connection = await asyncpg.connect(url)
    try:
        if await connection.fetchval("select to_regclass('public.alembic_version')") is None:
            return None
        found: str | None = await connection.fetchval("select version_num from public.alembic_version")
        return found
    finally:
        await connection.close()


def _migrate(connection: "Connection") -> None:
    from alembic import command  # noqa: PLC0415 (a start that has nothing to migrate does without)
    from alembic.config import Config  # noqa: PLC0415
    from sqlalchemy import text  # noqa: PLC0415

    connection.execute(text(f"select pg_advisory_xact_lock({LOCK})"))
    config = Config()
    config.set_main_option("script_location", str(HERE))
    config.attributes["connection"] = connection
    command.upgrade(config, "head")
