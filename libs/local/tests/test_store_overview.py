"""The page about the store: sums where sums are right, one voice where all know the same, nothing hidden."""

from shoal_contracts.errors import Unavailable
from shoal_contracts.v1 import common_pb2 as pb
from shoal_contracts.v1 import kvindex_pb2 as index
from shoal_local.index_client import Answer, Instance
from shoal_local.store_overview import asked_by_class, chosen, render

NOW_S = 1_700_000_000


def a_reply(**changes):
    given = {
        "blocks": 3000,
        "shared_bytes": 5 * 2**30,
        "shared_capacity_bytes": 20 * 2**30,
        "stores": [index.StoreOverview(store_instance_id="node-a", address="10.0.0.1:9000", l1_blocks=1024)],
        "classes": [index.ClassOverview(traffic_class=pb.CHAT, asked_blocks=100, hit_blocks=80)],
        "ages": [
            index.AgeOverview(expires_within_s=3600, blocks=10),
            index.AgeOverview(expires_within_s=86_400, blocks=0),
            index.AgeOverview(expires_within_s=7 * 86_400, blocks=2990),
        ],
        "sweep": index.SweepOverview(marked_blocks=50, expired_blocks=40, last_listing_unix_s=NOW_S - 60),
        "lease_holder": "kvindex-1",
        "is_complete": True,
    }
    return index.OverviewReply(**(given | changes))


def an_answer(number=1, reply=None, reason=""):
    return Answer(Instance(f"kvindex-{number}", f"10.0.0.{number}:7003", reason), reply or a_reply())


def a_failure(number=3):
    return Answer(Instance(f"kvindex-{number}", "10.0.0.3:7003"), None, Unavailable(pb.UNAVAILABLE, "is not there"))


def lines_with(text, *words):
    return [line for line in text.splitlines() if all(word in line for word in words)]


def test_everything_is_on_the_page_and_it_fits_the_terminal():
    text = render([an_answer(), an_answer(2), a_failure()], NOW_S)
    assert max(map(len, text.splitlines())) <= 80
    assert lines_with(text, "5.0 GiB of 20.0 GiB", "25.0 % full")
    assert lines_with(text, "complete; last listing", "1 min ago")
    assert lines_with(text, "expires within", "counted by the lease holder every few minutes")
    assert lines_with(text, "expired", " 40 ")
    assert lines_with(text, "renewed", "of 50 marked")
    assert lines_with(text, "node-a", "1,024", "10.0.0.1:9000")
    assert lines_with(text, "kvindex-1", "3,000", "complete · holds the lease")
    assert lines_with(text, "kvindex-3", "NO ANSWER")
    assert lines_with(text, "10.0.0.3:7003: is not there")


def test_questions_are_summed_over_instances_and_classes():
    agent = index.ClassOverview(traffic_class=pb.AGENT, asked_blocks=50, hit_blocks=49)
    answers = [an_answer(), an_answer(2, a_reply(classes=[agent, *a_reply().classes])), a_failure()]
    assert asked_by_class(answers) == {pb.CHAT: (160, 200), pb.AGENT: (49, 50)}
    text = render(answers, NOW_S)
    assert lines_with(text, "chat", "80.0 %", " 160 ", " 200")
    assert lines_with(text, "all", "83.6 %", " 209 ", " 250")


def test_the_lease_holder_is_believed_else_one_that_is_complete():
    behind, whole = a_reply(is_complete=False, blocks=1), a_reply(blocks=2)
    assert chosen([an_answer(2, whole), an_answer(1, behind)]).blocks == 1
    assert chosen([an_answer(3, behind), an_answer(2, whole), a_failure()]).blocks == 2


def test_an_index_that_is_not_complete_says_why():
    reply = a_reply(is_complete=False, reason="store node-a cannot list")
    text = render([an_answer(1, reply, "listing: store node-a cannot list")], NOW_S)
    assert lines_with(text, "NOT COMPLETE: store node-a cannot list")
    assert lines_with(text, "not complete · holds the lease")


def test_what_is_unknown_is_not_told_as_zero():
    reply = a_reply(ages=[], classes=[], lease_holder="", stores=[], sweep=None)
    reply.ClearField("shared_capacity_bytes")
    text = render([an_answer(1, reply)], NOW_S)
    assert lines_with(text, "no store tells how much room there is")
    assert lines_with(text, "expires within: not counted yet")
    assert lines_with(text, "NOBODY HOLDS THE LEASE")
    assert lines_with(text, "NONE IS REGISTERED")
    assert lines_with(text, "all", " - ")


def test_a_holder_that_does_not_answer_is_told_as_such():
    text = render([an_answer(2)], NOW_S)
    assert lines_with(text, "sweep, by kvindex-1, WHICH DOES NOT ANSWER")


def test_rows_that_say_nothing_are_left_out():
    ages = [index.AgeOverview(expires_within_s=3600, blocks=0), index.AgeOverview(expires_within_s=86_400, blocks=2)]
    never = index.ClassOverview(traffic_class=pb.AGENT, asked_blocks=0, hit_blocks=0)
    later = index.AgeOverview(expires_within_s=365 * 86_400, blocks=0)
    text = render([an_answer(1, a_reply(ages=[*ages, later], classes=[never, *a_reply().classes]))], NOW_S)
    assert lines_with(text, "  1 h", " 0")
    assert lines_with(text, "  1 day", " 2")
    assert not lines_with(text, "365 days")
    assert not lines_with(text, "agent")


def test_blocks_that_did_not_fit_the_map_are_told():
    assert lines_with(render([an_answer(1, a_reply(evicted_blocks=7))], NOW_S), "its bound pushed 7 out")
