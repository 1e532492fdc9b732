"""The size budget of what ships: files, functions, parameters, nesting.

An exception needs a reason, and an exception that is no longer needed fails too.
"""

import ast
import re
from collections.abc import Iterator
from pathlib import Path

FILE_LINES = 400
TEST_FILE_LINES = 600
FUNCTION_LINES = 60
PARAMETERS = 6
NESTING = 3

# "path" or "path::Class.function" -> why it may be over a limit.
EXCEPTIONS: dict[str, str] = {}

Function = ast.FunctionDef | ast.AsyncFunctionDef
BLOCKS = (ast.If, ast.For, ast.AsyncFor, ast.While, ast.With, ast.AsyncWith, ast.Try, ast.TryStar, ast.Match)


def functions(tree: ast.AST, prefix: str = "") -> Iterator[tuple[str, Function]]:
    for child in ast.iter_child_nodes(tree):
        name = prefix
        if isinstance(child, Function):
            name = f"{prefix}{child.name}"
            yield name, child
            name += "."
        elif isinstance(child, ast.ClassDef):
            name = f"{prefix}{child.name}."
        yield from functions(child, name)


def parameters(function: Function) -> int:
    arguments = function.args
    named = [*arguments.posonlyargs, *arguments.args, *arguments.kwonlyargs]
    has_receiver = bool(named) and named[0].arg in {"self", "cls"}
    return len(named) - has_receiver + (arguments.vararg is not None) + (arguments.kwarg is not None)


def nesting(node: ast.AST) -> int:
    """Deepest run of blocks inside blocks. An ``elif`` is no deeper than its ``if``; an inner function counts anew."""
    deepest = 0
    for child in ast.iter_child_nodes(node):
        if isinstance(child, Function | ast.ClassDef | ast.Lambda):
            continue
        is_elif = isinstance(node, ast.If) and node.orelse == [child] and isinstance(child, ast.If)
        deepest = max(deepest, nesting(child) + (isinstance(child, BLOCKS) and not is_elif))
    return deepest


def lines(path: Path) -> int:
    return len(path.read_text().splitlines())


def over_budget(name: str, source: str) -> Iterator[tuple[str, str]]:
    """What is over a limit: where, and by how much."""
    count = len(source.splitlines())
    if count > FILE_LINES:
        yield name, f"{count} lines, limit {FILE_LINES}"
    for qualified, function in functions(ast.parse(source)):
        length = (function.end_lineno or function.lineno) - function.lineno + 1
        for what, value, limit in (
            ("lines", length, FUNCTION_LINES),
            ("parameters", parameters(function), PARAMETERS),
            ("levels of nesting", nesting(function), NESTING),
        ):
            if value > limit:
                yield f"{name}::{qualified}", f"{value} {what}, limit {limit}"


def test_everything_is_within_budget_or_has_a_reason(repository):
    over = [found for path in repository.shipped() for found in over_budget(repository.name(path), path.read_text())]
    assert [f"{where}: {why}" for where, why in over if where not in EXCEPTIONS] == []


def test_no_exception_outlives_its_need(repository):
    over = {where for path in repository.shipped() for where, _ in over_budget(repository.name(path), path.read_text())}
    assert sorted(set(EXCEPTIONS) - over) == []
    assert all(EXCEPTIONS.values())


def test_no_test_file_is_longer_than_a_behaviour(repository):
    assert [repository.name(path) for path in repository.tests() if lines(path) > TEST_FILE_LINES] == []


def test_every_package_is_typed_and_every_service_has_a_page(repository):
    typed = [
        path.parent / f"src/shoal_{path.parent.name}/py.typed" for path in repository.root.glob("*/*/pyproject.toml")
    ]
    pages = [repository.root / "services" / service / "README.md" for service in repository.services()]
    assert [repository.name(path) for path in (*typed, *pages) if not path.is_file()] == []


def test_service_pages_have_the_same_headings(repository):
    headings = [
        *("owns / never has", "interface", "files in reading order", "what fails and what then happens"),
        *("run it alone", "its five metrics"),
    ]
    different = {}
    for service in repository.services():
        page = repository.root / "services" / service / "README.md"
        found = re.findall(r"^## (.*)$", page.read_text(), re.MULTILINE) if page.exists() else []
        if [heading.lower().replace(",", "") for heading in found] != headings:
            different[service] = found
    assert different == {}


def test_the_budget_bites():
    deep = "def f(a, b, c, d, e, g, h):\n for x in a:\n  if x:\n   with x:\n    if b: pass\n"
    assert [why for _, why in over_budget("deep.py", deep)] == [
        "7 parameters, limit 6",
        "4 levels of nesting, limit 3",
    ]
    assert [why for _, why in over_budget("long.py", "def f():\n" + " pass\n" * 400)] == [
        "401 lines, limit 400",
        "401 lines, limit 60",
    ]
    flat = "class A:\n def f(self, a, b, c, d, e, *g):\n  if a: pass\n  elif b: pass\n  elif c: pass\n  elif d: pass\n"
    assert list(over_budget("flat.py", flat)) == []
