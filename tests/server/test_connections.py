"""Limits on connections: their number, and timeouts for clients that send or read too slowly."""

import resource
import socket
import struct
import time
import weakref

import pytest

from kvweave.config import ServerConfig
from kvweave.server import connections
from kvweave.server.connections import PLACES, with_files
from support.rawkit import Wire, head, request
from support.serverkit import TEXT, FakeEngine, RunningServer, eventually

MOST = 20
PATIENCE = 0.6
BODY = {"prompt": "x", "max_tokens": 2}
LONG = {"prompt": ["x"] * 8, "max_tokens": 2000, "logprobs": 5}
"""Its answer is far larger than what the kernel holds for a reader."""


@pytest.fixture(scope="module")
def impatient():
    config = ServerConfig(port=0, client_seconds=PATIENCE, keep_alive_seconds=PATIENCE)
    with RunningServer(FakeEngine(), config) as server:
        yield server


@pytest.fixture(scope="module")
def small():
    with RunningServer(FakeEngine(), ServerConfig(port=0, max_connections=MOST)) as server:
        yield server


@pytest.fixture
def server(impatient):
    yield from used(impatient)


@pytest.fixture
def crowded(small):
    yield from used(small)


def used(server):
    """As new for each test, and forsaken at its end."""
    server.engine.reset()
    server.engine.answer = lambda request, index: TEXT * 44
    yield server
    assert eventually(lambda: not connected(server)), "a connection outlasts its client"
    assert eventually(lambda: not server.app.state.service.live)
    assert eventually(lambda: not server.engine.phases)


def connected(server):
    return len(server.server.server_state.connections)


def drip(wire, sent, every=PATIENCE / 8):
    """Send byte for byte, as long as the other side listens."""
    try:
        for at in range(len(sent)):
            wire.send(sent[at : at + 1])
            time.sleep(every)
    except ConnectionError:
        pass


def test_who_says_nothing_is_told_nothing(server):
    with Wire(server) as wire:
        assert wire.socket.recv(1) == b""


def test_a_head_that_comes_too_slowly(server):
    with Wire(server) as wire:
        drip(wire, head()[:40])
        assert f"within {PATIENCE:g} seconds" in wire.refusal(408)
        assert wire.is_closed()


def test_a_second_head_that_comes_too_slowly(server):
    with Wire(server) as wire:
        wire.send(request(BODY) + b"POST")
        wire.text()
        drip(wire, b" " * 30)
        assert wire.is_closed()


def test_a_body_that_comes_too_slowly(server):
    with Wire(server) as wire:
        wire.send(head(content_length=100))
        drip(wire, b"{" * 12)
        assert f"within {PATIENCE:g} seconds" in wire.refusal(408)


def test_a_connection_is_idle_between_requests_for_so_long_and_not_longer(server):
    with Wire(server) as wire:
        for _ in range(3):
            wire.send(request(BODY))
            assert wire.text() == "Th"
            time.sleep(PATIENCE / 12)
        assert wire.socket.recv(1) == b""


def test_a_client_that_resets_leaves_nothing_behind():
    config = ServerConfig(port=0, keep_alive_seconds=600, client_seconds=600)
    with RunningServer(FakeEngine(), config) as server:
        with Wire(server) as wire:
            wire.send(request(BODY))
            assert wire.text() == "Th"
            [kept] = map(weakref.ref, server.server.server_state.connections)
            wire.socket.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        assert eventually(lambda: kept() is None), "it is kept as long as it might have been idle"


def test_a_body_that_nobody_wants_is_not_read_for_ever(server, monkeypatch):
    monkeypatch.setattr(connections, "_LINGER_SECONDS", PATIENCE)
    with Wire(server) as wire:
        wire.send(head("/health", "GET", content_length=10**6))
        assert wire.reply().status == 200
        drip(wire, b"x" * 30)
        assert wire.is_closed()


def reading_nothing(server, body):
    """A request from one whose side takes next to nothing in advance."""
    wire = Wire.__new__(Wire)
    wire.socket = socket.socket()
    wire.socket.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
    wire.socket.settimeout(20)
    wire.socket.connect(server.server.servers[0].sockets[0].getsockname())
    wire._read = wire.socket.makefile("rb")
    wire.send(request(body))
    return wire


@pytest.mark.parametrize("stream", [False, True])
def test_a_reader_that_takes_nothing_is_left(server, stream):
    """Its request ends even if its answer never would."""
    if stream:
        server.engine.step_seconds = 0.001
    with reading_nothing(server, {**LONG, "stream": stream}):
        assert eventually(lambda: server.engine.phases)
        assert eventually(lambda: not connected(server)), "it is waited for"
        assert eventually(lambda: not server.engine.phases)
        assert not server.engine.pages


