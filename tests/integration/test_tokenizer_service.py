"""The tokenizer as a process would run it: real gRPC and NATS, a tiny model folder."""

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import grpc.aio
import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

from shoal_contracts.errors import BadRequest
from shoal_contracts.ids import pack_u32, unpack_u32
from shoal_contracts.v1 import common_pb2 as pb
from shoal_contracts.v1 import fleet_pb2, tokenizer_pb2_grpc
from shoal_contracts.v1 import tokenizer_pb2 as tpb
from shoal_runtime.grpc import call, connect
from shoal_runtime.nats import connect as connect_nats
from shoal_runtime.presence import Fleet
from shoal_runtime.process import running
from shoal_testkit.servers import NatsRunning
from shoal_tokenizer import metrics
from shoal_tokenizer.service import TokenizerService
from shoal_tokenizer.settings import Settings

TEMPLATE = (
    "{% for m in messages %}{{ '<|im_start|>' + m['role'] + '\\n' + m['content'] + '<|im_end|>\\n' }}{% endfor %}"
    "{{ '<|im_start|>assistant\\n' }}"
)
TIMEOUT_S = 20.0


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("model")
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=300,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        special_tokens=["<|im_start|>", "<|im_end|>"],
        show_progress=False,
    )
    tokenizer.train_from_iterator(["the quick brown fox"] * 9, trainer)
    tokenizer.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps({"eos_token": "<|im_end|>", "chat_template": TEMPLATE}))
    return folder


@asynccontextmanager
async def tokenizer_running(
    nats: NatsRunning, folder: Path, **settings: object
) -> AsyncIterator[tuple[TokenizerService, grpc.aio.Channel]]:
    values = {"model": str(folder), "served_name": "tiny", "nats_url": nats.url, "drain_s": 5.0} | settings
    configured = Settings(**values)  # type: ignore[arg-type]
    service = TokenizerService(configured)
    async with running(service, configured) as process:
        bus = await connect_nats(process, nats.url)
        fleet = Fleet(process, bus, [fleet_pb2.TOKENIZER])
        await fleet.start()
        while (member := fleet.get(process.instance_id)) is None:
            await asyncio.sleep(0.02)
        assert member.is_ready and member.model is not None and member.model.name == "tiny"
        channel = connect(member.address)
        yield service, channel
        await channel.close()


def encode_request(text: str = "fox", **fields: object) -> tpb.EncodeRequest:
    body = {"model": "tiny", "messages": [{"role": "user", "content": text}]} | fields
    return tpb.EncodeRequest(api=tpb.CHAT_COMPLETIONS, body=json.dumps(body).encode(), request_id="r1", created_s=1)


async def test_a_request_travels_there_and_back(nats: NatsRunning, folder: Path) -> None:
    async with tokenizer_running(nats, folder) as (_service, channel):
        stub = tokenizer_pb2_grpc.TokenizerStub(channel)
        encoded = await call(stub.Encode, encode_request(stream=True, stop=["quick"]), timeout_s=TIMEOUT_S)
        assert encoded.stream and list(encoded.sampling.stop_token_ids) == [1]
        answer = Tokenizer.from_file(str(folder / "tokenizer.json")).encode("the quick brown").ids

        stream = stub.Converse()
        opened = tpb.OpenStream(stream_id=7, output_state=encoded.output_state, prompt_tokens=9)
        await stream.write(
            tpb.ConverseRequest(
                open=[opened],
                stream_ids=pack_u32([7]),
                counts=pack_u32([len(answer)]),
                token_ids=pack_u32(answer),
            )
        )
        first = await stream.read()
        assert [(s.stream_id, s.stop_string) for s in first.stopped] == [(7, "quick")]
        assert list(unpack_u32(first.stream_ids)) == [7] and b'"content":"the "' in first.events
        await stream.write(tpb.ConverseRequest(finish=[tpb.FinishStream(stream_id=7, reason=pb.CANCEL)]))
        last = await stream.read()
        assert b'"finish_reason":"stop"' in last.events and last.events.endswith(b"data: [DONE]\n\n")
        assert last.closed[0].completion_tokens == unpack_u32(first.parsed_tokens)[0]
        await stream.done_writing()
        assert await stream.read() is grpc.aio.EOF


async def test_errors_keep_their_code_and_field_over_the_wire(nats: NatsRunning, folder: Path) -> None:
    async with tokenizer_running(nats, folder) as (_service, channel):
        stub = tokenizer_pb2_grpc.TokenizerStub(channel)
        with pytest.raises(BadRequest) as caught:
            await call(stub.Encode, encode_request(max_tokens=0), timeout_s=TIMEOUT_S)
        assert (caught.value.code, caught.value.param) == (pb.INVALID_REQUEST, "max_tokens")
        with pytest.raises(BadRequest) as caught:
            await call(stub.Count, encode_request(model="other"), timeout_s=TIMEOUT_S)
        assert caught.value.code == pb.MODEL_NOT_FOUND


async def test_a_million_tokens_fit_into_one_reply(nats: NatsRunning, folder: Path) -> None:
    async with tokenizer_running(nats, folder) as (_service, channel):
        stub = tokenizer_pb2_grpc.TokenizerStub(channel)
        encoded = await call(stub.Encode, encode_request("\n" * 1_000_000), timeout_s=TIMEOUT_S)
        assert len(encoded.token_ids) > 4_000_000


async def test_answers_of_a_broken_connection_are_forgotten(nats: NatsRunning, folder: Path) -> None:
    async with tokenizer_running(nats, folder) as (_service, channel):
        stub = tokenizer_pb2_grpc.TokenizerStub(channel)
        encoded = await call(stub.Encode, encode_request(stream=True), timeout_s=TIMEOUT_S)
        stream = stub.Converse()
        opened = tpb.OpenStream(stream_id=1, output_state=encoded.output_state)
        await stream.write(
            tpb.ConverseRequest(open=[opened], stream_ids=pack_u32([1]), counts=pack_u32([1]), token_ids=pack_u32([50]))
        )
        await stream.read()
        assert metrics.CATALOGUE.value("answers_open") == 1
        stream.cancel()
        async with asyncio.timeout(TIMEOUT_S):
            while metrics.CATALOGUE.value("answers_open"):
                await asyncio.sleep(0.01)


async def test_draining_waits_for_open_answers_and_takes_no_new_ones(nats: NatsRunning, folder: Path) -> None:
    async with asyncio.timeout(TIMEOUT_S):
        async with tokenizer_running(nats, folder) as (service, channel):
            stub = tokenizer_pb2_grpc.TokenizerStub(channel)
            encoded = await call(stub.Encode, encode_request(), timeout_s=TIMEOUT_S)
            stream = stub.Converse()
            opened = tpb.OpenStream(stream_id=1, output_state=encoded.output_state)
            await stream.write(tpb.ConverseRequest(open=[opened]))
            while not metrics.CATALOGUE.value("answers_open"):
                await asyncio.sleep(0.01)
            late = tpb.OpenStream(stream_id=2, output_state=encoded.output_state)
            draining = asyncio.ensure_future(service.drain())
            await asyncio.sleep(0)
            await stream.write(tpb.ConverseRequest(open=[late]))
            refused = await stream.read()
            assert refused.failed[0].failure.code == pb.DRAINING and not draining.done()
            await stream.write(tpb.ConverseRequest(finish=[tpb.FinishStream(stream_id=1, reason=pb.STOP)]))
            assert (await stream.read()).closed[0].stream_id == 1
            await draining
            stream.cancel()
