"""--kv-events-config: accepted settings, and the errors about others."""

from __future__ import annotations

import sys

import pytest

from kvweave.config import CacheConfig, validate
from kvweave.config.cache import EventsConfig
from kvweave.errors import ConfigError
from kvweave.events import open_sink


def test_settings_of_vllm_and_sglang_are_accepted():
    vllm = '{"enable_kv_cache_events": true, "publisher": "zmq", "topic": "kv-events"}'
    assert EventsConfig.parse(vllm) == EventsConfig(topic="kv-events")
    sglang = '{"publisher": "zmq", "endpoint": "tcp://*:6000", "bind": true, "buffer_steps": 5}'
    assert EventsConfig.parse(sglang).buffer_steps == 5
    assert EventsConfig.wanted(None) is None
    assert EventsConfig.wanted('{"publisher": "null"}') is None
    assert EventsConfig.wanted('{"enable_kv_cache_events": false}') is None
    assert EventsConfig.wanted("{}") == EventsConfig()


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("tcp://*:5557", "takes JSON, and this is none"),
        ("[1]", "takes a JSON object"),
        ('{"endpont": "tcp://*:1"}', "no key 'endpont'; it has .*endpoint"),
        ('{"endpoint": 5557}', "endpoint is a text, not 5557"),
        ('{"bind": 1}', "bind is true or false or null, not 1"),
        ('{"hwm": true}', "hwm is a whole number, not true"),
        ('{"endpoint": "*:5557"}', "endpoint begins with one of tcp://, ipc://"),
        ('{"replay_endpoint": "http://x"}', "replay_endpoint begins with"),
        ('{"buffer_steps": 0}', "buffer_steps must be above 0 and below .*, not 0"),
        ('{"hwm": 2147483648}', "hwm must be above 0 and below 2.31 - 1, not 2147483648"),
        ('{"publisher": "nats"}', "publisher is zmq or null, not 'nats'"),
        ('{"format": "json"}', "format is map or array, not 'json'"),
    ],
)
def test_wrong_settings_are_refused_at_start(text, words):
    with pytest.raises(ConfigError, match=words):
        validate(CacheConfig(kv_events_config=text))


def test_all_wrong_settings_are_named_at_once():
    with pytest.raises(ConfigError) as caught:
        validate(CacheConfig(kv_events_config='{"a": 1, "hwm": "x", "topic": 2}', page_size=0))
    assert len(caught.value.problems) == 4


@pytest.mark.parametrize(
    ("endpoint", "bind", "binds"),
    [
        ("tcp://*:5557", None, True),
        ("tcp://0.0.0.0:5557", None, True),
        ("tcp://[::]:5557", None, True),
        ("ipc:///tmp/events", None, True),
        ("tcp://indexer:5557", None, False),
        ("tcp://[fe80::1]:5557", None, False),
        ("tcp://127.0.0.1:5557", True, True),
        ("tcp://*:5557", False, False),
    ],
)
def test_wildcards_are_bound_and_hosts_connected_to(endpoint, bind, binds):
    assert EventsConfig(endpoint=endpoint, bind=bind).binds is binds


def test_routers_get_only_reachable_addresses():
    config = EventsConfig(topic="t", replay_endpoint="tcp://*:5558")
    assert config.described(16) == {
        **{"publisher": "zmq", "endpoint_host": "*", "endpoint_port_base": 5557, "topic": "t"},
        **{"block_size": 16, "dp_size": 1, "replay_endpoint_port_base": 5558},
    }
    assert "replay_endpoint_port_base" not in (EventsConfig().described(16) or {})
    for endpoint in ("ipc:///tmp/x", "tcp://*:0", "tcp://*:70000", "tcp://host"):
        assert EventsConfig(endpoint=endpoint).described(16) is None


def test_a_missing_package_is_named_with_the_extra_to_install(monkeypatch):
    monkeypatch.setitem(sys.modules, "zmq", None)
    monkeypatch.delitem(sys.modules, "kvweave.events.publisher", raising=False)
    with pytest.raises(ConfigError, match=r"needs zmq, which pip install '\.\[events\]'"):
        open_sink(EventsConfig())
