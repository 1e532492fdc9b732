"""Calls as Llama 3 writes them: the whole answer is a JSON object, or several with semicolons between.

    {"name": "look", "parameters": {"city": "Paris"}}

Often with ``<|python_tag|>`` before it. Nothing else tells a call from an answer in JSON, so only the names of the
request's own tools begin one.
"""

import re

from shoal_tokenizer.codec.chat_template.calls import CallFormat
from shoal_tokenizer.codec.chat_template.json_call import JsonCallReader
from shoal_tokenizer.codec.chat_template.markers import Markers
from shoal_tokenizer.codec.chat_template.probes import CALL_NAME, CALL_VALUE

_PYTHON_TAG = "<|python_tag|>"
_CALL = re.compile(
    rf'(?P<before_name>\{{\s*(?:"type":\s*"function",\s*)?"name":\s*"){CALL_NAME}'
    rf'(?P<after_name>",\s*"parameters":\s*)\{{\s*"city":\s*"{CALL_VALUE}"\s*\}}(?P<tail>\s*\}})'
)


def find_format(shown_call: str, markers: Markers) -> CallFormat | None:
    """The format in which the call of the probe was written; None: another one."""
    found = _CALL.search(shown_call)
    if found is None:
        return None
    return CallFormat(
        begin=markers.tag(_PYTHON_TAG),
        end=None,
        head=(found["before_name"], found["after_name"]),
        tail=found["tail"],
        arguments="json",
        new_reader=lambda shape, _end_text: JsonCallReader(None, frozenset(shape.text_parameters), has_end=False),
        is_bare=True,
        between="; ",
        separators=";",
    )
