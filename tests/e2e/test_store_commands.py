"""What a person learns of the store from the command line, after requests that used it."""

import json

import pytest

MODEL = "SmolLM2-135M-Instruct"
BEGINNING = "Tell me about the tides of the northern sea. " * 40
ENDING = "And what of the birds that follow the ships? " * 40
OTHER_ENDING = "And what of the lights that burn on the coast? " * 40


@pytest.fixture(scope="module")
def request_ids(scripted):
    """A prompt that is new, the same once more, and one that parts from it behind its shared beginning."""
    return [ask(scripted, text) for text in (BEGINNING + ENDING, BEGINNING + ENDING, BEGINNING + OTHER_ENDING)]


def ask(system, text):
    body = {"model": MODEL, "messages": [{"role": "user", "content": text}], "max_tokens": 4}
    with system.http as http:
        reply = http.post("/v1/chat/completions", json=body)
    assert reply.status_code == 200, reply.text
    return reply.headers["x-request-id"]


def explained(system, request_id):
    done = system.command("explain", request_id, "--json")
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)["explanation"]


def test_the_store_is_shown_on_one_page(scripted, request_ids):
    done = scripted.command("store")
    assert (done.returncode, done.stderr) == (0, "")
    for words in ("shared level", "directory", "hit rate", "sweep, by kvindex", "DRAM blocks", "holds the lease"):
        assert words in done.stdout
    assert max(map(len, done.stdout.splitlines())) <= 80


def test_programs_get_the_same_as_numbers(scripted, request_ids):
    done = scripted.command("store", "--json")
    assert done.returncode == 0, done.stderr
    (told,) = json.loads(done.stdout)["instances"]
    overview = told["overview"]
    assert overview["blocks"] >= 4
    assert overview["shared_bytes"] > 0
    assert overview["lease_holder"] == told["instance_id"]
    asked = {row["traffic_class"]: row for row in overview["classes"]}
    assert asked["CHAT"]["asked_blocks"] > asked["CHAT"]["hit_blocks"] > 0


def test_each_request_is_explained(scripted, request_ids):
    new, again, other = (explained(scripted, request_id) for request_id in request_ids)
    assert (new["reason"], new["hit_blocks"]) == ("NEVER_STORED", 0)
    assert new["now_hit_blocks"] == new["whole_blocks"] > 3
    assert (again["reason"], again["hit_blocks"]) == ("NO_MISS", again["whole_blocks"])
    assert (other["reason"], other["nearest_request_id"]) == ("DIVERGED", request_ids[1])
    assert 0 < other["hit_blocks"] == other["first_other_block"] < other["whole_blocks"]


def test_an_explanation_is_sentences(scripted, request_ids):
    done = scripted.command("explain", request_ids[0])
    assert done.returncode == 0, done.stderr
    assert "Block 0 (tokens 0-127) was never stored" in done.stdout
    assert f"request  {request_ids[0]}" in done.stdout


def test_an_unknown_request_is_told_as_such(scripted):
    done = scripted.command("explain", "req-that-never-was")
    assert done.returncode == 1
    assert "No instance of kvindex remembers request req-that-never-was" in " ".join(done.stderr.split())


def test_nothing_runs_elsewhere(tmp_path, scripted):
    environ = {**scripted.environ, "SHOAL_HOME": str(tmp_path)}
    assert scripted.__class__(scripted.process, environ, scripted.url, tmp_path).command("store").returncode == 3
