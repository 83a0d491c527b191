"""Fixtures of tests that talk to a running server."""

import pytest

from kvweave.config import ServerConfig
from support.serverkit import FakeEngine, RunningServer, eventually


@pytest.fixture(scope="session")
def running():
    with RunningServer(FakeEngine(), ServerConfig(port=0, max_body_bytes=100_000)) as server:
        yield server


@pytest.fixture
def server(running):
    """One server for all tests; its engine is as new, and must be idle again at the end."""
    running.engine.reset()
    yield running
    running.engine.hold = None
    live = running.app.state.service.live
    assert eventually(lambda: not live), "a request is still registered"
    assert eventually(lambda: not running.engine.phases), "the engine still works"
    assert not running.engine.pages


@pytest.fixture
def engine(server):
    return server.engine


@pytest.fixture
def client(server):
    with server.client() as client:
        yield client
