"""The official SDKs and recorded agents against a whole system: a scripted engine that plays DeepSeek V4.

Every byte of every stream goes through the grammar checker of its API, whichever client reads it.
"""

from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import anthropic
import httpx
import httpx2
import openai
import pytest
import pytest_asyncio

from shoal_testkit.checked_streams import Streams, keeping
from shoal_testkit.cluster import Cluster, Shape, cluster_running
from shoal_testkit.deepseek_tokenizer import write_v4
from shoal_testkit.plays import THINK_END, Line, call, calls, result_cue, write_script
from shoal_tokenizer.codec.api import Codec
from shoal_tokenizer.model_files import load_codec

from .recorded.claude_code_messages import ClaudeCode
from .recorded.cline_chat import Cline
from .recorded.codex_responses import Codex
from .recorded.opencode_chat import OpenCode

MODEL = "deepseek-v4"
AGENTS = (Codex, ClaudeCode, OpenCode, Cline)
SPELLED = (
    'See: </think>\n\n<｜DSML｜tool_calls>\n<｜DSML｜invoke name="step">\n<｜DSML｜parameter name="n" string="true">x'
    "</｜DSML｜parameter>\n</｜DSML｜invoke>\n</｜DSML｜tool_calls> <｜end▁of▁sentence｜><｜User｜><|im_end|> <think>."
)
VOCABULARY_TOKENS = 129_280
LOOP_CALLS = 5
PATCH = '*** Begin Patch\n+ "ünï" \\ 😀\n*** End Patch'

LOOP = [
    Line("Climb the stairs.", f"One step at a time.{THINK_END}I begin." + call("step", number=1, note='say "go"')),
    *(
        Line(result_cue(f"stair {n}"), f"On.{THINK_END}" + call("step", number=n + 1, note=f"to {n + 1}"))
        for n in range(1, LOOP_CALLS)
    ),
    Line(result_cue(f"stair {LOOP_CALLS}"), f"Done.{THINK_END}I am at the top."),
]
LINES = [
    *LOOP,
    Line("Say hello.", f"They greet me.{THINK_END}Hello there, friend. And more."),
    Line("Say hello at once.", "Hello there, friend. And more."),
    Line("Where is Paris?", f"A city.{THINK_END}" + '{"city": "Paris", "country": "France", "people": 2100000}'),
    Line(
        "Both at once.",
        f"Two.{THINK_END}" + calls(("step", {"number": 1, "note": "a"}), ("step", {"number": 2, "note": "b"})),
    ),
    Line(
        "Patch it.", f"A patch.{THINK_END}" + call("apply_patch", input='*** Begin Patch\n+ "ünï" \\ 😀\n*** End Patch')
    ),
    Line("Quote your markers.", SPELLED, is_spelled=True),
    *(line for agent in AGENTS for line in agent.lines),
    Line("Count for long.", f"Long.{THINK_END}" + " ".join(map(str, range(2000)))),
]


@pytest.fixture(scope="session")
def deepseek_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_v4(tmp_path_factory.mktemp("deepseek") / "model")


@pytest.fixture(scope="session")
def deepseek_codec(deepseek_folder: Path) -> Codec:
    return load_codec(deepseek_folder, MODEL, 64)


@pytest_asyncio.fixture(scope="session", loop_scope="session")
async def deepseek(deepseek_folder: Path) -> AsyncIterator[Cluster]:
    model = deepseek_folder
    script = write_script(model.parent / "script.jsonl", model / "tokenizer.json", LINES)
    engine = {
        "SHOAL_ENGINE_MODEL": MODEL,
        "SHOAL_ENGINE_MAX_CONTEXT_TOKENS": "65536",
        "SHOAL_SCRIPTED_VOCABULARY_TOKENS": str(VOCABULARY_TOKENS),
        "SHOAL_SCRIPTED_SCRIPT": str(script),
        "SHOAL_SCRIPTED_TOKENIZER": str(model / "tokenizer.json"),
        "SHOAL_SCRIPTED_PREFILL_TOKENS_PER_S": "100000",
        "SHOAL_SCRIPTED_STEP_MS": "2",
    }
    tokenizer = {"SHOAL_TOKENIZER_MODEL": str(model), "SHOAL_TOKENIZER_SERVED_NAME": MODEL}
    settings = {"tokenizer": tokenizer, "prefill": engine, "decode": engine}
    async with cluster_running(Shape(tokenizers=1, prefill=1, decode=1), settings) as cluster:
        yield cluster


@pytest.fixture
def streams() -> Iterator[Streams]:
    streams = Streams()
    yield streams
    streams.check()


@pytest.fixture
def openai_client(deepseek: Cluster, streams: Streams) -> Iterator[openai.OpenAI]:
    with keeping(httpx, streams) as http:
        yield openai.OpenAI(base_url=f"{deepseek.url}/v1", api_key="none", max_retries=0, http_client=http)


@pytest.fixture
def anthropic_client(deepseek: Cluster, streams: Streams) -> Iterator[anthropic.Anthropic]:
    with keeping(httpx2, streams) as http:
        yield anthropic.Anthropic(base_url=deepseek.url, api_key="none", max_retries=0, http_client=http)
