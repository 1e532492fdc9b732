"""Generated ids of a model with reasoning or tool calls -> text, reasoning and calls.

One token after the other, so that what comes out does not depend on how they were batched. Decoded text waits until it
is decided what it is: an end of it that may become a tag, white space that belongs to a tag, the head of a call. The
wait is bounded; what turns out to be no call is text, so nothing is lost.

A token counts as reasoning where it begins: the closing tag does, and the opening tag where it was generated.
"""

from collections.abc import Callable, Sequence

from shoal_tokenizer.codec.api import AnswerShape, AnswerStart, Delta, OutputParser, Part, TokenLogprob
from shoal_tokenizer.codec.chat_template.calls import CallReader
from shoal_tokenizer.codec.chat_template.formats import AnswerFormats
from shoal_tokenizer.codec.chat_template.held_text import HeldText
from shoal_tokenizer.codec.chat_template.tag import Tag
from shoal_tokenizer.codec.shown_answer import ShownAnswer
from shoal_tokenizer.codec.text_parser import NO_LOGPROB, TextParser, longest_end
from shoal_tokenizer.codec.vocabulary import Vocabulary

_SPACE = " \t\n\r"
_MAX_SPACE_CHARS = 256  # of white space that may belong to a tag


def new_parser(vocabulary: Vocabulary, formats: AnswerFormats, shape: AnswerShape) -> OutputParser:
    """The parser of one answer; that of plain text where it can be nothing else."""
    calls = formats.calls if shape.has_tools else None
    if formats.reasoning is None and calls is None:
        return TextParser(vocabulary, shape.stop_strings, shape.has_logprobs)
    return AnswerParser(vocabulary, AnswerFormats(formats.reasoning, calls), shape)


