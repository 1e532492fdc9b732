"""What runs, in which order, with which settings."""

import socket

import pytest

from shoal_local.home import Home
from shoal_local.servers import PORT_RANGE, Ports, is_port_free, specs_of
from shoal_local.settings import LocalSettings
from shoal_model import PreparedModel


@pytest.fixture
def planned(tmp_path, monkeypatch):
    """Specs by service, for an engine kind and an environment."""

    def plan(kind="vllm", **environ):
        for name, value in environ.items():
            monkeypatch.setenv(name, value)
        settings = LocalSettings(home=tmp_path, engine_kind=kind)
        model = PreparedModel(tmp_path / "tiny", "tiny-model")
        return {spec.service: spec for spec in specs_of(settings, Home(tmp_path), model, Ports.pick())}

    return plan


def test_everything_that_is_needed_is_there_and_starts_before(planned):
    specs = planned()
    assert list(specs) == ["nats", "postgres", "lmcache", "tokenizer", "kvindex", "prefill", "decode", "gateway"]
    for spec in specs.values():
        assert spec.needs | spec.uses <= specs.keys()
    assert specs["kvindex"].needs == {"nats", "postgres"}
    assert specs["gateway"].needs == {"nats", "postgres"}
    assert specs["gateway"].uses == {"tokenizer", "kvindex", "prefill", "decode"}
    urls = {specs[name].environ[f"SHOAL_{name.upper()}_POSTGRES_URL"] for name in ("gateway", "kvindex")}
    assert len(urls) == 1, "each has a schema of its own in one database"


def test_a_scripted_engine_needs_no_store(planned):
    specs = planned("scripted")
    assert "lmcache" not in specs
    assert "lmcache" not in specs["decode"].needs | specs["decode"].uses
    assert specs["decode"].environ["SHOAL_ENGINE_KIND"] == "scripted"
    assert "SHOAL_ENGINE_STORE_PORT" not in specs["decode"].environ


def test_both_engines_are_set_the_same_way_and_only_prefill_prefetches(planned):
    specs = planned()
    engine = [
        {name: value for name, value in specs[role].environ.items() if name.startswith("SHOAL_ENGINE_")}
        for role in ("prefill", "decode")
    ]
    assert int(engine[0].pop("SHOAL_ENGINE_STORE_HTTP_PORT")) != int(engine[0]["SHOAL_ENGINE_STORE_PORT"])
    assert engine[0] == engine[1]
    assert engine[0]["SHOAL_ENGINE_SERVED_NAME"] == "tiny-model"


def test_settings_of_services_pass_through_and_our_own_do_not(planned):
    specs = planned(SHOAL_GATEWAY_MAX_BODY_BYTES="2048", SHOAL_MODEL="x", SHOAL_LOCAL_STORE_L1_GIB="2")
    assert specs["gateway"].environ["SHOAL_GATEWAY_MAX_BODY_BYTES"] == "2048"
    assert not {"SHOAL_MODEL", "SHOAL_LOCAL_STORE_L1_GIB"} & specs["gateway"].environ.keys()


def test_ports_are_different_and_out_of_the_way_of_outgoing_connections():
    ports = Ports.pick()
    numbers = [getattr(ports, name) for name in Ports.__dataclass_fields__]
    assert len(set(numbers)) == len(numbers)
    assert set(numbers) <= set(PORT_RANGE)


def test_a_taken_port_is_seen():
    with socket.create_server(("127.0.0.1", 0)) as listener:
        assert not is_port_free("127.0.0.1", listener.getsockname()[1])


def test_an_address_of_another_machine_is_an_error():
    with pytest.raises(OSError):
        is_port_free("192.0.2.1", 8000)
