"""A decode worker dies mid-stream: the client sees a pause, no lost and no repeated token."""

import itertools

import pytest

from shoal_testkit.answers import ChatApi, a_prompt, assert_whole
from shoal_testkit.cluster import Cluster

pytestmark = [pytest.mark.chaos, pytest.mark.timeout(150)]


TOKENS = 80
BEGUN = 20
BOUND_S = 25.0


def _pause_s(arrived_s: list[float]) -> float:
    return max(later - earlier for earlier, later in itertools.pairwise(arrived_s))


async def test_streams_go_on_at_another_worker(cluster: Cluster, chat: ChatApi) -> None:
    prompts = [a_prompt(200), a_prompt(200), *(a_prompt(40) for _ in range(4))]
    answers = chat.ask_all(prompts, TOKENS)
    for answer in answers:
        await answer.has_begun(BEGUN)
    victim = await cluster.whose("decode")
    cluster.kill(victim)
    for answer in answers:
        await answer.read()
        assert_whole(answer, TOKENS)

    resumed = [answer for answer in answers if "decode_resumed" in answer.receipt["fallbacks"]]
    assert resumed
    assert all(answer.receipt["decode"]["instance_id"] != victim for answer in answers)
    print(f"pause: {max(_pause_s(answer.arrived_s) for answer in resumed):.3f} s")
    for answer, undisturbed in zip(answers, await chat.read_all(prompts, TOKENS), strict=True):
        assert (answer.text, answer.tokens) == (undisturbed.text, undisturbed.tokens)


async def test_a_whole_answer_comes_from_another_worker(cluster: Cluster, chat: ChatApi) -> None:
    prompt = a_prompt(40)
    answer = chat.ask(prompt, TOKENS, is_stream=False)
    victim = await cluster.whose("decode")
    cluster.kill(victim)
    await answer.read()

    assert_whole(answer, TOKENS)
    assert answer.receipt["decode"]["instance_id"] != victim
    assert (await chat.ask(prompt, TOKENS).read()).text == answer.text


async def test_the_only_worker_goes_on_after_its_restart(cluster: Cluster, chat: ChatApi) -> None:
    await cluster.stop("decode-2")
    prompt = a_prompt(40)
    answer = chat.ask(prompt, TOKENS)
    await answer.has_begun(BEGUN)
    cluster.kill("decode-1")
    await cluster.start("decode-1")
    await answer.read()

    assert_whole(answer, TOKENS)
    assert answer.receipt["decode"]["instance_id"] == "decode-1"
    print(f"pause: {_pause_s(answer.arrived_s):.3f} s")
    assert (await chat.ask(prompt, TOKENS).read()).text == answer.text


async def test_without_any_worker_the_client_is_told_in_bounded_time(cluster: Cluster, chat: ChatApi) -> None:
    await cluster.stop("decode-2")
    answer = chat.ask(a_prompt(40), TOKENS)
    await answer.has_begun(BEGUN)
    cluster.kill("decode-1")
    await answer.read()

    assert answer.error is not None and answer.error["type"] == "server_error"
    assert (answer.done_marks, answer.finish_reasons) == (1, [])
    assert _pause_s(answer.arrived_s) < BOUND_S
