"""What a container's health check is told."""

import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer

import pytest

from shoal_runtime.probe import main, probe

PAGES = {"/readyz": (200, b'{"is_ready":true}'), "/busy": (503, b'{"reasons":{"nats":\n"away"}}'), "/none": (204, b"")}


class _Pages(BaseHTTPRequestHandler):
    def do_GET(self) -> None:
        status, body = PAGES[self.path]
        self.send_response(status)
        self.send_header("content-length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *args: object) -> None:
        """Quiet."""


@pytest.fixture(scope="module")
def url() -> Iterator[str]:
    with HTTPServer(("127.0.0.1", 0), _Pages) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()
        thread.join()


def test_200_is_fine(url: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([f"{url}/readyz"]) == 0
    assert capsys.readouterr().out == '200 {"is_ready":true}\n'


def test_a_refusal_shows_its_reasons_in_one_line(url: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([f"{url}/busy"]) == 1
    assert capsys.readouterr().out == '503 {"reasons":{"nats": "away"}}\n'


def test_another_success_is_not_readiness(url: str) -> None:
    assert probe(f"{url}/none") == (False, "204")


def test_nobody_there_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("http_proxy", "http://proxy.invalid:3128")  # never asked
    is_fine, said = probe("http://127.0.0.1:9/readyz")
    assert (is_fine, said) == (False, "http://127.0.0.1:9/readyz does not answer: [Errno 111] Connection refused")


@pytest.mark.parametrize("arguments", [[], ["a", "b"], ["not-a-url"]])
def test_a_wrong_call_is_not_fine(arguments: list[str]) -> None:
    assert main(arguments) == 1
