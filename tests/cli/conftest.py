import sys
from pathlib import Path

import pytest

from kvweave.cli.flags import takes_settings
from kvweave.config import EngineConfig, ServerConfig

# The scripted engine is shared with the server's tests.
sys.path.insert(0, str(Path(__file__).parent.parent / "server"))


@pytest.fixture
def seen():
    return {}


@pytest.fixture
def command(seen):
    @takes_settings(config_file=True, engine=EngineConfig, server=ServerConfig)
    def command(engine: EngineConfig, server: ServerConfig) -> None:
        seen.update(engine=engine, server=server)

    return command
