"""Stored responses."""

import sqlalchemy as sa
from alembic import op

revision = "0001"
down_revision = None
branch_labels = None
depends_on = None

SCHEMA = "gateway"


def upgrade() -> None:
    op.create_table(
        "responses",
        sa.Column("tenant", sa.Text, nullable=False),
        sa.Column("id", sa.Text, nullable=False),
        sa.Column("previous_response_id", sa.Text),
        sa.Column("created_at", sa.DateTime(timezone=True), nullable=False),
        sa.Column("expires_at", sa.DateTime(timezone=True), nullable=False),
        sa.Column("is_background", sa.Boolean, nullable=False),
        sa.Column("deadline_at", sa.DateTime(timezone=True)),
        sa.Column("lost_body", sa.LargeBinary),
        sa.Column("input_items", sa.LargeBinary, nullable=False),
        sa.Column("output_items", sa.LargeBinary, nullable=False),
        sa.Column("body", sa.LargeBinary, nullable=False),
        sa.Column("items_bytes", sa.Integer, nullable=False),
        sa.PrimaryKeyConstraint("tenant", "id"),
        schema=SCHEMA,
    )
    op.create_index("responses_by_expiry", "responses", ["expires_at"], schema=SCHEMA)


def downgrade() -> None:
    op.drop_table("responses", schema=SCHEMA)
