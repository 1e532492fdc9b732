"""Codex CLI over Responses: stateless, the whole history each turn, reasoning items passed back.

Shape after the public sources of the client: instructions, a developer message about permissions, the environment as a
user message; a shell with sessions, a plan, a patch tool with a grammar, an MCP server as a namespace.
"""

import json
from typing import Any, ClassVar

from shoal_testkit.plays import THINK_END, Line, call, calls, result_cue

from .agent import COUNT, DONE, GO_ON, LONG, Event, function, schema
from .prompts import guide, source_file

TASK = "Let load_settings close its file, then test it."
PATCH = """*** Begin Patch
*** Update File: src/settings.py
@@ def load_settings(path: str) -> dict:
-    return json.load(open(path))
+    with open(path) as file:  # "closed" — also on errors \\ ünïcode 😀
+        return json.load(file)
*** End Patch"""
PERMISSIONS = """<permissions instructions>
Filesystem sandboxing defines which files can be read or written. `sandbox_mode` is `workspace-write`: files outside of
the folder and its writable roots are read-only. Network access is restricted.
Approvals are your way to ask for more. `approval_policy` is `on-request`: ask with `sandbox_permissions` set to
`require_escalated` and one sentence of `justification`. Prefixes that need no question: ["git", "status"], ["rg"].
</permissions instructions>"""
ENVIRONMENT = """<environment_context>
  <cwd>/home/dev/project</cwd>
  <shell>bash</shell>
  <current_date>2026-11-02</current_date>
  <timezone>Europe/Berlin</timezone>
</environment_context>"""
AGENTS = (
    "# AGENTS.md instructions for /home/dev/project\n\n<INSTRUCTIONS>\nRun `make test` before you say that it works. "
    "Line length is 100. No new dependency without a question.\n</INSTRUCTIONS>"
)
GRAMMAR = """start: begin_patch hunk+ end_patch
begin_patch: "*** Begin Patch" LF
end_patch: "*** End Patch" LF?
hunk: add_hunk | delete_hunk | update_hunk
add_hunk: "*** Add File: " filename LF add_line+
delete_hunk: "*** Delete File: " filename LF
update_hunk: "*** Update File: " filename LF change_move? change?
filename: /(.+)/
add_line: "+" /(.*)/ LF -> line
change_move: "*** Move to: " filename LF
change: (change_context | change_line)+ eof_line?
change_context: ("@@" | "@@ " /(.+)/) LF
change_line: ("+" | "-" | " ") /(.*)/ LF
eof_line: "*** End of File" LF
%import common.LF
"""
SEARCHED = "mcp: 1 hit\ndocs/settings.md: files are closed by the reader"


def _tool(name: str, description: str, required: tuple[str, ...] = (), /, **properties: Any) -> dict[str, Any]:
    return {"type": "function", "strict": False, **function(name, description, required, **properties)}


_NUMBER = {"type": "number", "description": "A whole number."}
_FLAG = {"type": "boolean", "description": "Off unless set."}
TOOLS: list[dict[str, Any]] = [
    _tool(
        "exec_command",
        "Runs a command in a terminal; gives its output, or a session to go on with.",
        ("cmd",),
        cmd="Shell command to run.",
        workdir="Folder to run in; the folder of the turn otherwise.",
        shell="Shell to start; the user's own otherwise.",
        login=_FLAG,
        tty=_FLAG,
        yield_time_ms=_NUMBER,
        max_output_tokens=_NUMBER,
        sandbox_permissions="`use_default` or `require_escalated`.",
        justification="Only with `require_escalated`: a question for the user.",
        prefix_rule={"type": "array", "items": {"type": "string"}, "description": "Prefix to allow from now on."},
    ),
    _tool(
        "write_stdin",
        "Writes to a session that still runs and gives what came out since.",
        ("session_id",),
        session_id=_NUMBER,
        chars="Bytes to write; may be empty.",
        yield_time_ms=_NUMBER,
        max_output_tokens=_NUMBER,
    ),
    _tool(
        "update_plan",
        "Updates the plan of the task. At most one step is in_progress at a time.",
        ("plan",),
        explanation="Why the plan changed.",
        plan={
            "type": "array",
            "description": "The list of steps",
            "items": schema(("step", "status"), step="What is done.", status="One of: pending, in_progress, completed"),
        },
    ),
    {
        "type": "custom",
        "name": "apply_patch",
        "description": "Edits files. This is a FREEFORM tool: do not wrap the patch in JSON.",
        "format": {"type": "grammar", "syntax": "lark", "definition": GRAMMAR},
    },
    _tool("view_image", "Shows an image of the local disk.", ("path",), path="Path of the image"),
    {
        "type": "namespace",
        "name": "mcp__notes",
        "description": "Notes of the team.",
        "tools": [
            _tool("search", "Searches the notes.", ("query",), query="Words.", limit={"type": "integer"}),
            _tool("read", "Reads a note.", ("id",), id="Its id."),
        ],
    },
]


