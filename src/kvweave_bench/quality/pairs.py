"""Runs a scenario: every prompt cold, and warm in every variant."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from kvweave.config import ModelConfig
from kvweave.engine.selfcheck.measure import kl_divergence
from kvweave.models import LoadedModel
from kvweave_bench.identity import Donors
from kvweave_bench.quality.metrics import perplexity_ratio, rouge_l, token_f1
from kvweave_bench.quality.scenarios import Scenario
from kvweave_bench.quality.session import RecordedKV, Served, Session
from kvweave_bench.quality.variants import COPY, RERUN, Variant
from kvweave_bench.quality.writer import Case

_SHARED_SLOTS = 8192
"""Slots where earlier cases stay cached; the oldest make room for the newest."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Pair:
    """One prompt served warm in one variant, against its cold answer."""

    case: int
    kl: float
    """Of the next token after the prompt, in nats."""
    kl_answer: float
    """Mean over the cold answer's tokens, both models led along them."""
    same_top: bool
    """Both models think the same next token likeliest."""
    ppl_ratio: float
    rouge_l: float
    token_f1: float
    cold_text: str
    warm_text: str
    reused: float
    """Share of the prompt that was served from what was computed for others, refreshed or not."""
    paraphrased: float
    """Share of the prompt that was served in other words."""
    refreshed: float
    fired: bool
    """Anything at all came from other positions."""
    identity: float
    """Share of moved positions that hold the prompt's own token."""
    cold_seconds: float
    """To the first token."""
    warm_seconds: float


@dataclass(frozen=True, slots=True)
class Compared:
    """All of one scenario: its cases, and pairs by variant in the order of cases."""

    scenario: Scenario
    cases: list[Case]
    pairs: dict[Variant, list[Pair]]


def variants_of(scenario: Scenario, variants: Sequence[Variant]) -> list[Variant]:
    """The variants that make sense in a scenario."""
    if scenario.rerun:
        return [Variant(RERUN)]
    if scenario.all_variants:
        return list(variants)
    return [next((variant for variant in variants if not variant.ablation), Variant(COPY))]


def compare(
    loaded: LoadedModel,
    model: ModelConfig,
    scenario: Scenario,
    cases: list[Case],
    variants: Sequence[Variant],
    advance: Callable[[], None] = lambda: None,
) -> Compared:
    """Serve all cases; `advance` is called once per case and variant.

    Donors are computed once and lent to every variant. Variants take turns at being the first
    after the reference run, so none profits from its place.
    """
    slots = _slots(scenario, cases)
    cold = Session(loaded, model, None, slots)
    base = None
    if scenario.against is not None:
        base = _Lane(Session(loaded, model, Variant(COPY), slots, scenario.against), scenario)
    lanes = {
        variant: _Lane(Session(loaded, model, variant, slots, scenario.provider), scenario)
        for variant in variants_of(scenario, variants)
    }
    if scenario.provider != "spans":
        for lane in lanes.values():  # the provider compares meanings only after a first request
            lane.session.serve(cases[0].recipient, 1)
    pairs: dict[Variant, list[Pair]] = {variant: [] for variant in lanes}
    for number, case in enumerate(cases):
        recordings = [cold.record(donor) for donor in case.donors]
        if base is None:
            reference = cold.serve(case.recipient, scenario.answer)
        else:
            reference = base.serve(case, recordings)
        turn = number % len(lanes)
        order = list(lanes)
        for variant in order[turn:] + order[:turn]:
            pairs[variant].append(lanes[variant].pair(number, case, recordings, reference))
            advance()
    return Compared(scenario, cases, pairs)


class _Lane:
    """One variant on its way through the cases, and what its cache may hold."""

    def __init__(self, session: Session, scenario: Scenario) -> None:
        self.session = session
        self.scenario = scenario
        self.donors = Donors()

    def serve(self, case: Case, recordings: Sequence[RecordedKV]) -> Served:
        """Serve a case's recipient behind its donors."""
        self._prepare(case, recordings)
        return self.session.serve(
            case.recipient, self.scenario.answer, protected_from=case.protected_from
        )

    def pair(
        self, number: int, case: Case, recordings: Sequence[RecordedKV], reference: Served
    ) -> Pair:
        """Serve a case's recipient and compare it with its reference answer."""
        served = self.serve(case, recordings)
        answer, usage = served.answer, served.answer.usage
        identity = self.donors.identity(answer)
        self.donors.add(answer)
        followed, logits = self._followed(case, recordings, reference, served)
        expected = reference.trace.logits[: len(followed)]
        divergence = kl_divergence(expected, logits)
        return Pair(
            case=number,
            kl=float(divergence[0]),
            kl_answer=float(divergence.mean()),
            same_top=bool(expected[0].argmax() == logits[0].argmax()),
            ppl_ratio=perplexity_ratio(expected, logits, followed),
            rouge_l=rouge_l(reference.text, served.text),
            token_f1=token_f1(reference.text, served.text),
            cold_text=reference.text,
            warm_text=served.text,
            reused=(
                usage.cached_tokens
                + usage.moved_tokens
                + usage.paraphrase_tokens
                + usage.refreshed_tokens
            )
            / usage.prompt_tokens,
            paraphrased=usage.paraphrase_tokens / usage.prompt_tokens,
            refreshed=usage.refreshed_tokens / usage.prompt_tokens,
            fired=bool(answer.plan),
            identity=identity,
            cold_seconds=reference.answer.first_token_seconds,
            warm_seconds=answer.first_token_seconds,
        )

    def _prepare(self, case: Case, recordings: Sequence[RecordedKV]) -> None:
        """Leave nothing in the cache but the case's donors."""
        if self.scenario.lives:
            return
        self.session.forget()
        self.donors = Donors()
        for donor, recorded in zip(case.donors, recordings, strict=True):
            self.donors.add(self.session.lend(donor, recorded))
        self.session.settle()

    def _followed(
        self, case: Case, recordings: Sequence[RecordedKV], reference: Served, served: Served
    ) -> tuple[tuple[int, ...], torch.Tensor]:
        """The cold answer's tokens, and the warm logits (T, V) along them.

        An answer that is the cold one has them already; else the warm model is led along it, from
        the same donors again. Where caches live on, the prompt itself is cached by then, so that
        the answer has to do up to where it leaves the cold one.
        """
        tokens, said = reference.trace.tokens, served.trace.tokens
        if said == tokens:
            return tokens, served.trace.logits
        if self.scenario.lives:
            both = zip(tokens, said, strict=False)
            common = next((at for at, (ours, theirs) in enumerate(both) if ours != theirs), 0)
            return tokens[: common + 1], served.trace.logits[: common + 1]
        self._prepare(case, recordings)
        led = self.session.serve(
            case.recipient, len(tokens), forced=tokens, protected_from=case.protected_from
        )
        return tokens, led.trace.logits


def _slots(scenario: Scenario, cases: Sequence[Case]) -> int:
    """Room for the donors and two answers of any one case, to whole pages of any usual size."""
    if scenario.lives:
        return _SHARED_SLOTS
    most = max(
        sum(len(donor) + _PAGE for donor in case.donors) + 2 * (len(case.recipient) + _PAGE)
        for case in cases
    )
    return most + 2 * scenario.answer


_PAGE = 64
