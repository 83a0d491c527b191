"""Moved spans behind SGLang's exact prefix: served, refused, and never leaked."""

from __future__ import annotations

import random
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

import support.fake_sglang as fake
from kvweave.prefix.lease import Namespace
from support.sglang_world import SMALL

pytestmark = pytest.mark.usefixtures("sglang")

HEADER, OTHER, DOCUMENT = range(8), range(16, 28), list(range(100, 148))
QUESTION, ANSWER = [300, 301, 302], [400, 401]


def _server(**about: Any) -> Any:
    from support.sglang_world import Server

    return Server(**about)


def _prompt(*parts: Any) -> list[int]:
    return [token for part in parts for token in part]


def _taught(**about: Any) -> Any:
    """A server that knows the document behind one header, and the other header."""
    server = _server(**about)
    server.run(_prompt(HEADER, DOCUMENT, QUESTION), ANSWER)
    server.run(_prompt(OTHER, QUESTION))
    return server


def test_a_document_is_lent_behind_a_header_that_is_cached() -> None:
    server = _taught()
    assert server.run(_prompt(OTHER, DOCUMENT, QUESTION, [9]), ANSWER) == len(DOCUMENT) + 2
    assert server.cache.counts["lent_requests"] == 1


def test_what_was_lent_is_never_inserted() -> None:
    server = _taught()
    before = len(server.cache.nodes())
    server.run(_prompt(OTHER, DOCUMENT, [305], [9]), ANSWER)
    assert len(server.cache.nodes()) == before
    # So whoever comes after it is lent the same from the exact donor.
    assert server.run(_prompt(OTHER, DOCUMENT, [305], [9, 9])) == len(DOCUMENT)


def test_reordered_passages_come_from_several_donors_in_one_span() -> None:
    server = _server()
    first, second = DOCUMENT[:24], DOCUMENT[24:]
    server.run(_prompt(HEADER, first, second, QUESTION))
    assert server.run(_prompt(HEADER, second, first, [7, 7, 7])) == len(DOCUMENT)


NEW = [50, 51, 52]
"""An instruction that is cached nowhere."""


def test_a_known_document_is_lent_behind_a_new_instruction() -> None:
    server = _taught()
    assert server.run(_prompt(NEW, DOCUMENT, QUESTION, [9]), ANSWER) == len(DOCUMENT) + 2
    # The instruction was computed, so it is exact, and the tree has it from now on.
    assert server.match(fake.Req("again", _prompt(NEW, [9, 9]))) == 0
    assert server.cache.match_prefix(_asked(_prompt(NEW, DOCUMENT))).device_prefix_len == len(NEW)


def _asked(tokens: list[int]) -> Any:
    return fake.MatchPrefixParams(fake.RadixKey(fake.Req("r", tokens).full_untruncated_fill_ids))


def test_runs_with_fresh_text_between_come_from_several_donors() -> None:
    server = _server()
    first, second, third = DOCUMENT[:16], DOCUMENT[16:32], DOCUMENT[32:]
    for at, passage in enumerate((first, second, third)):
        server.run(_prompt(HEADER[:4], [200 + at], passage, QUESTION))
    prompt = _prompt(NEW, second, [60, 61], third, [62], first, QUESTION, [9])
    assert server.run(prompt, ANSWER) == len(DOCUMENT) + 2
    assert server.cache.counts["lent_runs"] == 3


def test_without_hooks_one_run_behind_the_prefix_is_lent() -> None:
    server = _taught(chunk=None)
    assert server.run(_prompt(NEW, DOCUMENT, QUESTION, [9])) == 0
    assert server.run(_prompt(OTHER, DOCUMENT, QUESTION, [9]), ANSWER) == len(DOCUMENT) + 2


def test_the_first_tokens_of_a_run_are_computed_again_where_the_text_before_changed() -> None:
    server = _taught(config=replace(SMALL, refresh_tokens=5))
    assert server.run(_prompt(NEW, DOCUMENT, QUESTION, [9])) == len(DOCUMENT) + 2 - 5
    assert server.run(_prompt(OTHER, DOCUMENT, QUESTION, [9])) == len(DOCUMENT) + 2 - 5


