"""Keeps the latest answers of /v1/responses, so that later requests may continue them by id."""

from __future__ import annotations

import json
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from kvweave.errors import RequestError

MAX_BYTES = 256 * 2**20
"""Of all stored answers together, each counted with the conversation before it."""


@dataclass(frozen=True, slots=True)
class StoredResponse:
    """An answer and the conversation up to its end, as the messages of a chat."""

    response: dict[str, Any]
    items: Sequence[dict[str, Any]]
    """The request's own input items."""
    turns: Sequence[dict[str, Any]]
    """All turns so far without instructions, which only hold for one request."""
    cache_salt: str | None
    size: int


class ResponseStore:
    """At most `most` answers; the least recently used are forgotten first.

    An answer is found under the cache_salt of its request only.
    """

    def __init__(self, most: int) -> None:
        self._most = most
        self._by_id: OrderedDict[str, StoredResponse] = OrderedDict()
        self._bytes = 0

    def __len__(self) -> int:
        return len(self._by_id)

    def add(
        self,
        response: dict[str, Any],
        items: Sequence[dict[str, Any]],
        turns: Sequence[dict[str, Any]],
        cache_salt: str | None,
    ) -> None:
        """Keep an answer; it may already be too large to be kept."""
        size = len(json.dumps([response, items, turns]))
        self._by_id[response["id"]] = StoredResponse(response, items, turns, cache_salt, size)
        self._bytes += size
        while self._by_id and (len(self._by_id) > self._most or self._bytes > MAX_BYTES):
            self._forget(next(iter(self._by_id)))

    def find(self, name: str, cache_salt: str | None, param: str | None = None) -> StoredResponse:
        """RequestError (404) if it was not stored, is forgotten, or has another salt."""
        found = self._by_id.get(name)
        if found is None or found.cache_salt != cache_salt:
            raise RequestError(
                f"there is no stored response {name[:80]!r} under this cache_salt: this server "
                f"keeps the latest {self._most} (--max-stored-responses), and none with "
                "store: false",
                param=param,
                status=404,
                code="response_not_found",
            )
        self._by_id.move_to_end(name)
        return found

    def delete(self, name: str, cache_salt: str | None) -> None:
        """Forget it; answers that continue it stay. RequestError as in `find`."""
        self.find(name, cache_salt)
        self._forget(name)

    def _forget(self, name: str) -> None:
        self._bytes -= self._by_id.pop(name).size
