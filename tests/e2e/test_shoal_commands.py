"""`shoal status`, `chat`, `bench` and `logs`, as a person or a script uses them."""

import codecs
import json
import os
import pty
import re
import select
import signal
import subprocess
import time
from contextlib import contextmanager

from .conftest import SHOAL, shoal_up, until

WAIT_S = 60.0
SERVICES = ("gateway", "tokenizer", "kvindex", "prefill", "decode")
STORY = "Tell me about the tides of the northern sea and of those who sail there. " * 30


def test_status_shows_everybody_and_their_queues(scripted):
    until(lambda: "listing: not complete" not in scripted.command("status").stdout)
    done = scripted.command("status")
    assert (done.returncode, done.stderr) == (0, "")
    for service in SERVICES:
        assert re.search(rf"^{service} +{service}-[0-9a-f]+ .* ready$", done.stdout, re.MULTILINE)
    assert "hit rate" in done.stdout
    assert "supervisor" in done.stdout


def test_status_tells_programs_the_same(scripted):
    done = scripted.command("status", "--json")
    assert done.returncode == 0, done.stderr
    told = json.loads(done.stdout)
    assert {instance["service"] for instance in told["instances"]} == set(SERVICES)
    [decode] = [instance for instance in told["instances"] if instance["service"] == "decode"]
    assert decode["load"]["max_running_requests"] > 0
    [queue] = told["queues"]
    assert (queue["tier"], queue["has_consumer"]) == ("all", True)
    assert told["home"]["gateway_url"] == scripted.url


def test_what_is_shown_may_be_read_in_part(scripted):
    for command in (("store", "--json"), ("status", "--json"), ("logs",)):
        argv = (*SHOAL, *command)
        with subprocess.Popen(
            argv, env=scripted.environ, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
        ) as process:
            process.stdout.close()
            assert process.stderr.read() == ""


