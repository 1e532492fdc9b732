"""What a running system lacks or contradicts itself in: pure functions of what it says about itself.

Only instances that beat can be seen: one that is gone or stands still is missing here, and nobody knows its name.
"""

from collections import defaultdict
from collections.abc import Iterable, Sequence

from shoal_local.doctor.findings import Finding, ok, unknown, warning, wrong
from shoal_local.fleet_view import FleetView, InstanceView, QueueView
from shoal_local.wording import counted, span

SERVICES = ("gateway", "tokenizer", "kvindex", "prefill", "decode")
WITHOUT = {
    "gateway": "clients have nobody to ask",
    "tokenizer": "no request can be encoded",
    "kvindex": "nothing that is stored is found",
    "prefill": "decode computes every prompt itself, and stalls meanwhile",
    "decode": "nothing can be generated",
}
TELLING_CLOCK_S = 2.0  # the way of a beat and a busy machine stay below
WRONG_CLOCK_S = 30.0
SHOWN = 3


def check_instances(view: FleetView) -> list[Finding]:
    """One for each service: whether somebody of it is there, ready and without complaint."""
    return [_check_service(service, view.of(service)) for service in SERVICES]


def _check_service(service: str, instances: Sequence[InstanceView]) -> Finding:
    name = f"{service} instances"
    log = f"Read its log (`shoal logs {service}` or `docker compose logs {service}`) and its /readyz."
    if not instances:
        advice = f"Start one, or see why it ended or stands still. {log}"
        return wrong(name, f"none is heard: {WITHOUT[service]}", advice)
    silent = [one for one in instances if one.is_silent]
    ready = [one for one in instances if one.is_ready and not one.is_draining and not one.is_silent]
    troubled = [f"{one.instance_id}: {_trouble(one)}" for one in instances if one not in ready or one.reason]
    if not ready:
        return wrong(name, f"none is ready: {WITHOUT[service]}. {_some(troubled)}", log)
    if silent or len(ready) < len(instances):
        return warning(name, f"{len(ready)} of {len(instances)} ready. {_some(troubled)}", log)
    if troubled:
        return warning(name, f"{counted(len(ready), 'instance')} ready, with trouble. {_some(troubled)}", log)
    return ok(name, f"{counted(len(ready), 'instance')} ready: {', '.join(one.instance_id for one in ready)}")


def _trouble(instance: InstanceView) -> str:
    if instance.is_silent:
        return f"silent for {span(instance.silent_s)}"
    return instance.reason or ("leaving" if instance.is_draining else "not ready, and does not say why")


def _some(told: Sequence[str]) -> str:
    rest = f"; and {len(told) - SHOWN} more" if len(told) > SHOWN else ""
    return "; ".join(told[:SHOWN]) + rest


def check_versions(view: FleetView, own_version: str) -> Finding:
    """Of the code that all have in common, this program's own included."""
    by_version: dict[str, list[str]] = defaultdict(list)
    for instance in view.instances:
        by_version[instance.version or "one that tells no version"].append(instance.instance_id)
    if not by_version:
        return unknown("versions", "nobody tells one")
    if len(by_version) > 1:
        told = [f"{version} is {_names(ids)}" for version, ids in sorted(by_version.items())]
        advice = "Restart the older ones from the sources or images of the newer: they may not understand each other."
        return wrong("versions", "; ".join(told), advice)
    version = next(iter(by_version))
    if version != own_version:
        found = f"every instance is {version}, this program is {own_version}"
        return warning("versions", found, "Restart the system, or run the `shoal` that belongs to it.")
    return ok("versions", f"every instance is {version}, and so is this program")


def _names(instance_ids: Sequence[str]) -> str:
    rest = f" and {len(instance_ids) - SHOWN} more" if len(instance_ids) > SHOWN else ""
    return ", ".join(sorted(instance_ids)[:SHOWN]) + rest


