"""Who writes, and how far into the log."""

import sqlalchemy as sa
from alembic import op

revision = "0002"
down_revision = "0001"
branch_labels = None
depends_on = None

SCHEMA = "kvindex"


def upgrade() -> None:
    lease = op.create_table(
        "lease",
        sa.Column("name", sa.Text, primary_key=True),
        sa.Column("holder", sa.Text, nullable=False),
        sa.Column("term", sa.BigInteger, nullable=False),
        sa.Column("beat", sa.BigInteger, nullable=False),
        sa.Column("log_id", sa.Text, nullable=False),
        sa.Column("written_seq", sa.BigInteger, nullable=False),
        sa.UniqueConstraint("name", "term", name="lease_term"),
        schema=SCHEMA,
    )
    op.bulk_insert(lease, [{"name": "directory", "holder": "", "term": 0, "beat": 0, "log_id": "", "written_seq": 0}])


def downgrade() -> None:
    op.drop_table("lease", schema=SCHEMA)
