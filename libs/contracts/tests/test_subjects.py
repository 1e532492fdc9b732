import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shoal_contracts import subjects
from shoal_contracts.v1 import fleet_pb2

ROLES = [role for role in fleet_pb2.Role.values() if role != fleet_pb2.ROLE_UNSPECIFIED]
TOKEN = st.from_regex(r"\A[A-Za-z0-9_-]{1,30}\Z")


def covers(pattern: str, subject: str) -> bool:
    """Whether a NATS subscription to ``pattern`` hears ``subject``."""
    return bool(
        re.fullmatch(re.escape(pattern).replace(r"\*", r"[^.]+").replace(r"\.>", r"\..+").replace(">", ".+"), subject)
    )


@pytest.mark.parametrize("role", ROLES, ids=fleet_pb2.Role.Name)
def test_a_beat_is_heard_by_those_who_watch_its_role_and_no_other(role):
    subject = subjects.beat(role, "gateway-0a1b")
    assert covers(subjects.BEATS, subject)
    assert [other for other in ROLES if covers(subjects.beats(other), subject)] == [role]


@given(pool=TOKEN, tier=TOKEN)
def test_names_are_legal_and_differ_by_pool_and_tier(pool, tier):
    assert subjects.prefill_job(pool, tier).split(".") == ["prefill", pool, tier]
    # JetStream takes no dots, blanks or wildcards in the name of a stream.
    assert re.fullmatch(r"[A-Za-z0-9_-]+", subjects.prefill_stream(pool, tier))


def test_one_subject_never_hears_another():
    built = [
        subjects.beat(fleet_pb2.PREFILL, "a"),
        subjects.prefill_job("a", "b"),
        subjects.prefill_cancel("a"),
        subjects.prefill_answer("a"),
        subjects.RESPONSE_CANCEL,
    ]
    assert len({subject.split(".")[0] for subject in built}) == len(built)


@pytest.mark.parametrize("value", ["", "a.b", "a b", "*", ">", "a/b", "ä", "a\n", "a$"])
def test_what_would_split_or_widen_a_subject_is_refused(value):
    for build in (
        lambda: subjects.beat(fleet_pb2.DECODE, value),
        lambda: subjects.prefill_job(value, "short"),
        lambda: subjects.prefill_job("pool", value),
        lambda: subjects.prefill_stream(value, "short"),
        lambda: subjects.prefill_cancel(value),
        lambda: subjects.prefill_answer(value),
    ):
        with pytest.raises(ValueError, match="cannot be a part of a subject"):
            build()


@given(instance_id=TOKEN)
def test_who_hears_an_answer_is_read_from_its_subject(instance_id):
    assert subjects.answering_gateway(subjects.prefill_answer(instance_id)) == instance_id
    assert subjects.answering_gateway(subjects.prefill_cancel(instance_id)) == ""


@given(pool=TOKEN, tier=TOKEN)
def test_whose_queue_it_is_is_read_from_its_subject(pool, tier):
    assert subjects.pool_and_tier(subjects.prefill_job(pool, tier)) == (pool, tier)
    assert subjects.pool_and_tier(subjects.prefill_cancel(pool)) is None
    assert subjects.pool_and_tier(subjects.INDEX_CHANGE) is None