def test_a_reader_that_takes_something_now_and_then_gets_it_all(server):
    with reading_nothing(server, {**LONG, "stream": True}) as wire:
        got, began = b"", time.monotonic()
        while not got.endswith(b"data: [DONE]\n\n\r\n0\r\n\r\n"):
            some = wire.socket.recv(1 << 16)
            assert some, "it was left"
            got += some
            if time.monotonic() - began < 2 * PATIENCE:
                time.sleep(PATIENCE / 6)
        assert got.count(b'"finish_reason":"stop"') == 8


def test_what_waits_for_a_reader_is_bounded(server):
    """The rest of an answer is not buffered ahead of it: it is joined while it waits."""
    with reading_nothing(server, {**LONG, "stream": True}):
        assert eventually(lambda: connected(server))
        [connection] = server.server.server_state.connections
        most = 0

        def ended():
            nonlocal most
            most = max(most, connection.transport.get_write_buffer_size())
            return not connected(server)

        assert eventually(ended)
        assert 0 < most < 100_000, "an answer of a megabyte"


@pytest.fixture
def crowd(crowded):
    """As many idle connections as there may be."""
    wires = [Wire(crowded) for _ in range(MOST)]
    assert eventually(lambda: connected(crowded) == MOST)
    yield wires
    for wire in wires:
        wire.close()


def test_beyond_the_limit_one_is_told_so_and_only_health_is_answered(crowded, crowd):
    for sent in (request(BODY), head("/health/", "GET"), request({"prompt": "x" * 500_000})):
        with Wire(crowded) as wire:
            wire.send(sent)
            reply = wire.reply()
            assert reply.status == 503
            assert f"{MOST} connections" in reply.json()["error"]["message"]
            assert reply.headers["retry-after"] == "1"
            assert wire.is_closed()
    with Wire(crowded) as wire:
        wire.send(head("/health", "GET"))
        reply = wire.reply()
        assert (reply.status, reply.headers["connection"]) == (200, "close")
        assert wire.is_closed()
    assert not crowded.engine.requests
    crowd[3].send(request(BODY))
    assert crowd[3].text() == "Th", "who was there before is served"
    crowd[5].close()
    assert eventually(lambda: connected(crowded) < MOST)
    with Wire(crowded) as wire:
        wire.send(request(BODY))
        assert wire.text() == "Th"


def test_a_flood_of_silent_connections_hides_neither_refusal_nor_health(crowded, crowd):
    silent = [Wire(crowded) for _ in range(PLACES + 30)]
    assert eventually(lambda: connected(crowded) >= MOST + PLACES)
    with Wire(crowded) as wire:
        wire.send(head("/health", "GET"))
        assert wire.reply().status == 200
    assert eventually(lambda: connected(crowded) <= MOST + PLACES)
    assert f"{MOST} connections" in silent[0].refusal(503), "the first to come makes room"
    for wire in silent:
        wire.close()


def test_a_thousand_idle_connections_cost_nobody_his_answer():
    engine = FakeEngine()
    idle = 1000
    config = with_files(ServerConfig(port=0, max_connections=2 * idle + 2 * PLACES))
    assert config.max_connections > idle + PLACES
    with RunningServer(engine, config) as server:
        wires = [Wire(server) for _ in range(idle)]
        try:
            assert eventually(lambda: connected(server) == idle)
            for wire in (*wires[::100], Wire(server)):
                wire.send(request(BODY))
                assert wire.text() == "Th"
        finally:
            for wire in wires:
                wire.close()
        assert eventually(lambda: connected(server) <= 1)


@pytest.fixture
def files(monkeypatch):
    """This process's limits of open files, pretended: soft and hard."""
    limits = [100, 100]
    monkeypatch.setattr(resource, "getrlimit", lambda kind: tuple(limits))
    monkeypatch.setattr(
        resource, "setrlimit", lambda kind, changed: limits.__setitem__(slice(None), changed)
    )
    return limits


def test_the_limit_of_open_files_is_raised_as_far_as_needed(files):
    files[:] = 1024, 524_288
    config = ServerConfig()
    assert with_files(config) == config
    assert 10_000 < files[0] < 11_000
    files[:] = 1024, resource.RLIM_INFINITY
    assert with_files(config) == config
    assert 10_000 < files[0] < 11_000
    files[:] = 1024, 1024
    few = ServerConfig(max_connections=500)
    assert with_files(few) == few
    assert files == [1024, 1024]


def test_where_it_cannot_be_raised_there_are_fewer_connections_and_a_sentence(files, caplog):
    files[:] = 1024, 4096
    found = with_files(ServerConfig()).max_connections
    assert 3500 < found < 4096
    assert files == [4096, 4096]
    assert f"4096 files (ulimit -n, LimitNOFILE), which is room for {found}" in caplog.text
    files[:] = 256, 256
    assert with_files(ServerConfig()).max_connections == 16
    assert with_files(ServerConfig(max_connections=5)).max_connections == 5
