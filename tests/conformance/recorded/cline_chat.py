"""Cline over Chat Completions, with tools as XML in text: no tool definitions, long system prompt, content parts.

Shape after the public sources of the client: what a tool gives is a user message of text parts, the environment is the
last part of every one; reasoning is not passed back, temperature is 0, usage is asked for.
"""

import re
from typing import Any, ClassVar

from shoal_testkit.plays import THINK_END, Line

from .agent import DONE, GO_ON, LONG, Event
from .chat_stream import assembled, usage
from .prompts import guide, source_file

TASK = "Make load_settings close the file that it reads, and run the tests."
READ = "\n".join(source_file("load_settings", 60))
_TOOLS = {
    "execute_command": ("command", "requires_approval"),
    "read_file": ("path",),
    "write_to_file": ("path", "content"),
    "replace_in_file": ("path", "diff"),
    "search_files": ("path", "regex", "file_pattern"),
    "list_files": ("path", "recursive"),
    "list_code_definition_names": ("path",),
    "browser_action": ("action", "url"),
    "use_mcp_tool": ("server_name", "tool_name", "arguments"),
    "access_mcp_resource": ("server_name", "uri"),
    "ask_followup_question": ("question", "options"),
    "attempt_completion": ("result", "command"),
    "new_task": ("context",),
    "plan_mode_respond": ("response",),
}
DIFF = "------- SEARCH\n    return json.load(open(path))\n=======\n    with open(path) as file:\n+++++++ REPLACE"
_ANSWERS = [
    "<read_file>\n<path>src/settings.py</path>\n</read_file>",
    f"<replace_in_file>\n<path>src/settings.py</path>\n<diff>\n{DIFF}\n</diff>\n</replace_in_file>",
    "<execute_command>\n<command>make test</command>\n<requires_approval>false</requires_approval>\n</execute_command>",
    "<attempt_completion>\n<result>The file is closed now; 12 tests pass.</result>\n</attempt_completion>",
]
_RESULTS = {
    "read_file": f"[read_file for 'src/settings.py'] Result:\n{READ}",
    "replace_in_file": f"[replace_in_file for 'src/settings.py'] Result:\nThe content was saved to src/settings.py.\n\n"
    f'<final_file_content path="src/settings.py">\n{READ}\n</final_file_content>',
    "execute_command": "[execute_command for 'make test'] Result:\nCommand executed.\nOutput:\n12 passed in 0.84s",
}
_CALLED = re.compile(rf"<({'|'.join(_TOOLS)})>")


def _tool_guide() -> str:
    parts = []
    for name, fields in _TOOLS.items():
        usage = "\n".join(f"<{field}>the {field.replace('_', ' ')} here</{field}>" for field in fields)
        listed = "\n".join(f"- {field}: (required) What its name says." for field in fields)
        example = f"<{name}>\n{usage}\n</{name}>"
        parts.append(f"## {name}\nDescription: As its name says.\nParameters:\n{listed}\nUsage:\n{example}")
    return "\n\n".join(parts)


SYSTEM = (
    guide("Cline", "an editor of the user")
    + "\n\n====\n\nTOOL USE\n\nTool uses are written as XML tags; one tool a message, and its result comes in the next "
    "message of the user.\n\n# Tools\n\n"
    + _tool_guide()
    + "\n\n====\n\nSYSTEM INFORMATION\n\nOperating System: Linux 6.8\n"
    "Default Shell: /bin/bash\nHome Directory: /home/dev\nCurrent Working Directory: /home/dev/project"
)


def _environment(turn: int) -> str:
    return (
        "<environment_details>\n# Visual Studio Code Visible Files\nsrc/settings.py\n\n# Visual Studio Code Open Tabs\n"
        f"src/settings.py\n\n# Current Time\n11/2/2026, 10:{turn:02d}:31 AM (Europe/Berlin, UTC+1:00)\n\n"
        f"# Context Window Usage\n{9 + turn},214 / 128K tokens used ({8 + turn}%)\n\n# Current Mode\nACT MODE\n"
        "</environment_details>"
    )


def _cue(turn: int) -> str:
    environment = _environment(turn)
    return environment[environment.index(" Current Time") :]


class Cline:
    path = "/v1/chat/completions"
    goes_on = GO_ON
    task = TASK
    headers: ClassVar = {"user-agent": "Cline/3.38.1", "http-referer": "https://cline.bot", "x-title": "Cline"}
    lines: ClassVar = [
        *(Line(_cue(turn), f"Step {turn}.{THINK_END}{answer}") for turn, answer in enumerate(_ANSWERS)),
        Line(_cue(4), LONG),
        Line(_cue(5), DONE),
    ]

    def __init__(self, model: str) -> None:
        self._model = model
        self._said = ""
        self._turn = 0
        self._messages: list[dict[str, Any]] = [{"role": "system", "content": SYSTEM}]
        self._before: list[str] = []

    def say(self, text: str) -> None:
        first = f"<task>\n{text}\n</task>" if self._turn == 0 else f"<feedback>\n{text}\n</feedback>"
        self._add(*self._before, first)
        self._before = []

    def body(self) -> dict[str, Any]:
        return {
            "model": self._model,
            "messages": list(self._messages),
            "temperature": 0,
            "stream": True,
            "stream_options": {"include_usage": True},
        }

    def hear(self, events: list[Event]) -> bool:
        self._said = assembled(events)["content"]
        self._messages.append({"role": "assistant", "content": self._said})
        called = _CALLED.search(self._said)
        if called is None or called[1] not in _RESULTS:
            return False
        self._add(_RESULTS[called[1]])
        return True

    def break_off(self, events: list[Event]) -> None:
        said = assembled(events)["content"]
        self._messages.append({"role": "assistant", "content": f"{said}\n\n[Response interrupted by user]"})
        self._before = ["[TASK RESUMPTION] The user interrupted; the last step may not be complete."]

    def text(self) -> str:
        return str(self._said)

    @staticmethod
    def usage(events: list[Event]) -> tuple[int, int]:
        return usage(events)

    def _add(self, *texts: str) -> None:
        parts = [*texts, _environment(self._turn)]
        self._turn += 1
        self._messages.append({"role": "user", "content": [{"type": "text", "text": text} for text in parts]})
