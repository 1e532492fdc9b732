"""Cancelling a background response, whichever gateway generates it.

One that runs elsewhere is told over NATS to all; nobody answers, the store shows what became of it.
"""

from shoal_contracts.subjects import RESPONSE_CANCEL
from shoal_contracts.v1.gateway_pb2 import ResponseCancel
from shoal_gateway.background import BackgroundRuns
from shoal_runtime.nats import NatsConnection


class ResponseCancels:
    """Both sides of it: says and hears."""

    def __init__(self, nats: NatsConnection, runs: BackgroundRuns) -> None:
        self._nats = nats
        self._runs = runs

    async def start(self) -> None:
        await self._nats.subscribe(RESPONSE_CANCEL, ResponseCancel, self._on_cancel)

    async def cancel(self, tenant: str, response_id: str) -> None:
        """Raises Unavailable when it does not run here and the others cannot be told."""
        if not self._runs.cancel((tenant, response_id)):
            await self._nats.publish(RESPONSE_CANCEL, ResponseCancel(tenant=tenant, response_id=response_id))

    def _on_cancel(self, message: ResponseCancel) -> None:
        self._runs.cancel((message.tenant, message.response_id))
