"""The command line of a store, from a description and from the environment."""

import json
import socket
import subprocess
import sys
import urllib.request
from pathlib import Path

import pytest

from shoal_kvstore.command import LmcacheSpec, lmcache_argv, lmcache_server
from shoal_kvstore.settings import KvStoreSettings


def options(argv):
    """Each option with what follows it; flags have none."""
    return {
        name: None if value.startswith("--") else value
        for name, value in zip(argv, [*argv[1:], "--"], strict=True)
        if name.startswith("--")
    }


def spec_of(**environ):
    return KvStoreSettings.load("kvstore", {f"SHOAL_KVSTORE_{name}": value for name, value in environ.items()}).spec


def test_a_described_server_listens_on_loopback_and_reports_to_nobody():
    given = options(lmcache_argv(LmcacheSpec("a", Path("/kv"), mq_port=1, http_port=2, metrics_port=3)))
    assert (given["--host"], given["--http-host"]) == ("127.0.0.1", "127.0.0.1")
    assert (given["--port"], given["--http-port"], given["--prometheus-port"]) == ("1", "2", "3")
    assert not {name for name in given if name.startswith("--coordinator")}
    assert "--separate-object-groups" in given


def test_our_plugins_get_their_settings():
    spec = LmcacheSpec("a", Path("/kv"), 1, 2, 3, window_age_s=60.0, capacity_bytes=5)
    given = options(lmcache_argv(spec))
    adapter, module = json.loads(given["--l2-adapter"]), json.loads(given["--server-module"])
    assert adapter["adapter_params"] == {"folder": "/kv", "server": "a", "capacity_bytes": 5}
    assert adapter["shared"] is True
    assert module["config"] == {"window_age_s": 60.0}


def test_in_a_container_kvindex_is_told_the_host_name():
    given = options(lmcache_argv(spec_of(HOST="0.0.0.0", COORDINATOR_URL="http://kvindex:9300")))
    assert (given["--host"], given["--http-host"]) == ("0.0.0.0", "0.0.0.0")
    assert given["--coordinator-url"] == "http://kvindex:9300"
    assert given["--coordinator-advertise-ip"] == socket.gethostname()
    assert given["--instance-id"] == f"kvstore-{socket.gethostname()}"


def test_names_that_are_given_win():
    given = options(
        lmcache_argv(
            spec_of(HOST="0.0.0.0", ADVERTISE_HOST="node-1", INSTANCE_ID="store-1", COORDINATOR_URL="http://kvindex:1")
        )
    )
    assert (given["--coordinator-advertise-ip"], given["--instance-id"]) == ("node-1", "store-1")


def test_a_misspelled_setting_stops_the_start():
    with pytest.raises(SystemExit, match="SHOAL_KVSTORE_HTTP_PROT is no setting"):
        KvStoreSettings.load("kvstore", {"SHOAL_KVSTORE_HTTP_PROT": "1"})


def test_a_folder_that_cannot_be_made_is_told(tmp_path):
    (tmp_path / "file").write_text("")
    environ = {"SHOAL_KVSTORE_FOLDER": str(tmp_path / "file" / "kv")}
    result = subprocess.run([sys.executable, "-m", "shoal_kvstore"], env=environ, capture_output=True, text=True)
    assert result.returncode == 1
    assert result.stderr == f"SHOAL_KVSTORE_FOLDER={tmp_path}/file/kv cannot be used: Not a directory\n"


def test_no_proxy_hears_what_it_tells_kvindex(monkeypatch, tmp_path):
    monkeypatch.setenv("no_proxy", "example.com")
    for name, value in lmcache_server(LmcacheSpec("a", tmp_path, 1, 2, 3)).environ.items():
        monkeypatch.setenv(name, value)
    assert urllib.request.proxy_bypass("kvindex")


def test_the_command_line_needs_nothing_of_lmcache():
    code = (
        "import sys, shoal_kvstore.command, shoal_kvstore.settings; print([m for m in sys.modules if 'lmcache' in m])"
    )
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert result.stdout == "[]\n"
