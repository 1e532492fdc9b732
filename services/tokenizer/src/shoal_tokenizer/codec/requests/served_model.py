"""What every API's converter knows of the model: its name, its own sampling defaults, its vocabulary."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from shoal_contracts.errors import BadRequest
from shoal_contracts.v1.common_pb2 import MODEL_NOT_FOUND
from shoal_tokenizer.codec.api import Sampling
from shoal_tokenizer.codec.requests.fields import invalid

MAX_TOKENS = 2**31 - 1
_SHOWN_NAME_CHARS = 200


@dataclass(frozen=True, slots=True)
class ServedModel:
    """Shared by all converters of a codec."""

    name: str
    defaults: Sampling
    vocabulary_tokens: int

    def check_name(self, name: str) -> None:
        """BadRequest (MODEL_NOT_FOUND) for another model."""
        if name != self.name:
            raise BadRequest(
                MODEL_NOT_FOUND,
                f"The model '{name[:_SHOWN_NAME_CHARS]}' does not exist. This server has '{self.name}'.",
                param="model",
            )

    def sampling(
        self, *, ignores_eos: bool = False, logit_bias: Mapping[str, float] | None = None, **asked: Any
    ) -> Sampling:
        """The model's defaults, and over them what was asked for: fields of ``Sampling`` by name, None for not asked.

        A negative seed loses its sign bit, because engines take none: equal seeds stay equal.
        """
        defaults = self.defaults
        sampling = Sampling(
            temperature=defaults.temperature,
            top_p=defaults.top_p,
            top_k=defaults.top_k,
            min_p=defaults.min_p,
            repetition_penalty=defaults.repetition_penalty,
            stop_token_ids=[] if ignores_eos else list(defaults.stop_token_ids),
            ignore_eos=ignores_eos,
            logit_bias=self._logit_bias(logit_bias or {}),
        )
        for name, value in asked.items():
            if value is not None:
                setattr(sampling, name, value & (2**63 - 1) if name == "seed" else value)
        return sampling

    def _logit_bias(self, asked: Mapping[str, float]) -> dict[int, float]:
        bias: dict[int, float] = {}
        for key, value in asked.items():
            if not (key.isascii() and key.isdigit() and len(key) < 10 and int(key) < self.vocabulary_tokens):
                raise invalid(
                    f"Keys of 'logit_bias' are token ids from 0 to {self.vocabulary_tokens - 1}.", "logit_bias"
                )
            bias[int(key)] = value
        return bias
