"""No dead links: decisions that are cited exist, documents that are named exist, relative links resolve."""

import re
from collections.abc import Iterator
from pathlib import Path

from shoal_gateway.ports import Fallback

DECISION = re.compile(r"(?:docs/decisions/|\bdecisions? |(?=\b\d{4}-[a-z0-9-]+\.md))(\d{4})((?:-[a-z0-9]+)*)")
DOCUMENT = re.compile(r"(?<![\w/-])(?:docs|libs|services|tests)/[\w./-]+\.(?:md|py|proto)\b")
LINK = re.compile(r"!?\[[^\]]*\]\(([^)\s]+)\)")
FENCE = re.compile(r"^```.*?^```", re.MULTILINE | re.DOTALL)
HEADING = re.compile(r"^#+ +(.*)$", re.MULTILINE)


def dead_decisions(text: str, known: dict[str, str]) -> Iterator[str]:
    """Citations whose number does not exist, or whose name is no longer the file's."""
    for number, slug in DECISION.findall(text):
        name = known.get(number)
        if name is None or (slug and name != f"{number}{slug}"):
            yield f"{number}{slug}"


def anchors(text: str) -> set[str]:
    """The anchors that a page's headings make, as GitHub spells them."""
    return {re.sub(r"[^\w\- ]", "", heading.lower()).strip().replace(" ", "-") for heading in HEADING.findall(text)}


def dead_links(page: Path) -> Iterator[str]:
    for target in LINK.findall(FENCE.sub("", page.read_text())):
        if re.match(r"[a-z]+:", target):
            continue
        path, _, anchor = target.partition("#")
        file = (page.parent / path) if path else page
        if not file.exists() or (anchor and file.suffix == ".md" and anchor not in anchors(file.read_text())):
            yield target


def test_every_cited_decision_exists(repository):
    known = {path.stem[:4]: path.stem for path in (repository.root / "docs/decisions").glob("*.md")}
    dead = [
        f"{repository.name(path)}: {citation}"
        for path in repository.texts()
        if path != Path(__file__)
        for citation in dead_decisions(path.read_text(), known)
    ]
    assert dead == []


def test_every_named_document_exists(repository):
    dead = [
        f"{repository.name(path)}: {name}"
        for path in repository.texts()
        if path.parent != Path(__file__).parent  # their examples name what is not there
        for name in DOCUMENT.findall(path.read_text())
        if not (repository.root / name).exists()
    ]
    assert dead == []


def test_relative_links_resolve(repository):
    assert [f"{repository.name(page)}: {link}" for page in repository.markdown() for link in dead_links(page)] == []


def test_operations_has_a_line_for_each_fallback(repository):
    # The metric's own help sends the reader there.
    text = (repository.root / "docs/operations.md").read_text()
    assert [kind.value for kind in Fallback if f"| `{kind.value}` |" not in text] == []


def test_dead_links_are_seen(tmp_path):
    assert list(dead_decisions("docs/decisions/0001, docs/decisions/0002-b.md, decision 0003", {"0001": "0001-a"})) == [
        "0002-b",
        "0003",
    ]
    assert list(dead_decisions("docs/decisions/0001-old-name", {"0001": "0001-a"})) == ["0001-old-name"]
    page = tmp_path / "page.md"
    page.write_text("# Two words\n[a](#two-words) [b](#gone) [c](page.md) [d](gone.md) [e](https://example.org)\n")
    assert list(dead_links(page)) == ["#gone", "gone.md"]
