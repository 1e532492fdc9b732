"""Why a request did not hit more, in sentences for the person who asks.

From what kvindex remembers: hashes of blocks, never a prompt. So where two prompts part is known to a block.
"""

from collections.abc import Callable
from dataclasses import dataclass

from shoal_contracts.v1 import kvindex_pb2 as index
from shoal_local.wording import counted, moment, paragraph, span


@dataclass(frozen=True, slots=True)
class Explanation:
    """What was found, why not more, and what can be done."""

    found: str
    cause: str
    advice: str
    now: str


def explain(told: index.ExplainReply) -> Explanation:
    """The words for one answer of kvindex."""
    cause, advice = MEANINGS.get(told.reason, (_unknown, "Bring this program and kvindex to the same version."))
    if told.reason == index.NEVER_STORED and not told.hit_blocks:
        advice = f"{NEW_FROM_THE_START} {advice}"
    return Explanation(_found(told), cause(told), advice, _now(told))


def render(request_id: str, instance_id: str, told: index.ExplainReply, now_s: float) -> str:
    """For 80 columns."""
    words = explain(told)
    head = f"request  {request_id}\nmatched  {moment(told.asked_at_unix_s)}, {span(now_s - told.asked_at_unix_s)} ago"
    lines = [
        f"{head}, by {instance_id}\npool     {told.pool}",
        paragraph(words.found),
        paragraph(words.cause),
        paragraph(f"→ {words.advice}"),
        paragraph(words.now),
    ]
    return "\n\n".join(line for line in lines if line)


def _found(told: index.ExplainReply) -> str:
    if not told.whole_blocks:
        return "Its prompt is shorter than one block: nothing of it can be hit."
    tokens = ""
    if told.block_tokens:
        tokens = f" ({told.hit_blocks * told.block_tokens:,} of {told.whole_blocks * told.block_tokens:,} tokens)"
    return f"{told.hit_blocks:,} of {counted(told.whole_blocks, 'whole block')} were hit{tokens}."


def _now(told: index.ExplainReply) -> str:
    if told.now_hit_blocks == told.hit_blocks:
        return "" if told.reason == index.NO_MISS else "Asked again now, it would hit as much."
    return f"Asked again now, it would hit {told.now_hit_blocks:,} of {counted(told.whole_blocks, 'block')}."


def _block(told: index.ExplainReply, number: int | None = None) -> str:
    """``block 12 (tokens 1,536-1,663)``, counted from 0 as the tokens are."""
    number = told.hit_blocks if number is None else number
    return f"block {number:,}{f' ({_tokens(told, number)})' if told.block_tokens else ''}"


def _tokens(told: index.ExplainReply, number: int) -> str:
    first = number * told.block_tokens
    return f"tokens {first:,}-{first + told.block_tokens - 1:,}"


def _missing(text: str) -> Callable[[index.ExplainReply], str]:
    """A sentence about the first block that was not found, with the moment when that was noticed."""

    def cause(told: index.ExplainReply) -> str:
        sentence = f"{_block(told)} {text}"
        if told.HasField("gone_at_unix_s"):
            sentence += f" It was noticed at {moment(told.gone_at_unix_s)}, {_beside(told)} the request."
        return sentence[0].upper() + sentence[1:]

    return cause


def _beside(told: index.ExplainReply) -> str:
    away_s = told.gone_at_unix_s - told.asked_at_unix_s
    return f"{span(abs(away_s))} {'after' if away_s > 0 else 'before'}"


def _nothing_missed(told: index.ExplainReply) -> str:
    rest = "what is left is less than a block, and a rest of a block is always computed."
    return f"The index promised {'all of them' if told.whole_blocks else 'nothing'}; {rest}"


def _diverged(told: index.ExplainReply) -> str:
    other = told.first_other_block
    where = f"somewhere in {_tokens(told, other)}" if told.block_tokens else f"in block {other:,}"
    nearest = f"that of request {told.nearest_request_id}"
    if not other:
        return f"The prompt differs from {nearest} already {where}."
    return f"The prompt is equal to {nearest} for {counted(other, 'block')}, and differs from it {where}."


def _unknown(told: index.ExplainReply) -> str:
    return _missing(f"was not found, for a reason that this program does not know ({told.reason}).")(told)


NEW_FROM_THE_START = (
    "Most likely the beginning of the prompt is new: its first block holds the system prompt, the tools and "
    "any date or id in them, and one other token there makes all blocks new. Keep what changes "
    "behind what stays the same."
)
MEANINGS: dict[int, tuple[Callable[[index.ExplainReply], str], str]] = {
    index.NO_MISS: (
        _nothing_missed,
        "If the answer's cached_tokens is lower than that, look for hit_lost among the fallbacks of its receipt: then "
        "the store did not have what was promised, and the index has learnt it by now.",
    ),
    index.NEVER_STORED: (
        _missing("was never stored, as far as this index remembers."),
        "Nothing to do if no request came this far before. Otherwise the store does not take blocks, or does not "
        "report them: look at `shoal store`, at the room on the disk, and at the fallbacks in the receipt of the "
        "request that should have stored it.",
    ),
    index.EXPIRED: (
        _missing("had expired: nobody used it for as long as its traffic class asks."),
        "Raise SHOAL_KVINDEX_CHAT_LIFETIME_S or SHOAL_KVINDEX_AGENT_LIFETIME_S if such pauses are usual and the shared "
        "level has room.",
    ),
    index.EVICTED: (
        _missing("was deleted before its time, because the shared level was full."),
        "Give the shared level more room, or shorten lifetimes so that what is used most stays; see `shoal store`.",
    ),
    index.DROPPED: (
        _missing(
            "was in the DRAM of one store only, which evicted it, restarted, left or fell silent; it never reached the "
            "shared level."
        ),
        "Look why it was not written there: a full or read-only disk, or a store that ended first. The log of that "
        "`lmcache server` says which.",
    ),
    index.DAMAGED: (
        _missing("was damaged: the store found its bytes wrong or missing, and took it away."),
        "The next request stores it again. Look at the disk under the shared folder, and whether something else writes "
        "there: one damaged object is rarely alone.",
    ),
    index.OTHER_SALT: (
        _missing("is stored, but for another tenant or cache group, and those share nothing."),
        "Nothing to do: that they share nothing is what keeps them apart.",
    ),
    index.OTHER_POOL: (
        _missing("is stored, but in another pool: for another model, revision, dtype, layout, device or block size."),
        "If it should be one pool, compare how the workers are set: all that share KV must load the same model folder "
        "with the same dtype and block size.",
    ),
    index.DIVERGED: (
        _diverged,
        "Keep what changes from request to request (dates, ids, the order of tools) behind what stays the same. "
        "If the two are turns of one conversation, its history was edited: diverged_at_token in the receipt is the "
        "first token that is not what was generated.",
    ),
    index.STATE_MISSING: (
        _missing("is stored, but the state of its sliding window is gone, and this model cannot rebuild it."),
        "Windows are kept in DRAM for minutes, and on the shared level at the end of each stored run. A prompt that "
        "leaves a run in its middle cannot hit there.",
    ),
    index.MARKED: (
        _missing("was about to be deleted: its time was over, or the shared level was full."),
        "See `shoal store` which of both; the answer is more room, or longer lifetimes.",
    ),
}
