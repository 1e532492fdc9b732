"""HTTP in, events out: ``python -m shoal_gateway``, and ``... migrate`` for its schema alone."""

import sys

from shoal_gateway.service import GatewayService
from shoal_gateway.settings import GatewaySettings
from shoal_gateway.store.engine import RESPONSES
from shoal_runtime.postgres import run_migration
from shoal_runtime.process import run

if __name__ == "__main__":
    settings = GatewaySettings.load("gateway")
    match sys.argv[1:]:
        case []:
            run(GatewayService, settings)
        case ["migrate"]:
            sys.exit(run_migration(settings, settings.postgres, RESPONSES))
        case _:
            sys.exit("usage: python -m shoal_gateway [migrate]")
