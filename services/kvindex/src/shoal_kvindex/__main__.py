"""The directory of stored blocks: ``python -m shoal_kvindex``, and ``... migrate`` for its schema alone."""

import sys

from shoal_kvindex.service import KvIndexService
from shoal_kvindex.settings import KvIndexSettings
from shoal_kvindex.store.engine import DIRECTORY
from shoal_runtime.postgres import run_migration
from shoal_runtime.process import run

if __name__ == "__main__":
    settings = KvIndexSettings.load("kvindex")
    match sys.argv[1:]:
        case []:
            run(KvIndexService, settings)
        case ["migrate"]:
            sys.exit(run_migration(settings, settings.postgres, DIRECTORY))
        case _:
            sys.exit("usage: python -m shoal_kvindex [migrate]")