def _shell_output(text: str) -> str:
    tokens = len(text) // 4
    return (
        f"Chunk ID: 3f2a1c\nWall time: 0.0521 seconds\nProcess exited with code 0\n"
        f"Original token count: {tokens}\nOutput:\n{text}\n"
    )


OUTPUTS = {
    "cat": _shell_output("\n".join(source_file("load_settings", 60))),
    "make": _shell_output("............ [100%]\n12 passed in 0.84s"),
}
PATCHED = json.dumps(
    {"output": "Success. Updated the following files:\nM src/settings.py\n", "metadata": {"exit_code": 0}}
)
PLAN = [{"step": "Read", "status": "completed"}, {"step": "Patch", "status": "in_progress"}]


class Codex:
    path = "/v1/responses"
    goes_on = GO_ON
    task = TASK
    headers: ClassVar = {
        "user-agent": "codex_cli_rs/0.98.0 (Ubuntu 24.4.0; x86_64) xterm-256color",
        "originator": "codex_cli_rs",
        "session_id": "019a9a2c-6c1e-7c52-8f0e-3d1f2c9a0b11",
        "accept": "text/event-stream",
    }
    lines: ClassVar = [
        Line(TASK, f"I look first.{THINK_END}I read the file." + call("exec_command", cmd="cat src/settings.py")),
        Line(
            result_cue(OUTPUTS["cat"]),
            f"Two things.{THINK_END}"
            + calls(("update_plan", {"plan": PLAN}), ("mcp__notes::search", {"query": "files", "limit": 3})),
        ),
        Line(result_cue(SEARCHED), f"Now the patch.{THINK_END}" + call("apply_patch", input=PATCH)),
        Line(result_cue(PATCHED), f"Test it.{THINK_END}" + call("exec_command", cmd="make test", yield_time_ms=1000)),
        Line(result_cue(OUTPUTS["make"]), f"Green.{THINK_END}The file is closed now; 12 tests pass."),
        Line(COUNT, LONG),
        Line(GO_ON, DONE),
    ]

    def __init__(self, model: str) -> None:
        self._model = model
        self._said = ""
        self._items: list[dict[str, Any]] = [
            _message("developer", PERMISSIONS),
            _message("user", AGENTS, ENVIRONMENT),
        ]

    def say(self, text: str) -> None:
        self._items.append(_message("user", text))

    def body(self) -> dict[str, Any]:
        return {
            "model": self._model,
            "instructions": guide("Codex", "a terminal of the user"),
            "input": list(self._items),
            "tools": TOOLS,
            "tool_choice": "auto",
            "parallel_tool_calls": True,
            "reasoning": {"effort": "high", "summary": "auto"},
            "store": False,
            "stream": True,
            "include": ["reasoning.encrypted_content"],
            "prompt_cache_key": self.headers["session_id"],
            "text": {"verbosity": "medium"},
        }

    def hear(self, events: list[Event]) -> bool:
        """Items are passed back as they came, without ids and states: the client's own types do not have them."""
        done = [event["item"] for event in events if event["type"] == "response.output_item.done"]
        self._items += [_kept(item) for item in done]
        self._said = "".join(part["text"] for item in done if item["type"] == "message" for part in item["content"])
        results = [self._run(item) for item in done if item["type"] in {"function_call", "custom_tool_call"}]
        self._items += results
        return bool(results)

    def break_off(self, events: list[Event]) -> None:
        """Items that were not complete are dropped; a note tells the model that the turn was cut."""
        self.hear(events)
        self._items.append(
            _message(
                "user",
                "<turn_aborted>\nThe user interrupted the previous turn on purpose. Commands that ran may have been "
                "cut off; check before you go on.\n</turn_aborted>",
            )
        )

    def text(self) -> str:
        return self._said

    @staticmethod
    def usage(events: list[Event]) -> tuple[int, int]:
        usage = events[-1]["response"]["usage"]
        return usage["input_tokens"], usage["input_tokens_details"]["cached_tokens"]

    @staticmethod
    def _run(item: dict[str, Any]) -> dict[str, Any]:
        if item["type"] == "custom_tool_call":
            assert (item["name"], item["input"]) == ("apply_patch", PATCH)
            return {"type": "custom_tool_call_output", "call_id": item["call_id"], "output": PATCHED}
        arguments = json.loads(item["arguments"])
        if item["name"] == "exec_command":
            output = OUTPUTS[arguments["cmd"].split()[0]]
        elif item["name"] == "update_plan":
            assert arguments["plan"] == PLAN
            output = "Plan updated"
        else:
            assert (item["name"], item["namespace"]) == ("search", "mcp__notes")
            output = SEARCHED
        return {"type": "function_call_output", "call_id": item["call_id"], "output": output}


def _message(role: str, *texts: str) -> dict[str, Any]:
    return {"type": "message", "role": role, "content": [{"type": "input_text", "text": text} for text in texts]}


def _kept(item: dict[str, Any]) -> dict[str, Any]:
    kept = {name: value for name, value in item.items() if name not in {"id", "status"}}
    if item["type"] == "message":
        kept["content"] = [{"type": "output_text", "text": part["text"]} for part in item["content"]]
    return kept
