"""`shoal store` and `shoal explain` find kvindex by its beats on a real NATS and ask it over gRPC."""

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager

import pytest

from shoal_contracts.errors import BadRequest, Unavailable
from shoal_contracts.v1 import common_pb2 as pb
from shoal_contracts.v1 import fleet_pb2, kvindex_pb2, kvindex_pb2_grpc
from shoal_local.cli import NOTHING_RUNS, main
from shoal_runtime import grpc
from shoal_runtime.nats import connect
from shoal_runtime.presence import Announcer, Presence
from shoal_runtime.process import new_process
from shoal_runtime.servers import free_port
from shoal_runtime.settings import ServiceSettings
from shoal_testkit.servers import NatsRunning

KNOWN = "req-known"


class Answering(kvindex_pb2_grpc.KvIndexServicer):
    """An index that knows one request, or is still loading."""

    def __init__(self, instance_id: str, *, is_loaded: bool = True) -> None:
        self._instance_id = instance_id
        self._is_loaded = is_loaded

    async def Overview(self, request: kvindex_pb2.OverviewRequest, context: object) -> kvindex_pb2.OverviewReply:
        if not self._is_loaded:
            raise Unavailable(pb.UNAVAILABLE, "the directory of stored blocks is still loading")
        return kvindex_pb2.OverviewReply(blocks=4321, lease_holder="kvindex-1", is_complete=True)

    async def Explain(self, request: kvindex_pb2.ExplainRequest, context: object) -> kvindex_pb2.ExplainReply:
        if request.request_id != KNOWN or self._instance_id != "kvindex-2":
            raise BadRequest(pb.NOT_FOUND, "this instance does not remember the request")
        return kvindex_pb2.ExplainReply(
            whole_blocks=15, hit_blocks=12, now_hit_blocks=15, reason=kvindex_pb2.NEVER_STORED, block_tokens=128
        )


@asynccontextmanager
async def announced(nats_url: str, instance_id: str, *, is_loaded: bool = True) -> AsyncIterator[str]:
    """One instance; yields its address."""
    process = new_process("kvindex", ServiceSettings(nats_url=nats_url, instance_id=instance_id))
    try:
        server = grpc.create_server(process)
        kvindex_pb2_grpc.add_KvIndexServicer_to_server(Answering(instance_id, is_loaded=is_loaded), server)
        address = await grpc.serve(process, server)
        connection = await connect(process, nats_url)
        await Announcer(process, connection, fleet_pb2.KVINDEX, lambda: Presence(address=address)).start()
        yield address
    finally:
        await process.tasks.close()
        await process.stack.aclose()


async def shoal(*arguments: str) -> int:
    """The command; it has an event loop of its own."""
    return await asyncio.to_thread(main, arguments)


async def test_both_instances_are_asked_and_shown(nats: NatsRunning, capsys: pytest.CaptureFixture[str]) -> None:
    async with announced(nats.url, "kvindex-1"), announced(nats.url, "kvindex-2", is_loaded=False):
        assert await shoal("store", "--nats", nats.url) == 0
    page = capsys.readouterr().out
    assert "directory     4,321 blocks" in page
    assert "NO ANSWER" in page
    assert "the directory of stored blocks is still loading" in page


async def test_programs_get_every_answer(
    nats: NatsRunning, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SHOAL_NATS_URL", nats.url)
    async with announced(nats.url, "kvindex-1") as address, announced(nats.url, "kvindex-2", is_loaded=False):
        assert await shoal("store", "--json") == 0
    told = json.loads(capsys.readouterr().out)["instances"]
    assert [one["instance_id"] for one in told] == ["kvindex-1", "kvindex-2"]
    assert told[0]["address"] == address
    assert told[0]["overview"]["blocks"] == 4321
    assert told[0]["overview"]["shared_capacity_bytes"] is None
    assert (told[1]["overview"], bool(told[1]["failure"])) == (None, True)


async def test_the_instance_that_remembers_explains(nats: NatsRunning, capsys: pytest.CaptureFixture[str]) -> None:
    async with AsyncExitStack() as stack:
        for number in (1, 2, 3):
            await stack.enter_async_context(announced(nats.url, f"kvindex-{number}"))
        assert await shoal("explain", KNOWN, "--nats", nats.url) == 0
        page = capsys.readouterr().out
        assert "Block 12 (tokens 1,536-1,663) was never stored" in page
        assert "by kvindex-2" in page
        assert await shoal("explain", KNOWN, "--nats", nats.url, "--json") == 0
        told = json.loads(capsys.readouterr().out)
        assert (told["instance_id"], told["explanation"]["reason"]) == ("kvindex-2", "NEVER_STORED")
        assert await shoal("explain", "req-other", "--nats", nats.url) == 1
        assert "No instance of kvindex remembers request req-other" in capsys.readouterr().err


async def test_what_is_not_there_is_told(nats: NatsRunning, capsys: pytest.CaptureFixture[str]) -> None:
    assert await shoal("store", "--nats", nats.url) == 1
    assert "No instance of kvindex is there" in capsys.readouterr().err
    assert await shoal("store", "--nats", f"nats://me:secret@127.0.0.1:{free_port()}") == 1
    told = capsys.readouterr().err
    assert "does not answer" in told
    assert "secret" not in told


async def test_an_instance_that_is_gone_is_told_with_its_address(
    nats: NatsRunning, capsys: pytest.CaptureFixture[str]
) -> None:
    async with announced(nats.url, "kvindex-1", is_loaded=False) as address:
        assert await shoal("store", "--nats", nats.url) == 1
    told = " ".join(capsys.readouterr().err.split())
    assert f"kvindex-1 at {address}: the directory of stored blocks is still loading" in told


async def test_without_a_system_and_without_an_address_nothing_runs(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: object
) -> None:
    monkeypatch.delenv("SHOAL_NATS_URL", raising=False)
    monkeypatch.setenv("SHOAL_HOME", str(tmp_path))
    assert await shoal("explain", KNOWN) == NOTHING_RUNS
    assert "--nats URL" in capsys.readouterr().out
