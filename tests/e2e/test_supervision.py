"""`shoal up` and `down`: what dies comes back, and in the end nothing is left, however it ends."""

import os
import signal
import socket
from pathlib import Path

import pytest

from shoal_local.home import Home
from shoal_local.processes import family, is_alive

from .conftest import READY_SIGN, free_port, shoal_up, until

WAIT_S = 60.0
BODY = {
    "model": "SmolLM2-135M-Instruct",
    "messages": [{"role": "user", "content": "What is the capital of France?"}],
    "max_tokens": 4,
}


def everyone(home: Path):
    """All processes of a running system."""
    record = Home(home).read()
    assert record is not None
    members = [member for child in record.children if child.name for member in family(child.name)]
    return [record.supervisor, *members, *family(record.supervisor)]


def child_of(home: Path, service: str):
    record = Home(home).read()
    return next(child for child in record.children if child.service == service)


def segments():
    return {path.name for path in Path("/dev/shm").glob("lmcache*")}


def test_it_tells_what_runs(scripted):
    assert "everything is ready after" in scripted.output
    status = scripted.command("status")
    assert status.returncode == 0
    for service in ("nats", "postgres", "kvindex", "tokenizer", "prefill", "decode", "gateway", "all"):
        assert f"\n{service} " in status.stdout


def test_a_second_one_says_that_one_runs(scripted):
    second = scripted.command("up", "--engine", "scripted")
    assert second.returncode == 1
    assert f"A system already runs at {scripted.url} (pid {scripted.process.pid})" in second.stdout


@pytest.mark.parametrize("service", ["decode", "prefill", "kvindex", "tokenizer", "gateway"])
def test_a_killed_service_comes_back_and_answers(service, scripted):
    before = child_of(scripted.home, service)
    os.kill(before.name.pid, signal.SIGKILL)
    until(lambda: child_of(scripted.home, service).restarts == before.restarts + 1)
    until(lambda: child_of(scripted.home, service).state == "ready")
    with scripted.http as http:
        until(lambda: http.post("/v1/chat/completions", json=BODY).status_code == 200)
    assert f"{service} was ended by SIGKILL" in scripted.output


def test_a_taken_port_is_told_with_the_setting_that_helps(scripted, tmp_path):
    with socket.create_server(("127.0.0.1", free_port())) as listener:
        taken = str(listener.getsockname()[1])
        with shoal_up(tmp_path / "home", "--engine", "scripted", SHOAL_GATEWAY_PORT=taken) as second:
            assert second.process.wait(timeout=WAIT_S) == 1
    assert f"port {taken} on 127.0.0.1 is taken" in second.output
    assert "SHOAL_GATEWAY_PORT" in second.output


def test_a_model_that_is_not_there_is_told(tmp_path):
    with shoal_up(tmp_path / "home", "--engine", "scripted", SHOAL_MODEL=str(tmp_path / "none")) as running:
        assert running.process.wait(timeout=WAIT_S) == 1
    assert "SHOAL_MODEL" in running.output
    assert "no such folder" in running.output


def test_down_leaves_nothing_behind(tmp_path):
    with shoal_up(tmp_path / "home", "--engine", "scripted") as running:
        running.wait_for(READY_SIGN, timeout_s=240)
        members = everyone(running.home)
        assert len(members) > 10
        down = running.command("down")
        assert (down.returncode, down.stdout.splitlines()[-1]) == (0, "Stopped.")
        assert running.process.wait(timeout=WAIT_S) == 0
        until(lambda: not any(map(is_alive, members)), timeout_s=5)
        assert Home(running.home).read() is None
        assert running.command("status").returncode == 3
        assert running.command("down").stdout == "Nothing runs.\n"
        assert running.errors() == []


def test_a_killed_supervisor_leaves_nothing_behind_and_the_next_start_works(tmp_path):
    before = segments()
    home = tmp_path / "home"
    with shoal_up(home, "--engine", "scripted") as running:
        running.wait_for(READY_SIGN, timeout_s=240)
        members = everyone(home)
        running.process.kill()
        until(lambda: not any(map(is_alive, members)))
        until(lambda: Home(home).read() is None)
        assert segments() <= before
    with shoal_up(home, "--engine", "scripted") as running:
        running.wait_for(READY_SIGN, timeout_s=240)
