"""`shoal bench`: a short load against a running system, for a first idea of how fast it is.

Conversations run side by side, each one turn after the other. Every conversation begins with text of its own that was
never sent before, so that first turns miss; later turns repeat the history, so that it hits.

Exit codes: 0 measured, 1 with errors, 130 stopped by Ctrl-C; what was measured is shown in each case.
"""

import asyncio
import random
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import httpx
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.text import Text

from shoal_local.answer import (
    CHAT_PATH,
    MODELS_PATH,
    AnswerFailed,
    StreamedAnswer,
    client_options,
    failure_of_response,
    failure_of_transport,
    served_model,
)
from shoal_local.bench_report import Measured, Sample, bench_tables
from shoal_local.terminal import output, remarks

INTERRUPTED = 130
TEXT = (
    "sea ship wind wave sand rock bird fish tree leaf hill road town door wall lamp book page line word "
    "king cook farm corn milk salt rain snow moon star night day hand foot head back time year week hour"
)
WORDS = tuple(TEXT.split())  # each is about one token in every vocabulary
NEXT_QUESTION = "Go on about the {word}."


@dataclass(frozen=True, slots=True)
class BenchOptions:
    """What was asked for on the command line."""

    url: str
    model: str = ""  # "": the one that is served
    requests: int = 8
    concurrency: int = 2
    prompt_tokens: int = 300
    max_tokens: int = 16
    turns: int = 2


def bench(options: BenchOptions) -> int:
    """Run the load and show what came of it."""
    measured = Measured()
    is_stopped = False
    try:
        asyncio.run(_run(options, measured))
    except AnswerFailed as error:  # before the load began
        remarks().print(Text(error.explained, "bad"))
        return 1
    except KeyboardInterrupt:
        is_stopped = True
    output().print(bench_tables(measured, options.requests))
    if is_stopped:
        return INTERRUPTED
    return 1 if measured.failures else 0


async def _run(options: BenchOptions, measured: Measured) -> None:
    limits = httpx.Limits(max_connections=options.concurrency + 1)
    async with httpx.AsyncClient(**client_options(options.url), limits=limits) as http:
        model = await _model(http, options)
        with _progress() as progress:
            bar = progress.add_task("requests", total=options.requests)
            await Load(http, options, model, measured, lambda: progress.advance(bar)).run()


def _progress() -> Progress:
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    screen = remarks()
    return Progress(*columns, console=screen, transient=True, refresh_per_second=2, disable=not screen.is_terminal)


async def _model(http: httpx.AsyncClient, options: BenchOptions) -> str:
    try:
        return options.model or served_model(await http.get(MODELS_PATH))
    except httpx.HTTPError as error:
        raise failure_of_transport(error, options.url) from error


def conversation_lengths(requests: int, turns: int) -> Iterator[int]:
    """How many turns each conversation has; the last one may be shorter."""
    while requests > 0:
        yield min(turns, requests)
        requests -= turns


def new_prompt(prompt_tokens: int, dice: random.Random) -> str:
    """About so many tokens that nobody sent before: the first words are never the same twice."""
    return " ".join(dice.choice(WORDS) for _ in range(prompt_tokens))


class Load:
    """Everything that the conversations share."""

    def __init__(
        self,
        http: httpx.AsyncClient,
        options: BenchOptions,
        model: str,
        measured: Measured,
        on_answer: Callable[[], None],
    ) -> None:
        self._http = http
        self._options = options
        self._model = model
        self._measured = measured
        self._on_answer = on_answer
        self._dice = random.Random()  # another seed each run: what an earlier one stored must not hit

    async def run(self) -> None:
        """All conversations, ``concurrency`` at a time. What they do is in ``measured`` at any moment."""
        waiting = conversation_lengths(self._options.requests, self._options.turns)
        started_s = time.monotonic()
        try:
            async with asyncio.TaskGroup() as group:
                for _ in range(self._options.concurrency):
                    group.create_task(self._converse_all(waiting))
        finally:
            self._measured.wall_s = time.monotonic() - started_s

    async def _converse_all(self, waiting: Iterator[int]) -> None:
        for turns in waiting:
            try:
                await self._converse(turns)
            except AnswerFailed as error:
                self._measured.fail(error.kind, error.explained)

    async def _converse(self, turns: int) -> None:
        messages = [{"role": "user", "content": new_prompt(self._options.prompt_tokens, self._dice)}]
        for turn in range(1, turns + 1):
            answer = await self._ask(messages)
            self._measured.samples.append(sample_of(turn, answer))
            self._on_answer()
            question = NEXT_QUESTION.format(word=self._dice.choice(WORDS))
            messages += [{"role": "assistant", "content": answer.text}, {"role": "user", "content": question}]

    async def _ask(self, messages: list[dict[str, str]]) -> StreamedAnswer:
        body = {
            "model": self._model,
            "messages": messages,
            "stream": True,
            "stream_options": {"include_usage": True},
            "max_tokens": self._options.max_tokens,
        }
        answer = StreamedAnswer(time.monotonic)
        try:
            async with self._http.stream("POST", CHAT_PATH, json=body) as response:
                if response.status_code != httpx.codes.OK:
                    raise failure_of_response(response.status_code, await response.aread())
                async for line in response.aiter_lines():
                    answer.take(line)
        except httpx.HTTPError as error:
            raise failure_of_transport(error, self._options.url) from error
        answer.close()
        return answer


def sample_of(turn: int, answer: StreamedAnswer) -> Sample:
    """What is counted of one answer. Raises AnswerFailed when it did not tell its usage."""
    if answer.prompt_tokens is None or answer.cached_tokens is None or answer.completion_tokens is None:
        raise AnswerFailed("no_usage", "The answer did not tell its tokens, or which of them were cached.")
    return Sample(
        turn=turn,
        prompt_tokens=answer.prompt_tokens,
        cached_tokens=answer.cached_tokens,
        completion_tokens=answer.completion_tokens,
        ttft_s=answer.ttft_s,
        token_s=answer.token_s,
    )
