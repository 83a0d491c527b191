import pytest

from kvweave.cli.flags import takes_settings
from kvweave.config import EngineConfig, ServerConfig


@pytest.fixture
def seen():
    return {}


@pytest.fixture
def command(seen):
    @takes_settings(config_file=True, engine=EngineConfig, server=ServerConfig)
    def command(engine: EngineConfig, server: ServerConfig) -> None:
        seen.update(engine=engine, server=server)

    return command
