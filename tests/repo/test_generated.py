"""docs/reference says what the code says: ``make gen`` writes it, nobody else."""

import importlib.util

import pytest


@pytest.fixture(scope="module")
def generator(repository):
    spec = importlib.util.spec_from_file_location("generate_reference", repository.root / "docs/generate_reference.py")
    module = importlib.util.module_from_spec(spec)
    with pytest.MonkeyPatch.context() as patched:
        patched.syspath_prepend(str(repository.root / "docs"))
        spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize("page", ["settings.md", "metrics.md", "errors.md", "apis.md", "openapi.json"])
def test_reference_pages_are_what_the_code_says(page, generator, repository):
    written = (repository.root / "docs/reference" / page).read_text()
    assert written == generator.pages()[page], "run `make gen` and commit what it changes"


def test_every_service_shows_its_settings_and_metrics(generator, repository):
    pages = generator.pages()
    missing = [
        f"{service}: {page}"
        for service in repository.services()
        for page in ("settings.md", "metrics.md")
        if f"\n## {service}\n" not in pages[page]
    ]
    assert missing == []


def test_every_setting_says_when_to_change_it(generator):
    rows = [line for line in generator.pages()["settings.md"].splitlines() if line.startswith("| `")]
    assert [row for row in rows if row.split(" | ")[-1].strip(" |") == ""] == []


def test_no_service_has_more_settings_than_a_person_can_hold(generator):
    sections = generator.pages()["settings.md"].split("\n## ")[1:]
    counts = {section.split("\n")[0]: section.count("\n| `") for section in sections}
    assert {name: count for name, count in counts.items() if count > 25} == {}
