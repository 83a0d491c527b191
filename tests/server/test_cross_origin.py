"""Pages of other sites, in browsers that reach the server: DNS rebinding, CSRF, and CORS."""

import socket

import pytest

from kvweave.config import ServerConfig, validate
from kvweave.errors import ConfigError
from support.serverkit import FakeEngine, RunningServer

ACTIONS = ("/v1/completions", "/abort_request", "/flush_cache")
BODY = {"prompt": "x", "max_tokens": 2, "abort_all": True}
KEY = {"Authorization": "Bearer k"}
APP = "https://app.example.com"


@pytest.fixture
def serve():
    """Starts a server with these settings; returns a client of it."""
    running = []

    def start(**settings):
        server = RunningServer(FakeEngine(), ServerConfig(port=0, **settings)).__enter__()
        client = server.client()
        running.extend((client, server))
        return client

    yield start
    for each in running:
        each.__exit__(None, None, None)


def codes(client, headers):
    """Status and error code of everything that acts or reads."""
    replies = [client.post(path, json=BODY, headers=headers) for path in ACTIONS]
    for path in ("/v1/models", "/metrics", "/server_info", "/explorer/api/overview"):
        replies.append(client.get(path, headers=headers))
    return {
        (reply.status_code, reply.json()["error"]["code"] if reply.is_error else None)
        for reply in replies
    }


FOREIGN_NAMES = ("evil.example", "evil.example:8000", "127.0.0.1.evil.example", "localhost.example")


@pytest.mark.parametrize("host", [*FOREIGN_NAMES, "", "[::1", "10.0.0.1", "0.0.0.0"])
def test_a_rebound_name_reads_and_does_nothing(client, engine, host):
    """The browser takes a rebound page and the server for one origin."""
    for more in ({}, {"sec-fetch-site": "same-origin", "origin": f"http://{host}"}):
        assert codes(client, {"Host": host} | more) == {(403, "foreign_host")}
    assert not engine.requests
    assert not engine.aborts


OWN_NAMES = ("localhost", "LocalHost:8000", "127.0.0.1:1", "127.0.0.9", "[::1]:8000", "localhost.")


@pytest.mark.parametrize("host", [*OWN_NAMES, "kvweave.localhost", "host.docker.internal:8000"])
def test_names_of_this_machine_are_answered(client, host):
    assert codes(client, {"Host": host}) == {(200, None)}


def test_health_and_the_empty_page_answer_to_every_name(client):
    """Load balancers ask under names of their own."""
    for path in ("/health", "/explorer", "/explorer/static/app.js"):
        assert client.get(path, headers={"Host": "evil.example"}).status_code == 200


def test_beyond_the_loopback_any_address_is_answered_and_no_other_name(serve):
    client = serve(host="0.0.0.0")
    for host in ("192.0.2.7:8000", "[2001:db8::1]", "0.0.0.0", "localhost", socket.gethostname()):
        assert codes(client, {"Host": host}) == {(200, None)}, host
    for host in FOREIGN_NAMES:
        assert codes(client, {"Host": host}) == {(403, "foreign_host")}, host


def test_allowed_hosts_are_answered(serve):
    client = serve(allowed_hosts="LLM.example.com, *.lan,192.0.2.7")
    for host in ("llm.example.com:8000", "a.lan", "a.b.lan", "192.0.2.7:80", "localhost"):
        assert codes(client, {"Host": host}) == {(200, None)}, host
    for host in ("lan", "xllm.example.com", "evil-lan", "192.0.2.8"):
        assert codes(client, {"Host": host}) == {(403, "foreign_host")}, host
    assert codes(serve(allowed_hosts="*"), {"Host": "evil.example"}) == {(200, None)}


@pytest.mark.parametrize(
    "headers",
    [
        {"sec-fetch-site": "cross-site"},
        {"sec-fetch-site": "same-site"},  # another port of this machine, or a sister of its name
        {"origin": "https://evil.example"},  # Sec-Fetch-Site is not sent to plain HTTP elsewhere
        {"origin": "null"},
        {"origin": "http://localhost:1"},
        {"sec-fetch-site": "cross-site", "origin": "http://localhost"},
    ],
)
def test_a_foreign_page_reads_and_does_nothing(client, engine, headers):
    assert codes(client, {"Host": "localhost"} | headers) == {(403, "foreign_page")}
    assert client.get("/explorer", headers=headers).status_code == 200, "it may link to the page"
    assert client.get("/health", headers=headers).status_code == 200
    assert not engine.requests
    assert not engine.aborts


