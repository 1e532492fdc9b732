"""opencode over Chat Completions: tools as functions, results as tool messages, reasoning passed back beside calls.

Shape after the public sources of the client and of the provider package that it calls: the model's name, the limit,
``tool_choice``, usage in the stream, ``reasoning_content`` on every assistant message once the model thinks.
"""

import json
from typing import Any, ClassVar

from shoal_testkit.plays import THINK_END, Line, call, calls, result_cue

from .agent import COUNT, DONE, GO_ON, LONG, Event, function, schema
from .chat_stream import assembled, usage
from .prompts import guide, source_file

TASK = "Make load_settings close the file that it reads, and run the tests."
READ = (
    "<file>\n"
    + "\n".join(f"{number:05d}| {line}" for number, line in enumerate(source_file("load_settings", 60), 1))
    + "\n\n(End of file - total 64 lines)\n</file>"
)
FOUND = "Found 1 matches\n/home/dev/project/src/settings.py:\n  Line 64: json.load(open(path))"
EDITED = "Edit applied successfully."
TESTED = "............ [100%]\n12 passed in 0.84s\n"
_ENVIRONMENT = (
    "Here is some useful information about the environment you are running in:\n<env>\n"
    "  Working directory: /home/dev/project\n  Is directory a git repo: yes\n  Platform: linux\n"
    "  Today's date: Mon Nov 02 2026\n</env>\n<files>\n  src/\n    settings.py\n</files>"
)
_NUMBER = {"type": "number", "description": "A number."}
_TODOS = {
    "type": "array",
    "description": "The list",
    "items": schema(("content", "status", "id"), content="Short.", status="pending or completed", id="Its id."),
}
_FUNCTIONS = [
    function("bash", "Runs a command.", ("command", "description"), command="It.", description="Why.", timeout=_NUMBER),
    function("read", "Reads a file.", ("filePath",), filePath="Path.", offset=_NUMBER, limit=_NUMBER),
    function("glob", "Finds files.", ("pattern",), pattern="As `**/*.ts`.", path="Folder."),
    function("grep", "Searches files.", ("pattern",), pattern="Expression.", path="Folder.", include="As `*.py`."),
    function("list", "Lists a folder.", (), path="Folder.", ignore={"type": "array", "items": {"type": "string"}}),
    function(
        "edit",
        "Replaces text in a file.",
        ("filePath", "oldString", "newString"),
        filePath="Path.",
        oldString="What",
        newString="By what",
        replaceAll={"type": "boolean"},
    ),
    function("write", "Writes a file.", ("filePath", "content"), filePath="Path.", content="All of it."),
    function("webfetch", "Reads a page.", ("url", "format"), url="Address.", format={"enum": ["text", "markdown"]}),
    function("todowrite", "Keeps the list.", ("todos",), todos=_TODOS),
    function("todoread", "Reads the list.", ()),
    function("task", "Starts an agent.", ("prompt", "subagent_type"), prompt="It.", description="Short."),
]
TOOLS = [{"type": "function", "function": entry} for entry in _FUNCTIONS]
for _entry in _FUNCTIONS:  # the client's schema generator says which dialect it writes
    _entry["parameters"]["$schema"] = "http://json-schema.org/draft-07/schema#"
EDIT = {
    "filePath": "/home/dev/project/src/settings.py",
    "oldString": "return json.load(open(path))",
    "newString": 'with open(path) as file:  # "closed" \\ ünï 😀\n        return json.load(file)',
}


class OpenCode:
    path = "/v1/chat/completions"
    goes_on = GO_ON
    task = TASK
    headers: ClassVar = {"user-agent": "opencode/1.2.10 ai-sdk/provider-utils/4.0.1 runtime/bun/1.3.5"}
    lines: ClassVar = [
        Line(
            TASK,
            f"Look first.{THINK_END}I look."
            + calls(("grep", {"pattern": "open\\("}), ("read", {"filePath": EDIT["filePath"], "limit": 200})),
        ),
        Line(result_cue(READ), f"Now edit.{THINK_END}" + call("edit", **EDIT)),
        Line(result_cue(EDITED), f"Test.{THINK_END}" + call("bash", command="make test", description="Run the tests")),
        Line(result_cue(TESTED), f"Green.{THINK_END}The file is closed now; 12 tests pass."),
        Line(COUNT, LONG),
        Line(GO_ON, DONE),
    ]

    def __init__(self, model: str) -> None:
        self._model = model
        self._said = ""
        system = guide("opencode", "a terminal of the user") + "\n" + _ENVIRONMENT
        self._messages: list[dict[str, Any]] = [{"role": "system", "content": system}]

    def say(self, text: str) -> None:
        self._messages.append({"role": "user", "content": text})

    def body(self) -> dict[str, Any]:
        return {
            "model": self._model,
            "max_tokens": 32000,
            "messages": list(self._messages),
            "tools": TOOLS,
            "tool_choice": "auto",
            "reasoning_effort": "high",
            "stream": True,
            "stream_options": {"include_usage": True},
        }

    def hear(self, events: list[Event]) -> bool:
        message = assembled(events)
        self._said = message["content"]
        self._messages.append(message)
        results = [self._run(called) for called in message.get("tool_calls", ())]
        self._messages += results
        return bool(results)

    def break_off(self, events: list[Event]) -> None:
        """The text that came stays; calls that were not complete are dropped."""
        message = assembled(events)
        message.pop("tool_calls", None)
        self._messages.append(message)

    def text(self) -> str:
        return str(self._said)

    @staticmethod
    def usage(events: list[Event]) -> tuple[int, int]:
        return usage(events)

    @staticmethod
    def _run(called: dict[str, Any]) -> dict[str, Any]:
        name, arguments = called["function"]["name"], json.loads(called["function"]["arguments"])
        if name == "edit":
            assert arguments == EDIT
        output = {"grep": FOUND, "read": READ, "edit": EDITED, "bash": TESTED}[name]
        return {"role": "tool", "tool_call_id": called["id"], "content": output}
