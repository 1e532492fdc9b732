"""Run by alembic with a connection that ``shoal_runtime.postgres.upgrade`` opened and commits."""

from alembic import context

from shoal_gateway.store.tables import SCHEMA, metadata

context.configure(
    connection=context.config.attributes["connection"],
    target_metadata=metadata,
    version_table_schema=SCHEMA,
    include_schemas=True,
)
context.run_migrations()
