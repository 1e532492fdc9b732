"""What the store reads of stored JSON; items themselves go through untouched."""

import json

import pytest

from shoal_contracts.errors import BadRequest
from shoal_gateway.store.items import join_items, list_items, output_items

ITEMS = [{"id": f"item_{number}", "text": "\u0000 ü 😀"} for number in range(5)]
STORED = json.dumps(ITEMS).encode()


def test_items_go_through_as_they_are() -> None:
    body = b'{"output":[{"id":"a", "big":12345678901234567890123}],"id":"resp_1"}'
    assert output_items(body) == b'[{"id":"a", "big":12345678901234567890123}]'
    joined = join_items([b'[{"id":"1"}]', output_items(body), b"[]", b'[{"id":"2"}]'])
    assert joined == b'[{"id":"1"},{"id":"a", "big":12345678901234567890123},{"id":"2"}]'


def test_response_that_was_lost_has_no_output() -> None:
    assert output_items(b'{"id":"resp_1"}') == b"[]"


def page(*, is_newest_first: bool = False, after: str | None = None, limit: int = 20) -> dict[str, object]:
    told: dict[str, object] = json.loads(list_items(STORED, is_newest_first=is_newest_first, after=after, limit=limit))
    return told


def test_list_names_its_ends_and_whether_more_follows() -> None:
    told = page(limit=2)
    assert told == {
        "object": "list",
        "data": ITEMS[:2],
        "first_id": "item_0",
        "last_id": "item_1",
        "has_more": True,
    }
    assert page()["data"] == ITEMS


@pytest.mark.parametrize("is_newest_first", [False, True])
def test_pages_put_together_are_the_whole(is_newest_first: bool) -> None:
    found, after = [], None
    for _ in range(3):
        told = page(is_newest_first=is_newest_first, after=after, limit=2)
        found += told["data"]  # type: ignore[arg-type]
        after = str(told["last_id"])
    assert not told["has_more"]
    assert found == (ITEMS[::-1] if is_newest_first else ITEMS)


def test_page_behind_the_last_item_is_empty() -> None:
    assert page(after="item_4") == {"object": "list", "data": [], "first_id": None, "last_id": None, "has_more": False}


def test_page_behind_no_item_is_refused() -> None:
    with pytest.raises(BadRequest):
        page(after="item_5")
