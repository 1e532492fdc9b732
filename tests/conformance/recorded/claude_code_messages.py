"""Claude Code over Messages: system blocks behind a billing line that changes each turn, thinking passed back.

Shape after public captures of the client: cache marks that move with the conversation, reminders inside of user turns,
results with ``is_error``, an interruption told as text, management of the context asked for.
"""

import hashlib
import json
from typing import Any, ClassVar

from shoal_testkit.plays import THINK_END, Line, call, calls, result_cue

from .agent import COUNT, DONE, GO_ON, LONG, Event, schema, tail
from .prompts import guide, source_file

TASK = "Please have load_settings close what it opens, and run the tests."
READ = "\n".join(f"{number:>6}\t{line}" for number, line in enumerate(source_file("load_settings", 60), 1))
MISSING = "<tool_use_error>File does not exist.</tool_use_error>"
EDITED = "The file /home/dev/project/src/settings.py has been updated successfully."
TESTED = "............ [100%]\n12 passed in 0.84s"
REMINDER = (
    "<system-reminder>\nAs you answer the user's questions, you can use the following context:\n# claudeMd\n"
    "Run `make test` before you say that it works. Line length is 100.\n# currentDate\nToday's date is 2026-11-02.\n"
    "</system-reminder>"
)
INTERRUPTED = "[Request interrupted by user]"
CACHED = {"type": "ephemeral"}
_ENVIRONMENT = (
    "# Environment\n - Primary working directory: /home/dev/project\n - Is a git repository: true\n - Platform: linux\n"
    " - Shell: bash\n - OS Version: Linux 6.8.0\n\ngitStatus: This is the state at the start of the conversation.\n"
    "Current branch: main\n\nStatus:\n M src/settings.py\n\nRecent commits:\n1a2b3c4 Settings are read once"
)
_NUMBER = {"type": "number", "description": "A number."}
_FLAG = {"type": "boolean", "description": "Off unless set."}
_TODO = {
    "type": "array",
    "description": "The whole list",
    "items": schema(
        ("content", "status", "activeForm"),
        content={"type": "string", "minLength": 1},
        status={"type": "string", "enum": ["pending", "in_progress", "completed"]},
        activeForm={"type": "string", "minLength": 1},
    ),
}


def _tool(name: str, description: str, required: tuple[str, ...] = (), /, **properties: Any) -> dict[str, Any]:
    declared = {"$schema": "https://json-schema.org/draft/2020-12/schema", **schema(required, **properties)}
    return {"name": name, "description": description, "input_schema": declared}


TOOLS = [
    _tool("Task", "Starts an agent of its own.", ("description", "prompt"), description="Short.", prompt="The task."),
    _tool("TaskOutput", "Output of a task that runs.", ("task_id",), task_id="Its id.", block=_FLAG, timeout=_NUMBER),
    _tool(
        "Bash",
        "Runs a command. The folder stays between calls, variables do not.",
        ("command",),
        command="The command to execute",
        description="What it does, in five to ten words.",
        timeout=_NUMBER,
        run_in_background=_FLAG,
        dangerouslyDisableSandbox=_FLAG,
    ),
    _tool("Glob", "Finds files by pattern.", ("pattern",), pattern="As `**/*.ts`.", path="Folder to look in."),
    _tool(
        "Grep",
        "Searches with ripgrep.",
        ("pattern",),
        pattern="A regular expression",
        path="File or folder.",
        output_mode={"type": "string", "enum": ["content", "files_with_matches", "count"]},
        head_limit=_NUMBER,
        multiline=_FLAG,
        **{"-A": _NUMBER, "-B": _NUMBER, "-i": _FLAG, "-n": _FLAG},
    ),
    _tool("ExitPlanMode", "Asks whether the plan is good.", ()),
    _tool("Read", "Reads a file.", ("file_path",), file_path="Absolute path.", offset=_NUMBER, limit=_NUMBER),
    _tool(
        "Edit",
        "Replaces text in a file that was read before.",
        ("file_path", "old_string", "new_string"),
        file_path="Absolute path.",
        old_string="What is replaced",
        new_string="By what",
        replace_all={"type": "boolean", "default": False, "description": "All of them."},
    ),
    _tool("Write", "Writes a file.", ("file_path", "content"), file_path="Absolute path.", content="All of it."),
    _tool("NotebookEdit", "Edits a cell.", ("notebook_path",), notebook_path="Absolute path.", new_source="Text."),
    _tool("WebFetch", "Reads a page.", ("url", "prompt"), url={"type": "string", "format": "uri"}, prompt="Question."),
    _tool("WebSearch", "Searches the web.", ("query",), query={"type": "string", "minLength": 2}),
    _tool("TodoWrite", "Keeps the list of what is to do.", ("todos",), todos=_TODO),
    _tool("AskUserQuestion", "Asks the user.", ("question",), question="One sentence ending in a question mark."),
    _tool("Skill", "Runs a skill.", ("skill",), skill="Its name.", args="For it."),
    _tool("mcp__notes__search", "Searches the notes.", ("query",), query="Words."),
]
EDIT = {
    "file_path": "/home/dev/project/src/settings.py",
    "old_string": "return json.load(open(path))",
    "new_string": 'with open(path) as file:  # "closed" \\ ünï 😀\n        return json.load(file)',
}


