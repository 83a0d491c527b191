"""The public interface for whoever nominates donors.

A provider proposes, and the cache disposes: whatever `match` returns is compared with the live tree
token by token (of tier paraphrase, fact by fact), pinned and planned before a slot is copied. So a
provider may be wrong, late or out of date, and costs at most the reuse of the request it was asked
for. Calls come one at a time and are waited for; one that takes longer than
`--fuzzy-time-budget-ms` is given up on, and until it ends the provider is neither asked nor told
anything. What can take long belongs on a thread of the provider's own.

To add one, publish a factory (a subclass of `FuzzyMatchProvider` is one) under the entry point
group `kvweave.fuzzy_providers`; docs/example_provider.py is a whole one.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import ClassVar, Protocol, TypeAlias, cast

from kvweave.config import FuzzyConfig
from kvweave.kv.pool import IntArray
from kvweave.plugins import FUZZY_PROVIDERS
from kvweave.prefix.lease import Namespace, RequestView
from kvweave.prefix.plan import Tier


@dataclass(frozen=True, slots=True)
class Candidate:
    """`length` prompt positions from `start` on might be served from a donor's KV.

    `page` names the donor: a cached page that holds the donor run's last token, or lies behind it
    on the same path. The way from a page up to its root is unique, so the page, and `donor_start`,
    the run's position in its donor's own prompt, say where the KV is. Positions are absolute.

    Of tier paraphrase, it claims no equal tokens but equal meaning: the run's `donor_tokens` stand
    for the prompt's last `lead + length` tokens up to `end`, of which the first `lead` are computed
    (0 where both texts are equally long). `similarity` is how alike the two are, 1 at most.
    """

    start: int
    length: int
    page: int
    donor_start: int
    tier: Tier = Tier.MOVED
    lead: int = 0
    similarity: float = 0.0
    donor_tokens: IntArray | None = field(default=None, compare=False, repr=False)

    @property
    def end(self) -> int:
        return self.start + self.length

    @property
    def donor_end(self) -> int:
        return self.donor_start + self.length


@dataclass(frozen=True, slots=True, eq=False)
class PublishedRun:
    """Pages that request `rid` has just computed exactly and handed to the cache.

    `pages[i]` holds `tokens[i * page_size : (i + 1) * page_size]`, the first at position `start`.
    Both arrays are int32, read-only, and valid during the call only. Text that is not `semantic`
    must not be compared by meaning. `complete` says that no page of the request's prompt is still
    to come: a provider that works on whole prompts need not look at the parts before.
    """

    rid: str
    namespace: Namespace
    pages: IntArray
    start: int
    tokens: IntArray
    semantic: bool = True
    complete: bool = True


class Donors(Protocol):
    """What a provider can see of the live tree: all that is cached now, and nothing else.

    To be asked during a call into the provider only, from whichever thread; else RuntimeError.
    """

    @property
    def page_size(self) -> int:
        """Slots per page."""

    @property
    def num_pages(self) -> int:
        """Pages are numbered from 0 to below this, and numbers come back for other text."""

    @property
    def running(self) -> int:
        """Requests that hold pages now, and whose answers wait for the processor; at any time, from
        any thread."""

    @property
    def decode(self) -> Callable[[IntArray], str] | None:
        """Token ids to text, for providers that look at what a prompt says; at any time, from any
        thread. None where there is no text."""

    def start(self, page: int) -> int:
        """The position of the page's first token on its path; -1 if it is not cached."""

    def tokens(self, page: int, first: int = 0) -> IntArray:
        """The path's tokens from position `first` to the end of `page`; empty if it is not cached.

        int32, a copy.
        """

    def run_around(
        self, view: RequestView, position: int, page: int, donor_position: int
    ) -> Candidate | None:
        """The longest run of equal tokens in which prompt and donor meet at the given positions.

        Backward through the path's parents, forward through children where one goes on as the
        prompt does. None if the tokens there differ, the page is not cached, or its namespace is
        not the view's.
        """


class FuzzyMatchProvider(ABC):
    """Nominates donors for text that is cached elsewhere than at the prompt's own prefix.

    Made once per engine, with its view of the cache and the engine's settings.
    """

    bounded: ClassVar[bool] = False
    """Promises never to take long, whatever it is asked, and so may run on the engine's thread."""

    zeroed_layers: frozenset[int] = frozenset()
    """Layers whose moved KV is to be zero instead of a copy: costs most of the quality, and exists
    so that this can be measured."""

    def __init__(self, donors: Donors, config: FuzzyConfig) -> None:
        self.donors = donors
        self.config = config

    @abstractmethod
    def match(self, view: RequestView, exact: int) -> Iterable[Candidate]:
        """Donor runs for a prompt whose first `exact` tokens are served already.

        They may overlap each other and anything else, in any order; the planner chooses. Must not
        keep `view.tokens` without copying it.
        """

    def on_published(self, run: PublishedRun) -> None:  # noqa: B027  (optional)
        """New donors are cached. Requests served approximately never get here."""

    def on_evicted(self, pages: IntArray) -> None:  # noqa: B027  (optional)
        """These pages are no donors any more; their numbers will come back for other text."""

    def clear(self) -> None:  # noqa: B027  (optional)
        """Nothing is cached any more."""

    def settle(self, seconds: float) -> bool:
        """Wait until nothing is left to do in the background; False if there still is something.

        For tests and benches, which otherwise would be faster than any provider.
        """
        return True

    def stats(self) -> Mapping[str, float]:
        """Numbers worth watching, by name."""
        return {}


ProviderFactory: TypeAlias = Callable[[Donors, FuzzyConfig], FuzzyMatchProvider]
"""What packages offer under a name in the entry point group `kvweave.fuzzy_providers`."""


def create_provider(name: str, donors: Donors, config: FuzzyConfig) -> FuzzyMatchProvider:
    """The provider called `name`; ConfigError if there is none, or its package does not load."""
    return cast(FuzzyMatchProvider, FUZZY_PROVIDERS.make(name, donors, config))
