"""A store that promises blocks and then cannot load them, on command: vLLM's connector for tests.

It runs inside the engine process, so the command is a file: while the file that ``SWITCH_VARIABLE`` names exists,
every load fails on the path that LMCache takes when its server dies between lookup and load.
"""

import os
from pathlib import Path
from typing import Any

from shoal_engine.vllm.lmcache import PooledConnector

SWITCH_VARIABLE = "SHOAL_TESTKIT_FAILING_LOADS"
CONNECTOR = "shoal_testkit.failing_store:FailingConnector"


class FailingConnector(PooledConnector):
    """``PooledConnector`` with a switch."""

    def start_load_kv(self, forward_context: Any, **kwargs: Any) -> None:
        if Path(os.environ[SWITCH_VARIABLE]).exists():
            # The worker believes that the server is gone until the next heartbeat registers it again.
            self.worker_adapter._health_event.clear()
        super().start_load_kv(forward_context, **kwargs)
