"""Generated ids of a DeepSeek model -> text, reasoning and calls, by deepseek-recipe's stream processor.

recipe decides from token ids what is reasoning, a call or text, and tells it in the form of Chat Completions chunks;
its own stop strings, call ids and usage are not used but for the number of reasoning tokens. Arguments pass a guard,
because recipe puts what the model wrote for a number into the JSON as it is. What recipe is fed is whole characters
(see feed.py), so that it never waits for the end of one.

Leading newlines of an answer are kept where the prompt ends in it; behind reasoning recipe leaves them out.
"""

from collections.abc import Sequence
from typing import TypeAlias

import deepseek_recipe as recipe
import msgspec

from shoal_tokenizer.codec.api import (
    AnswerShape,
    AnswerStart,
    CallArguments,
    CallBegin,
    CallEnd,
    Delta,
    Part,
    ShownToken,
    TokenLogprob,
)
from shoal_tokenizer.codec.arguments import ArgumentsGuard
from shoal_tokenizer.codec.deepseek.dialects import ControlTokens
from shoal_tokenizer.codec.deepseek.feed import Feed, TokenKinds
from shoal_tokenizer.codec.shown_answer import ShownAnswer
from shoal_tokenizer.codec.text_parser import NO_LOGPROB, show_token
from shoal_tokenizer.codec.vocabulary import Vocabulary

_STAGES = {
    AnswerStart.TEXT: recipe.ThinkingInitialStage.ContentContinuation,
    AnswerStart.REASONING: recipe.ThinkingInitialStage.ReasoningContinuation,
    AnswerStart.CALLS: None,
}


_AnyChunk: TypeAlias = recipe.ChatCompletionChunk | recipe.ResponsesStreamEvent | recipe.MessagesStreamEvent


class _Function(msgspec.Struct):
    name: str | None = None
    arguments: str = ""


class _Call(msgspec.Struct):
    function: _Function


class _Delta(msgspec.Struct):
    content: str | None = None
    reasoning_content: str | None = None
    tool_calls: list[_Call] = []


class _Logprob(msgspec.Struct):
    logprob: float


class _Logprobs(msgspec.Struct):
    content: list[_Logprob] = []


class _Choice(msgspec.Struct):
    delta: _Delta
    logprobs: _Logprobs | None = None


class _CompletionDetails(msgspec.Struct):
    reasoning_tokens: int = 0


class _Usage(msgspec.Struct):
    completion_tokens_details: _CompletionDetails | None = None


class _Chunk(msgspec.Struct):
    choices: list[_Choice]
    usage: _Usage | None = None


_decode = msgspec.json.Decoder(_Chunk).decode


class RecipeModel:
    """What the parsers of one model share."""

    def __init__(
        self,
        vocabulary: Vocabulary,
        tokenizer: recipe.Tokenizer,
        version: recipe.ModelVersion,
        tokens: ControlTokens,
    ) -> None:
        self.vocabulary = vocabulary
        self.tokenizer = tokenizer
        self.tokens = tokens
        self.kinds = TokenKinds(vocabulary, left_out=(tokens.end_of_turn,))
        # Chunks derive from a request; nothing of this one shows in what is read of them.
        self._request = recipe.ConversationRequest(recipe.Conversation([recipe.UserMessage("")]), version)

    def processor(self, shape: AnswerShape) -> recipe.StreamProcessor:
        options = recipe.ParsingOptions(
            parse_tool_calls=shape.has_tools,
            starts_in_tool_calls=shape.start is AnswerStart.CALLS,
            thinking_initial_stage=_STAGES[shape.start],
        )
        generator = recipe.ChatCompletionRequest.chunk_generator(self._request, "", "")
        return recipe.StreamProcessor(generator, options, self.tokenizer)


