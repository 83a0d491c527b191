"""Flags derived from dataclasses: all there, read right, and every problem reported at once."""

from dataclasses import dataclass, field, fields
from typing import Annotated

import pytest
import typer

from kvweave.cli.flags import takes_settings
from kvweave.config import CacheConfig, EngineConfig, ServerConfig
from kvweave.config.base import flag_name, groups_of
from kvweave.errors import ConfigError
from support.clikit import run


def test_defaults_without_flags_are_those_of_the_dataclasses(command, seen):
    run(command)
    assert seen == {"engine": EngineConfig(), "server": ServerConfig()}


def test_every_field_is_a_flag_with_its_help(command, capsys):
    run(command, "--help")
    shown = " ".join(capsys.readouterr().out.split())
    for group in groups_of(EngineConfig, ServerConfig):
        for item in fields(group):
            assert flag_name(group, item.name) in shown
            assert item.metadata["help"] in shown


def test_values_arrive_in_their_types(command, seen):
    run(
        command,
        *("--model", "some/folder", "--context-length", "512", "--page-size=128"),
        *("--mem-fraction-static", "0.25", "--no-cold-group-wait", "--log-requests"),
        *("--prefix-cache-backend", "radix", "--random-seed", "-4"),
    )
    engine = seen["engine"]
    assert (engine.model.model, engine.model.context_length) == ("some/folder", 512)
    assert (engine.cache.page_size, engine.cache.mem_fraction_static) == (128, 0.25)
    assert engine.cache.cold_group_wait is False
    assert engine.cache.prefix_cache_backend == "radix"
    assert engine.scheduler.random_seed == -4
    assert seen["server"].log_requests is True


def test_a_repeatable_flag_keeps_its_order(command, seen, monkeypatch):
    run(command, "--volatile-head", "b c", "--volatile-head=a")
    assert seen["server"].volatile_head == ("b c", "a")
    monkeypatch.setenv("KVWEAVE_VOLATILE_HEAD", r"x:\s y")
    run(command)
    assert seen["server"].volatile_head == (r"x:\s", "y")


def test_flags_win_over_the_environment(command, seen, monkeypatch):
    monkeypatch.setenv("KVWEAVE_API_KEY", "secret")
    monkeypatch.setenv("KVWEAVE_PAGE_SIZE", "32")
    monkeypatch.setenv("KVWEAVE_LOG_REQUESTS", "1")
    run(command, "--page-size", "64")
    assert seen["server"].api_key == "secret"
    assert seen["server"].log_requests is True
    assert seen["engine"].cache.page_size == 64


def test_all_problems_are_reported_together(command, seen):
    with pytest.raises(ConfigError) as refused:
        run(
            command,
            *("--port", "http", "--page-size", "0", "--prefix-cache-backend", "magic"),
            *("--pagesize", "3", "--mem-fraction-static", "nan", "--log-level=loud", "extra"),
        )
    assert list(refused.value.problems) == [
        "--port takes a whole number, not 'http'",
        "there is no flag --pagesize (did you mean --page-size?)",
        "--page-size must be above 0, not 0",
        "--mem-fraction-static is a share above 0, up to 1, not nan",
        "--prefix-cache-backend is one of none, hash, radix, fuzzy_match, not 'magic'",
        "--log-level is one of debug, info, warning, error, not 'loud'",
    ]
    assert not seen


def test_an_unexpected_argument_is_named(command):
    with pytest.raises(ConfigError, match="no place for the argument 'serve'"):
        run(command, "serve")


@dataclass(frozen=True, slots=True, kw_only=True)
class Flat:
    """A group of its own."""

    size: int | None = field(default=None, metadata={"help": "How much."})
    shape: str = field(default="round", metadata={"help": "Which.", "choices": ("round", "flat")})

    def problems(self):
        return []


def test_a_command_keeps_its_own_arguments(seen):
    @takes_settings(flat=Flat)
    def command(flat: Flat, names: Annotated[list[str] | None, typer.Argument()] = None) -> None:
        seen.update(flat=flat, names=names)

    run(command, "a", "--size", "3", "b")
    assert seen == {"flat": Flat(size=3), "names": ["a", "b"]}
    with pytest.raises(ConfigError, match=r"no flag --sice \(did you mean --size\?\)"):
        run(command, "a", "--sice", "3")


def test_a_command_receives_the_names_of_given_settings(monkeypatch):
    told = []

    @takes_settings(flat=Flat)
    def command(flat: Flat, given: frozenset[str]) -> None:
        told.append(given)

    run(command)
    run(command, "--shape", "round")
    monkeypatch.setenv("KVWEAVE_SIZE", "3")
    run(command)
    assert told == [set(), {"shape"}, {"size"}]


@pytest.mark.parametrize(
    ("backend", "given", "warned"),
    [
        ("hash", {"fuzzy_provider", "fuzzy_min_span", "page_size"}, True),
        ("hash", {"page_size"}, False),
        ("fuzzy_match", {"fuzzy_provider"}, False),
    ],
)
def test_fuzzy_flags_without_effect_are_named_in_one_line(backend, given, warned, caplog):
    config = EngineConfig(cache=CacheConfig(prefix_cache_backend=backend))
    config.warn_without_effect(given)
    said = [record.getMessage() for record in caplog.records]
    assert len(said) == warned
    for line in said:
        assert "without effect: --fuzzy-provider, --fuzzy-min-span; " in line
        assert "--prefix-cache-backend hash moves no text" in line


def test_choices_are_in_the_help(seen, capsys):
    @takes_settings(flat=Flat)
    def command(flat: Flat) -> None: ...

    run(command, "--help")
    assert "One of round, flat." in " ".join(capsys.readouterr().out.split())
