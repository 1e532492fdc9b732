"""What only a request can show: that it goes the whole way, and that a block stored by prefill is loaded by decode.

One prompt of more than two blocks that nobody asked before is sent twice, with the receipt asked for. The first time
it must be computed and stored by prefill and loaded by decode, which has never seen it; the second time the index must
know it. What the receipts say is judged by pure functions.
"""

import json
import secrets
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, TypeAlias

import httpx

from shoal_local.doctor.findings import Finding, ok, unknown, warning, wrong

WORD = " river"  # one token at least, in any vocabulary
BLOCKS = 2
ANSWER_TOKENS = 2
DEFAULT_BLOCK_TOKENS = 128
REQUEST_S = 20.0
READY_S = 31.0  # a gateway gives its own probe 30 s, and then names the stage that hangs
MODELS_S = 4.0
UNUSABLE_STAGES = frozenset({"admission", "tokenizer", "decode"})  # without them no request is answered
STEPS = ("block stored", "block reported", "block loaded", "second turn")

Receipt: TypeAlias = Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class Gateway:
    """What a gateway says about itself: ``models`` that it serves now, and the ``stage`` at which its probe failed."""

    finding: Finding
    models: tuple[str, ...] = ()
    stage: str = ""

    @property
    def is_usable(self) -> bool:
        """Whether a request has a chance to be answered."""
        return bool(self.models) and self.stage not in UNUSABLE_STAGES


class NoAnswer(Exception):
    """The message says what came instead."""


async def check_gateway(http: httpx.AsyncClient) -> Gateway:
    """Its own readiness is a real request too, whose result it keeps for half a minute."""
    url = str(http.base_url).rstrip("/")
    try:
        reply = await http.get("/readyz", timeout=READY_S)
        if reply.status_code == httpx.codes.SERVICE_UNAVAILABLE and "error" in reply.json():
            advice = "See why it does not run or is not ready: in compose `docker compose logs gateway`."
            return Gateway(wrong("gateway", f"what is before the gateways answers at {url}, and none is ready", advice))
        models = (await http.get("/v1/models", timeout=MODELS_S)).json()["data"]
        told = dict(reply.json())
        names, finding = tuple(model["id"] for model in models), _judge_readiness(url, told)
    except httpx.TimeoutException:
        advice = "It hangs, or everything is slow: `shoal status` shows the load, its log the rest."
        return Gateway(wrong("gateway", f"{url} does not answer within {READY_S:g} s", advice))
    except httpx.HTTPError as error:
        advice = "Is the address right (--url), and does the gateway run?"
        return Gateway(wrong("gateway", f"nobody answers at {url} ({type(error).__name__})", advice))
    except (ValueError, KeyError, TypeError):
        advice = "Another program has that port: give --url, or set SHOAL_GATEWAY_PORT to another one."
        return Gateway(wrong("gateway", f"what answers at {url} is no Shoal gateway", advice))
    return Gateway(finding, names, str(told.get("stage") or ""))


def _judge_readiness(url: str, told: Mapping[str, Any]) -> Finding:
    reasons = "; ".join(f"{part}: {reason}" for part, reason in (told.get("reasons") or {}).items())
    if not told["is_ready"]:
        stage, reason = told.get("stage"), told.get("reason")
        advice = f"See stage `{stage}` under 'When the gateway is not ready' in docs/operations.md."
        return wrong("gateway", f"not ready at stage {stage}: {reason}{f' ({reasons})' if reasons else ''}", advice)
    if reasons:
        return warning("gateway", f"ready, with trouble: {reasons}", "See 'When a process is not ready'.")
    return ok("gateway", f"{url} is ready; its own probe took {told.get('total_ms', 0)} ms")


async def check_journey(http: httpx.AsyncClient, model: str, block_tokens: int | None) -> list[Finding]:
    """Two requests to ``model``; blocks of unknown size are taken for the usual ones."""
    words = WORD * (BLOCKS * (block_tokens or DEFAULT_BLOCK_TOKENS))
    prompt = f"{secrets.token_hex(8)}{words}"
    try:
        first = await _ask(http, model, prompt)
        second = await _ask(http, model, prompt)
    except NoAnswer as error:
        advice = "The gateway's log has the line `request.settled` of it; `shoal status` shows who is missing."
        answered = wrong("request", f"a request for {model} was not answered: {error}", advice)
        return [answered, *(unknown(step, "no request was answered") for step in STEPS)]
    took = f"a request for {model} with {first.get('prompt_tokens')} tokens took {first.get('total_ms')} ms"
    return [ok("request", f"{took}, the same again {second.get('total_ms')} ms"), *judge(first, second)]