class DeepseekParser:
    """``OutputParser`` of one answer; used by one task."""

    def __init__(self, model: RecipeModel, shape: AnswerShape) -> None:
        self.stop_string: str | None = None
        self.completion_tokens = 0
        self.reasoning_tokens = 0
        self._model = model
        self._processor = model.processor(shape)
        self._feed = Feed(model.kinds, numbers=shape.has_logprobs)
        self._out = ShownAnswer(shape.stop_strings)
        self._is_single_file = bool(shape.stop_strings) or shape.has_logprobs  # one token after the other
        self._tokens: list[ShownToken] | None = [] if shape.has_logprobs else None
        self._call: _OpenCall | None = None
        self._is_over = False

    def push(self, token_ids: Sequence[int], logprobs: Sequence[TokenLogprob]) -> Delta:
        if self.stop_string is not None:
            return Delta()
        if not self._is_single_file:
            self.completion_tokens += len(token_ids)
            self._push(token_ids)
            return self._out.take()
        for index, token_id in enumerate(token_ids):
            self.completion_tokens += 1
            if self._tokens is not None:
                logprob = logprobs[index] if index < len(logprobs) else NO_LOGPROB
                self._tokens.append(show_token(self._model.vocabulary, token_id, logprob))
            self._push((token_id,))
            self.stop_string = self._out.stop_string
            if self.stop_string is not None:
                break
        return self._out.take()

    def close(self, *, is_cut: bool = True) -> Delta:
        if self._is_over:
            return Delta()
        self._is_over = True
        self._read(self._processor.push(recipe.InferenceChunk.finish(recipe.InferenceFinishReason.Stop)))
        if self.stop_string is not None:
            return Delta()
        if self._call is not None and (self._call.looks_closed or not is_cut):
            self._end_call()
        self._out.end_text()
        return self._out.take()

    def _push(self, token_ids: Sequence[int]) -> None:
        for chunk in self._feed.push(token_ids):
            self._read(self._processor.push(chunk))

    def _read(self, chunks: Sequence[_AnyChunk]) -> None:
        for encoded in chunks:
            chunk = _decode(encoded.to_json())
            if chunk.usage is not None and chunk.usage.completion_tokens_details is not None:
                # Of what it was fed, where a broken character may be more tokens than the model generated.
                fed = chunk.usage.completion_tokens_details.reasoning_tokens
                self.reasoning_tokens = min(fed, self.completion_tokens)
            if self._out.stop_string is None:
                self._read_choice(chunk.choices[0])

    def _read_choice(self, choice: _Choice) -> None:
        delta = choice.delta
        if delta.reasoning_content:
            self._out.think(delta.reasoning_content)
            self._feed.replaced.clear()
        if delta.content:
            self._end_call()
            self._out.show(delta.content, self._tokens_of(choice.logprobs))
        for call in delta.tool_calls:
            self._read_call(call.function)

    def _read_call(self, function: _Function) -> None:
        if function.name is not None:
            self._end_call()
            self._out.end_text()
            self._out.call([CallBegin(function.name)])
            self._call = _OpenCall()
        if self._call is not None and function.arguments:
            self._out.call(self._call.push(function.arguments))
            if self._call.is_complete:
                self._end_call()

    def _end_call(self) -> None:
        if self._call is not None:
            self._out.call(self._call.close())
            self._call = None

    def _tokens_of(self, logprobs: _Logprobs | None) -> list[tuple[int, ShownToken]]:
        """The tokens of a piece of text, and where in it each begins. Several are one character."""
        if self._tokens is None:
            return []
        numbers = sorted([*self._feed.replaced, *(int(entry.logprob) for entry in (logprobs or _Logprobs()).content)])
        self._feed.replaced.clear()
        return [(0, self._tokens[number]) for number in numbers]


class _OpenCall:
    """A call whose arguments are not complete yet."""

    def __init__(self) -> None:
        self._guard = ArgumentsGuard()
        self._last = ""

    @property
    def is_complete(self) -> bool:
        return self._guard.is_complete

    @property
    def looks_closed(self) -> bool:
        """For an answer that is over: whether recipe closed the object, be it within a string that the model left open,
        or there is a mistake, whose rest would be lost."""
        return self._last == "}" or self._guard.is_mending

    def push(self, text: str) -> list[Part]:
        self._last = text[-1]
        shown = self._guard.push(text)
        return [CallArguments(shown)] if shown else []

    def close(self) -> list[Part]:
        rest = self._guard.close()
        return [CallArguments(rest), CallEnd()] if rest else [CallEnd()]
