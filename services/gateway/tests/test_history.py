"""Where a next turn diverges from what was generated, as far as this gateway remembers."""

from shoal_contracts.ids import pack_u32
from shoal_gateway.history import RECORD_BYTES, AnswerHistory
from shoal_gateway.request import Blocks
from shoal_kvblocks import block_hashes

BLOCK = 4
PROMPT = list(range(10))
ANSWER = [100, 101, 102, 103, 104, 105]


def blocks_of(tokens: list[int]) -> Blocks:
    return Blocks(block_hashes(pack_u32(tokens), BLOCK), BLOCK)


def a_history(max_bytes: int = 10_000) -> AnswerHistory:
    history = AnswerHistory(max_bytes)
    history.remember("pool", blocks_of(PROMPT), pack_u32(PROMPT), pack_u32(ANSWER))
    return history


def diverged_at(history: AnswerHistory, tokens: list[int], pool: str = "pool") -> int | None:
    return history.diverged_at_token(pool, blocks_of(tokens), pack_u32(tokens))


def test_history_that_was_encoded_as_it_was_generated_does_not_differ() -> None:
    assert diverged_at(a_history(), [*PROMPT, *ANSWER, 7, 8, 9]) is None


def test_first_token_that_differs_is_named() -> None:
    assert diverged_at(a_history(), [*PROMPT, *ANSWER[:2], 7, *ANSWER[3:]]) == len(PROMPT) + 2
    assert diverged_at(a_history(), [*PROMPT, 7, 7]) == len(PROMPT)


def test_another_conversation_after_the_same_blocks_is_not_compared() -> None:
    assert diverged_at(a_history(), [*PROMPT[:8], 55, 56, 57]) is None
    assert diverged_at(a_history(), [*PROMPT, 7], pool="another") is None


def test_prompt_within_a_block_is_not_remembered() -> None:
    history = AnswerHistory(10_000)
    history.remember("pool", blocks_of([1, 2]), pack_u32([1, 2]), pack_u32(ANSWER))
    assert len(history) == 0


def test_memory_is_bounded_and_evicts_the_oldest() -> None:
    history = AnswerHistory(3 * (RECORD_BYTES + 4 * (BLOCK + len(ANSWER))))
    prompts = [[seed, *PROMPT] for seed in range(1, 6)]
    for prompt in prompts:
        history.remember("pool", blocks_of(prompt), pack_u32(prompt), pack_u32(ANSWER))
    assert len(history) == 3
    assert diverged_at(history, [*prompts[0], 7]) is None
    assert diverged_at(history, [*prompts[-1], 7]) == len(prompts[-1])


def test_no_memory_is_allowed() -> None:
    assert len(a_history(max_bytes=0)) == 0