def test_where_a_piece_goes_on_as_it_did_nothing_is_computed_again() -> None:
    server = _server(config=replace(SMALL, refresh_tokens=5))
    server.run(_prompt(HEADER, DOCUMENT[:30], QUESTION))
    exact = fake.SamplingParams({"kvweave_fuzzy": False})
    server.run(_prompt(OTHER, DOCUMENT[12:], QUESTION), sampling_params=exact)
    assert server.run(_prompt(NEW, DOCUMENT, [9] * 3)) == len(DOCUMENT) - 5
    assert server.cache.counts["lent_runs"] == 1, "of two donors"


def test_a_chunk_is_not_ended_for_a_short_run() -> None:
    server = _taught(config=replace(SMALL, min_chunk_span=40))
    assert server.run(_prompt(NEW, DOCUMENT[:39], [9] * 3)) == 0
    assert server.run(_prompt(NEW[1:], DOCUMENT[:40], [9] * 3)) == 40
    assert server.run(_prompt(OTHER, DOCUMENT[:39], [8] * 3)) == 39, "right behind the prefix"


def _under_way(server: Any, rid: str = "r") -> Any:
    """A request whose first chunk is computed; a run of the document comes next."""
    req = fake.Req(rid, _prompt(NEW, DOCUMENT, [9] * 3))
    assert server.admit(req)
    return req


def test_a_donor_that_goes_between_chunks_costs_its_run_only() -> None:
    server = _taught()
    req = _under_way(server)
    server.cache.evict(fake.EvictParams(1000))
    while server.go_on(req):
        pass
    assert (server.cache.counts["gone"], server.cache.counts["lent_runs"]) == (1, 0)
    server.check([req])
    server.release(req)
    server.check([])


def test_what_others_publish_between_chunks_changes_nothing() -> None:
    server = _taught()
    req = _under_way(server)
    server.run([7] * 20)
    while server.go_on(req):
        pass
    assert server.cache.counts["lent_tokens"] == len(DOCUMENT)
    server.check([req])


def test_without_room_for_the_run_and_what_follows_it_is_computed() -> None:
    server = _taught(slots=160)
    holder = fake.Req("holder", [500] * 8)
    server.prefill(holder)
    req = _under_way(server)
    while server.allocator.available_size() > len(DOCUMENT) + 2:  # so the run alone would fit
        server.decode(holder, 500)
    adder = fake.PrefillAdder(server.cache, 4096)
    held = [server.cache.lock(node) for node in server.cache.nodes()]
    adder.add_chunked_req(req)
    assert server.cache.counts["no_room"] == 1
    assert req.prefix_len == len(NEW)
    for lock in held:
        server.cache.unlock(lock)


@pytest.mark.parametrize("lent", [False, True])
def test_an_abort_between_chunks_leaves_nothing_behind(lent: bool) -> None:
    server = _taught(chunk=8)
    req = _under_way(server)
    if lent:
        server.go_on(req)
        assert server.cache.counts["lent_runs"] == 1
    server.release(req, finished=False)
    server.check([])
    assert not req.skip_radix_cache_insert
    assert req not in server.cache.loans


def test_a_second_request_in_chunks_waits_for_the_first() -> None:
    """SGLang holds one of them; another would take its place, and the first be lost."""
    server = _taught()
    _under_way(server)
    other = fake.Req("other", _prompt(NEW, [1], DOCUMENT, [9] * 3))
    server.match(other)
    for busy, has_chunked in ((object(), False), (None, True)):
        adder = fake.PrefillAdder(server.cache, 4096)
        adder.new_chunked_req = busy
        asked = {"host_hit_length": 0, "has_chunked_req": has_chunked}
        assert adder._select_prefill_admission(other, **asked) is fake.AddReqResult.OTHER
        assert adder.rem_chunk_tokens == 4096
    whole = fake.Req("whole", [3] * 30)
    server.match(whole)
    asked = {"host_hit_length": 0, "has_chunked_req": True}
    assert not adder._select_prefill_admission(whole, **asked).is_chunked


def test_a_chunk_that_sglang_shortens_ends_where_sglang_says() -> None:
    server = _taught()
    req = fake.Req("r", _prompt(NEW * 4, DOCUMENT, [9] * 3))
    server._chunk = 5
    assert server.admit(req)
    assert req.prefix_len == 5
    adder = fake.PrefillAdder(server.cache, 4096)
    adder.chunked_req_limit = 2
    adder.add_chunked_req(req)
    assert (req.prefix_len, req.extend_end, adder.chunked_req_limit) == (5, 7, 2)


