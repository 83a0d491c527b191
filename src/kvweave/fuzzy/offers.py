"""Factories by name: the built-in ones, and those that other packages bring."""

from __future__ import annotations

from collections.abc import Mapping
from importlib import import_module
from importlib.metadata import EntryPoint, entry_points
from typing import Any

from kvweave.errors import ConfigError


class Offers:
    """What can be made of one kind, such as "fuzzy provider"; modules load when they are used."""

    def __init__(self, kind: str, group: str, built_in: Mapping[str, str]) -> None:
        """`group` is the entry point group of other packages; `built_in`: "module:attribute"."""
        self._kind = kind
        self._group = group
        self._built_in = built_in

    def names(self) -> tuple[str, ...]:
        """All names that `make` knows, the built-in ones first."""
        return (*self._built_in, *sorted(set(self._offered()) - set(self._built_in)))

    def make(self, name: str, *arguments: Any) -> Any:
        """What the factory called `name` makes; ConfigError if there is none, or it fails."""
        try:
            return self._factory(name)(*arguments)
        except ConfigError:
            raise
        except Exception as error:
            raise ConfigError([f"the {self._kind} {name!r} does not start: {error}"]) from error

    def _factory(self, name: str) -> Any:
        if name in self._built_in:
            module, _, attribute = self._built_in[name].partition(":")
            return getattr(import_module(module), attribute)
        offered = self._offered().get(name)
        if offered is None:
            names = ", ".join(self.names())
            raise ConfigError([f"there is no {self._kind} {name!r}; there are {names}"])
        return offered.load()

    def _offered(self) -> dict[str, EntryPoint]:
        return {point.name: point for point in entry_points(group=self._group)}
