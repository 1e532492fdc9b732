"""The durable directory, in the schema ``kvindex`` of whatever database it is given.

Names of namespaces and places are kept once and numbered, so that the rows of the two large tables have a fixed
width: the reader parses them without looking at each field.
"""

from sqlalchemy import (
    BigInteger,
    Column,
    ForeignKey,
    Identity,
    Index,
    Integer,
    LargeBinary,
    MetaData,
    SmallInteger,
    Table,
    Text,
    UniqueConstraint,
)

SCHEMA = "kvindex"

metadata = MetaData(schema=SCHEMA)

namespaces = Table(
    "namespaces",
    metadata,
    Column("namespace_id", Integer, Identity(), primary_key=True),
    Column("pool", Text, nullable=False),
    Column("cache_salt", Text, nullable=False),
    UniqueConstraint("pool", "cache_salt", name="namespaces_name"),
)

places = Table(
    "places",
    metadata,
    Column("place_id", Integer, Identity(), primary_key=True),
    Column("level", SmallInteger, nullable=False),
    Column("instance_id", Text, nullable=False),
    UniqueConstraint("level", "instance_id", name="places_name"),
)

blocks = Table(
    "blocks",
    metadata,
    Column("namespace_id", Integer, ForeignKey(namespaces.c.namespace_id), primary_key=True),
    Column("block_hash", LargeBinary, primary_key=True),
    Column("expires_at_s", BigInteger, nullable=False),
    Index("blocks_by_expiry", "expires_at_s"),
)

# One row an object: a copy of a block is whole when all its objects are there. No foreign key to blocks: both are
# written in one transaction, and the check would cost more than the insert.
objects = Table(
    "objects",
    metadata,
    Column("namespace_id", Integer, primary_key=True),
    Column("block_hash", LargeBinary, primary_key=True),
    Column("place_id", Integer, ForeignKey(places.c.place_id), primary_key=True),
    Column("kv_rank", BigInteger, primary_key=True),
    Column("object_group_id", Integer, primary_key=True),
    Column("size_bytes", BigInteger, nullable=False),
    Index("objects_by_place", "place_id"),
)

cursors = Table(
    "cursors",
    metadata,
    Column("instance_id", Text, primary_key=True),
    Column("incarnation", BigInteger, nullable=False),
    Column("seq", BigInteger, nullable=False),
)

# One row. (name, term) is unique so that term is a key column: a write locks the row FOR KEY SHARE, which a new term
# must wait for and a beat need not.
lease = Table(
    "lease",
    metadata,
    Column("name", Text, primary_key=True),
    Column("holder", Text, nullable=False),  # "": nobody
    Column("term", BigInteger, nullable=False),  # counts the holders
    Column("beat", BigInteger, nullable=False),
    Column("log_id", Text, nullable=False),  # "": nothing of any log was written
    Column("written_seq", BigInteger, nullable=False),  # up to which change of this log all is durable
    UniqueConstraint("name", "term", name="lease_term"),
)
