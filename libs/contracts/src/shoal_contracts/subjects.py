"""Every NATS subject: how it is built, what it carries, which stream holds it. No other file spells one.

| subject                       | message        | kept in                                             |
| ----------------------------- | -------------- | --------------------------------------------------- |
| beat.<role>.<instance_id>     | Beat           | nothing (core)                                      |
| prefill.<pool>.<tier>         | PrefillJob     | stream PREFILL_<pool>_<tier>, work queue in memory  |
| prefill-cancel.<pool>         | PrefillCancel  | nothing (core)                                      |
| prefill-answer.<instance_id>  | PrefillAnswer  | nothing (core); the gateway's own                   |
| response-cancel               | ResponseCancel | nothing (core); every gateway hears it              |
| kvindex.change                | IndexChange    | stream KVINDEX, bounded, in memory, oldest go first |
"""

import re

from shoal_contracts.v1 import fleet_pb2

_TOKEN = re.compile(r"[A-Za-z0-9_-]+")

BEATS = "beat.>"
RESPONSE_CANCEL = "response-cancel"
INDEX_CHANGE = "kvindex.change"
INDEX_STREAM = "KVINDEX"


def _token(value: str) -> str:
    if not _TOKEN.fullmatch(value):
        raise ValueError(f"{value!r} cannot be a part of a subject: use letters, digits, '-' and '_'")
    return value


def beat(role: fleet_pb2.Role.ValueType, instance_id: str) -> str:
    """Where one instance says that it is there."""
    return f"beat.{fleet_pb2.Role.Name(role).lower()}.{_token(instance_id)}"


def beats(role: fleet_pb2.Role.ValueType) -> str:
    """The beats of every instance of one role."""
    return f"beat.{fleet_pb2.Role.Name(role).lower()}.*"


def prefill_job(pool: str, tier: str) -> str:
    """The queue of one pool and tier."""
    return f"prefill.{_token(pool)}.{_token(tier)}"


def prefill_stream(pool: str, tier: str) -> str:
    """Name of the JetStream stream that holds ``prefill_job(pool, tier)``."""
    return f"PREFILL_{_token(pool)}_{_token(tier)}"


def pool_and_tier(subject: str) -> tuple[str, str] | None:
    """Whose queue ``prefill_job(pool, tier)`` is; None when it is another subject."""
    match subject.split("."):
        case ["prefill", pool, tier]:
            return pool, tier
        case _:
            return None


def prefill_cancel(pool: str) -> str:
    """Heard by every prefill worker of a pool."""
    return f"prefill-cancel.{_token(pool)}"


def prefill_answer(gateway_instance_id: str) -> str:
    """The subject on which one gateway hears the answers to its jobs."""
    return f"prefill-answer.{_token(gateway_instance_id)}"


def answering_gateway(answer_subject: str) -> str:
    """The instance id within ``prefill_answer(...)``; "" when it is another subject."""
    prefix, _, instance_id = answer_subject.partition(".")
    return instance_id if prefix == "prefill-answer" else ""