class ClaudeCode:
    path = "/v1/messages?beta=true"
    goes_on = GO_ON
    task = TASK
    headers: ClassVar = {
        "user-agent": "claude-cli/2.1.126 (external, cli)",
        "x-app": "cli",
        "anthropic-version": "2023-06-01",
        "anthropic-beta": "claude-code-20250219,interleaved-thinking-2025-05-14,context-management-2025-06-27,"
        "prompt-caching-scope-2026-01-05,effort-2025-11-24",
        "anthropic-dangerous-direct-browser-access": "true",
        "x-stainless-lang": "js",
        "x-stainless-helper-method": "stream",
    }
    lines: ClassVar = [
        Line(
            tail(TASK),
            f"Look first.{THINK_END}I read both."
            + calls(
                ("Read", {"file_path": "/home/dev/project/settings.py"}),
                ("Read", {"file_path": "/home/dev/project/src/settings.py", "limit": 200}),
            ),
        ),
        Line(result_cue(READ), f"Now edit.{THINK_END}" + call("Edit", **EDIT)),
        Line(
            result_cue(EDITED),
            f"Test it.{THINK_END}" + call("Bash", command="make test", description="Run the tests", timeout=60000),
        ),
        Line(result_cue(TESTED), f"Green.{THINK_END}The file is closed now; 12 tests pass."),
        Line(tail(COUNT), LONG),
        Line(tail(GO_ON), DONE),
    ]

    def __init__(self, model: str) -> None:
        self._model = model
        self._said = ""
        self._messages: list[dict[str, Any]] = []
        self._before: list[dict[str, Any]] = [_text(REMINDER)]  # blocks that stand before what the user says next

    def say(self, text: str) -> None:
        self._messages.append({"role": "user", "content": [*self._before, _text(text)]})
        self._before = []

    def body(self) -> dict[str, Any]:
        return {
            "model": self._model,
            "max_tokens": 32000,
            "system": self._system(),
            "messages": self._marked(),
            "tools": TOOLS,
            "metadata": {
                "user_id": json.dumps(
                    {"device_id": "5f" * 32, "account_uuid": "", "session_id": "8d4a7a4e-6f2b-4a3e-9f55-2f7f0a1c9e10"}
                )
            },
            "thinking": {"type": "adaptive"},
            "output_config": {"effort": "high"},
            "context_management": {"edits": [{"type": "clear_thinking_20251015", "keep": "all"}]},
            "stream": True,
        }

    def hear(self, events: list[Event]) -> bool:
        blocks = _blocks(events)
        self._messages.append({"role": "assistant", "content": blocks})
        self._said = "".join(block["text"] for block in blocks if block["type"] == "text")
        results = [self._run(block) for block in blocks if block["type"] == "tool_use"]
        if results:
            self._messages.append({"role": "user", "content": results})
        return bool(results)

    def break_off(self, events: list[Event]) -> None:
        """Text that was shown stays, thinking without its signature goes."""
        blocks = [block for block in _blocks(events) if block["type"] != "thinking" or block["signature"]]
        if blocks:
            self._messages.append({"role": "assistant", "content": blocks})
        self._before = [_text(INTERRUPTED)]

    def text(self) -> str:
        return self._said

    @staticmethod
    def usage(events: list[Event]) -> tuple[int, int]:
        usage = next(event["message"]["usage"] for event in events if event["type"] == "message_start")
        hit = usage.get("cache_read_input_tokens") or 0
        return usage["input_tokens"] + hit, hit

    def _system(self) -> list[dict[str, Any]]:
        nonce = hashlib.sha256(json.dumps(self._messages).encode()).hexdigest()[:5]
        billing = f"x-anthropic-billing-header: cc_version=2.1.126.c5f; cc_entrypoint=cli; cch={nonce};"
        return [
            _text(billing),
            _text("You are Claude Code, Anthropic's official CLI for Claude."),
            _text(guide("the agent of a terminal", "a terminal of the user"), cache_control=CACHED),
            _text(_ENVIRONMENT, cache_control=CACHED),
        ]

    def _marked(self) -> list[dict[str, Any]]:
        """The last block of the last message has the mark; it moves on each turn."""
        *before, last = self._messages
        *blocks, end = last["content"]
        return [*before, {**last, "content": [*blocks, {**end, "cache_control": CACHED}]}]

    @staticmethod
    def _run(use: dict[str, Any]) -> dict[str, Any]:
        result = {"type": "tool_result", "tool_use_id": use["id"]}
        if use["name"] == "Read" and "limit" not in use["input"]:
            return {**result, "content": MISSING, "is_error": True}
        if use["name"] == "Edit":
            assert use["input"] == EDIT
        content = {"Read": READ, "Edit": EDITED, "Bash": TESTED}[use["name"]]
        return {**result, "content": [_text(content)] if use["name"] == "Read" else content}


def _text(text: str, **others: Any) -> dict[str, Any]:
    return {"type": "text", "text": text, **others}


def _blocks(events: list[Event]) -> list[dict[str, Any]]:
    """Content blocks as the SDK puts them together; input that was cut off is left out with its block."""
    blocks: dict[int, dict[str, Any]] = {}
    inputs: dict[int, str] = {}
    for event in events:
        index = event.get("index", -1)
        if event["type"] == "content_block_start":
            blocks[index] = dict(event["content_block"])
            inputs[index] = ""
        elif event["type"] == "content_block_delta":
            _add(blocks[index], inputs, index, event["delta"])
        elif event["type"] == "content_block_stop" and blocks[index]["type"] == "tool_use":
            blocks[index]["input"] = json.loads(inputs.pop(index) or "{}")
    return [block for index, block in blocks.items() if block["type"] != "tool_use" or index not in inputs]


def _add(block: dict[str, Any], inputs: dict[int, str], index: int, delta: dict[str, Any]) -> None:
    if delta["type"] == "input_json_delta":
        inputs[index] += delta["partial_json"]
        return
    name = {"text_delta": "text", "thinking_delta": "thinking", "signature_delta": "signature"}[delta["type"]]
    block[name] = block.get(name, "") + delta[name]
