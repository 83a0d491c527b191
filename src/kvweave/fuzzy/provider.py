"""The public interface of providers, which nominate donors.

The cache verifies what `match` returns: it compares candidates with the live tree token by token
(of tier paraphrase, fact by fact), pins and plans them before a slot is copied. A provider that is
wrong, late or out of date costs at most the reuse of the request it was asked for.

Calls come one at a time and the engine waits for each, for `--fuzzy-time-budget-ms` at most; until
a late call ends, the provider is neither asked nor told anything. The engine also limits the time
that publications take in sum, and skips some for a slow provider. Long work belongs on a thread of
the provider's own. All arrays that a provider gets are read-only.

To add a provider, publish a factory (such as a subclass of `FuzzyMatchProvider`) under the entry
point group `kvweave.fuzzy_providers`; docs/example_provider.py is a complete one.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import Counter, deque
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import ClassVar, Protocol, TypeAlias, cast

from kvweave.config import FuzzyConfig
from kvweave.kv.pool import IntArray
from kvweave.plugins import FUZZY_PROVIDERS
from kvweave.prefix.contract import Declined
from kvweave.prefix.lease import Namespace, RequestView, Tier


@dataclass(frozen=True, slots=True)
class Candidate:
    """`length` prompt positions from `start` on might be served from a donor's KV.

    `page` names the donor: a cached page that holds the donor run's last token, or lies behind it
    on the same path. The path from a page up to its root is unique, so the page and `donor_start`
    (the run's position in the donor's prompt) say where the KV is. Positions are absolute.

    A candidate of tier paraphrase claims equal meaning: the run's `donor_tokens` replace the
    prompt's `lead + length` tokens that end at `end`, of which the first `lead` are computed (0
    where both texts are equally long). `similarity` compares the two texts, 1 at most.
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

    def part(self, start: int, end: int) -> Candidate:
        """The part of a moved run that serves positions `start` to `end` of the prompt."""
        if (start, end) == (self.start, self.end):
            return self
        donor_start = self.donor_start + start - self.start
        return replace(self, start=start, length=end - start, donor_start=donor_start)


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
    """A provider's view of the live tree: what is cached now.

    Usable from any thread, but only during a call into the provider; RuntimeError outside of one.
    """

    @property
    def page_size(self) -> int:
        """Slots per page."""

    @property
    def num_pages(self) -> int:
        """Pages have numbers below this, which are reused for other text."""

    @property
    def running(self) -> int:
        """Requests that run now; usable at any time, from any thread."""

    @property
    def decode(self) -> Callable[[IntArray], str] | None:
        """Token ids to text; usable at any time, from any thread. None where there is no text."""

    def start(self, page: int) -> int:
        """The position of the page's first token on its path; -1 if it is not cached."""

    def tokens(self, page: int, first: int = 0) -> IntArray:
        """The path's tokens from position `first` to the end of `page`, a copy: int32.

        Empty if the page is not cached.
        """

    def run_around(
        self, view: RequestView, position: int, page: int, donor_position: int
    ) -> Candidate | None:
        """The longest run of equal tokens through the given positions of prompt and donor.

        It extends backward through the path's parents, and forward into the child that continues
        as the prompt does. None if the tokens there differ, the page is not cached, or its
        namespace is not the view's.
        """


class FuzzyMatchProvider(ABC):
    """Nominates donors for text that is cached elsewhere than at the prompt's own prefix.

    Made once per engine, with its view of the cache and the engine's settings.
    """

    bounded: ClassVar[bool] = False
    """Whether no call takes long; then calls run on the engine's thread without a time limit."""

    zeroed_layers: frozenset[int] = frozenset()
    """Layers whose moved KV is zeroed, not copied. For ablation: costs most of the quality."""

    def __init__(self, donors: Donors, config: FuzzyConfig) -> None:
        self.donors = donors
        self.config = config

    @abstractmethod
    def match(self, view: RequestView, exact: int) -> Iterable[Candidate]:
        """Donor runs for a prompt whose first `exact` tokens are served already.

        They may overlap and come in any order; the planner chooses. To keep `view.tokens` beyond
        the call, copy it.
        """

    def on_published(self, run: PublishedRun) -> None:  # noqa: B027  (optional)
        """New donors are cached. Approximate KV is never among them."""

    def on_evicted(self, pages: IntArray) -> None:  # noqa: B027  (optional)
        """These pages are no donors any more; their numbers will be reused for other text."""

    def clear(self) -> None:  # noqa: B027  (optional)
        """Nothing is cached any more."""

    def settle(self, seconds: float) -> bool:
        """Wait for background work; False if some is left. For tests and benches."""
        return True

    def stats(self) -> Mapping[str, float]:
        """Numbers worth watching, by name."""
        return {}


ProviderFactory: TypeAlias = Callable[[Donors, FuzzyConfig], FuzzyMatchProvider]
"""What packages offer under a name in the entry point group `kvweave.fuzzy_providers`."""


def create_provider(name: str, donors: Donors, config: FuzzyConfig) -> FuzzyMatchProvider:
    """The provider called `name`; ConfigError if there is none, or its package does not load."""
    return cast(FuzzyMatchProvider, FUZZY_PROVIDERS.make(name, donors, config))


def split_tiers(candidates: Iterable[Candidate]) -> tuple[list[Candidate], list[Candidate]]:
    """The candidates that claim equal tokens, and those that claim equal meaning."""
    moved: list[Candidate] = []
    paraphrased: list[Candidate] = []
    for each in candidates:
        (paraphrased if each.tier is Tier.PARAPHRASE else moved).append(each)
    return moved, paraphrased


class Gate(Protocol):
    """Judges candidates of tier paraphrase by whether they say what the prompt says."""

    declined: Counter[str]
    """Candidates declined, by kind."""
    latest_declined: deque[Declined]
    """The latest of them."""

    def fill(
        self, view: RequestView, exact: int, pieces: list[Candidate], claims: Iterable[Candidate]
    ) -> list[Candidate]:
        """`pieces`, and those of `claims` that pass and overlap nothing, ascending."""
        ...

    def stats(self) -> Mapping[str, float]:
        """Refusals by kind."""
        ...
