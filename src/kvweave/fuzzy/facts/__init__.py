"""Whether a text may stand in for another: every fact of one has its equal in the other.

Cosine similarity cannot tell "cancel it" from "do not cancel it", nor 15 % from 50 %: it nominates,
and this decides. Both texts are read into one canonical wording (`reading`), in which numbers,
dates, spellings, synonyms, courtesies and frames of questions have one form. Whatever else differs,
in words or in their order within a sentence, refuses. So it is a proof of sameness, not a search
for differences: what is not understood is not served.
"""

from __future__ import annotations

from typing import Protocol

from kvweave.fuzzy.facts.comparing import difference
from kvweave.fuzzy.facts.reading import read


class Verifier(Protocol):
    """Says why a donor's text must not stand in for a recipient's; None if nothing speaks against.

    Called with whole sentences, one call at a time, on a thread that is not the engine's. It only
    ever vetoes: to raise, or to come late, is to veto.
    """

    def __call__(self, donor: str, recipient: str) -> str | None: ...


def differing(donor: str, recipient: str) -> str | None:
    """None when every fact of one text has its equal in the other; else one sentence that says
    which fact differs.

    Both texts should begin and end where sentences do: half a sentence has lost its context.
    Symmetric, but for who is called the donor.
    """
    if donor == recipient:
        return None
    if not lengths_compatible(len(donor), len(recipient)):
        return f"lengths differ: {len(donor)} and {len(recipient)} characters"
    return difference(read(donor), read(recipient))


def lengths_compatible(donor: int, recipient: int) -> bool:
    """Whether texts of these lengths, in characters or tokens, may say the same at all."""
    return 3 * min(donor, recipient) + 24 >= max(donor, recipient)
