import pytest
from hypothesis import given
from hypothesis import strategies as st

from shoal_contracts.ids import count_u32, new_instance_id, new_request_id, pack_u32, unpack_u32
from shoal_contracts.subjects import prefill_answer

U32 = st.integers(0, 2**32 - 1)


@given(st.lists(U32))
def test_packed_numbers_come_back(values):
    packed = pack_u32(values)
    assert list(unpack_u32(packed)) == values
    assert count_u32(packed) == len(values)


@given(st.lists(U32), st.lists(U32))
def test_packed_columns_join_by_concatenation(left, right):
    assert pack_u32(left) + pack_u32(right) == pack_u32(left + right)


def test_the_packed_form_is_little_endian():
    assert pack_u32([1, 0x01020304]) == bytes([1, 0, 0, 0, 4, 3, 2, 1])


@given(st.binary().filter(lambda packed: len(packed) % 4))
def test_a_torn_column_is_refused(packed):
    with pytest.raises(ValueError, match="multiple of 4"):
        unpack_u32(packed)


@pytest.mark.parametrize("value", [-1, 2**32])
def test_numbers_outside_are_refused(value):
    with pytest.raises(OverflowError):
        pack_u32([value])


def test_ids_are_fresh_and_fit_into_a_subject():
    assert len({new_request_id() for _ in range(100)}) == 100
    assert len({prefill_answer(new_instance_id("gateway")) for _ in range(100)}) == 100
