"""Whether a prompt and the answer asked for fit into the model's context."""

from dataclasses import replace

import pytest

from shoal_contracts.errors import BadRequest
from shoal_contracts.ids import pack_u32
from shoal_contracts.v1 import common_pb2 as pb
from shoal_gateway.request import Choice, Prompt, ServedModel
from shoal_gateway.steps.encode import check_choices, check_context
from shoal_policy import DecodeWorkerView

MODEL = ServedModel("m", "pool", 16, 100)


def a_prompt(prompt_tokens: int, max_tokens: int | None = None) -> Prompt:
    return Prompt("m", pack_u32(range(prompt_tokens)), b"", b"", is_streaming=False, max_tokens=max_tokens)


@pytest.mark.parametrize(("prompt_tokens", "max_tokens"), [(1, None), (99, None), (99, 1), (60, 40)])
def test_what_fits_is_let_through(prompt_tokens: int, max_tokens: int | None) -> None:
    check_context(a_prompt(prompt_tokens, max_tokens), MODEL)


@pytest.mark.parametrize(
    ("prompt_tokens", "max_tokens", "param"),
    [(100, None, "messages"), (101, None, "messages"), (100, 1, "messages"), (60, 41, "max_tokens")],
)
def test_what_does_not_fit_is_told_with_both_numbers(prompt_tokens: int, max_tokens: int | None, param: str) -> None:
    with pytest.raises(BadRequest) as refused:
        check_context(a_prompt(prompt_tokens, max_tokens), MODEL)
    assert refused.value.code == pb.CONTEXT_LENGTH_EXCEEDED
    assert refused.value.param == param
    assert "100" in refused.value.message
    assert str(prompt_tokens) in refused.value.message


@pytest.mark.parametrize(("rooms", "is_refused"), [((2, 1), False), ((2,), True), ((1, 1), True), ((1, None), False)])
def test_more_answers_than_can_run_at_once_are_refused(rooms: tuple[int | None, ...], is_refused: bool) -> None:
    prompt = replace(a_prompt(10), other_choices=(Choice(b"", b""),) * 2)
    workers = [DecodeWorkerView(f"d{n}", max_running_requests=room) for n, room in enumerate(rooms)]
    if is_refused:
        with pytest.raises(BadRequest, match="lower 'n'") as refused:
            check_choices(prompt, workers)
        assert refused.value.param == "n"
    else:
        check_choices(prompt, workers)
