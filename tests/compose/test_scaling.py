"""Services that come, go and start again one by one while people are served: replicas take work, and nothing is lost.

Scripted engines, so that the river between the containers is what is tested. The tests go on where the one before
them ended: one of each, then two, then one again.
"""

import asyncio
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from shoal_testkit.answers import Answer, ChatApi, a_prompt, assert_whole
from shoal_testkit.compose import ComposeProject, compose_project
from shoal_testkit.tiny_tokenizer import write_tiny_tokenizer
from shoal_testkit.waits import until

pytestmark = [pytest.mark.compose, pytest.mark.timeout(600), pytest.mark.asyncio(loop_scope="module")]

CLIENTS = 4
TOKENS = 40
# What each replica counts when it has had its part of the work.
WORK = {
    "gateway": "shoal_gateway_requests_total",
    "tokenizer": "shoal_tokenizer_answers_total",
    "kvindex": "shoal_kvindex_match_seconds_count",
    "prefill": "shoal_prefill_jobs_total",
    "decode": "shoal_decode_streams_total",
}


@pytest.fixture(scope="module")
def system(root: Path, scripted_file: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[ComposeProject]:
    models = tmp_path_factory.mktemp("models")
    write_tiny_tokenizer(models / "served")
    for path in (models, models.parent, models / "served", *(models / "served").iterdir()):
        path.chmod(0o755)  # for the user in the container
    with compose_project(root, scripted_file, TINY_MODEL=str(models), SHOAL_DRAIN_S="10") as project:
        project.run("build", "--quiet", "prefill", "decode", timeout_s=600)
        project.up("--no-build", timeout_s=180)
        yield project


@asynccontextmanager
async def a_crowd(system: ComposeProject) -> AsyncIterator[list[Answer]]:
    """Clients that ask all the time, each request on a connection of its own; at the end every answer was whole."""
    chat, answers, is_over = ChatApi(system.url, "tiny"), [], asyncio.Event()

    async def ask_on() -> None:
        while not is_over.is_set():
            answer = chat.ask(a_prompt(200), TOKENS)
            answers.append(await answer.read())
            assert_whole(answer, TOKENS)

    clients = [asyncio.create_task(ask_on()) for _ in range(CLIENTS)]
    try:
        await until(lambda: len(answers) >= CLIENTS, 60)
        yield answers
    finally:
        is_over.set()
        await asyncio.gather(*clients)


async def scale(system: ComposeProject, count: int) -> None:
    numbers = [argument for service in WORK for argument in ("--scale", f"{service}={count}")]
    await asyncio.to_thread(system.up, "--no-build", "--no-recreate", *numbers)


def work(system: ComposeProject) -> dict[str, float]:
    """What each replica has done so far."""
    return {
        f"{service} {container.id[:12]}": system.metric(container, name)
        for service, name in WORK.items()
        for container in system.containers(service)
    }


async def test_new_replicas_take_their_part(system: ComposeProject) -> None:
    async with a_crowd(system):
        await scale(system, 2)
        before = await asyncio.to_thread(work, system)
        assert len(before) == 2 * len(WORK)

        async def idle() -> list[str]:
            now = await asyncio.to_thread(work, system)
            return [name for name, done in now.items() if done < before[name] + 2]

        for _ in range(15):
            if not (waiting := await idle()):
                break
            await asyncio.sleep(1)
        assert waiting == []


@pytest.mark.parametrize("service", [*WORK, "nats", "postgres"])
async def test_each_starts_again_and_no_request_fails(system: ComposeProject, service: str) -> None:
    async with a_crowd(system) as answers:
        for container in system.containers(service):
            await asyncio.to_thread(system.restart, container)
            served = len(answers)
            await until(lambda served=served: len(answers) >= served + CLIENTS, 60)


async def test_replicas_leave_and_no_request_is_lost(system: ComposeProject) -> None:
    async with a_crowd(system) as answers:
        await scale(system, 1)
        assert {service: len(system.containers(service)) for service in WORK} == dict.fromkeys(WORK, 1)
        served = len(answers)
        await until(lambda: len(answers) >= served + CLIENTS, 60)


async def test_a_client_that_leaves_is_noticed_through_the_front(system: ComposeProject) -> None:
    chat, (decode,) = ChatApi(system.url, "tiny"), system.containers("decode")
    running = "shoal_decode_running_requests"
    streaming, waiting = chat.ask(a_prompt(20), 4000), chat.ask(a_prompt(20), 4000, is_stream=False)

    async def runs(count: int) -> None:
        async with asyncio.timeout(10):
            while await asyncio.to_thread(system.metric, decode, running) != count:
                await asyncio.sleep(0.1)

    await streaming.has_begun()
    await runs(2)
    await streaming.leave()
    await waiting.leave()
    await runs(0)


async def test_no_process_logged_an_error(system: ComposeProject) -> None:
    lines = {service: system.logs(service).splitlines() for service in WORK}
    assert all(lines.values())
    assert [line for told in lines.values() for line in told if '"level":"ERROR"' in line] == []
