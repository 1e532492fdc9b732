"""Whether NATS is what Shoal needs: there, with room for a long prompt in one message, and with JetStream."""

import nats.errors
import nats.js.errors
from nats.aio.client import Client

from shoal_local.doctor.findings import Finding, ok, unknown, wrong
from shoal_local.nats_client import NatsAway, connected, shown_address
from shoal_local.wording import counted, size
from shoal_runtime.nats import MAX_PAYLOAD_BYTES

ANSWER_S = 3.0
OF_NATS = ("nats payload", "jetstream")


async def check_bus(nats_url: str) -> list[Finding]:
    """Over a connection of its own."""
    try:
        async with connected(nats_url) as client:
            return [check_nats(client, nats_url), check_payload(client), await check_jetstream(client)]
    except NatsAway:
        found = f"{shown_address(nats_url)} does not answer: nobody hears of anybody, and no job can be queued"
        advice = "Start NATS, or give its right address: --nats URL, SHOAL_NATS_URL."
        return [wrong("nats", found, advice), *(unknown(name, "NATS could not be asked") for name in OF_NATS)]


def check_nats(client: Client, nats_url: str) -> Finding:
    version = client.connected_server_version
    return ok("nats", f"{shown_address(nats_url)} answers, version {version.major}.{version.minor}.{version.patch}")


def check_payload(client: Client) -> Finding:
    """Services do not start where a job could be refused for its size."""
    found = f"a message may have {size(client.max_payload)}"
    if client.max_payload < MAX_PAYLOAD_BYTES:
        advice = f"Write `max_payload: {MAX_PAYLOAD_BYTES}` into nats.conf and restart NATS; services end without it."
        return wrong("nats payload", f"{found}, a long prompt needs {size(MAX_PAYLOAD_BYTES)}", advice)
    return ok("nats payload", found)


async def check_jetstream(client: Client) -> Finding:
    """The prefill queues and the change log of kvindex are kept there, in memory."""
    name = "jetstream"
    try:
        told = await client.jetstream(timeout=ANSWER_S).account_info()
    except (nats.js.errors.ServiceUnavailableError, nats.errors.NoRespondersError):
        advice = "Add a `jetstream { max_memory_store: 1GB }` block to nats.conf and restart NATS."
        return wrong(name, "it is off: no job can be queued, and instances of kvindex cannot agree", advice)
    except (TimeoutError, nats.errors.Error, nats.js.errors.Error) as error:
        return unknown(name, f"NATS does not tell of it ({type(error).__name__})", "Look at the log of NATS.")
    return ok(name, f"it is on: {counted(told.streams, 'stream')}, {size(told.memory)} in memory")
