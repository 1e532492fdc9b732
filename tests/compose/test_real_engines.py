"""The whole system with vLLM and LMCache, as people start it: it answers, hits, comes back, and leaves nothing.

The tests go on where the one before them ended.
"""

import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import openai
import pytest

from shoal_testkit.answers import a_prompt
from shoal_testkit.compose import ComposeProject, Container, compose_project

pytestmark = [pytest.mark.compose, pytest.mark.timeout(600)]

MODEL = "SmolLM2-135M-Instruct"
BLOCK_TOKENS = 128
CLIENTS = 2
ONCE = {"password", "model", "migrate", "migrate-gateway"}
Turns = list[dict[str, str]]


@pytest.fixture(scope="module")
def system(root: Path) -> Iterator[ComposeProject]:
    with compose_project(root) as project:
        project.up("--no-build")
        yield project


@pytest.fixture(scope="module")
def conversation() -> Turns:
    """Grows from test to test; its first turn is three blocks that nobody asked before."""
    return [{"role": "user", "content": a_prompt(3 * BLOCK_TOKENS)}]


def ask(system: ComposeProject, messages: Turns) -> tuple[str, int]:
    """One streamed answer, and how many tokens of its prompt came from the store."""
    client = openai.OpenAI(base_url=f"{system.url}/v1", api_key="none", timeout=120, max_retries=0)
    events = list(
        client.chat.completions.create(
            model=MODEL,
            messages=messages,
            stream=True,
            stream_options={"include_usage": True},
            temperature=0,
            max_tokens=16,
        )
    )
    usage = events[-1].usage
    assert usage is not None and usage.prompt_tokens_details is not None
    text = "".join(event.choices[0].delta.content or "" for event in events if event.choices)
    return text, usage.prompt_tokens_details.cached_tokens or 0


def say(system: ComposeProject, conversation: Turns, then: str) -> int:
    """One turn, and what is asked next; returns how many tokens of the prompt came from the store."""
    text, cached_tokens = ask(system, conversation)
    assert text
    conversation += [{"role": "assistant", "content": text}, {"role": "user", "content": then}]
    return cached_tokens


def test_it_answers_and_the_second_turn_hits(system: ComposeProject, conversation: Turns) -> None:
    assert say(system, conversation, "Go on.") == 0
    assert say(system, conversation, "And then?") >= 3 * BLOCK_TOKENS


def test_every_container_is_what_its_file_promises(system: ComposeProject) -> None:
    for container in system.containers():
        host, name = container.details["HostConfig"], container.service
        assert container.details["Config"]["User"] not in ("", "0", "root", "0:0"), name
        assert (host["Privileged"], host["CapAdd"], host["CapDrop"]) == (False, None, ["ALL"]), name
        assert host["ReadonlyRootfs"] and host["Memory"] > 0 and host["PidsLimit"] > 0, name
        assert host["LogConfig"]["Config"] == {"max-file": "3", "max-size": "10m"}, name
        assert bool(host["PortBindings"]) == (name == "front"), name
        assert (container.status == "exited") == (name in ONCE), name


def test_what_is_killed_comes_back_and_hits_from_the_disk(system: ComposeProject, conversation: Turns) -> None:
    killed = [system.containers(service)[0] for service in ("kvstore", "gateway")]
    for container in killed:
        system.kill(container)
    for container in killed:
        system.wait(lambda container=container: system.container(container.id).restarts == 1, 60)
        system.wait(lambda container=container: system.container(container.id).is_well, 180)
    for service in ("prefill", "decode"):  # they register at the store again by themselves
        (worker,) = system.containers(service)
        system.wait(lambda worker=worker: not has_lost_store(system, worker), 60)
    assert say(system, conversation, "What else?") >= 3 * BLOCK_TOKENS


def test_the_store_starts_again_and_no_request_fails(system: ComposeProject) -> None:
    is_over = threading.Event()

    def ask_on() -> int:
        answers = 0
        while not is_over.is_set():
            ask(system, [{"role": "user", "content": a_prompt(2 * BLOCK_TOKENS)}])
            answers += 1
        return answers

    with ThreadPoolExecutor(CLIENTS) as clients:
        asked = [clients.submit(ask_on) for _ in range(CLIENTS)]
        try:
            system.restart(system.containers("kvstore")[0])
        finally:
            is_over.set()
    assert all(client.result() > 0 for client in asked)


def has_lost_store(system: ComposeProject, worker: Container) -> bool:
    return bool(system.metric(worker, f"shoal_{worker.service}_store_lost"))


def test_down_and_up_again_hits_from_the_volume(system: ComposeProject, conversation: Turns) -> None:
    system.down()
    assert system.left()["containers"] == [] and system.left()["volumes"] != []
    system.up("--no-build")
    assert say(system, conversation, "Thanks.") >= 3 * BLOCK_TOKENS


def test_down_with_volumes_leaves_nothing(system: ComposeProject) -> None:
    system.down("--volumes")
    assert system.left() == {"containers": [], "volumes": [], "networks": []}
