"""What ``Sampling.constraint`` promises; part of ``EngineContract``.

The engine under test has the tiny tokenizer's vocabulary (``write_tiny_tokenizer``); ids beyond it spell nothing.
"""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer

from shoal_engine.api import MAX_CONSTRAINT_CHARS, ConstraintRefused, Engine, FinishReason, Sampling
from shoal_testkit.suites.engine_lab import GREEDY, Answer, EngineLab

STOP = 2
MAX_TOKENS = 200
LITTLE_SPACE = {"max_whitespace_cnt": 1}  # models that know nothing write blanks for ever
CHOICE = {
    "type": "object",
    "properties": {"is_sure": {"type": "boolean"}, "side": {"enum": ["left", "right"]}},
    "required": ["is_sure", "side"],
    "additionalProperties": False,
}


def tag(form: dict[str, Any]) -> str:
    return json.dumps({"type": "structural_tag", "format": form})


def of_schema(schema: object) -> dict[str, Any]:
    return {"type": "json_schema", "json_schema": schema, **LITTLE_SPACE}


def under(form: dict[str, Any]) -> Sampling:
    return replace(GREEDY, stop_token_ids=(STOP,), constraint=tag(form))


@pytest.mark.asyncio(loop_scope="class")
class ConstraintContract(EngineLab):
    """Needs what ``EngineContract`` needs, and the tokenizer."""

    tokenizer_folder: Path  # where write_tiny_tokenizer wrote it

    async def constrained(self, engine: Engine, form: dict[str, Any], prompt: list[int] | None = None) -> Answer:
        request = self.a_request(prompt or self.prompt(20), under(form), max_tokens=MAX_TOKENS)
        return await self.read(engine, request)

    def text(self, answer: Answer) -> str:
        tokenizer = Tokenizer.from_file(str(self.tokenizer_folder / "tokenizer.json"))
        return str(tokenizer.decode(answer.token_ids, skip_special_tokens=False))

    async def test_an_answer_is_json_of_its_schema_and_ends_by_itself(self, engine: Engine) -> None:
        for _ in range(3):
            answer = await self.constrained(engine, of_schema(CHOICE))
            assert (answer.finish, answer.stop_token_id) == (FinishReason.STOP, STOP)
            told = json.loads(self.text(answer))
            assert set(told) == {"is_sure", "side"}
            assert isinstance(told["is_sure"], bool) and told["side"] in ("left", "right")

    async def test_a_regular_expression_holds(self, engine: Engine) -> None:
        answer = await self.constrained(engine, {"type": "regex", "pattern": "(wave|tide)-[0-9]{2}"})
        assert answer.finish is FinishReason.STOP
        word, number = self.text(answer).split("-")
        assert word in ("wave", "tide") and len(number) == 2 and number.isdigit()

    async def test_a_required_call_is_made(self, engine: Engine) -> None:
        call = {"type": "tag", "begin": '<call name="pick">', "content": of_schema(CHOICE), "end": "</call>"}
        text = self.text(await self.constrained(engine, call))
        assert text.startswith('<call name="pick">{') and text.endswith("}</call>")

    async def test_a_hit_changes_nothing(self, engine: Engine) -> None:
        prompt = self.prompt(2 * engine.description.block_tokens + 3)
        cold = await self.constrained(engine, of_schema(CHOICE), prompt)
        hit = await self.constrained(engine, of_schema(CHOICE), prompt)
        assert hit.hit_tokens >= 2 * engine.description.block_tokens > cold.hit_tokens
        assert hit.token_ids == cold.token_ids

    async def test_max_tokens_ends_it_where_it_is(self, engine: Engine) -> None:
        request = self.a_request(self.prompt(20), under(of_schema(CHOICE)), max_tokens=3)
        answer = await self.read(engine, request)
        assert (answer.finish, len(answer.token_ids)) == (FinishReason.LENGTH, 3)
        assert self.text(answer).startswith("{")

    @pytest.mark.parametrize(
        "constraint",
        [
            "",
            "{",
            "null",
            tag({"type": "unheard_of"}),
            tag({"type": "regex", "pattern": "(a"}),
            tag(of_schema({"$ref": "https://example.org/schema.json"})),
            tag(of_schema({"type": "string", "description": "x" * MAX_CONSTRAINT_CHARS})),
        ],
        ids=["empty", "no json", "null", "unknown kind", "bad expression", "foreign reference", "too long"],
    )
    async def test_what_cannot_be_held_is_refused_and_the_engine_serves_on(
        self, engine: Engine, constraint: str
    ) -> None:
        sampling = replace(GREEDY, stop_token_ids=(STOP,), constraint=constraint)
        with pytest.raises(ConstraintRefused):
            await self.read(engine, self.a_request(self.prompt(20), sampling))
        assert len((await self.read(engine, self.a_request(self.prompt(20)))).token_ids) == 8

    async def test_resumed_tokens_and_a_constraint_are_refused(self, engine: Engine) -> None:
        request = replace(self.a_request(self.prompt(20), under(of_schema(CHOICE))), resumed_token_ids=[7, 8])
        with pytest.raises(ConstraintRefused, match="cannot go on"):
            await self.read(engine, request)

    async def test_prefill_does_not_look_at_it(self, engine: Engine) -> None:
        bad = replace(GREEDY, constraint="{")
        prompt = self.prompt(engine.description.block_tokens + 9)
        done = await engine.prefill(self.a_request(prompt, bad))
        assert done.miss_tokens == len(prompt)
