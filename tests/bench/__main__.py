"""Measurements of the whole and of its parts, each against a baseline in the same run. Nothing is asserted.

    python tests/bench [--real] [TOPIC ...]

One table to stdout, the same as build/bench.json. Machines differ and are shared: compare within a run. CPU is what
the kernel counted for a process. ``--real`` (or SHOAL_BENCH_REAL=1) measures the first token on the packaged model,
and waiting_hit on a tiny one, with vLLM instead of the scripted engine; that takes minutes more.
"""

import argparse
import os
import time
from collections.abc import Awaitable, Callable
from pathlib import Path

import block_hashing
import converse
import decode_serve
import encode_long
import first_token
import gateway_load
import kvindex_match
import kvindex_scale
import uvloop
import waiting_hit
from rows import Row, machine, table, write
from systems import SCRIPTED, http_alone, shoal_up

RESULTS = Path(__file__).parents[2] / "build" / "bench.json"
GATEWAY_TOPICS = {"gateway_request": gateway_load.requests, "streamed_token": gateway_load.streams}
IN_PROCESS = {
    "block_hashing": block_hashing.measure,
    "encode_long": encode_long.measure,
    "converse": converse.measure,
}
LARGE_TOPICS = ("kvindex_scale",)  # only when they are named
TOPICS = (
    "gateway_request",
    "streamed_token",
    "first_token",
    "decode_serve",
    "waiting_hit",
    "kvindex_match",
    "block_hashing",
    "encode_long",
    "converse",
)


async def on_scripted_system(topics: list[str], *, has_first_token: bool) -> list[Row]:
    """What one running system can tell, asked over HTTP."""
    rows = []
    async with shoal_up("--engine", "scripted", **SCRIPTED) as system, http_alone() as alone:
        for topic, measure in GATEWAY_TOPICS.items():
            if topic in topics:
                rows += await measure(system, alone)
        if has_first_token:
            rows += await first_token.measure(system, "scripted")
    return rows


async def on_real_system() -> list[Row]:
    async with shoal_up(**first_token.REAL) as system:
        return await first_token.measure(system, "vllm")


async def in_process(topics: list[str]) -> list[Row]:
    """What needs no system."""
    return [row for topic, measure_topic in IN_PROCESS.items() if topic in topics for row in measure_topic()]


async def measure(topics: list[str], *, is_real: bool) -> list[Row]:
    """One after the other, so that they do not disturb each other."""
    has_first_token = "first_token" in topics
    parts: list[tuple[bool, Callable[[], Awaitable[list[Row]]]]] = [
        (
            bool(GATEWAY_TOPICS.keys() & topics) or (has_first_token and not is_real),
            lambda: on_scripted_system(topics, has_first_token=has_first_token and not is_real),
        ),
        (has_first_token and is_real, on_real_system),
        ("decode_serve" in topics, decode_serve.measure),
        ("waiting_hit" in topics, lambda: waiting_hit.measure(is_real=is_real)),
        ("kvindex_match" in topics, kvindex_match.measure),
        ("kvindex_scale" in topics, kvindex_scale.measure),
        (bool(IN_PROCESS.keys() & topics), lambda: in_process(topics)),
    ]
    rows = []
    for is_wanted, part in parts:
        if is_wanted:
            found = await part()
            print(table(found), flush=True)
            rows += found
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="python tests/bench", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--real", action="store_true", default=os.environ.get("SHOAL_BENCH_REAL") == "1")
    parser.add_argument(
        "topics", nargs="*", metavar="TOPIC", help=f"all of {', '.join(TOPICS)}; or {', '.join(LARGE_TOPICS)}"
    )
    chosen = parser.parse_args()
    if unknown := set(chosen.topics) - {*TOPICS, *LARGE_TOPICS}:
        parser.error(f"no such topic: {', '.join(sorted(unknown))}")
    described = machine()
    began_s = time.monotonic()
    print(f"{described['cores']} cores of {described['cpu']}, load {os.getloadavg()[0]:.1f}")
    rows = uvloop.run(measure(chosen.topics or list(TOPICS), is_real=chosen.real))
    described |= {"load_after": os.getloadavg(), "took_s": round(time.monotonic() - began_s)}
    write(RESULTS, described, rows)
    print(f"\nTook {described['took_s']} s; load {os.getloadavg()[0]:.1f} at the end. Kept in build/{RESULTS.name}.")


if __name__ == "__main__":
    main()
