"""HTTP in, events out: ``python -m shoal_gateway``."""

from shoal_gateway.service import GatewayService
from shoal_gateway.settings import GatewaySettings
from shoal_runtime.process import run

if __name__ == "__main__":
    run(GatewayService, GatewaySettings.load("gateway"))
