"""Runs the migrations on the connection that the caller has opened."""

from alembic import context

from gpulease.store.tables import Row

connection = context.config.attributes["connection"]
context.configure(
    connection=connection,
    target_metadata=Row.metadata,
    # SQLite changes a table by making it anew; needed as soon as a column is altered.
    render_as_batch=True,
    # The caller holds the one write transaction: a migration is done whole or not at all.
    transaction_per_migration=False,
    transactional_ddl=False,
)
context.run_migrations()
