"""`shoal doctor` finds each fault that is planted into a real system or machine, by its name, and says what to do.

One cluster for all tests; each plants one fault, looks by the command itself, and mends it.
"""

import asyncio
import json
import shutil
import socket
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path

import nats
import pytest
import pytest_asyncio

from shoal_contracts import subjects
from shoal_contracts.v1 import fleet_pb2, prefill_pb2
from shoal_local.cli import main
from shoal_local.home import ChildRecord, Home, Record
from shoal_local.processes import ProcessName, boot_id, name_of
from shoal_model.prepare import seal
from shoal_runtime.clock import SystemClock
from shoal_runtime.nats import MAX_PAYLOAD_BYTES, connect
from shoal_runtime.presence import Announcer, Presence
from shoal_runtime.process import new_process
from shoal_runtime.queues import JobQueue
from shoal_runtime.servers import LOOPBACK, free_port, nats_server
from shoal_runtime.settings import ServiceSettings
from shoal_testkit.cluster import Cluster, Shape, cluster_running
from shoal_testkit.processes import process_running

Findings = dict[str, list[dict[str, str]]]
Doctor = Callable[..., Awaitable[tuple[int, Findings]]]

pytestmark = pytest.mark.timeout(180)


@pytest_asyncio.fixture(scope="module", loop_scope="session")
async def shared_cluster() -> AsyncIterator[Cluster]:
    async with cluster_running(Shape(tokenizers=1, prefill=1, decode=1)) as cluster:
        yield cluster


@pytest_asyncio.fixture
async def cluster(shared_cluster: Cluster) -> Cluster:
    await shared_cluster.heal()
    return shared_cluster


@pytest.fixture
def doctor(capsys: pytest.CaptureFixture[str]) -> Doctor:
    """The command; its exit code, and what it found by name."""

    async def look(*arguments: str) -> tuple[int, Findings]:
        capsys.readouterr()
        code = await asyncio.to_thread(main, ("doctor", "--json", *arguments))
        found: Findings = {}
        for section in json.loads(capsys.readouterr().out)["sections"]:
            for finding in section["findings"]:
                found.setdefault(finding["name"], []).append(finding)
        return code, found

    return look


