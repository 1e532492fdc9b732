"""What a constraint lets a scripted engine generate: the same grammar that vLLM holds, without a model to choose.

Of the allowed tokens one that leads on to the end is chosen: a stop token where the answer is complete, else of the
tokens that close something the one after which the fewest are allowed. So answers are short, the same for the same
prompt, and end wherever the grammar lets them. xgrammar and transformers are imported with the first constraint.
"""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from shoal_engine.api import ConstraintRefused, EngineFailed

_CLOSERS = ('"', "}", "]", ":", ",", ">", "</", "<", "1", "e")
_MAX_ADDED = 128  # added tokens that are tried: the tags of a family are among them


class Constraints:
    """Compiles for one tokenizer; ``load`` and ``compile`` block, and are called in a thread."""

    def __init__(self, tokenizer_file: Path, vocabulary_tokens: int) -> None:
        self._file = tokenizer_file
        self._vocabulary_tokens = vocabulary_tokens
        self._compiler: Any = None
        self._closers: list[int] = []

    def compile(self, constraint: str, stop_token_ids: frozenset[int]) -> "ConstrainedAnswer":
        """ConstraintRefused for what xgrammar cannot read, EngineFailed without its packages."""
        if self._compiler is None:
            self._load()
        import xgrammar

        if not stop_token_ids:
            raise ConstraintRefused("an answer under a constraint needs a stop token to end with")
        try:
            grammar = self._compiler.compile_structural_tag(constraint)
        except (RuntimeError, ValueError) as exc:
            raise ConstraintRefused("the schema or the tools cannot be enforced") from exc
        matcher = xgrammar.GrammarMatcher(grammar, override_stop_tokens=sorted(stop_token_ids))
        mask = xgrammar.allocate_token_bitmask(1, self._vocabulary_tokens)
        return ConstrainedAnswer(matcher, mask, self._closers, stop_token_ids)

    def _load(self) -> None:
        try:
            import xgrammar
            from transformers import PreTrainedTokenizerFast
        except ImportError as exc:
            raise EngineFailed("a constraint needs xgrammar and transformers: install the engine") from exc
        tokenizer = PreTrainedTokenizerFast(tokenizer_file=str(self._file))
        facts = xgrammar.TokenizerInfo.from_huggingface(tokenizer, vocab_size=self._vocabulary_tokens)
        spec = json.loads(self._file.read_text())
        added = [token["id"] for token in spec.get("added_tokens") or () if not token.get("special")]
        ids = (tokenizer.convert_tokens_to_ids(tokenizer.tokenize(text)[-1]) for text in _CLOSERS)
        self._closers = [*added[:_MAX_ADDED], *ids]
        self._compiler = xgrammar.GrammarCompiler(facts, max_threads=1)


class ConstrainedAnswer:
    """Of one request; used by the step loop."""

    def __init__(self, matcher: Any, mask: Any, closers: Sequence[int], stop_token_ids: frozenset[int]) -> None:
        self._matcher = matcher
        self._mask = mask
        self._closers = closers
        self._stop_token_ids = stop_token_ids

    def choose(self, wish: int) -> int:
        """The next token; ``wish`` picks one where none of those that close is allowed."""
        allowed = self._allowed()
        stops = [token_id for token_id in self._stop_token_ids if allowed[token_id]]
        if stops:
            return min(stops)
        closing = [token_id for token_id in self._closers if allowed[token_id]]
        if closing:
            return min(closing, key=self._width_after)
        others = np.flatnonzero(allowed)
        if not len(others):
            raise RuntimeError("a constraint lets nothing follow")
        return int(others[wish % len(others)])

    def accept(self, token_id: int) -> bool:
        """Go on after it; False when it is not allowed."""
        return bool(self._matcher.accept_token(token_id))

    def _allowed(self) -> npt.NDArray[np.uint8]:
        """For each token 1 where it may follow."""
        self._matcher.fill_next_token_bitmask(self._mask)
        return np.unpackbits(self._mask.numpy().view(np.uint8), bitorder="little")

    def _width_after(self, token_id: int) -> tuple[int, int]:
        if not self._matcher.accept_token(token_id):
            return 1 << 31, token_id
        width = int(self._allowed().sum(dtype=np.int64))
        self._matcher.rollback(1)
        return width, token_id