def check_clocks(view: FleetView) -> Finding:
    """Blocks expire by the wall clock; nothing else depends on it. Compared with the clock of this machine."""
    told = [(one.clock_ahead_s, one.instance_id) for one in view.instances if one.clock_ahead_s is not None]
    if not told:
        return unknown("clocks", "no instance tells its time")
    off = sorted(((ahead_s, name) for ahead_s, name in told if abs(ahead_s) > TELLING_CLOCK_S), key=lambda one: one[1])
    if not off:
        return ok("clocks", f"{counted(len(told), 'instance')} agree with this machine to {TELLING_CLOCK_S:g} s")
    found = _some([f"{name} is {span(abs(ahead_s))} {'ahead' if ahead_s > 0 else 'behind'}" for ahead_s, name in off])
    advice = "Let NTP set the clocks (`timedatectl`): blocks expire too early or too late by the difference."
    if len(off) == len(told):
        found = f"{found}; as all of them differ, it may be this machine's clock that is wrong"
    judged = wrong if max(abs(ahead_s) for ahead_s, _ in off) > WRONG_CLOCK_S else warning
    return judged("clocks", found, advice)


def check_pools(view: FleetView) -> list[Finding]:
    """KV goes from prefill to decode within one pool only, and a tokenizer serves a model by its name."""
    decode, prefill = _by_pool(view.of("decode")), _by_pool(view.of("prefill"))
    if not decode:
        return [unknown("pools", "no decode worker tells its pool")]
    names = {one.model.name for one in view.of("tokenizer") if one.model is not None}
    found = [_check_pool(pool, members, prefill, names) for pool, members in sorted(decode.items())]
    for pool in sorted(prefill.keys() - decode.keys()):
        workers = _names([one.instance_id for one in prefill[pool]])
        advice = f"Start a decode worker of that pool, or give {workers} the model and dtype of the decode workers."
        found.append(wrong("pools", f"pool {pool} has prefill ({workers}) and no decode worker", advice))
    return found


def _by_pool(instances: Iterable[InstanceView]) -> dict[str, list[InstanceView]]:
    pools: dict[str, list[InstanceView]] = defaultdict(list)
    for instance in instances:
        if instance.model is not None and not instance.is_silent:
            pools[instance.model.pool].append(instance)
    return pools


def _check_pool(
    pool: str, decode: Sequence[InstanceView], prefill: dict[str, list[InstanceView]], names: set[str]
) -> Finding:
    model = next(one.model.name for one in decode if one.model is not None)
    if pool not in prefill:
        advice = (
            "Start a prefill worker with the same model folder, dtype, block size and versions of engine and LMCache."
        )
        twins = [
            one.instance_id for workers in prefill.values() for one in workers if one.model and one.model.name == model
        ]
        if twins:
            found = f"prefill ({_names(twins)}) is for the same model, but in another pool than decode's {pool}"
            return wrong("pools", f"{found}: its KV cannot be loaded", f"Compare how they are set. {advice}")
        return wrong("pools", f"no prefill worker is in pool {pool} of {model}", advice)
    if model not in names:
        advice = f"Set SHOAL_TOKENIZER_SERVED_NAME={model} and SHOAL_TOKENIZER_MODEL to the folder of that model."
        return wrong(
            "pools", f"no tokenizer serves {model}; they serve {', '.join(sorted(names)) or 'nothing'}", advice
        )
    workers = f"{len(prefill[pool])} prefill, {len(decode)} decode"
    return ok("pools", f"{model} in pool {pool}: {workers}, and its tokenizer")


def check_queues(view: FleetView) -> list[Finding]:
    """A job that waits needs somebody of its pool and tier who takes it."""
    if view.queues is None:
        return [unknown("queues", "JetStream does not tell of them")]
    served = {
        (one.model.pool, tier)
        for one in view.of("prefill")
        if one.model is not None and one.is_ready and not one.is_silent
        for tier in one.model.tiers
    }
    stranded = [queue for queue in view.queues if queue.queued_jobs and not _is_taken(queue, served)]
    if stranded:
        return [_stranded(queue) for queue in stranded]

    queued = sum(queue.queued_jobs for queue in view.queues)
    running = sum(queue.running_jobs for queue in view.queues)
    return [ok("queues", f"{counted(len(view.queues), 'queue')}: {queued} jobs wait, {running} are being computed")]


def _is_taken(queue: QueueView, served: set[tuple[str, str]]) -> bool:
    return queue.has_consumer and (queue.pool, queue.tier) in served


def _stranded(queue: QueueView) -> Finding:
    waiting = f"{counted(queue.queued_jobs, 'job')} in pool {queue.pool}, tier {queue.tier}"
    found = f"{waiting} wait, and no ready worker takes them"
    advice = (
        "Start a prefill worker of that pool and tier (SHOAL_PREFILL_TIERS); without it decode computes them, late."
    )
    return wrong("queues", found, advice)