@pytest.fixture
def home(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Home:
    """A machine on which nothing runs, with a port and folders of its own."""
    for name, value in {
        "SHOAL_HOME": str(tmp_path / "home"),
        "SHOAL_MODELS_DIR": str(tmp_path / "models"),
        "SHOAL_GATEWAY_PORT": str(free_port()),
        "SHOAL_ENGINE_KIND": "scripted",
    }.items():
        monkeypatch.setenv(name, value)
    for name in ("SHOAL_NATS_URL", "SHOAL_URL", "SHOAL_MODEL"):
        monkeypatch.delenv(name, raising=False)
    return Home(tmp_path / "home")


def wrong(found: Findings) -> dict[str, str]:
    """What was found wrong, with the advice, by name."""
    return {
        name: f"{finding['found']} → {finding['advice']}"
        for name, findings in found.items()
        for finding in findings
        if finding["verdict"] == "wrong"
    }


def verdicts(found: Findings, *names: str) -> list[str]:
    return [finding["verdict"] for name in names for finding in found[name]]


def of(cluster: Cluster) -> tuple[str, ...]:
    return ("--nats", cluster.commands["nats"].url, "--url", cluster.url)


@asynccontextmanager
async def restarted(cluster: Cluster, name: str, **changes: str) -> AsyncIterator[None]:
    """One process with other variables, long enough for the gateway to have heard of it; gone at the end."""
    await cluster.stop(name)
    with cluster.changed(name, **changes):
        await cluster.start(name)
    await asyncio.sleep(2)
    yield
    await cluster.stop(name)


# A system that is well


async def test_nothing_is_wrong_with_a_system_that_is_well(cluster: Cluster, doctor: Doctor) -> None:
    for _ in range(10):
        code, found = await doctor(*of(cluster))
        assert (code, wrong(found)) == (0, {})
        odd = [finding for findings in found.values() for finding in findings if finding["verdict"] != "ok"]
        if not odd:
            break
        await asyncio.sleep(2)  # it has just started: the index may not have listed every store yet
    assert odd == []
    assert "decode-1 loaded" in found["block loaded"][0]["found"]


async def test_the_page_says_what_was_not_looked_at(
    cluster: Cluster, home: Home, capsys: pytest.CaptureFixture[str]
) -> None:
    assert await asyncio.to_thread(main, ("doctor", "--nats", cluster.commands["nats"].url)) == 0
    page = capsys.readouterr().out
    assert "not looked at: the gateway, and that a stored block is loaded: give --url URL" in page
    assert "not looked at: this machine" in page
    assert "Nothing is wrong" in page


# Faults of a system


async def test_a_nats_that_is_down(doctor: Doctor) -> None:
    code, found = await doctor("--nats", f"nats://{LOOPBACK}:{free_port()}")
    assert code == 1
    assert "Start NATS" in wrong(found)["nats"]
    assert set(verdicts(found, "jetstream", "instances", "pools", "queues", "index")) == {"unknown"}


@asynccontextmanager
async def nats_configured(folder: Path, *lines: str) -> AsyncIterator[str]:
    """A NATS with a configuration of these lines alone."""
    server = nats_server(folder, free_port())
    listen = server.url.removeprefix("nats://")
    (folder / "nats.conf").write_text("\n".join([f"listen: {listen}", *lines]))
    async with process_running(server, folder):
        yield server.url


async def test_a_nats_that_refuses_long_prompts(doctor: Doctor, tmp_path: Path) -> None:
    async with nats_configured(tmp_path, f"jetstream {{ store_dir: {json.dumps(str(tmp_path / 'js'))} }}") as url:
        code, found = await doctor("--nats", url)
    assert code == 1
    assert f"max_payload: {MAX_PAYLOAD_BYTES}" in wrong(found)["nats payload"]
    assert verdicts(found, "nats", "jetstream") == ["ok", "ok"]


async def test_a_nats_without_jetstream(doctor: Doctor, tmp_path: Path) -> None:
    async with nats_configured(tmp_path, f"max_payload: {MAX_PAYLOAD_BYTES}") as url:
        code, found = await doctor("--nats", url)
    assert code == 1
    assert "jetstream {" in wrong(found)["jetstream"]
    assert verdicts(found, "nats", "nats payload", "queues") == ["ok", "ok", "unknown"]


async def test_no_prefill_worker(cluster: Cluster, doctor: Doctor) -> None:
    await cluster.stop("prefill-1")
    _, found = await doctor(*of(cluster))
    assert "none is heard" in wrong(found)["prefill instances"]
    assert "no prefill worker is in pool" in wrong(found)["pools"]
    assert "no_prefill_worker" in wrong(found)["block stored"]


async def test_no_decode_worker_because_it_stands_still(cluster: Cluster, doctor: Doctor) -> None:
    cluster.freeze("decode-1")
    try:
        await asyncio.sleep(1.5)
        code, found = await doctor(*of(cluster))
    finally:
        cluster.thaw("decode-1")
    assert code == 1
    assert "Start one, or see why it ended or stands still" in wrong(found)["decode instances"]
    assert "not ready at stage decode" in wrong(found)["gateway"]
    assert verdicts(found, "request", "block loaded") == ["unknown", "unknown"]


async def test_no_kvindex(cluster: Cluster, doctor: Doctor) -> None:
    cluster.kill("kvindex")
    _, found = await doctor(*of(cluster))
    assert "nothing that is stored is found" in wrong(found)["kvindex instances"]
    assert "no kvindex answers" in wrong(found)["index"]
    assert verdicts(found, "postgres", "stores") == ["unknown", "unknown"]
    assert "stage kvindex" in wrong(found)["gateway"]


async def test_no_postgres(cluster: Cluster, doctor: Doctor) -> None:
    await cluster.stop("postgres")
    await asyncio.sleep(6)  # until the lease has lapsed
    _, found = await doctor("--nats", cluster.commands["nats"].url)
    assert "Start Postgres" in wrong(found)["postgres"]


async def test_workers_of_different_pools(cluster: Cluster, doctor: Doctor) -> None:
    async with restarted(cluster, "decode-1", SHOAL_ENGINE_DTYPE="float16"):
        _, found = await doctor(*of(cluster))
    faults = [finding for finding in found["pools"] if finding["verdict"] == "wrong"]
    assert "prefill (prefill-1) is for the same model, but in another pool" in faults[0]["found"]
    assert "Compare how they are set" in faults[0]["advice"]


async def test_a_tokenizer_of_another_model(cluster: Cluster, doctor: Doctor) -> None:
    async with restarted(cluster, "tokenizer-1", SHOAL_TOKENIZER_SERVED_NAME="huge"):
        _, found = await doctor("--nats", cluster.commands["nats"].url)
    assert "SHOAL_TOKENIZER_SERVED_NAME=tiny" in wrong(found)["pools"]


NOWHERE = f"http://{LOOPBACK}:1"
SHORT = {"SHOAL_PREFILL_HANDOFF_WAIT_MS": "300"}


async def test_reports_that_do_not_reach_the_index(cluster: Cluster, doctor: Doctor) -> None:
    async with restarted(cluster, "prefill-1", SHOAL_SCRIPTED_COORDINATOR_URL=NOWHERE, **SHORT):
        _, found = await doctor(*of(cluster))
    assert "SHOAL_KVSTORE_COORDINATOR_URL" in wrong(found)["block reported"]
    assert verdicts(found, "block stored", "block loaded") == ["ok", "ok"]


async def test_a_decode_worker_that_cannot_load(cluster: Cluster, doctor: Doctor, tmp_path: Path) -> None:
    async with restarted(cluster, "decode-1", SHOAL_SCRIPTED_SHARED_FOLDER=str(tmp_path)):
        _, found = await doctor(*of(cluster))
    assert "decode-1 loaded 0 of 256 tokens that prefill-1 had stored" in wrong(found)["block loaded"]
    assert verdicts(found, "block stored", "block reported") == ["ok", "ok"]


async def test_a_store_that_nobody_else_sees(cluster: Cluster, doctor: Doctor, tmp_path: Path) -> None:
    changes = {"SHOAL_SCRIPTED_COORDINATOR_URL": NOWHERE, "SHOAL_SCRIPTED_SHARED_FOLDER": str(tmp_path)}
    async with restarted(cluster, "prefill-1", **changes, **SHORT):
        _, found = await doctor(*of(cluster))
    assert "neither the index nor decode-1 saw its blocks" in wrong(found)["block stored"]
    assert verdicts(found, "block reported", "block loaded") == ["unknown", "unknown"]


class SteppedClock(SystemClock):
    """An hour behind."""

    def now(self) -> float:
        return super().now() - 3600


async def test_a_clock_that_is_an_hour_behind(cluster: Cluster, doctor: Doctor) -> None:
    url = cluster.commands["nats"].url
    process = new_process("gateway", ServiceSettings(nats_url=url, instance_id="gateway-late"), SteppedClock())
    try:
        connection = await connect(process, url)
        await Announcer(process, connection, fleet_pb2.GATEWAY, Presence).start()
        code, found = await doctor("--nats", url)
    finally:
        await process.tasks.close()
        await process.stack.aclose()
    assert code == 1
    assert "gateway-late is 1 h behind" in wrong(found)["clocks"]
    assert "NTP" in wrong(found)["clocks"]


async def test_an_instance_of_another_version_and_one_that_cannot_be_reached(cluster: Cluster, doctor: Doctor) -> None:
    url = cluster.commands["nats"].url
    beat = fleet_pb2.Beat(
        instance_id="tokenizer-old",
        incarnation=1,
        role=fleet_pb2.TOKENIZER,
        address=f"{LOOPBACK}:{free_port()}",
        is_ready=True,
        version="0.0.0+src.old",
    )
    client = await nats.connect(url)

    async def beat_on() -> None:
        while True:
            await client.publish(subjects.beat(beat.role, beat.instance_id), beat.SerializeToString())
            await asyncio.sleep(0.5)

    beating = asyncio.create_task(beat_on())
    try:
        _, found = await doctor("--nats", url)
    finally:
        beating.cancel()
        await asyncio.wait([beating])
        await client.close()
    assert "0.0.0+src.old is tokenizer-old" in wrong(found)["versions"]
    assert "beats, but nobody answers: tokenizer-old at" in wrong(found)["addresses"]
    assert "ADVERTISE_HOST" in wrong(found)["addresses"]


async def test_jobs_that_nobody_takes(cluster: Cluster, doctor: Doctor) -> None:
    url = cluster.commands["nats"].url
    process = new_process("gateway", ServiceSettings(nats_url=url))
    pool, tier = "gone", "long"
    try:
        connection = await connect(process, url)
        queue = JobQueue(
            connection,
            stream=subjects.prefill_stream(pool, tier),
            subject=subjects.prefill_job(pool, tier),
            job_type=prefill_pb2.PrefillJob,
        )
        await queue.ensure()
        await queue.publish(prefill_pb2.PrefillJob(), job_id="job-1", attempt=1, expires_s=60)
        _, found = await doctor("--nats", url)
        await connection.jetstream.delete_stream(subjects.prefill_stream(pool, tier))
    finally:
        await process.tasks.close()
        await process.stack.aclose()
    assert "1 job in pool gone, tier long wait" in wrong(found)["queues"]
    assert "SHOAL_PREFILL_TIERS" in wrong(found)["queues"]


async def test_a_gateway_address_of_another_program(doctor: Doctor) -> None:
    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        writer.write(b"HTTP/1.1 200 OK\r\ncontent-length: 5\r\nconnection: close\r\n\r\nhello")
        writer.close()

    server = await asyncio.start_server(answer, LOOPBACK, 0)
    async with server:
        code, found = await doctor("--url", f"http://{LOOPBACK}:{server.sockets[0].getsockname()[1]}")
    assert code == 1
    assert "no Shoal gateway" in wrong(found)["gateway"]


# Faults of this machine


async def test_a_machine_on_which_nothing_runs(home: Home, doctor: Doctor) -> None:
    code, found = await doctor()
    assert (code, wrong(found)) == (0, {})
    assert "not prepared yet" in found["model"][0]["found"]


async def test_the_port_of_the_gateway_taken_by_another_program(
    home: Home, doctor: Doctor, monkeypatch: pytest.MonkeyPatch
) -> None:
    with socket.create_server((LOOPBACK, 0)) as listener:
        port = listener.getsockname()[1]
        monkeypatch.setenv("SHOAL_GATEWAY_PORT", str(port))
        code, found = await doctor()
    assert code == 1
    assert f"port {port} on {LOOPBACK} is taken by" in wrong(found)["gateway port"]
    assert "SHOAL_GATEWAY_PORT" in wrong(found)["gateway port"]


async def test_the_port_of_the_gateway_taken_by_another_shoal(
    cluster: Cluster, home: Home, doctor: Doctor, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SHOAL_GATEWAY_PORT", cluster.url.rpartition(":")[2])
    _, found = await doctor()
    assert "taken by another Shoal" in wrong(found)["gateway port"]


async def test_a_prepared_model_with_one_byte_altered(home: Home, doctor: Doctor) -> None:
    folder = home.folder.parent / "models" / "SmolLM2-135M-Instruct"
    folder.mkdir(parents=True)
    weights = folder / "model.safetensors"
    weights.write_bytes(bytes(4096))
    seal(folder)
    _, found = await doctor()
    assert verdicts(found, "model") == ["ok"]
    with weights.open("r+b") as file:
        file.seek(1000)
        file.write(b"\x01")
    code, found = await doctor()
    assert code == 1
    assert "model.safetensors has changed" in wrong(found)["model"]
    assert "rm -r" in wrong(found)["model"]


async def test_a_package_in_another_version(
    home: Home, doctor: Doctor, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    metadata = tmp_path / "site" / "pydantic-1.0.dist-info"
    metadata.mkdir(parents=True)
    (metadata / "METADATA").write_text("Metadata-Version: 2.1\nName: pydantic\nVersion: 1.0\n")
    monkeypatch.syspath_prepend(str(metadata.parent))
    code, found = await doctor()
    assert code == 1
    assert "pydantic is 1.0, pinned is" in wrong(found)["packages"]
    assert "make setup" in wrong(found)["packages"]


async def test_a_home_that_cannot_be_used(home: Home, doctor: Doctor, monkeypatch: pytest.MonkeyPatch) -> None:
    home.folder.parent.joinpath("file").write_text("")
    monkeypatch.setenv("SHOAL_HOME", str(home.folder.parent / "file" / "home"))
    code, found = await doctor()
    assert code == 1
    assert "Set SHOAL_HOME to a folder that is yours" in wrong(found)["home"]


async def test_what_a_dead_system_left_behind(home: Home, doctor: Doctor) -> None:
    home.folder.mkdir()
    home.write(Record(boot_id(), ProcessName(1, 1), "http://127.0.0.1:1", "nats://127.0.0.1:1", 0.0))
    code, found = await doctor()
    assert code == 0
    assert (found["home"][0]["verdict"], "shoal down" in found["home"][0]["advice"]) == ("warning", True)


async def test_a_process_of_this_home_that_was_stopped(cluster: Cluster, home: Home, doctor: Doctor) -> None:
    """The record of the home names the cluster's processes, as `shoal up` would."""
    names = {name: name_of(running.process.pid) for name, running in cluster.running.items()}
    own = name_of(names["gateway"].pid) if names["gateway"] else None
    assert own is not None
    children = [ChildRecord(name.split("-")[0], process, "ready", 0, 1.0) for name, process in names.items()]
    home.folder.mkdir()
    record = Record(boot_id(), own, cluster.url, cluster.commands["nats"].url, 0.0, children)
    home.write(record)
    _, found = await doctor()
    assert wrong(found) == {}
    cluster.freeze("prefill-1")
    try:
        code, found = await doctor()
    finally:
        cluster.thaw("prefill-1")
    pid = cluster.running["prefill-1"].process.pid
    assert code == 1
    assert f"prefill stands still: pid {pid} was stopped" in wrong(found)["processes"]
    assert f"kill -CONT {pid}" in wrong(found)["processes"]
    home.write(replace(record, children=[replace(children[0], name=None, state="failed"), *children[1:]]))
    _, found = await doctor()
    assert "nats is failed" in wrong(found)["processes"]
    shutil.rmtree(home.folder)
