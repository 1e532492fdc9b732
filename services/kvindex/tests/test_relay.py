"""What Match and Settle used here, on its way to the others."""

from shoal_kvindex.claims import Claims
from shoal_kvindex.directory import SHARED, Directory, Namespace, ObjectKey, Part
from shoal_kvindex.ingest.changes import Renewal, Renewals
from shoal_kvindex.ingest.relay import Relay
from shoal_kvindex.store.pending import PendingChanges

SPACE = Namespace("pool", "")
BLOCKS = [number.to_bytes(32, "big") for number in range(4)]


def a_directory(relay: Relay) -> Directory:
    directory = Directory(relay, 100)
    for block_hash in BLOCKS:
        directory.store(ObjectKey(SPACE, block_hash, Part(0x01000100, 0)), SHARED, 10, 100)
    return directory


def test_renewals_and_claims_go_together_by_expiry_and_only_once() -> None:
    journal = PendingChanges(1000)
    relay = Relay(journal, 100)
    directory = a_directory(relay)
    assert relay.take() is None
    directory.extend(SPACE, BLOCKS[:2], 500)
    directory.extend(SPACE, BLOCKS[2:3], 700)
    Claims(10, 60, relay.collect).add(SPACE, bytes([9]) * 32, 700, 0.0)
    assert relay.take() == Renewals(
        [Renewal(SPACE, BLOCKS[:2], 500), Renewal(SPACE, [BLOCKS[2], bytes([9]) * 32], 700)]
    )
    assert relay.take() is None
    assert journal.expiries[SPACE, BLOCKS[2]] == 700


def test_what_comes_from_the_log_is_written_and_not_sent_back() -> None:
    journal = PendingChanges(1000)
    relay = Relay(journal, 100)
    directory = a_directory(relay)
    with relay.deaf():
        directory.extend(SPACE, BLOCKS, 500)
    assert relay.take() is None
    assert journal.expiries[SPACE, BLOCKS[0]] == 500


def test_past_the_bound_renewals_are_dropped_and_counted() -> None:
    relay = Relay(PendingChanges(1000), 2)
    a_directory(relay).extend(SPACE, BLOCKS, 500)
    assert relay.dropped_count == 2
    assert relay.take() == Renewals([Renewal(SPACE, BLOCKS[:2], 500)])
