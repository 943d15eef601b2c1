"""Running the SQL files."""

from pathlib import Path
from typing import Any, Final

from alembic import op

SQL: Final = Path(__file__).parent / "sql"


def run(*names: str) -> None:
    """Execute `sql/<name>.sql`, each of which may hold several statements."""
    adapter: Any = op.get_bind().connection.dbapi_connection
    for name in names:
        statements = (SQL / f"{name}.sql").read_text()
        adapter.run_async(lambda connection, statements=statements: connection.execute(statements))
