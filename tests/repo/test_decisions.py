"""Decision records keep one form: numbered without gaps, four sections, at most 40 lines."""

import re

SECTIONS = ["Context", "Decision", "Consequence", "Revisit when"]


def test_decisions_are_numbered_without_gaps(repository):
    numbers = sorted(int(path.name[:4]) for path in (repository.root / "docs/decisions").glob("*.md"))
    assert numbers == list(range(1, len(numbers) + 1))


def test_every_decision_has_the_four_sections_and_fits_a_screen(repository):
    wrong = []
    for path in sorted((repository.root / "docs/decisions").glob("*.md")):
        text = path.read_text()
        title = re.match(r"# (\d{4})\. .+\n", text)
        has_form = title is not None and title[1] == path.name[:4] and re.findall(r"^## (.*)$", text, re.M) == SECTIONS
        if not has_form or len(text.splitlines()) > 40:
            wrong.append(path.name)
    assert wrong == []
