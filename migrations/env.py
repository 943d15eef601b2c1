"""Alembic's entry: the connection comes from `upgrade`, whose transaction this is."""

from alembic import context

context.configure(connection=context.config.attributes["connection"], transaction_per_migration=False)
with context.begin_transaction():
    context.run_migrations()
