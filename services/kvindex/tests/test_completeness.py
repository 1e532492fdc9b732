"""What a listing has to find out, by the marks of the lease holder in the log."""

from shoal_kvindex.ingest.changes import IndexState
from shoal_kvindex.ingest.completeness import Completeness

LISTING = IndexState(is_complete=False, reason="listing", lease_holder="one")
LISTED = IndexState(is_complete=True, reason="", lease_holder="one")


def test_until_a_holder_spoke_nothing_is_sure() -> None:
    completeness = Completeness()
    assert not completeness.is_complete
    assert "nothing was listed" in completeness.reason
    completeness.tell(LISTED)
    assert completeness.is_complete
    assert completeness.reason == ""


def test_a_fence_asks_for_a_listing_and_the_listing_answers_it() -> None:
    completeness = Completeness()
    completeness.tell(LISTED)
    completeness.fence("node-a")
    assert not completeness.is_complete
    assert "node-a" in completeness.reason
    completeness.tell(LISTING)
    assert completeness.reason == "listing"
    assert completeness.unlisted == {"node-a"}
    completeness.tell(LISTED)
    assert completeness.is_complete


def test_a_fence_during_a_listing_is_left_for_the_next_one() -> None:
    completeness = Completeness()
    completeness.fence("node-a")
    completeness.tell(LISTING)
    completeness.fence("node-b")
    completeness.fence("node-a")
    completeness.tell(LISTED)
    assert not completeness.is_complete
    assert completeness.unlisted == {"node-a", "node-b"}


def test_who_left_in_order_need_not_be_listed() -> None:
    completeness = Completeness()
    completeness.tell(LISTED)
    completeness.fence("node-a")
    completeness.leave("node-a")
    assert completeness.is_complete