def test_another_system_is_seen_by_its_nats_alone(scripted, tmp_path):
    nats_url = json.loads(scripted.command("status", "--json").stdout)["home"]["nats_url"]
    argv = (*SHOAL, "status", "--nats", nats_url)
    environ = {**scripted.environ, "SHOAL_HOME": str(tmp_path)}
    done = subprocess.run(argv, env=environ, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stderr
    assert "decode-" in done.stdout
    assert "supervisor" not in done.stdout


def test_nats_that_is_away_is_told(scripted):
    done = scripted.command("status", "--nats", "nats://127.0.0.1:1")
    assert (done.returncode, done.stdout) == (1, "")
    assert "NATS at nats://127.0.0.1:1 does not answer" in done.stderr


def piped(running, text, *arguments):
    argv = (*SHOAL, "chat", "--max-tokens", "5", *arguments)
    return subprocess.run(
        argv, env=running.environ, input=text, capture_output=True, text=True, timeout=60, check=False
    )


def test_a_script_talks_a_line_a_turn(scripted):
    done = piped(scripted, f"{STORY}\n\nAnd then?\n")
    assert done.returncode == 0, done.stderr
    first, second = done.stderr.splitlines()
    assert ", 0 of them cached" in first
    assert int(re.search(r", ([\d,]+) of them cached", second)[1].replace(",", "")) > 300
    assert "first token after" in second
    assert len(done.stdout.split()) >= 2


def test_a_script_hears_of_an_error(scripted):
    done = piped(scripted, "hello\nhello\n", "--model", "nobody-has-it")
    assert (done.returncode, done.stdout) == (1, "")
    assert done.stderr.count("The model 'nobody-has-it' does not exist") == 1
    nobody = piped(scripted, "hello\n", "--url", "http://127.0.0.1:1")
    assert nobody.returncode == 1
    assert "Nothing answers at http://127.0.0.1:1" in nobody.stderr


class Terminal:
    """A person in front of one command."""

    def __init__(self, process: subprocess.Popen[bytes], keyboard: int) -> None:
        self.process, self.keyboard, self.seen = process, keyboard, ""
        self._decoder = codecs.getincrementaldecoder("utf-8")()  # a read may end within a character

    def type(self, text: str) -> None:
        os.write(self.keyboard, text.encode())

    def wait_for(self, sign: str) -> str:
        """Until it shows ``sign``; returns what stood before, and forgets that."""
        deadline = time.monotonic() + WAIT_S
        while sign not in self.seen:
            assert time.monotonic() < deadline, self.seen
            self._look()
        before, self.seen = self.seen.split(sign, 1)
        return before

    def wait_for_more(self, chars: int) -> None:
        """Until it shows so much more, whatever it is; keeps that."""
        deadline = time.monotonic() + WAIT_S
        while len(self.seen) < chars:
            assert time.monotonic() < deadline, self.seen
            self._look()

    def _look(self) -> None:
        if select.select([self.keyboard], [], [], 0.1)[0]:
            self.seen += self._decoder.decode(os.read(self.keyboard, 65536))


def take_terminal(screen: int) -> None:
    """Of a new session; and as a person's shell starts it, whatever started the tests: Ctrl-C is not ignored."""
    os.close(os.open(os.ttyname(screen), os.O_RDWR))
    signal.signal(signal.SIGINT, signal.SIG_DFL)


@contextmanager
def terminal(running, *arguments):
    """On a terminal of its own, whose Ctrl-C reaches the command as a signal."""
    keyboard, screen = pty.openpty()
    environ = {**running.environ, "TERM": "xterm", "COLUMNS": "120", "LINES": "40"}
    process = subprocess.Popen(
        (*SHOAL, *arguments), env=environ, stdin=screen, stdout=screen, stderr=screen,
        start_new_session=True, preexec_fn=lambda: take_terminal(screen),
    )  # fmt: skip
    os.close(screen)
    try:
        yield Terminal(process, keyboard)
    finally:
        process.kill()
        process.wait(timeout=10)
        os.close(keyboard)


def test_a_person_stops_an_answer_and_goes_on(scripted):
    log = scripted.home / "logs" / "gateway.log"
    cancelled = log.read_text().count('"outcome":"cancelled"')
    with terminal(scripted, "chat", "--max-tokens", "4000") as person:
        person.wait_for("Ctrl-D ends")
        person.wait_for("› ")
        person.type(f"\033[200~{STORY[:400]}\nin two lines\033[201~\r")
        person.wait_for("in two lines")
        person.wait_for("\033[?2004l")  # the prompt has taken the text
        person.wait_for_more(60)  # some words of the answer
        person.type("\003")
        person.wait_for("stopped")
        person.wait_for("› ")
        person.type("\004")
        assert person.process.wait(timeout=10) == 0
    deadline = time.monotonic() + 10
    while log.read_text().count('"outcome":"cancelled"') == cancelled:
        assert time.monotonic() < deadline
        time.sleep(0.05)
    assert log.read_text().count('"outcome":"cancelled"') == cancelled + 1


def test_status_draws_itself_again_until_a_person_leaves(scripted):
    with terminal(scripted, "status", "--every", "0.3") as person:
        for _ in range(3):
            person.wait_for("hit rate")
        person.type("\003")
        assert person.process.wait(timeout=10) == 0


def test_bench_tells_hits_from_misses(scripted):
    done = scripted.command("bench", "--requests", "6", "--turns", "3", "--max-tokens", "4")
    assert done.returncode == 0, done.stderr
    first, later = re.search(r"^cached of them +([\d.]+) % +([\d.]+) %$", done.stdout, re.MULTILINE).groups()
    assert float(first) == 0
    assert float(later) > 50
    assert "6 requests in" in done.stdout


def test_logs_of_one_request_are_found_by_the_id_in_its_answer(scripted):
    body = {"model": "SmolLM2-135M-Instruct", "messages": [{"role": "user", "content": STORY}], "max_tokens": 2}
    with scripted.http as http:
        completion_id = http.post("/v1/chat/completions", json=body).json()["id"]
    done = scripted.command("logs", "--request", completion_id)
    assert done.returncode == 0
    assert {line.split()[1] for line in done.stdout.splitlines()} >= {"gateway", "decode"}
    assert "request.settled" in done.stdout


def test_logs_go_on_with_what_comes(scripted):
    argv = (*SHOAL, "logs", "gateway", "--follow")
    with subprocess.Popen(argv, env=scripted.environ, stdout=subprocess.PIPE, text=True) as following:
        assert "gateway" in following.stdout.readline()
        with scripted.http as http:
            asked = http.post("/v1/chat/completions", json={}).headers["x-request-id"]
        while asked not in (line := following.stdout.readline()):
            assert line
        following.kill()


def test_a_misspelt_setting_ends_the_start_at_once(tmp_path):
    with shoal_up(tmp_path / "home", "--engine", "scripted", SHOAL_GATEWAY_PROT="1") as running:
        assert running.process.wait(timeout=WAIT_S) == 1
    assert "SHOAL_GATEWAY_PROT is no setting. Did you mean: SHOAL_GATEWAY_PORT" in running.output
    assert "starting it again" not in running.output