class AnswerParser:
    """``OutputParser`` of one answer; used by one task."""

    def __init__(self, vocabulary: Vocabulary, formats: AnswerFormats, shape: AnswerShape) -> None:
        self.stop_string: str | None = None
        self.completion_tokens = 0
        self.reasoning_tokens = 0
        self._shape = shape
        self._held = HeldText(vocabulary, _tags_of_tokens(formats), wants_tokens=shape.has_logprobs)
        self._out = ShownAnswer(shape.stop_strings)
        self._reasoning = formats.reasoning
        self._calls = formats.calls
        self._reader: CallReader | None = None
        self._read_chars = 0  # of the held text that the reader has
        self._tag_chars = 0  # of the held text before the call itself
        self._lead = ""  # white space that belongs to the tag before
        self._is_start = True  # nothing was decided yet
        self._is_blank = True  # nothing but white space since the beginning or the last tag
        self._is_behind_call = False
        self._step: Callable[[], bool] = self._in_text
        if shape.start is AnswerStart.REASONING and self._reasoning is not None:
            self._lead = self._reasoning.space
            self._step = self._in_reasoning

    def push(self, token_ids: Sequence[int], logprobs: Sequence[TokenLogprob]) -> Delta:
        for index, token_id in enumerate(token_ids):
            if self.stop_string is not None:
                break
            self.completion_tokens += 1
            if self._step == self._in_reasoning:
                self.reasoning_tokens += 1
            self._held.add(token_id, logprobs[index] if index < len(logprobs) else NO_LOGPROB)
            self._decide()
            self.stop_string = self._out.stop_string
        return self._out.take()

    def close(self, *, is_cut: bool = True) -> Delta:
        if self.stop_string is not None:
            return Delta()
        while self._reader is not None:
            reader = self._reader
            if not self._take(reader.close() if is_cut or not reader.is_begun else reader.end(), -1):
                return self._out.take()  # cut within a call
            self._decide()
        if self._step == self._in_reasoning:
            self._out.think(self._held.drop(len(self._held.text)))
        else:
            self._show(0 if self._is_blank and self._is_behind_call else len(self._held.text))
            self._out.end_text()
        self.stop_string = self._out.stop_string
        return self._out.take()

    def _decide(self) -> None:
        while self._held.text and self._step() and self._out.stop_string is None:
            pass

    # Each step decides about the beginning of the held text. True: it went on to another step.

    def _in_text(self) -> bool:
        if not self._is_lead_over():
            return False
        if self._is_blank:
            begins = self._look_behind_space()
            if begins is not False:
                return begins is True
        place, tag = self._first_tag()
        if tag is None:
            self._show(len(self._held.text) - self._undecided_chars())
            return False
        self._show_before(place, tag)
        if self._reasoning is not None and tag is self._reasoning.open:
            self.reasoning_tokens += 1
            self._begin_reasoning(len(tag.text))
        else:
            self._begin_call(len(tag.text))
        return True

    def _in_reasoning(self) -> bool:
        form, held = self._reasoning, self._held
        assert form is not None
        if not self._is_lead_over() or (self._is_start and not self._is_opening_over()):
            return False
        place = held.find(form.close)
        if place < 0:
            spelled = "" if form.close.token_id is not None else form.close.text
            keep = max(longest_end(held.text, form.close_space + spelled), longest_end(held.text, spelled))
            self._out.think(held.drop(len(held.text) - keep))
            return False
        self._out.think(held.text[:place].removesuffix(form.close_space))
        held.drop(place + len(form.close.text))
        self._begin_text(form.after)
        return True

    def _in_call(self) -> bool:
        calls, held, reader = self._calls, self._held, self._reader
        assert calls is not None and reader is not None
        end = held.find(calls.end) if calls.end is not None and calls.end.token_id is not None else -1
        parts = reader.push(held.text[self._read_chars : end if end >= 0 else None])
        self._read_chars = end if end >= 0 else len(held.text)
        if end >= 0 and not (reader.is_text or reader.is_over):
            parts += reader.end()
        return self._take(parts, end)

    def _take(self, parts: list[Part], end: int) -> bool:
        """What a reader read; ``end``: where its closing token stands."""
        calls, held, reader = self._calls, self._held, self._reader
        assert calls is not None and reader is not None
        if reader.is_text:
            self._reader = None
            self._step = self._in_text
            self._is_blank = False
            self._show(self._tag_chars)  # what follows the tag is looked at again
            return True
        self._out.call(parts)
        if reader.is_begun:
            held.drop(self._read_chars - len(reader.rest))
            self._read_chars = 0
        if not reader.is_over:
            return False
        if end >= 0 and calls.end is not None and not reader.rest:
            held.drop(len(calls.end.text))
        self._begin_text("")
        self._is_behind_call = True
        return True

    def _is_lead_over(self) -> bool:
        """Leave out the white space that belongs to the tag before; False while there may be more of it."""
        if not self._lead:
            return True
        text, count = self._held.text, 0
        while count < min(len(text), len(self._lead)) and text[count] == self._lead[count]:
            count += 1
        self._held.drop(count)
        self._lead = "" if self._held.text else self._lead[count:]
        return bool(self._held.text)

    def _is_opening_over(self) -> bool:
        """The prompt opened the reasoning; models that open it again mean the same one."""
        form, held = self._reasoning, self._held
        assert form is not None
        if form.open.token_id is None and held.text != form.open.text and form.open.text.startswith(held.text):
            return False
        self._is_start = False
        if held.find(form.open) != 0:
            return True
        held.drop(len(form.open.text))
        self._lead = form.space
        return self._is_lead_over() and bool(held.text)

    def _look_behind_space(self) -> bool | None:
        """Whether something begins behind the white space that a text begins with. None: more text decides."""
        separators = self._separators()
        left = self._held.text.lstrip(separators)
        space = len(self._held.text) - len(left)
        if not left:
            return None if space <= _MAX_SPACE_CHARS else False
        opening = self._reasoning.open if self._reasoning is not None and self._is_start else None
        if opening is not None and opening.token_id is None:
            if left.startswith(opening.text):
                self.reasoning_tokens = self.completion_tokens
                self._begin_reasoning(space + len(opening.text))
                return True
            if opening.text.startswith(left):
                return None
        if self._calls is not None and self._calls.is_bare and left[0] == "{":
            self._begin_call(space)
            return True
        return False

    def _separators(self) -> str:
        """What may stand between two calls."""
        return _SPACE + (self._calls.separators if self._calls is not None and self._is_behind_call else "")

    def _first_tag(self) -> tuple[int, Tag | None]:
        """Where the held text stops being text. Of reasoning only a token does: text may speak of its tag."""
        first: tuple[int, Tag | None] = (-1, None)
        opening = self._reasoning.open if self._reasoning is not None else None
        for tag in (
            opening if opening is not None and opening.token_id is not None else None,
            self._calls.begin if self._calls is not None else None,
        ):
            place = self._held.find(tag) if tag is not None else -1
            if place >= 0 and (first[1] is None or place < first[0]):
                first = place, tag
        return first

    def _undecided_chars(self) -> int:
        """How much of the text's end may belong to the tag of a call."""
        calls = self._calls
        if calls is None or calls.begin is None:
            return 0
        text = self._held.text
        spelled = "" if calls.begin.token_id is not None else calls.begin.text
        return max(longest_end(text, calls.before + spelled), longest_end(text, spelled))

    def _show(self, chars: int) -> None:
        if chars > 0:
            self._is_blank = self._is_start = self._is_behind_call = False
            tokens = self._held.take_tokens(chars)
            self._out.show(self._held.drop(chars), tokens)

    def _show_before(self, place: int, tag: Tag) -> None:
        """The text before a tag, without the white space that belongs to that."""
        shown = self._held.text[:place]
        if self._calls is not None and tag is self._calls.begin:
            shown = shown.removesuffix(self._calls.before)
            shown = "" if self._is_blank and not shown.strip(self._separators()) else shown
        self._show(len(shown))
        self._out.end_text()
        self._held.drop(place - len(shown))

    def _begin_reasoning(self, chars: int) -> None:
        """``chars`` opened it."""
        assert self._reasoning is not None
        self._held.drop(chars)
        self._is_start = False
        self._lead = self._reasoning.space
        self._step = self._in_reasoning

    def _begin_text(self, lead: str) -> None:
        self._lead = lead
        self._is_blank = True
        self._is_start = False
        self._reader = None
        self._step = self._in_text

    def _begin_call(self, tag_chars: int) -> None:
        """The tag stays held: if this is no call, it is text."""
        assert self._calls is not None
        self._reader = self._calls.reader(self._shape)
        self._read_chars = self._tag_chars = tag_chars
        self._step = self._in_call


def _tags_of_tokens(formats: AnswerFormats) -> dict[int, Tag]:
    """The tags that are tokens of their own."""
    reasoning, calls = formats.reasoning, formats.calls
    tags = [reasoning.open, reasoning.close] if reasoning is not None else []
    tags += [tag for tag in (calls.begin, calls.end) if tag is not None] if calls is not None else []
    return {tag.token_id: tag for tag in tags if tag.token_id is not None}
