"""Stored responses, in the schema ``gateway`` of whatever database it is given.

Times are the database's own: no two gateways need to agree on one. JSON is kept as bytes, exactly as it came.
"""

from sqlalchemy import (
    Boolean,
    Column,
    DateTime,
    Index,
    Integer,
    LargeBinary,
    MetaData,
    PrimaryKeyConstraint,
    Table,
    Text,
)

SCHEMA = "gateway"

metadata = MetaData(schema=SCHEMA)

responses = Table(
    "responses",
    metadata,
    Column("tenant", Text, nullable=False),
    Column("id", Text, nullable=False),
    Column("previous_response_id", Text),
    Column("created_at", DateTime(timezone=True), nullable=False),
    Column("expires_at", DateTime(timezone=True), nullable=False),
    Column("is_background", Boolean, nullable=False),
    # Only while it is generated: from then on it counts as lost, and what is told of it then.
    Column("deadline_at", DateTime(timezone=True)),
    Column("lost_body", LargeBinary),
    Column("input_items", LargeBinary, nullable=False),
    Column("output_items", LargeBinary, nullable=False),  # those of body, so that a history need not read bodies
    Column("body", LargeBinary, nullable=False),
    Column("items_bytes", Integer, nullable=False),
    PrimaryKeyConstraint("tenant", "id"),
    Index("responses_by_expiry", "expires_at"),
)
