"""Settings of `shoal up`."""

from pathlib import Path

import pytest

from shoal_local.settings import LocalSettings


def test_plain_names_and_own_names_are_read():
    settings = LocalSettings.load(
        "local", {"SHOAL_HOME": "/x", "SHOAL_GATEWAY_PORT": "9000", "SHOAL_LOCAL_STORE_L1_GIB": "2"}
    )
    assert (settings.home, settings.gateway_port, settings.store_l1_gib) == (Path("/x"), 9000, 2.0)


def test_a_wrong_port_stops_the_start():
    with pytest.raises(SystemExit, match="PORT"):
        LocalSettings.load("local", {"SHOAL_GATEWAY_PORT": "http"})


@pytest.mark.parametrize(
    ("host", "url"),
    [
        ("127.0.0.1", "http://127.0.0.1:8000"),
        ("0.0.0.0", "http://127.0.0.1:8000"),
        ("::1", "http://[::1]:8000"),
    ],
)
def test_the_gateway_is_named_as_a_client_here_reaches_it(host, url):
    assert LocalSettings(gateway_host=host).gateway_url == url
