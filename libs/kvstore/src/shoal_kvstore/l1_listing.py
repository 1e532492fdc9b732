"""What is in a server's DRAM, listed over the same HTTP path as the shared level: GET /cache/objects?tier=l1.

LMCache lists only the shared level. The service behind the path is wrapped, and the objects are read from the L1
itself, under its lock: reports can be lost, and this is what finds out. Copies that a load holds only until the
engine has them are left out. Pages are in ascending order of block hashes over all pools, ranks, groups and salts;
each page looks anew, so objects that come and go meanwhile shift nothing.
"""

import asyncio
import heapq
from collections.abc import Callable, Iterator
from functools import wraps
from typing import Any, TypeAlias

from lmcache.v1.distributed.api import KeyEntry, L1BackendType, ObjectKey, Tier
from lmcache.v1.distributed.storage_manager import StorageManager
from lmcache.v1.memory_management import MemoryObj
from lmcache.v1.multiprocess.cache_control.errors import InvalidRequest
from lmcache.v1.multiprocess.cache_control.object_service import ObjectService

from shoal_kvstore.object_file import file_name, key_of

Resident: TypeAlias = tuple[ObjectKey, MemoryObj]


def resident(storage: StorageManager) -> Callable[[], Iterator[Resident]]:
    """Every object that readers can find in DRAM, as it is now; the result may be gone through again."""
    taken = []
    # LMCache offers no way to ask; these names are the only ones of its insides that we use here.
    for l1 in storage._l1_managers_by_id.values():
        with l1._lock:  # everything else in the server waits for it, so nothing is looked at here
            taken.append((list(l1._objects), list(l1._objects.values())))

    def walk() -> Iterator[Resident]:
        for keys, states in taken:
            for key, state in zip(keys, states, strict=True):
                if not state.is_temporary:
                    yield key, state.memory_obj

    return walk


def list_page(
    storage: StorageManager, model_name: str | None, page_size: int, page_token: str | None
) -> tuple[list[KeyEntry], str | None]:
    """One page and the token of the next; InvalidRequest for a token that is none of ours."""
    last = None if page_token is None else key_of(page_token)
    if page_token is not None and last is None:
        raise InvalidRequest("not a page token of this listing")
    walk = resident(storage)

    def wanted(key: ObjectKey) -> bool:
        return model_name is None or key.model_name == model_name

    # Names cost more than hashes, and DRAM may hold millions: only those near the page are made.
    begin = last.chunk_hash if last is not None else b""
    blocks = {key.chunk_hash for key, _ in walk() if key.chunk_hash > begin and wanted(key)}
    end = max(heapq.nsmallest(page_size + 1, blocks), default=begin)
    # By name, as an object may be in two L1s.
    named = {file_name(key): (key, item) for key, item in walk() if begin <= key.chunk_hash <= end and wanted(key)}
    # One more than a page, to know whether there is another.
    names = sorted(name for name in named if page_token is None or name > page_token)[: page_size + 1]
    page, has_more = names[:page_size], len(names) > page_size
    entries = [KeyEntry(key.to_encoded_object_key(), item.get_size()) for key, item in (named[name] for name in page)]
    return entries, page[-1] if has_more else None


def serve(storage: StorageManager) -> None:
    """Answer listings of L1 from ``storage``, the only one of this process."""
    listing = ObjectService.list_objects

    @wraps(listing)
    async def list_objects(
        service: ObjectService,
        tier: Tier,
        adapter_selector: str | None,
        model_name: str | None,
        page_size: int,
        page_token: str | None,
    ) -> dict[str, Any]:
        if tier is not Tier.L1:
            shared: dict[str, Any] = await listing(service, tier, adapter_selector, model_name, page_size, page_token)
            return shared
        page = await asyncio.to_thread(list_page, storage, model_name, page_size, page_token)
        entries, next_page_token = page
        return {
            "adapter": L1BackendType.DRAM.value,
            "shared": False,
            "entries": entries,
            "next_page_token": next_page_token,
        }

    ObjectService.list_objects = list_objects
