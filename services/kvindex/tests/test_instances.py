"""Who is there, by a clock that a stopped process cannot fool."""

from shoal_kvindex.ingest.instances import Address, StoreInstances

HERE = Address("127.0.0.1", 8080)


def test_a_beat_of_an_unknown_server_is_told_so_until_it_registers() -> None:
    instances = StoreInstances(silence_s=15)
    assert not instances.beat("node-a")
    instances.register("node-a", HERE)
    assert instances.beat("node-a")


def test_who_is_registered_has_an_address_until_it_leaves() -> None:
    instances = StoreInstances(silence_s=15)
    instances.expect(["node-b"])
    instances.register("node-a", HERE)
    assert instances.addresses() == {"node-a": HERE}
    assert (instances.is_known("node-b"), instances.is_registered("node-b")) == (True, False)
    instances.deregister("node-a")
    assert instances.address_of("node-a") is None


def test_the_capacity_of_the_shared_level_is_kept_while_one_who_told_it_is_there() -> None:
    instances = StoreInstances(silence_s=15)
    instances.register("node-a", HERE)
    assert instances.shared_capacity_bytes is None
    instances.tell_capacity("node-a", 10)
    instances.register("node-a", HERE)
    assert (instances.shared_capacity_bytes, instances.capacity_of("node-a")) == (10, 10)
    instances.deregister("node-a")
    assert instances.shared_capacity_bytes is None


def test_silence_is_told_once_and_the_server_is_unknown_then() -> None:
    instances = StoreInstances(silence_s=3)
    instances.register("node-a", HERE)
    instances.register("node-b", HERE)
    silent = []
    for _ in range(5):
        silent += instances.advance(1)
        instances.beat("node-b")
    assert silent == ["node-a"]
    assert not instances.beat("node-a")


def test_a_long_stop_of_this_process_makes_nobody_silent() -> None:
    instances = StoreInstances(silence_s=15)
    instances.register("node-a", HERE)
    assert instances.advance(3600) == []


def test_an_expected_server_has_the_usual_time_but_must_register() -> None:
    instances = StoreInstances(silence_s=3)
    instances.expect(["node-a", "node-b"])
    assert not instances.beat("node-a")
    instances.register("node-a", HERE)
    silent = []
    for _ in range(3):
        instances.beat("node-a")
        silent += instances.advance(2)
    assert silent == ["node-b"]
