"""The error table is complete, and an error survives the wire."""

import grpc
import pytest
from hypothesis import given
from hypothesis import strategies as st

from shoal_contracts.errors import (
    ERRORS,
    BadRequest,
    Bug,
    CacheFault,
    ErrorMeaning,
    Interrupted,
    Refused,
    ShoalError,
    Unavailable,
    from_failure,
    to_failure,
)
from shoal_contracts.v1 import common_pb2 as pb

CODES = [code for code in pb.ErrorCode.values() if code != pb.ERROR_CODE_UNSPECIFIED]


def test_every_code_has_a_meaning_and_unspecified_has_none():
    assert sorted(ERRORS) == sorted(CODES)


@pytest.mark.parametrize("code", CODES, ids=pb.ErrorCode.Name)
def test_statuses_agree_with_the_branch(code):
    meaning = ERRORS[code]
    allowed = {
        BadRequest: range(400, 429),
        Refused: (429, 503),
        Unavailable: (503,),
        Interrupted: (ErrorMeaning.CLIENT_CLOSED_REQUEST, 504),
        CacheFault: (500,),
        Bug: (500,),
    }
    assert meaning.http_status in allowed[meaning.type]
    assert meaning.grpc_status is not grpc.StatusCode.OK


@pytest.mark.parametrize("code", CODES, ids=pb.ErrorCode.Name)
def test_what_the_caller_must_change_is_never_tried_elsewhere(code):
    if ERRORS[code].type in (BadRequest, Interrupted, Bug, CacheFault):
        assert not ERRORS[code].is_retried


def test_code_numbers_keep_their_branch():
    # Twenty numbers a branch: a reader of a raw number knows what kind of trouble it is.
    branches = [BadRequest, Refused, Unavailable, Interrupted, CacheFault, Bug]
    assert {code: branches[code // 20] for code in CODES} == {code: ERRORS[code].type for code in CODES}


@given(
    code=st.sampled_from(CODES),
    message=st.text(max_size=50),
    retry_after_ms=st.none() | st.integers(0, 2**32 - 1),
    param=st.none() | st.text(max_size=20),
)
def test_an_error_survives_the_wire(code, message, retry_after_ms, param):
    retry_after_s = None if retry_after_ms is None else retry_after_ms / 1000
    error = ERRORS[code].type(code, message, retry_after_s=retry_after_s, param=param)
    read = from_failure(pb.Failure.FromString(to_failure(error).SerializeToString()))
    assert type(read) is type(error)
    assert (read.code, read.message, read.retry_after_s, read.param) == (code, message, retry_after_s, param)


def test_absent_is_not_zero():
    failure = to_failure(Refused(pb.OVERLOADED, "full", retry_after_s=0.0))
    assert failure.HasField("retry_after_ms")
    assert not to_failure(Refused(pb.OVERLOADED, "full")).HasField("retry_after_ms")
    assert from_failure(failure).retry_after_s == 0.0


@pytest.mark.parametrize("code", [pb.ERROR_CODE_UNSPECIFIED, 19, 999])
def test_a_code_of_a_newer_peer_is_seen_as_a_bug(code):
    read = from_failure(pb.Failure(code=code, message="later"))
    assert type(read) is Bug
    assert str(code) in read.message


def test_a_code_of_another_branch_is_refused_at_once():
    with pytest.raises(ValueError, match="INVALID_REQUEST is not a code of Refused"):
        Refused(pb.INVALID_REQUEST, "mixed up")


def test_every_branch_is_a_shoal_error():
    assert {meaning.type for meaning in ERRORS.values()} == set(ShoalError.__subclasses__())
