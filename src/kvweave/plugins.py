"""Tables of all parts that a setting selects by name: built-in ones, and entry points.

Listing names imports none of the parts' modules.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from importlib import import_module
from importlib.metadata import EntryPoint, entry_points
from typing import Any, NamedTuple

from kvweave.errors import ConfigError


def load(path: str) -> Any:
    """The object at "module:attribute"."""
    module, _, attribute = path.partition(":")
    return getattr(import_module(module), attribute)


class Registry:
    """Factories of one kind, such as "fuzzy provider", by name."""

    def __init__(self, kind: str, built_in: Mapping[str, str], group: str | None = None) -> None:
        """`built_in`: name to "module:attribute"; `group`: entry points of other packages."""
        self._kind = kind
        self._built_in = built_in
        self.group = group

    def names(self) -> tuple[str, ...]:
        """All names that `make` accepts, the built-in ones first."""
        return (*self._built_in, *sorted(set(self._entry_points()) - set(self._built_in)))

    def make(self, name: str, *arguments: Any) -> Any:
        """Call the factory `name`; ConfigError if there is none, or it fails."""
        try:
            return self._factory(name)(*arguments)
        except ConfigError:
            raise
        except Exception as error:
            raise ConfigError([f"the {self._kind} {name!r} does not start: {error}"]) from error

    def check(self, name: str, *arguments: Any) -> None:
        """ConfigError if `name` needs a package that is not installed; `make` would fail later."""
        if (check := getattr(self._factory(name), "check_installed", None)) is not None:
            check(*arguments)

    def _factory(self, name: str) -> Any:
        if name in self._built_in:
            return load(self._built_in[name])
        offered = self._entry_points().get(name)
        if offered is None:
            names = ", ".join(self.names())
            raise ConfigError([f"there is no {self._kind} {name!r}; there are {names}"])
        return offered.load()

    def _entry_points(self) -> dict[str, EntryPoint]:
        if self.group is None:
            return {}
        return {point.name: point for point in entry_points(group=self.group)}


class Backend(NamedTuple):
    """A prefix cache backend."""

    path: str
    moves: bool = False
    """Its factory takes a KVMover as third argument."""
    exact: str | None = None
    """For approximate backends: the backend that serves the same prefixes exactly."""
    keeps: bool = True
    """It keeps KV of requests that have ended."""


BACKENDS: Mapping[str, Backend] = {
    "none": Backend("kvweave.prefix.base:NoCache", keeps=False),
    "hash": Backend("kvweave.prefix.hash:HashCache"),
    "radix": Backend("kvweave.prefix.radix:RadixCache"),
    "fuzzy_match": Backend("kvweave.fuzzy.backend:FuzzyCache", moves=True, exact="radix"),
}


def moving_backends() -> tuple[str, ...]:
    """Names of the backends that reuse text at other positions."""
    return tuple(name for name, backend in BACKENDS.items() if backend.moves)


FUZZY_PROVIDERS = Registry(
    "fuzzy provider",
    {
        "spans": "kvweave.fuzzy.anchors:SpanIndex",
        "semblend": "kvweave.paraphrase.semblend:SemblendProvider",
        "semantic": "kvweave.paraphrase.semantic:SemanticProvider",
    },
    group="kvweave.fuzzy_providers",
)
VERIFIERS = Registry(
    "verifier", {"nli": "kvweave.paraphrase.verifiers:Entailment"}, group="kvweave.verifiers"
)
EMBEDDERS = Registry(
    "embedder",
    {
        "minilm": "kvweave.paraphrase.embedders:MiniLM",
        "use": "kvweave.paraphrase.embedders:UniversalSentenceEncoder",
    },
)
PARAPHRASE_GATE = "kvweave.paraphrase.gate:create_gate"
"""The factory of the gate that checks candidates of tier paraphrase."""
RECOMPUTE_STRATEGIES = ("seams", "deviation", "mix")
"""Keys of `kvweave.fuzzy.recompute.STRATEGIES`."""

NO_VERIFIER = "none"

AUTO = "auto"
NO_PARSER = "none"
TOOL_CALL_PARSERS = (
    "hermes",
    "qwen",
    "qwen25",
    "qwen3_coder",
    "llama3",
    "mistral",
    "pythonic",
    "json",
    "deepseekv3",
    "deepseekv31",
    "kimi_k2",
    "glm45",
)
"""Keys of `kvweave.server.tools.TOOL_PARSERS`."""
REASONING_PARSERS = ("deepseek-r1", "qwen3", "qwen3-thinking", "glm45", "kimi")
"""Keys of `kvweave.server.tools.REASONING_PARSERS`."""

_CHOICES: Mapping[str, Callable[[], tuple[str, ...]]] = {
    "prefix-cache-backends": lambda: tuple(BACKENDS),
    "fuzzy-providers": FUZZY_PROVIDERS.names,
    "embedders": EMBEDDERS.names,
    "verifiers": lambda: (NO_VERIFIER, *VERIFIERS.names()),
    "tool-call-parsers": lambda: (AUTO, NO_PARSER, *TOOL_CALL_PARSERS),
    "reasoning-parsers": lambda: (AUTO, NO_PARSER, *REASONING_PARSERS),
    "fuzzy-refresh-strategies": lambda: RECOMPUTE_STRATEGIES,
}


def choices_of(source: Any) -> tuple[str, ...]:
    """The values behind a setting's `choices`: a tuple as it is, a table's keys by its name."""
    if source is None:
        return ()
    return _CHOICES[source]() if isinstance(source, str) else tuple(source)