@pytest.mark.parametrize(
    "headers",
    [
        {},
        {"sec-fetch-site": "same-origin"},
        {"sec-fetch-site": "none"},
        {"sec-fetch-site": "same-origin", "origin": "https://a.proxys.name"},
        {"origin": "http://localhost:8000"},
    ],
)
def test_the_servers_own_page_and_its_users_may(client, headers):
    assert codes(client, {"Host": "localhost:8000"} | headers) == {(200, None)}


def test_nothing_is_flushed_or_aborted_by_get(client):
    for path in ("/flush_cache", "/abort_request"):
        for method in ("GET", "HEAD"):
            assert client.request(method, path).status_code == 405


def test_with_a_key_the_key_decides(serve):
    client = serve(api_key="k")
    for headers in ({"Host": "evil.example"}, {"sec-fetch-site": "cross-site", "origin": APP}):
        assert codes(client, headers) == {(401, "invalid_api_key")}
        assert codes(client, headers | KEY) == {(200, None)}


def test_where_only_operators_have_a_key_clients_routes_are_guarded(serve):
    client = serve(admin_api_key="k")
    headers = {"Host": "evil.example"}
    assert client.get("/v1/models", headers=headers | KEY).json()["error"]["code"] == "foreign_host"
    assert client.get("/metrics", headers=headers | KEY).status_code == 200


PREFLIGHT = {
    "access-control-request-method": "POST",
    "access-control-request-headers": "authorization,content-type,x-stainless-os",
}


def allowed(reply):
    return reply.headers.get("access-control-allow-origin")


@pytest.mark.parametrize("settings", [{}, {"api_key": "k"}])
def test_allowed_origins_may_all_that_the_servers_own_page_may(serve, settings):
    client = serve(allowed_origins=f"{APP}, http://localhost:5173/", **settings)
    key = KEY if settings else {}
    for origin in (APP, "http://localhost:5173"):
        headers = {"origin": origin, "sec-fetch-site": "cross-site"}
        asked = client.options("/v1/completions", headers=headers | PREFLIGHT)
        assert (asked.status_code, allowed(asked)) == (200, origin)
        assert "x-stainless-os" in asked.headers["access-control-allow-headers"]
        assert codes(client, headers | key) == {(200, None)}
        reply = client.post("/v1/completions", json={"prompt": "x"}, headers=headers | key)
        assert allowed(reply) == origin
        assert "x-request-id" in reply.headers["access-control-expose-headers"].lower()
        failed = client.post("/v1/completions", json={}, headers=headers | key)
        assert (failed.status_code, allowed(failed)) == (400, origin), "pages read errors too"
    other = {"origin": "https://evil.example", "sec-fetch-site": "cross-site"}
    assert allowed(client.options("/v1/completions", headers=other | PREFLIGHT)) is None
    if not settings:
        assert codes(client, other) == {(403, "foreign_page")}
    assert codes(client, {"Host": "evil.example", "origin": APP} | key) == (
        {(200, None)} if settings else {(403, "foreign_host")}
    )


def test_every_origin_may_be_allowed_and_none_is_by_default(serve, client):
    headers = {"origin": "https://evil.example", "sec-fetch-site": "cross-site"}
    everyone = serve(allowed_origins="*")
    assert allowed(everyone.options("/v1/completions", headers=headers | PREFLIGHT)) == "*"
    assert codes(everyone, headers) == {(200, None)}
    refused = client.options("/v1/completions", headers=headers | PREFLIGHT)
    assert (refused.status_code, allowed(refused)) == (403, None)


def test_lists_that_cannot_be_meant_are_refused_at_start():
    for hosts in ("", "http://a", "a:80", "a b", "a,,b", "a/b", "*a", "*.*.a"):
        with pytest.raises(ConfigError, match="--allowed-hosts lists names"):
            validate(ServerConfig(allowed_hosts=hosts))
    for origins in ("", "a", "null", "https://a/b", "https://", "https://a https://b"):
        with pytest.raises(ConfigError, match="--allowed-origins lists origins"):
            validate(ServerConfig(allowed_origins=origins))
    validate(ServerConfig(allowed_hosts="*,[::1],a_b.c-d", allowed_origins="*,tauri://localhost"))
