"""The first directory."""

import sqlalchemy as sa
from alembic import op

revision = "0001"
down_revision = None
branch_labels = None
depends_on = None

SCHEMA = "kvindex"


def upgrade() -> None:
    op.create_table(
        "namespaces",
        sa.Column("namespace_id", sa.Integer, sa.Identity(), primary_key=True),
        sa.Column("pool", sa.Text, nullable=False),
        sa.Column("cache_salt", sa.Text, nullable=False),
        sa.UniqueConstraint("pool", "cache_salt", name="namespaces_name"),
        schema=SCHEMA,
    )
    op.create_table(
        "places",
        sa.Column("place_id", sa.Integer, sa.Identity(), primary_key=True),
        sa.Column("level", sa.SmallInteger, nullable=False),
        sa.Column("instance_id", sa.Text, nullable=False),
        sa.UniqueConstraint("level", "instance_id", name="places_name"),
        schema=SCHEMA,
    )
    op.create_table(
        "blocks",
        sa.Column("namespace_id", sa.Integer, sa.ForeignKey(f"{SCHEMA}.namespaces.namespace_id"), primary_key=True),
        sa.Column("block_hash", sa.LargeBinary, primary_key=True),
        sa.Column("expires_at_s", sa.BigInteger, nullable=False),
        schema=SCHEMA,
    )
    op.create_index("blocks_by_expiry", "blocks", ["expires_at_s"], schema=SCHEMA)
    op.create_table(
        "objects",
        sa.Column("namespace_id", sa.Integer, primary_key=True),
        sa.Column("block_hash", sa.LargeBinary, primary_key=True),
        sa.Column("place_id", sa.Integer, sa.ForeignKey(f"{SCHEMA}.places.place_id"), primary_key=True),
        sa.Column("kv_rank", sa.BigInteger, primary_key=True),
        sa.Column("object_group_id", sa.Integer, primary_key=True),
        sa.Column("size_bytes", sa.BigInteger, nullable=False),
        schema=SCHEMA,
    )
    op.create_index("objects_by_place", "objects", ["place_id"], schema=SCHEMA)
    op.create_table(
        "cursors",
        sa.Column("instance_id", sa.Text, primary_key=True),
        sa.Column("incarnation", sa.BigInteger, nullable=False),
        sa.Column("seq", sa.BigInteger, nullable=False),
        schema=SCHEMA,
    )


def downgrade() -> None:
    for table in ("cursors", "objects", "blocks", "places", "namespaces"):
        op.drop_table(table, schema=SCHEMA)