@pytest.mark.parametrize("alone", [True, False])
def test_a_fault_between_chunks(alone: bool) -> None:
    """Alone, the request is computed; a rank among others must not go on alone."""
    server = _taught(alone=alone)
    req = _under_way(server)

    def fail(*_: Any) -> None:
        raise RuntimeError("a bug")

    server.cache.req_to_token_pool.write = fail
    if not alone:
        with pytest.raises(RuntimeError):
            server.go_on(req)
        return
    while server.go_on(req):
        pass
    server.check([req])
    assert not server.cache.lends


def test_server_info_shows_what_was_lent() -> None:
    from kvweave.integrations.sglang import add_state

    server = _taught()
    server.run(_prompt(NEW, DOCUMENT, [9] * 3))
    reply = SimpleNamespace(internal_state={})
    add_state(reply, SimpleNamespace(scheduler=SimpleNamespace(tree_cache=server.cache)), None)
    shown = reply.internal_state["kvweave"]
    assert (shown["lent_requests"], shown["lent_tokens"]) == (1, len(DOCUMENT))
    assert shown["between_chunks"]
    add_state(reply, SimpleNamespace(scheduler=SimpleNamespace(tree_cache=object())))


def test_metrics_show_what_was_lent() -> None:
    from prometheus_client import REGISTRY

    server = _taught()
    server.cache.counts.export("some-model")
    server.run(_prompt(NEW, DOCUMENT, [9] * 3))
    labels = {"model_name": "some-model"}
    assert REGISTRY.get_sample_value("kvweave:fuzzy_lent_tokens_total", labels) == len(DOCUMENT)


def test_a_fault_in_the_mirror_leaves_it_as_it_was() -> None:
    server = _taught()
    mirror = server.cache.mirror
    before, pages = mirror.version, mirror.stats()["pages"]

    def fail(*_: Any) -> None:
        raise RuntimeError("a bug")

    mirror._tree.unlock = fail  # the last thing that `add` does
    with pytest.raises(RuntimeError):
        mirror.add("r", Namespace(""), np.arange(40, dtype=np.int32))
    del mirror._tree.unlock
    mirror.check()
    assert (mirror.version, mirror.stats()["pages"]) == (before, pages)


def test_first_tokens_are_the_requests_own() -> None:
    server = _server()
    server.run(_prompt(DOCUMENT, QUESTION))
    own = SMALL.sink_tokens
    assert server.run(_prompt(DOCUMENT[4:], QUESTION, [9])) == len(DOCUMENT) - 4
    server.run(_prompt(OTHER, QUESTION))
    assert server.run(_prompt(OTHER, DOCUMENT, QUESTION)) == len(DOCUMENT) + 1 - own, "a donor's"


@pytest.mark.parametrize("page_size", [4, 16])
def test_spans_are_whole_pages(page_size: int) -> None:
    server = _server(page_size=page_size)
    header, other = list(range(16)), list(range(32, 64))
    server.run(_prompt(header, DOCUMENT, QUESTION * 6))
    server.run(_prompt(other, QUESTION * 6))
    lent = server.run(_prompt(other, DOCUMENT, [9] * 20))
    assert lent == len(DOCUMENT) // page_size * page_size


@pytest.mark.parametrize("page_size", [1, 4])
def test_no_span_passes_the_limit_of_the_key(page_size: int) -> None:
    """SGLang limits a key where it needs logits of prompt tokens: those have to be computed."""
    server = _taught(page_size=page_size)
    prompt = _prompt(OTHER, DOCUMENT, QUESTION, [9])
    req = fake.Req("limited", prompt)
    whole = server.match(req)
    for limit in (len(OTHER) + 21, len(OTHER), 6, None):
        key = fake.RadixKey(req.full_untruncated_fill_ids, None, limit)
        result = server.cache.match_prefix(fake.MatchPrefixParams(key, req))
        promised = result.device_prefix_len + result.host_hit_length
        assert promised <= (len(prompt) if limit is None else limit)
        if limit == len(OTHER) + 21:
            assert result.host_hit_length == 21 // page_size * page_size
    assert result.host_hit_length == whole


