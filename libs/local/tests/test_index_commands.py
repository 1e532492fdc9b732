"""A request that nobody remembers is told with every cause; the id in an answer's body is as good as its own."""

from shoal_contracts.errors import BadRequest, Unavailable
from shoal_contracts.v1 import common_pb2 as pb
from shoal_local.index_client import Answer, Instance
from shoal_local.index_commands import not_remembered, without_prefix

REQUEST_ID = "0123456789abcdef01234567"


def a_failure(error):
    return Answer(Instance("kvindex-1", "10.0.0.1:7003"), None, error)


def test_the_id_in_the_body_of_an_answer_names_the_request_too():
    assert without_prefix(f"chatcmpl-{REQUEST_ID}") == REQUEST_ID
    assert without_prefix(REQUEST_ID) == REQUEST_ID


def test_a_request_that_nobody_remembers_may_have_been_too_short_to_be_looked_up():
    told = not_remembered([a_failure(BadRequest(pb.NOT_FOUND, "not remembered"))], REQUEST_ID)
    assert f"remembers request {REQUEST_ID} (asked: kvindex-1)" in told
    assert "had a prompt of less than one block, which is never looked up" in told


def test_an_instance_that_did_not_answer_may_still_know_it():
    told = not_remembered([a_failure(Unavailable(pb.UNAVAILABLE, "is not there"))], REQUEST_ID)
    assert "is not known to those that answered" in told
    assert "kvindex-1 at 10.0.0.1:7003: is not there" in told
