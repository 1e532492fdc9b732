"""A ``FleetView`` as a person reads it: who is there, what waits, what is stored."""

from collections.abc import Iterator

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from shoal_local import store_overview
from shoal_local.fleet_view import FleetView, InstanceView, QueueView
from shoal_local.terminal import table
from shoal_local.wording import counted, share, size, span

SERVICES = ("gateway", "tokenizer", "kvindex", "prefill", "decode")  # without one of each nothing is served whole


def fleet_tables(view: FleetView, now_s: float) -> Group:
    """Everything, for at least 80 columns."""
    parts: list[RenderableType] = [instance_table(view, now_s)]
    beating = {instance.service for instance in view.instances if not instance.is_silent}
    if missing := [service for service in SERVICES if service not in beating]:
        parts.append(Text(f"nobody beats for: {', '.join(missing)}", "bad"))
    parts += ["", queue_table(view), "", Text("store", "heading"), *_store(view)]
    return Group(*parts)


def instance_table(view: FleetView, now_s: float) -> Table:
    """One row an instance; a service is named at its first one."""
    right = frozenset({"up", "running", "waiting", "tokens"})
    shown = table("", "service", "instance", "address", "up", "running", "waiting", "tokens", "state", right=right)
    for name in ("address", "instance"):
        column = next(column for column in shown.columns if column.header == name)
        column.no_wrap, column.overflow = True, "ellipsis"
    before = ""
    for instance in view.instances:
        shown.add_row(
            "" if instance.service == before else instance.service,
            instance.instance_id,
            instance.address or "-",
            age(now_s - instance.started_at_s),
            *_load(instance),
            _state(instance),
        )
        before = instance.service
    return shown


def age(seconds: float) -> str:
    """The largest unit alone, so that a table that is drawn again does not tremble."""
    return " ".join(span(seconds).split()[:2])


def _load(instance: InstanceView) -> tuple[str, str, str]:
    load = instance.load
    if load is None:
        return "", "", ""
    room = f" ({100 * load.cached_tokens / load.max_cached_tokens:.0f} %)" if load.max_cached_tokens else ""
    return (
        f"{load.running_requests}/{load.max_running_requests}",
        f"{load.waiting_requests}",
        f"{load.cached_tokens:,}{room}",
    )


def _state(instance: InstanceView) -> Text:
    if instance.is_silent:
        return Text(f"SILENT for {span(instance.silent_s)}", "bad")
    if instance.is_draining:
        return Text("draining", "odd")
    if instance.is_ready:
        # A reason that leaves it ready is a part that is degraded.
        return Text("ready", "good") if not instance.reason else Text(f"ready; {instance.reason}", "odd")
    return Text(f"not ready: {instance.reason or 'it does not say why'}", "bad")


def queue_table(view: FleetView) -> RenderableType:
    """One row a prefill queue, and the tiers that workers serve but nobody has queued for."""
    if view.queues is None:
        return Text("prefill queues: JetStream does not answer", "bad")
    right = frozenset({"queued", "running", "workers"})
    shown = table("", "prefill tier", "pool", "queued", "running", "workers", "", right=right)
    for queue in view.queues:
        workers = [worker for worker in view.of("prefill") if _serves(worker, queue)]
        shown.add_row(
            queue.tier, queue.pool, f"{queue.queued_jobs:,}", f"{queue.running_jobs:,}", str(len(workers)),
            _queue_remark(queue, has_worker=bool(workers)),
        )  # fmt: skip
    return shown if view.queues else Text("prefill queues: none yet", "odd")


def _serves(worker: InstanceView, queue: QueueView) -> bool:
    model = worker.model
    return model is not None and not worker.is_silent and model.pool == queue.pool and queue.tier in model.tiers


def _queue_remark(queue: QueueView, *, has_worker: bool) -> Text:
    if not queue.has_consumer:
        return Text("has lost its consumer: nobody can take a job", "bad")
    return Text("") if has_worker else Text("nobody serves it: decode computes these prompts", "odd")


def _store(view: FleetView) -> Iterator[Text]:
    answers = view.overviews
    if not any(answer.reply is not None for answer in answers):
        yield Text("kvindex does not answer: what is stored is not known", "bad")
        return
    sums = store_overview.asked_by_class(answers)
    hit, asked = (sum(column) for column in zip(*sums.values(), strict=True)) if sums else (0, 0)
    yield Text(f"hit rate      {share(hit, asked)} of {counted(asked, 'block')} asked for")
    told = store_overview.chosen(answers)
    room = f" of {size(told.shared_capacity_bytes)}" if told.HasField("shared_capacity_bytes") else ""
    yield Text(f"shared level  {size(told.shared_bytes)}{room} in {counted(told.blocks, 'block')}")
    in_dram = sum(store.l1_blocks for store in told.stores)
    if told.stores:
        yield Text(f"stores        {len(told.stores)}, with {counted(in_dram, 'block')} in DRAM")
    else:
        yield Text("stores        none is registered: nothing is stored", "bad")
    if not told.is_complete:
        yield Text(f"not complete  {told.reason or 'a listing is needed'}: some hits are missed meanwhile", "odd")