@pytest.mark.parametrize(
    ("teacher", "asker"),
    [
        ({"cache_salt": "a"}, {"cache_salt": "b"}),
        ({"cache_salt": "a"}, {}),
        ({"extra_key": "adapter"}, {}),
        ({"extra_key": "a", "cache_salt": "b"}, {"extra_key": "b", "cache_salt": "a"}),
    ],
)
def test_nothing_is_lent_across_salts_and_extra_keys(
    teacher: dict[str, str], asker: dict[str, str]
) -> None:
    server = _server()
    server.run(_prompt(HEADER, DOCUMENT, QUESTION), **teacher)
    for about in (teacher, asker):
        server.run(_prompt(OTHER, QUESTION), **about)
    assert server.run(_prompt(OTHER, DOCUMENT, [9] * 3), **asker) == 0
    assert server.run(_prompt(OTHER, DOCUMENT, [9] * 3), **teacher) == len(DOCUMENT)


@pytest.mark.parametrize(
    "about",
    [
        {"sampling_params": fake.SamplingParams({"kvweave_fuzzy": False})},
        {"input_embeds": [[0.0]]},
        {"positional_embed_overrides": object()},
        {"session": object()},
        {"beam_group": object()},
    ],
)
def test_who_wants_or_needs_exact_kv_gets_it(about: dict[str, Any]) -> None:
    server = _taught()
    prompt = _prompt(OTHER, DOCUMENT, QUESTION, [9])
    assert server.match(fake.Req("exact", prompt, **about)) == 0
    assert server.match(fake.Req("any", prompt)) > 0


def test_prompt_logprobs_are_computed() -> None:
    server = _taught()
    req = fake.Req("logprobs", _prompt(OTHER, DOCUMENT, QUESTION, [9]), return_logprob=True)
    assert server.match(req) > 0, "logprobs of the output do not need the prompt"
    req.logprob_start_len = 0
    assert server.match(req) == 0


def test_a_donor_that_went_since_the_match_costs_the_span_only() -> None:
    server = _taught()
    req = fake.Req("late", _prompt(OTHER, DOCUMENT, QUESTION, [9]))
    assert server.match(req) > 0
    req.lock = server.cache.lock(req.last_node)
    server.cache.evict(fake.EvictParams(1000))
    assert server.load(req) == 0
    server.cache.unlock(req.lock)
    assert not req.skip_radix_cache_insert
    server.check([])
    assert server.match(fake.Req("next", req.full_untruncated_fill_ids)) == 0
    assert server.cache.counts["gone"] == 1, "the mirror forgot what is gone"


def test_a_look_up_is_void_once_something_else_can_be_found() -> None:
    """What names a donor may name other text by then."""
    server = _taught()
    req = fake.Req("late", _prompt(OTHER, DOCUMENT, QUESTION, [9]))
    assert server.match(req) > 0
    server.run([7] * 20)
    assert server.load(req) == 0
    assert server.match(req) > 0
    assert server.load(req) > 0


def test_without_room_nothing_is_lent_and_nothing_leaks() -> None:
    server = _taught(slots=96)
    holder = fake.Req("holder", [500] * 8)
    server.prefill(holder)
    while server.allocator.available_size():
        server.decode(holder, 500)
    req = fake.Req("late", _prompt(OTHER, DOCUMENT, QUESTION, [9]))
    assert server.match(req) > 0
    req.lock = server.cache.lock(req.last_node)
    assert server.load(req) == 0
    assert server.cache.counts["no_room"] == 1
    server.cache.unlock(req.lock)
    server.release(holder, finished=False)
    server.check([])


@pytest.mark.parametrize("alone", [True, False])
def test_a_copy_that_fails(alone: bool) -> None:
    """Alone, the request goes on without it; a rank among others must not go on alone."""
    server = _taught(alone=alone)

    def fail(runs: Any) -> None:
        raise MemoryError("no memory for the copy")

    server.mover.move = fail
    prompt = _prompt(OTHER, DOCUMENT, QUESTION, [9])
    if alone:
        assert server.run(prompt, ANSWER) == 0
        assert server.cache.counts["failed"] == 1
    else:
        with pytest.raises(MemoryError):
            server.run(prompt)


