"""GET /healthz, /readyz and /metrics.

/healthz only says that the loop turns: a gateway whose peers are away must not be restarted for it. /readyz shows
the result of a real request and the state of what this process depends on.
"""

from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from shoal_gateway.admission import AdmissionGate
from shoal_gateway.metrics import CATALOGUE, RUNNING, WAITING
from shoal_gateway.readiness import ReadinessProbe
from shoal_runtime.health import Health
from shoal_runtime.metrics import CONTENT_TYPE, RUNTIME, exposition


class Ops:
    """For operators, load balancers and Prometheus."""

    def __init__(self, health: Health, probe: ReadinessProbe, admission: AdmissionGate) -> None:
        self._health = health
        self._probe = probe
        self._admission = admission

    async def healthz(self, request: Request) -> JSONResponse:
        return JSONResponse({"is_alive": True})

    async def readyz(self, request: Request) -> JSONResponse:
        report = await self._probe.check()
        body = {**report.fields(), "reasons": self._health.report}
        return JSONResponse(body, status_code=200 if report.is_ready else 503)

    async def metrics(self, request: Request) -> Response:
        view = self._admission.view
        RUNNING.set(view.running_requests)
        WAITING.set(view.waiting_requests)
        return Response(exposition([RUNTIME, CATALOGUE]), headers={"content-type": CONTENT_TYPE})
