"""The running server that tests of the explorer share."""

from support.server_fixtures import engine, running, server

__all__ = ["engine", "running", "server"]
