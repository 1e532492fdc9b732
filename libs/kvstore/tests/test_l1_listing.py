"""DRAM is listed in order, page by page, from LMCache's own L1."""

from types import SimpleNamespace

import pytest
import torch
from lmcache.v1.distributed.api import MemoryLayoutDesc, ObjectKey, Tier
from lmcache.v1.distributed.config import L1ManagerConfig, L1MemoryManagerConfig
from lmcache.v1.distributed.l1_manager import L1Manager
from lmcache.v1.distributed.storage_manager import StorageManager
from lmcache.v1.multiprocess.cache_control.errors import InvalidRequest
from lmcache.v1.multiprocess.cache_control.object_service import ObjectService

from shoal_kvstore import l1_listing
from shoal_kvstore.l1_listing import list_page, resident
from shoal_kvstore.object_file import file_name

LAYOUT = MemoryLayoutDesc([torch.Size([16])], [torch.float32])
OBJECT_BYTES = 64


def a_key(number: int, model: str = "pool") -> ObjectKey:
    return ObjectKey(bytes([number]) * 32, model, 16777472)


@pytest.fixture
def l1():
    memory = L1MemoryManagerConfig(size_in_bytes=1 << 20, use_lazy=False, shm_name="")
    manager = L1Manager(L1ManagerConfig(memory))
    yield manager
    manager.close()


def storage_of(l1: L1Manager) -> StorageManager:
    """As far as a listing looks at it."""
    return SimpleNamespace(_l1_managers_by_id={l1.l1_manager_id: l1})


def put(l1: L1Manager, *keys: ObjectKey, is_temporary: bool = False) -> None:
    l1.reserve_write(list(keys), [is_temporary] * len(keys), LAYOUT)
    l1.finish_write(list(keys))


def test_what_readers_can_find_is_listed(l1):
    put(l1, a_key(1), a_key(2))
    put(l1, a_key(3), is_temporary=True)
    l1.reserve_write([a_key(4)], [False], LAYOUT)  # being written
    found = {key: item.get_size() for key, item in resident(storage_of(l1))()}
    assert found == {a_key(1): OBJECT_BYTES, a_key(2): OBJECT_BYTES}


def test_pages_are_in_the_order_of_hashes_and_survive_what_comes_and_goes(l1):
    put(l1, *(a_key(number) for number in (9, 1, 5, 3, 7)))
    storage = storage_of(l1)
    page, token = list_page(storage, None, 2, None)
    assert [entry.key.to_object_key() for entry in page] == [a_key(1), a_key(3)]
    assert page[0].size_bytes == OBJECT_BYTES
    l1.delete([a_key(3), a_key(5)])
    put(l1, a_key(2), a_key(8))
    rest, end = list_page(storage, None, 10, token)
    assert [entry.key.to_object_key() for entry in rest] == [a_key(7), a_key(8), a_key(9)]
    assert end is None


def test_objects_of_one_block_are_spread_over_pages_in_the_order_of_names(l1):
    keys = [
        ObjectKey(bytes([number]) * 32, model, 16777472, group)
        for number in (1, 2, 3)
        for group in (0, 1)
        for model in ("a", "b")
    ]
    put(l1, *reversed(keys))
    for page_size in (1, 2, 3, 5, 11, 12, 13):
        seen, token = [], None
        while True:
            page, token = list_page(storage_of(l1), None, page_size, token)
            seen += [entry.key.to_object_key() for entry in page]
            if token is None:
                break
            assert len(page) == page_size
        assert seen == keys


def test_an_object_in_two_l1s_is_listed_once(l1):
    put(l1, *(a_key(number) for number in (1, 2, 3)))
    storage = SimpleNamespace(_l1_managers_by_id={0: l1, 1: l1})
    page, token = list_page(storage, None, 2, None)
    rest, end = list_page(storage, None, 2, token)
    assert [entry.key.to_object_key() for entry in [*page, *rest]] == [a_key(1), a_key(2), a_key(3)]
    assert end is None


def test_names_are_made_only_of_objects_near_the_page(l1, monkeypatch):
    named = []
    monkeypatch.setattr(l1_listing, "file_name", lambda key: named.append(key) or file_name(key))
    put(l1, *(a_key(number) for number in range(1, 101)))
    _, token = list_page(storage_of(l1), None, 5, None)
    list_page(storage_of(l1), None, 5, token)
    assert len(named) <= 2 * (5 + 2)


def test_nothing_is_an_empty_page(l1):
    assert list_page(storage_of(l1), None, 5, None) == ([], None)


def test_a_full_last_page_has_no_token(l1):
    put(l1, a_key(1), a_key(2))
    assert list_page(storage_of(l1), None, 2, None)[1] is None


def test_only_one_model_when_asked(l1):
    put(l1, a_key(1, "a"), a_key(2, "b"))
    assert [entry.key.model_name for entry in list_page(storage_of(l1), "b", 9, None)[0]] == ["b"]


def test_a_token_of_somebody_else_is_refused(l1):
    with pytest.raises(InvalidRequest, match="token"):
        list_page(storage_of(l1), None, 2, "nonsense")


async def test_lmcaches_service_answers_for_dram_and_leaves_the_rest(l1, monkeypatch):
    monkeypatch.setattr(ObjectService, "list_objects", ObjectService.list_objects)  # given back afterwards
    put(l1, a_key(1))
    l1_listing.serve(storage_of(l1))
    engine = SimpleNamespace(storage_manager=SimpleNamespace(l2_adapters=lambda: []))
    service = ObjectService(engine)
    answer = await service.list_objects(Tier.L1, None, None, 10, None)
    assert (answer["adapter"], answer["shared"], answer["next_page_token"]) == ("dram", False, None)
    assert [entry.key.to_object_key() for entry in answer["entries"]] == [a_key(1)]
    with pytest.raises(Exception, match="no L2 adapters"):
        await service.list_objects(Tier.L2, None, None, 10, None)
