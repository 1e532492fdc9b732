"""Step 1: body → token ids, and whether the model has room for them.

The tokenizer knows the API and the model's template; only the decode workers know how long a context may be, and only
the gateway has the stored responses that a body may go on with: the tokenizer asks for their items.
An explicit max_tokens that does not fit beside the prompt is refused, as OpenAI does: answering with less than was
asked for would look like the model's own decision.
"""

from collections.abc import Iterable
from dataclasses import replace

from shoal_contracts.errors import BadRequest, Bug, Unavailable
from shoal_contracts.v1 import common_pb2 as pb
from shoal_gateway.ports import DecodeFleet, ResponseStore, TokenizerFleet
from shoal_gateway.receipt import Receipt
from shoal_gateway.request import BodyToEncode, HistoryNeeded, Options, Prompt, ServedModel
from shoal_policy import DecodeWorkerView

RETRY_AFTER_S = 5.0


class EncodeStep:
    """Shared by all requests; holds no state of any."""

    def __init__(self, tokenizers: TokenizerFleet, decode: DecodeFleet, responses: ResponseStore) -> None:
        self._tokenizers = tokenizers
        self._decode = decode
        self._responses = responses

    async def run(self, body: bytes, options: Options, receipt: Receipt) -> tuple[ServedModel, Prompt]:
        """Raises BadRequest for bodies that cannot be served, Unavailable when nobody can encode or decode."""
        prompt = await self._encode(BodyToEncode(options.api, body, options.request_id), options.tenant)
        if options.traffic_class is not None:
            prompt = replace(prompt, traffic_class=options.traffic_class)
        receipt.model = prompt.model
        receipt.prompt_tokens = prompt.prompt_tokens
        receipt.notes.extend(prompt.notes)
        model = self._find_model(prompt.model)
        receipt.pool = model.pool
        check_context(prompt, model)
        if prompt.other_choices:
            check_choices(prompt, self._decode.workers(model.pool))
        return model, prompt

    async def _encode(self, work: BodyToEncode, tenant: str) -> Prompt:
        encoded = await self._tokenizers.encode(work)
        if isinstance(encoded, HistoryNeeded):
            history = await self._responses.history(tenant, encoded.response_id)
            encoded = await self._tokenizers.encode(replace(work, history=history))
        if isinstance(encoded, HistoryNeeded):
            raise Bug(pb.BUG, "the tokenizer asks twice for the same history")
        return encoded

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


def check_choices(prompt: Prompt, workers: Iterable[DecodeWorkerView]) -> None:
    """BadRequest for more answers than can ever run at once: they would wait for each other in vain."""
    most = [worker.max_running_requests for worker in workers]
    room = sum(count for count in most if count is not None)
    if None not in most and room < 1 + len(prompt.other_choices):
        raise BadRequest(
            pb.UNSUPPORTED, f"No more than {room} answers can be generated at once here: lower 'n'.", param="n"
        )
