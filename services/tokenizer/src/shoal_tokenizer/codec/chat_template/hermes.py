"""Calls as Hermes and Qwen write them: a JSON object between two tags.

    <tool_call>
    {"name": "look", "arguments": {"city": "Paris"}}
    </tool_call>

The tags' names are the template's own.
"""

import re

from shoal_tokenizer.codec.chat_template.calls import CallFormat
from shoal_tokenizer.codec.chat_template.json_call import JsonCallReader
from shoal_tokenizer.codec.chat_template.markers import Markers
from shoal_tokenizer.codec.chat_template.probes import CALL_NAME, CALL_VALUE

_CALL = re.compile(
    rf'(?P<begin><[^<>\s/]+>)(?P<before_name>\s*\{{\s*"name":\s*"){CALL_NAME}'
    rf'(?P<after_name>",\s*"(?:arguments|parameters)":\s*)\{{\s*"city":\s*"{CALL_VALUE}"\s*\}}'
    r"(?P<tail>\s*\}\s*)(?P<end></[^<>\s]+>)"
)


def find_format(shown_call: str, markers: Markers) -> CallFormat | None:
    """The format in which the call of the probe was written; None: another one."""
    found = _CALL.search(shown_call)
    if found is None:
        return None
    return CallFormat(
        begin=markers.tag(found["begin"]),
        end=markers.tag(found["end"]),
        head=(found["before_name"], found["after_name"]),
        tail=found["tail"],
        arguments="json",
        new_reader=lambda _shape, end_text: JsonCallReader(end_text),
    )
