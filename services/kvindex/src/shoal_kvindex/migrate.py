"""Brings the schema to the newest version and ends: ``python -m shoal_kvindex migrate``.

For rollouts of several instances: it runs once before them, so that a migration that takes long or fails shows as
itself, and not as instances that never become ready. They migrate at their start all the same, which then does
nothing; so a single instance needs nobody to run this first. It waits for a Postgres that is still starting.
"""

import asyncio

from sqlalchemy.ext.asyncio import AsyncEngine

from shoal_kvindex.settings import KvIndexSettings
from shoal_kvindex.store.engine import STORE_FAILURES, create_engine, upgrade
from shoal_runtime import logs

log = logs.get_logger(__name__)

WAIT_S = 60.0
RETRY_S = 1.0
MIGRATION_S = 3600.0  # for one statement of it, and to wait for another process that migrates


def main(settings: KvIndexSettings) -> int:
    """The exit code: 1 when Postgres did not let us within ``WAIT_S``; the log says what to do."""
    logs.configure(settings.log_level, "kvindex", settings.instance_id or "migrate")
    return asyncio.run(migrate(settings.database_url))


async def migrate(postgres_url: str, *, wait_s: float = WAIT_S) -> int:
    """Try until it works or ``wait_s`` has passed. A migration is one transaction, so a failed one leaves nothing."""
    until_s = asyncio.get_running_loop().time() + wait_s
    engine = create_engine(postgres_url, connections=1, command_s=MIGRATION_S)
    try:
        log.info("schema.migrated", version=await _upgrade_until(engine, until_s))
    except STORE_FAILURES as failure:
        log.error("schema.not_migrated", reason=str(failure), do="check SHOAL_KVINDEX_POSTGRES_URL and Postgres")
        return 1
    finally:
        await engine.dispose()
    return 0


async def _upgrade_until(engine: AsyncEngine, until_s: float) -> str:
    while True:
        try:
            return await upgrade(engine)
        except STORE_FAILURES as failure:
            if asyncio.get_running_loop().time() >= until_s:
                raise
            log.warning("schema.waiting", reason=type(failure).__name__)
        await asyncio.sleep(RETRY_S)
