"""`shoal store` and `shoal explain`: what the instances of kvindex know, asked by a person or by a program.

Exit codes: 0 told, 1 nobody could tell (a sentence says why). With ``--json`` one object goes to standard output.
"""

import asyncio
import json
import sys
import time
from typing import Any

from shoal_contracts.v1 import common_pb2 as pb
from shoal_local import explanation, store_overview
from shoal_local.index_client import Answer, IndexNotFound, explanations, overviews, plain
from shoal_local.wording import paragraph

ID_PREFIX = "chatcmpl-"  # of the id in an answer's body; what follows is the request's


def show_store(nats_url: str, *, is_json: bool) -> int:
    """What is stored, and what became of it."""
    try:
        answers = asyncio.run(overviews(nats_url))
    except IndexNotFound as error:
        return _failed(str(error))
    if is_json:
        print(json.dumps({"instances": [_as_json(answer, "overview") for answer in answers]}, indent=1))
    elif any(answer.reply is not None for answer in answers):
        print(store_overview.render(answers, time.time()))
    if all(answer.reply is None for answer in answers):
        return _failed(_nobody(answers))
    return 0


def show_explanation(nats_url: str, request_id: str, *, is_json: bool) -> int:
    """Why a request did not hit more."""
    request_id = without_prefix(request_id)
    try:
        answers = asyncio.run(explanations(nats_url, request_id))
    except IndexNotFound as error:
        return _failed(str(error))
    known = [(answer.instance.instance_id, answer.reply) for answer in answers if answer.reply is not None]
    if not known:
        return _failed(not_remembered(answers, request_id))
    # A request that was matched twice (a retry after an answer that did not come) is told as it was last.
    instance_id, told = max(known, key=lambda answer: answer[1].asked_at_unix_s)
    if is_json:
        print(json.dumps({"instance_id": instance_id, "explanation": plain(told)}, indent=1))
    else:
        print(explanation.render(request_id, instance_id, told, time.time()))
    return 0


def _as_json(answer: Answer[Any], name: str) -> dict[str, object]:
    return {
        "instance_id": answer.instance.instance_id,
        "address": answer.instance.address,
        "reason": answer.instance.reason,
        "failure": None if answer.failure is None else answer.failure.message,
        name: None if answer.reply is None else plain(answer.reply),
    }


def without_prefix(given: str) -> str:
    """The request's own id: the one in the body of an answer is longer."""
    return given.removeprefix(ID_PREFIX)


def not_remembered(answers: list[Answer[Any]], request_id: str) -> str:
    """Every cause that there can be, when all were asked and none knows it."""
    if all(answer.failure is not None and answer.failure.code == pb.NOT_FOUND for answer in answers):
        asked = ", ".join(answer.instance.instance_id for answer in answers)
        return (
            f"No instance of kvindex remembers request {request_id} (asked: {asked}). It is mistyped, too long ago, "
            "had a prompt of less than one block, which is never looked up, went on without the index (fallback "
            "index_unknown in its receipt), or its instance started again since."
        )
    return f"Request {request_id} is not known to those that answered. {_nobody(answers)}"


def _nobody(answers: list[Answer[Any]]) -> str:
    told = [
        f"{answer.instance.instance_id} at {answer.instance.address}: {answer.failure.message}"
        for answer in answers
        if answer.failure is not None
    ]
    return f"kvindex does not tell. {'. '.join(told)}."


def _failed(sentence: str) -> int:
    print(paragraph(sentence), file=sys.stderr)
    return 1
