"""Step 1: body → token ids, and whether the model has room for them.

The tokenizer knows the API and the model's template; only the decode workers know how long a context may be.
An explicit max_tokens that does not fit beside the prompt is refused, as OpenAI does: answering with less than was
asked for would look like the model's own decision.
"""

from dataclasses import replace

from shoal_contracts.errors import BadRequest, Unavailable
from shoal_contracts.v1 import common_pb2 as pb
from shoal_gateway.ports import DecodeFleet, TokenizerFleet
from shoal_gateway.receipt import Receipt
from shoal_gateway.request import Options, Prompt, ServedModel

RETRY_AFTER_S = 5.0


class EncodeStep:
    """Shared by all requests; holds no state of any."""

    def __init__(self, tokenizers: TokenizerFleet, decode: DecodeFleet) -> None:
        self._tokenizers = tokenizers
        self._decode = decode

    async def run(self, body: bytes, options: Options, receipt: Receipt) -> tuple[ServedModel, Prompt]:
        """Raises BadRequest for bodies that cannot be served, Unavailable when nobody can encode or decode."""
        prompt = await self._tokenizers.encode(body, options.request_id)
        if options.traffic_class is not None:
            prompt = replace(prompt, traffic_class=options.traffic_class)
        receipt.model = prompt.model
        receipt.prompt_tokens = prompt.prompt_tokens
        model = self._find_model(prompt.model)
        receipt.pool = model.pool
        check_context(prompt, model)
        return model, prompt

    def _find_model(self, name: str) -> ServedModel:
        for model in self._decode.models():
            if model.name == name:
                return model
        raise Unavailable(
            pb.UNAVAILABLE, f"no decode worker serves the model {name} now; try again", retry_after_s=RETRY_AFTER_S
        )


def check_context(prompt: Prompt, model: ServedModel) -> None:
    """BadRequest (CONTEXT_LENGTH_EXCEEDED) unless prompt and answer fit into the model's context."""
    limit = model.max_context_tokens
    if prompt.prompt_tokens >= limit:
        raise BadRequest(
            pb.CONTEXT_LENGTH_EXCEEDED,
            f"This model's maximum context length is {limit} tokens. However, your messages resulted in "
            f"{prompt.prompt_tokens} tokens. Please reduce the length of the messages.",
            param="messages",
        )
    if prompt.max_tokens is not None and prompt.prompt_tokens + prompt.max_tokens > limit:
        raise BadRequest(
            pb.CONTEXT_LENGTH_EXCEEDED,
            f"This model's maximum context length is {limit} tokens. However, you requested "
            f"{prompt.prompt_tokens + prompt.max_tokens} tokens ({prompt.prompt_tokens} in the messages, "
            f"{prompt.max_tokens} in the completion). Please reduce the length of the messages or completion.",
            param="max_tokens",
        )
