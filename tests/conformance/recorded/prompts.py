"""System prompts of the form and length that coding agents send, in words of our own.

The clients' own texts are theirs; what matters to a server is the form: headings, lists, tags, quotes, code, 10 to
30 KB that stay the same over all turns of a conversation.
"""

_RULES = (
    "Read the file before you change it, even when you believe that you know what it holds.",
    "Keep a change as small as the task allows; unrelated repairs belong into a note at the end.",
    "Follow the names, the layout and the error handling of the code around the place that you edit.",
    "Prefer `rg` over `grep -r`, and `rg --files` over `find`, because both skip what git ignores.",
    "Never run a command that rewrites history, and never push; say which command the user could run instead.",
    "When a test fails, find out whether it failed before your change, and say so.",
    "A path in an answer is written as `src/module.py:42`, so that a terminal makes a link of it.",
    "Do not guess addresses on the network. Use those of the user, or of files of the project.",
    "Explain a command that changes the system before it runs: what it does and how to undo it.",
    "If two readings of a request lead to different code, take the smaller one and name the other.",
)
_SUBJECTS = (
    "Python",
    "TypeScript",
    "Rust",
    "Go",
    "SQL migrations",
    "shell scripts",
    "container images",
    "continuous integration",
    "documentation",
    "tests",
    "dependencies",
    "secrets and credentials",
    "generated files",
    "large repositories",
    "user interfaces",
    "performance work",
)
_EXAMPLES = (
    ("user: is 91 prime?\nassistant: no, 7 × 13", "A question of one line gets an answer of one line."),
    ("user: where do we retry?\nassistant: `net/client.ts:118`", "A place is the answer to a question for a place."),
    ("user: add a flag --quiet\nassistant: [searches, edits, runs the tests]\nDone: `cli.py:31`.", "Work, then words."),
)


def guide(name: str, host: str, *, sections: int = len(_SUBJECTS)) -> str:
    """A prompt of about a kilobyte a section."""
    parts = [
        f"You are {name}, an agent that works on software in {host}. You are precise, careful and brief.\n",
        "# How to work\n\n" + "\n".join(f"- {rule}" for rule in _RULES),
        "# Examples\n\n" + "\n\n".join(f"<example>\n{talk}\n</example>\n{why}" for talk, why in _EXAMPLES),
    ]
    return "\n\n".join([*parts, *(_section(number, _SUBJECTS[number]) for number in range(sections))])


def _section(number: int, subject: str) -> str:
    ordered = [_RULES[(number + step) % len(_RULES)] for step in range(6)]
    rules = "\n".join(f"{place}. For {subject}: {rule[0].lower()}{rule[1:]}" for place, rule in enumerate(ordered, 1))
    return (
        f"## {number + 1}. {subject.capitalize()}\n\n"
        f"What holds for {subject} in this project is written in `docs/{subject.replace(' ', '-').lower()}.md`; "
        f"where that file and this section differ, the file is right.\n\n{rules}\n\n"
        f'```json\n{{"topic": "{subject}", "order": {number}, "strict": {str(number % 2 == 0).lower()}}}\n```'
    )


def source_file(name: str, lines: int) -> list[str]:
    """The lines of a file that a tool could have read."""
    body = [
        f"    {name}_{number} = compute({number}, scale={number * 7 % 13})  # step {number}" for number in range(lines)
    ]
    return ["import json", "", f"def {name}(path: str) -> dict:", *body, "    return json.load(open(path))"]
