"""What the index knows, which stores report to it, and whether what instances announce can be reached from here."""

import asyncio
from collections.abc import Sequence

import grpc
import grpc.aio
import httpx
from grpc_health.v1 import health_pb2, health_pb2_grpc
from prometheus_client.parser import text_string_to_metric_families

from shoal_contracts.v1 import kvindex_pb2 as index
from shoal_local.doctor.findings import Finding, ok, unknown, warning, wrong
from shoal_local.fleet_view import FleetView
from shoal_local.index_client import Answer
from shoal_local.store_overview import chosen
from shoal_local.wording import counted, share, size
from shoal_runtime.grpc import connect

ASK_S = 3.0
FULL = 0.98  # kvindex deletes for room well before
WRITTEN = "shoal_store_stored_objects"
NOT_WRITTEN = frozenset({"full", "read_only", "refused", "failed"})
STORE_ADVICE = "Is its `lmcache server` up, and SHOAL_KVSTORE_COORDINATOR_URL (--coordinator-url) that of kvindex?"

Overviews = Sequence[Answer[index.OverviewReply]]


def check_index(overviews: Overviews) -> list[Finding]:
    """Whether what is stored is found, and whether it is kept in Postgres. Postgres is seen through kvindex."""
    replies = [answer for answer in overviews if answer.reply is not None]
    if not replies:
        reasons = "; ".join(answer.instance.reason or _failure(answer) for answer in overviews) or "none is there"
        advice = "If it loads, wait. If it cannot read Postgres, check SHOAL_KVINDEX_POSTGRES_URL and Postgres."
        return [wrong("index", f"no kvindex answers: {reasons}", advice), unknown("postgres", "no kvindex tells of it")]
    told = chosen(overviews)
    return [_check_complete(told), _check_postgres(told, [answer.instance.reason for answer in replies])]


def _failure(answer: Answer[index.OverviewReply]) -> str:
    return answer.failure.message if answer.failure is not None else ""


def _check_complete(told: index.OverviewReply) -> Finding:
    if not told.is_complete:
        found = f"not complete, some hits are missed: {told.reason or 'a listing is needed'}"
        advice = "Usually it mends itself within seconds: look again. If it stays, restart the store that it names."
        return warning("index", found, advice)
    return ok("index", f"complete, {counted(told.blocks, 'block')}")


def _check_postgres(told: index.OverviewReply, reasons: Sequence[str]) -> Finding:
    trouble = [part for reason in reasons for part in reason.split("; ") if part.startswith(("postgres:", "lease:"))]
    advice = "Start Postgres, check SHOAL_KVINDEX_POSTGRES_URL; nothing is deleted or kept over restarts until then."
    if trouble:
        return wrong("postgres", trouble[0], advice)
    if not told.lease_holder:
        return wrong("postgres", "nobody holds the lease: nothing is written, listed or deleted", advice)
    return ok("postgres", f"{told.lease_holder} holds the lease and writes")


async def check_stores(overviews: Overviews) -> list[Finding]:
    """Each ``lmcache server`` that reports: whether it is there, has room, and could write."""
    if all(answer.reply is None for answer in overviews):
        return [unknown("stores", "no kvindex tells which there are")]
    told = chosen(overviews)
    if not told.stores:
        return [wrong("stores", "none reports to kvindex: whatever is stored is never found", STORE_ADVICE)]
    findings = list(await asyncio.gather(*(_check_store(store) for store in told.stores)))
    capacity = told.shared_capacity_bytes
    if told.HasField("shared_capacity_bytes") and told.shared_bytes > FULL * capacity:
        found = f"the shared level is {share(told.shared_bytes, capacity)} full, {size(told.shared_bytes)}"
        findings.append(warning("stores", found, "Give its folder room, or shorten lifetimes; see `shoal store`."))
    return findings


async def _check_store(store: index.StoreOverview) -> Finding:
    name, url = f"{store.store_instance_id} at {store.address}", f"http://{store.address}"
    async with httpx.AsyncClient(base_url=url, timeout=ASK_S, trust_env=False) as http:
        try:
            health = await http.get("/healthcheck")
            metrics = await http.get("/metrics")
        except httpx.HTTPError as error:
            found = f"{name} reports, but does not answer from here ({type(error).__name__})"
            advice = (
                "In compose that is meant: its admin API is on a network of its own. Elsewhere: is the address right?"
            )
            return warning("stores", found, advice)
    if health.status_code != httpx.codes.OK:
        return wrong("stores", f"{name} is not well (status {health.status_code})", "Read its log, restart it.")
    if metrics.status_code != httpx.codes.OK:
        return ok("stores", f"{name} reports and answers; of what it wrote it does not tell")
    if failed := objects_not_written(metrics.text):
        told = ", ".join(f"{count:,} {outcome}" for outcome, count in sorted(failed.items()))
        advice = "See room and rights of its folder; what was not written is computed again each time."
        return warning("stores", f"{name} could not write objects since its start: {told}", advice)
    return ok("stores", f"{name} reports, answers and wrote all that it was given")


def objects_not_written(exposition: str) -> dict[str, int]:
    """By why, from the metrics of a store."""
    samples = [s for family in text_string_to_metric_families(exposition) for s in family.samples]
    outcomes = {s.labels["outcome"]: int(s.value) for s in samples if s.name == f"{WRITTEN}_total"}
    return {outcome: count for outcome, count in outcomes.items() if count and outcome in NOT_WRITTEN}


async def check_addresses(view: FleetView) -> Finding:
    """Gateways call these addresses; one that only its own machine understands keeps its instance idle."""
    called = [instance for instance in view.instances if instance.address and not instance.is_silent]
    if not called:
        return unknown("addresses", "no instance tells one")
    codes = await asyncio.gather(*(_health_code(instance.address) for instance in called))
    told = [(f"{one.instance_id} at {one.address}", code) for one, code in zip(called, codes, strict=True)]
    silent = [name for name, code in told if code is grpc.StatusCode.DEADLINE_EXCEEDED]
    if lost := [name for name, code in told if code is not None and name not in silent]:
        advice = "Set SHOAL_<SERVICE>_ADVERTISE_HOST (and HOST) of it to an address that the other machines can reach."
        return wrong("addresses", f"beats, but nobody answers: {', '.join(lost)}", advice)
    if silent:
        advice = (
            "It hangs, is very busy, or its address leads nowhere: see its /readyz and SHOAL_<SERVICE>_ADVERTISE_HOST."
        )
        return unknown("addresses", f"no answer within {ASK_S:g} s: {', '.join(silent)}", advice)
    return ok("addresses", f"all {len(called)} that are called answer from here")


async def _health_code(address: str) -> grpc.StatusCode | None:
    """Why its health service does not answer; None when it does."""
    async with connect(address) as channel:
        try:
            await health_pb2_grpc.HealthStub(channel).Check(health_pb2.HealthCheckRequest(), timeout=ASK_S)
        except grpc.aio.AioRpcError as error:
            return error.code()
    return None
