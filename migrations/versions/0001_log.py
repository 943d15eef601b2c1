"""The log and what stands beside it."""

from migrations.files import run

revision = "0001"
down_revision = None


def upgrade() -> None:
    run("tables", "refuse_change", "append", "begin_reign", "first_since", "privileges")