async def _ask(http: httpx.AsyncClient, model: str, prompt: str) -> Receipt:
    message = {"role": "user", "content": prompt}
    body = {"model": model, "messages": [message], "max_tokens": ANSWER_TOKENS, "temperature": 0}
    headers = {"x-shoal-receipt": "1"}
    try:
        reply = await http.post("/v1/chat/completions", json=body, headers=headers, timeout=REQUEST_S)
    except httpx.TimeoutException:
        raise NoAnswer(f"nothing came within {REQUEST_S:g} s") from None
    except httpx.HTTPError as error:
        raise NoAnswer(f"the connection broke ({type(error).__name__})") from error
    if reply.status_code != httpx.codes.OK:
        raise NoAnswer(f"status {reply.status_code}, {_message(reply)}")
    try:
        receipt: Receipt = json.loads(reply.headers["x-shoal-receipt"])
    except (KeyError, ValueError):
        raise NoAnswer("the answer came without its receipt: is that a Shoal gateway?") from None
    return receipt


def _message(reply: httpx.Response) -> str:
    try:
        return str(reply.json()["error"]["message"])
    except (ValueError, KeyError, TypeError):
        return "without a reason"


def judge(first: Receipt, second: Receipt) -> list[Finding]:
    """Where the way of a block breaks, if it does. ``first`` is of a new prompt, ``second`` of the same again."""
    prefill, decode = first.get("prefill"), first.get("decode") or {}
    loaded_tokens = decode.get("hit_tokens") or 0
    by, at = (prefill or {}).get("instance_id"), decode.get("instance_id")
    if not by:
        why = ", ".join(first.get("fallbacks", ())) or "it was not asked"
        advice = "Is a prefill worker of this pool and tier ready? 'When requests fall back' says what each word means."
        stored = wrong("block stored", f"no prefill worker computed the prompt: {why}", advice)
        return [stored, *_unproven("block reported", "block loaded"), _judge_again(second)]
    is_reported = (prefill or {}).get("stored") == "yes"
    if not is_reported and not loaded_tokens:
        advice = (
            f"Is the `lmcache server` of {by} up, can it write its folder, and does it report to kvindex "
            "(SHOAL_KVSTORE_COORDINATOR_URL)? Do both workers use the same shared folder?"
        )
        found = f"{by} computed the prompt; neither the index nor {at} saw its blocks"
        return [
            wrong("block stored", found, advice),
            *_unproven("block reported", "block loaded"),
            _judge_again(second),
        ]
    return [
        ok("block stored", f"{by} computed the prompt and stored its blocks"),
        _judge_report(by, is_reported=is_reported),
        _judge_load(by, at, loaded_tokens, second),
        _judge_again(second),
    ]


def _unproven(*names: str) -> list[Finding]:
    return [unknown(name, "nothing was stored that could show it") for name in names]


def _judge_report(by: str, *, is_reported: bool) -> Finding:
    if is_reported:
        return ok("block reported", "the index heard of them in time")
    found = f"what {by} stored is in the store, but its report did not reach the index in time"
    advice = (
        "Set the coordinator URL of that node's `lmcache server` (SHOAL_KVSTORE_COORDINATOR_URL) to kvindex's, and see "
        "`shoal store`: a store that is not listed there reports to nobody. On a slow disk raise "
        "SHOAL_PREFILL_HANDOFF_WAIT_MS."
    )
    return wrong("block reported", found, advice)


def _judge_load(by: str, at: str | None, loaded_tokens: int, second: Receipt) -> Finding:
    # What the index knows the second time is what was there to be loaded; the last token is always computed.
    stored_tokens = min(second.get("matched_tokens") or 1, (second.get("prompt_tokens") or 2) - 1)
    if loaded_tokens >= stored_tokens:
        return ok("block loaded", f"{at} loaded {loaded_tokens} tokens that {by} had computed")
    found = f"{at} loaded {loaded_tokens} of {stored_tokens} tokens that {by} had stored, and computed the rest"
    advice = (
        f"Give {at} the same shared folder and an `lmcache server` that is up; its log and its /readyz part `store` "
        "say why it cannot load."
    )
    return wrong("block loaded", found, advice)


def _judge_again(second: Receipt) -> Finding:
    hit_tokens, prompt_tokens = second.get("hit_tokens") or 0, second.get("prompt_tokens") or 0
    matched_tokens = second.get("matched_tokens")
    if matched_tokens is None:
        return wrong("second turn", "the index did not answer", "Look at kvindex: `shoal status`, its /readyz.")
    if not matched_tokens:
        advice = "Reports do not arrive, or stores do not store: see the checks above, and `shoal store`."
        return wrong("second turn", "the same prompt again was new to the index", advice)
    if not hit_tokens:
        advice = "Workers cannot load what is stored: see the log of the decode worker and of its `lmcache server`."
        return wrong("second turn", f"{matched_tokens} tokens were said to be stored, none was loaded", advice)
    return ok("second turn", f"the same prompt again hit {hit_tokens} of {prompt_tokens} tokens")
