"""Which earlier prompt lent what: found by comparing tokens, only when somebody asks.

A plan names donors by their place in the tree, which changes and goes. What was lent does not: the
same tokens, at the donor's position, in a prompt that was there before.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from kvweave.prefix.plan import Tier
from kvweave.server.explorer.history import Record
from kvweave.server.explorer.sources import SourceRun


def donor_of(record: Record, run: SourceRun, earlier: Sequence[Record]) -> Record | None:
    """The first of `earlier` that has the run's tokens where the donor had them, exact ones first.

    None for what nobody lent, for a paraphrase, whose donor has other tokens, and for donors that
    are not remembered any more.
    """
    start = run.donor_start
    if start is None or (run.span is not None and run.span.tier is Tier.PARAPHRASE):
        return None
    wanted, end = record.prompt[run.start : run.end], start + run.length
    approximate = None
    for donor in earlier:
        if donor.salt != record.salt or not np.array_equal(donor.tokens[start:end], wanted):
            continue
        if end <= donor.lends_up_to:
            return donor
        approximate = approximate or donor  # exact by now, if it was healed
    return approximate
