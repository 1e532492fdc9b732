"""What is in the store, as a page for the person who runs it.

Every instance of kvindex has the whole directory, so what is stored is told once, by the holder of the lease if it
answers. Questions go to any instance, so what was asked is summed.
"""

from collections import defaultdict
from collections.abc import Sequence, Set

from shoal_contracts.v1 import common_pb2 as pb
from shoal_contracts.v1 import kvindex_pb2 as index
from shoal_local.index_client import Answer
from shoal_local.wording import bar, counted, moment, paragraph, share, size, span

BAR_COLUMNS = 40
NAME_COLUMNS = 28


def render(answers: Sequence[Answer[index.OverviewReply]], now_s: float) -> str:
    """For 80 columns. At least one instance answered."""
    told = chosen(answers)
    parts = [
        _stored(told, now_s),
        _hit_rates(answers),
        _ages(told),
        _sweep(told, {answer.instance.instance_id for answer in answers if answer.reply is not None}),
        _stores(told),
        _instances(answers),
    ]
    return "\n\n".join(part for part in parts if part)


def chosen(answers: Sequence[Answer[index.OverviewReply]]) -> index.OverviewReply:
    """The reply to believe about what all instances know: the lease holder's, else that of one which is complete."""
    replies = {answer.instance.instance_id: answer.reply for answer in answers if answer.reply is not None}
    for instance_id, reply in replies.items():
        if instance_id == reply.lease_holder:
            return reply
    return max(replies.values(), key=lambda reply: reply.is_complete)


def asked_by_class(
    answers: Sequence[Answer[index.OverviewReply]],
) -> dict[pb.TrafficClass.ValueType, tuple[int, int]]:
    """Blocks hit and blocks asked for, over all instances."""
    sums: dict[pb.TrafficClass.ValueType, tuple[int, int]] = defaultdict(lambda: (0, 0))
    for answer in answers:
        for told in answer.reply.classes if answer.reply is not None else ():
            hit, asked = sums[told.traffic_class]
            sums[told.traffic_class] = (hit + told.hit_blocks, asked + told.asked_blocks)
    return dict(sums)


def _stored(told: index.OverviewReply, now_s: float) -> str:
    if told.HasField("shared_capacity_bytes"):
        capacity = f"{size(told.shared_bytes)} of {size(told.shared_capacity_bytes)}"
        room = f"{capacity}, {share(told.shared_bytes, told.shared_capacity_bytes)} full"
    else:
        room = f"{size(told.shared_bytes)}; no store tells how much room there is"
    lines = [f"shared level  {room}", f"directory     {counted(told.blocks, 'block')}"]
    if told.evicted_blocks:
        lines.append(f"              its bound pushed {told.evicted_blocks:,} out; Postgres is asked for those")
    if told.is_complete:
        lines.append(f"              complete{_listed(told.sweep, now_s)}")
    else:
        lines.append(paragraph(f"NOT COMPLETE: {told.reason or 'a listing is needed'}", " " * 14))
    return "\n".join(lines)


def _listed(sweep: index.SweepOverview, now_s: float) -> str:
    if not sweep.HasField("last_listing_unix_s"):
        return ""
    return f"; last listing {moment(sweep.last_listing_unix_s)}, {span(now_s - sweep.last_listing_unix_s)} ago"


def _hit_rates(answers: Sequence[Answer[index.OverviewReply]]) -> str:
    sums = asked_by_class(answers)
    lines = [f"{'hit rate':<21}  {'hit blocks':>12}  {'asked blocks':>12}  since each kvindex started"]
    for traffic_class, (hit, asked) in sorted(sums.items()):
        if asked:
            lines.append(f"  {_class_name(traffic_class):<10}  {share(hit, asked):>7}  {hit:>12,}  {asked:>12,}")
    hit, asked = (sum(column) for column in zip(*sums.values(), strict=True)) if sums else (0, 0)
    lines.append(f"  {'all':<10}  {share(hit, asked):>7}  {hit:>12,}  {asked:>12,}")
    return "\n".join(lines)


def _class_name(traffic_class: pb.TrafficClass.ValueType) -> str:
    known = pb.TrafficClass.DESCRIPTOR.values_by_number.get(traffic_class)
    return str(traffic_class) if known is None else known.name.lower()


def _ages(told: index.OverviewReply) -> str:
    if not told.ages:
        return "expires within: not counted yet"
    largest = max(age.blocks for age in told.ages)
    last = max((row for row, age in enumerate(told.ages) if age.blocks), default=0)
    lines = [f"{'expires within':<14}  {'blocks':>15}  counted by the lease holder every few minutes"]
    for age in told.ages[: last + 1]:
        line = f"  {span(age.expires_within_s):<12}  {age.blocks:>15,}  {bar(age.blocks, largest, BAR_COLUMNS)}"
        lines.append(line.rstrip())
    return "\n".join(lines)


def _sweep(told: index.OverviewReply, answering: Set[str]) -> str:
    if not told.lease_holder:
        return paragraph("sweep  NOBODY HOLDS THE LEASE: nothing is written to Postgres, listed or deleted now")
    sweep = told.sweep
    rows = [
        ("expired", sweep.expired_blocks, "blocks deleted because their time was over"),
        ("evicted", sweep.evicted_blocks, "blocks deleted before it, for want of room"),
        ("renewed", sweep.renewed_blocks, f"of {sweep.marked_blocks:,} marked were used again and stayed"),
        ("orphans", sweep.orphan_objects, "objects that only a listing knew, taken in"),
        ("phantoms", sweep.phantom_objects, "objects that a listing missed, taken out"),
    ]
    is_there = told.lease_holder in answering
    lines = [f"sweep, by {told.lease_holder}, {'since it holds the lease' if is_there else 'WHICH DOES NOT ANSWER'}"]
    return "\n".join([*lines, *(f"  {name:<10}  {count:>11,}  {meaning}" for name, count, meaning in rows)])


def _stores(told: index.OverviewReply) -> str:
    if not told.stores:
        return "stores  NONE IS REGISTERED: nothing is stored, and nothing can be deleted"
    lines = [f"{'store':<{NAME_COLUMNS}}  {'DRAM blocks':>15}  address"]
    for store in told.stores:
        lines.append(f"  {store.store_instance_id:<{NAME_COLUMNS - 2}}  {store.l1_blocks:>15,}  {store.address}")
    return "\n".join(lines)


def _instances(answers: Sequence[Answer[index.OverviewReply]]) -> str:
    """Each instance of kvindex: what it has in its map, and what is wrong with it."""
    lines = [f"{'kvindex':<{NAME_COLUMNS}}  {'blocks':>15}  state"]
    for answer in answers:
        name, reply = answer.instance.instance_id, answer.reply
        blocks = "-" if reply is None else f"{reply.blocks:,}"
        lines.append(f"  {name:<{NAME_COLUMNS - 2}}  {blocks:>15}  {_state(answer)}")
        lines += [paragraph(reason, " " * 6) for reason in _reasons(answer)]
    return "\n".join(lines)


def _state(answer: Answer[index.OverviewReply]) -> str:
    if answer.reply is None:
        return "NO ANSWER"
    holds = " · holds the lease" if answer.reply.lease_holder == answer.instance.instance_id else ""
    return f"{'complete' if answer.reply.is_complete else 'not complete'}{holds}"


def _reasons(answer: Answer[index.OverviewReply]) -> list[str]:
    reasons = [answer.instance.reason]
    if answer.failure is not None:
        reasons.insert(0, f"{answer.instance.address}: {answer.failure.message}")
    return [reason for reason in reasons if reason]
