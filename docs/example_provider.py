"""A whole fuzzy provider: it remembers where documents begin.

Where prompts mark each document with a token of its own, one look at every mark is enough. A
package offers this class under the entry point group `kvweave.fuzzy_providers`, say as
`marks = "example_provider:Marks"`, and its users choose it with `--fuzzy-provider marks`.
"""

from collections.abc import Iterator

import numpy as np

from kvweave.config import FuzzyConfig
from kvweave.fuzzy.provider import Candidate, Donors, FuzzyMatchProvider, PublishedRun
from kvweave.kv.pool import IntArray
from kvweave.prefix.lease import RequestView

MARK = 1  # the token that stands before every document
HEAD = 16  # so many tokens behind it name the document


class Marks(FuzzyMatchProvider):
    """Proposes the text behind a mark wherever an earlier prompt had a document of that name."""

    def __init__(self, donors: Donors, config: FuzzyConfig) -> None:
        super().__init__(donors, config)
        self._places: dict[bytes, tuple[int, int]] = {}  # by name: page and position of the mark

    def match(self, view: RequestView, exact: int) -> Iterator[Candidate]:
        for at, name in _documents(view.tokens[exact:]):
            page, position = self._places.get(name, (-1, -1))
            # Compares tokens, and sees whether the page is still there and may be shared.
            run = self.donors.run_around(view, exact + at, page, position)
            if run is not None:
                yield run

    def on_published(self, run: PublishedRun) -> None:
        for at, name in _documents(run.tokens):
            page = int(run.pages[at // self.donors.page_size])
            self._places[name] = page, run.start + at

    def on_evicted(self, pages: IntArray) -> None:
        gone = set(pages.tolist())
        self._places = {name: at for name, at in self._places.items() if at[0] not in gone}


def _documents(tokens: IntArray) -> Iterator[tuple[int, bytes]]:
    for at in np.flatnonzero(tokens == MARK).tolist():
        if at + HEAD < len(tokens):
            yield at, tokens[at : at + HEAD + 1].tobytes()
