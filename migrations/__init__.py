"""The database's schema. `upgrade` brings it to this release's; functions live one a file in `sql/`."""

from migrations.upgrade import NewerSchema, current, newest, upgrade

__all__ = ["NewerSchema", "current", "newest", "upgrade"]