def test_a_fault_of_ours_leaves_a_plain_cache() -> None:
    server = _taught()

    def fail(*_: Any) -> None:
        raise RuntimeError("a bug")

    server.cache.mirror.find = fail
    assert server.run(_prompt(OTHER, DOCUMENT, QUESTION, [9])) == 0
    server.cache.mirror.add = fail
    server.run([1, 2, 3])


def test_a_waiting_request_is_looked_up_once() -> None:
    server = _taught()
    asked = server.cache.mirror.stats()["asked"]
    req = fake.Req("waiting", _prompt(OTHER, DOCUMENT, QUESTION, [9]))
    for _ in range(5):
        assert server.match(req) > 0
    assert server.cache.mirror.stats()["asked"] == asked + 1


def test_a_retracted_request_is_lent_its_span_again() -> None:
    server = _taught()
    req = fake.Req("retracted", _prompt(OTHER, DOCUMENT, QUESTION, [9]))
    lent = server.prefill(req)
    server.decode(req, 400)
    server.release(req, finished=False)
    server.check([])
    assert server.prefill(req) >= lent > 0
    server.check([req])
    server.release(req)
    server.check([])


def test_after_a_flush_nothing_is_known() -> None:
    server = _taught()
    for node in server.cache.nodes():
        if len(node.slots):
            server.allocator.free(node.slots)
    server.cache.reset()
    server.check([])
    server.run(_prompt(OTHER, QUESTION))
    assert server.run(_prompt(OTHER, DOCUMENT, QUESTION)) == 0


def _traffic(seed: int, count: int) -> list[list[int]]:
    """Prompts of few headers, documents and questions, in random order and number."""
    chance = random.Random(seed)
    headers = [[at] * 2 + list(range(8 * at, 8 * at + chance.randint(4, 12))) for at in range(4)]
    documents = [
        [chance.randrange(64, 512) for _ in range(chance.randint(8, 60))] for _ in range(6)
    ]
    prompts = []
    for _ in range(count):
        parts = [chance.choice(headers), *chance.sample(documents, chance.randint(1, 3))]
        prompts.append([*_prompt(*parts), *(chance.randrange(512) for _ in range(3))])
    return prompts


@pytest.mark.parametrize("chunk", [16, 4096])
@pytest.mark.parametrize("page_size", [1, 4])
def test_random_traffic_under_pressure(page_size: int, chunk: int) -> None:
    """Several requests at a time, eviction, retraction: slots add up and hold what they should."""
    chance = random.Random(page_size)
    config = replace(SMALL, refresh_tokens=3)
    server = _server(slots=480, page_size=page_size, chunk=chunk, config=config)
    running: list[fake.Req] = []
    lent = 0
    for number, prompt in enumerate(_traffic(page_size, 120)):
        req = fake.Req(str(number), prompt)
        before, more = server.cache.counts["lent_requests"], server.admit(req)
        while more and chance.random() < 0.95:  # else it is aborted between two chunks
            more = server.go_on(req)
        lent += server.cache.counts["lent_requests"] > before
        if more:
            server.release(req, finished=False)
        else:
            running.append(req)
        for other in running:
            server.decode(other, chance.randrange(512))
        while len(running) > chance.randint(0, 2):
            gone = running.pop(chance.randrange(len(running)))
            server.release(gone, finished=chance.random() < 0.8)
        server.check(running)
    assert lent > 20
    assert server.cache.counts["gone"] > 0, "nothing was evicted unseen"


def test_ranks_with_the_same_requests_decide_alike() -> None:
    """Where slots lie, and what was computed when, has no part in it."""
    ranks = [_server(slots=700, config=replace(SMALL, refresh_tokens=3)) for _ in range(2)]
    ranks[1].allocator.pages.reverse()
    for prompt in _traffic(7, 60):
        lent = {rank.run(prompt) for rank in ranks}
        assert len(lent) == 1
    first, second = (rank.cache.counts for rank in ranks)
    assert first.as_dict() == second.as_dict()
    assert first["lent_runs"] > first["lent_requests"] > 10
    assert not torch.equal(*(rank.cache.nodes()[5].slots for rank in ranks))
