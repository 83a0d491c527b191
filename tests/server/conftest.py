"""The running server that tests of HTTP share."""

from support.server_fixtures import client, engine, running, server

__all__ = ["client", "engine", "running", "server"]
