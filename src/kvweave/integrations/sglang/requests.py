"""What of an SGLang request decides whether, and from whom, it may be lent moved KV."""

from __future__ import annotations

from typing import Any

from kvweave.prefix.lease import Namespace

OPT_OUT = "kvweave_fuzzy"
"""`"custom_params": {"kvweave_fuzzy": false}` among the sampling parameters keeps one exact."""


def may_be_moved(req: Any) -> bool:
    """Whether tokens alone determine this request's KV, and approximate KV is what it wants."""
    wants_prompt_logprobs = req.return_logprob and req.logprob_start_len >= 0
    more_than_tokens = (
        req.input_embeds is not None
        or req.positional_embed_overrides is not None
        or req.multimodal_inputs is not None
    )
    custom = req.sampling_params.custom_params or {}
    return not (
        wants_prompt_logprobs
        or more_than_tokens
        or req.session is not None
        or req.beam_group is not None  # SGLang does not search beams behind host hits
        or custom.get(OPT_OUT) is False
    )


def namespace_of(holder: Any) -> Namespace:
    """Of a request or a RadixKey: nothing is lent across two of these.

    SGLang's extra key holds the adapter and whatever else a client adds; its salt may be empty,
    which means none.
    """
    return Namespace("", holder.extra_key, holder.cache_salt or None)
