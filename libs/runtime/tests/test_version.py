"""Two processes of equal sources have equal versions, and no others."""

import pytest

from shoal_runtime.version import digest_of, version


@pytest.fixture
def package(tmp_path):
    folder = tmp_path / "package"
    (folder / "inner").mkdir(parents=True)
    (folder / "a.py").write_text("a = 1\n")
    (folder / "inner" / "b.py").write_text("b = 1\n")
    return folder


def test_a_version_names_the_package_and_its_sources():
    number, _, digest = version().rpartition(".")
    assert number == "0.0.0+src"
    assert len(digest) == 10


def test_only_sources_count(package):
    before = digest_of(package)
    (package / "notes.txt").write_text("x")
    (package / "__pycache__").mkdir()
    assert digest_of(package) == before


def test_every_change_of_a_source_is_another_version(package):
    digests = [digest_of(package)]
    (package / "inner" / "b.py").write_text("b = 2\n")
    digests.append(digest_of(package))
    (package / "inner" / "b.py").rename(package / "inner" / "c.py")
    digests.append(digest_of(package))
    assert len(set(digests)) == 3
