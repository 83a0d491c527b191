"""Ranking of replicas by overlap, load and cached tokens."""

from __future__ import annotations

from kvweave.cluster.overlap import Overlap, ReplicaLoad, Weights, ranked, score


def replica_load(exact: int = 0, moved: int = 0, load: int = 0, kept: int = 0) -> ReplicaLoad:
    return ReplicaLoad(Overlap(exact, moved), load, kept)


def best(length: int = 400, weights: Weights = Weights(), **standings: ReplicaLoad) -> str:  # noqa: B008
    return ranked(standings, length, weights)[0]


def test_a_score_is_exact_plus_weighted_moved_less_load():
    assert score(replica_load(200, 100, 40), 400, Weights(moved=0.5, load=0.25)) == 200 + 50 - 10
    assert score(replica_load(200, 100, 40), 400, Weights(moved=0.0, load=1.0)) == 160


def test_the_replica_with_the_prefix_comes_first():
    assert best(a=replica_load(kept=10), b=replica_load(exact=300, kept=900)) == "b"
    assert best(a=replica_load(exact=320), b=replica_load(exact=304)) == "a"


def test_moved_text_counts_for_less_than_the_same_text_in_place():
    assert best(a=replica_load(moved=300), b=replica_load(exact=300)) == "b"
    assert best(a=replica_load(moved=380), b=replica_load()) == "a"
    assert (
        best(a=replica_load(moved=380, kept=1), b=replica_load(), weights=Weights(moved=0)) == "b"
    )


def test_waiting_work_can_outweigh_the_savings():
    assert best(a=replica_load(exact=300, load=1199, kept=9), b=replica_load()) == "a"
    assert best(a=replica_load(exact=300, load=1201), b=replica_load()) == "b"


def test_a_common_system_prompt_attracts_no_request():
    weights = Weights(least_share=0.25)
    assert (
        best(a=replica_load(exact=96, kept=500), b=replica_load(kept=400), weights=weights) == "b"
    )
    assert (
        best(a=replica_load(exact=112, kept=500), b=replica_load(kept=400), weights=weights) == "a"
    )


def test_new_conversations_go_to_the_least_load_then_to_the_smallest_cache():
    assert best(a=replica_load(load=10), b=replica_load(load=9, kept=1000)) == "b"
    assert (
        best(a=replica_load(kept=1001), b=replica_load(kept=1000), c=replica_load(kept=1002)) == "b"
    )


def test_all_replicas_are_ranked():
    standings = {"a": replica_load(load=5), "b": replica_load(exact=350), "c": replica_load(kept=1)}
    assert ranked(standings, 400, Weights()) == ["b", "c", "a"]


def test_six_conversations_of_five_turns_keep_their_replica_and_spread_evenly():
    """The whole policy, simulated: views are sets, and no load remains between turns."""
    kept: dict[str, set[tuple[int, int]]] = {"a": set(), "b": set()}
    homes: dict[int, set[str]] = {}
    for turn in range(5):
        for group in range(6):
            length = 100 * (turn + 1)
            held = {name: sum(100 for g, _ in kept[name] if g == group) for name in kept}
            stand = {name: replica_load(held[name], kept=100 * len(kept[name])) for name in kept}
            home = ranked(stand, length, Weights())[0]
            kept[home].add((group, turn))
            homes.setdefault(group, set()).add(home)
    assert all(len(names) == 1 for names in homes.values())
    assert sorted(len(blocks) for blocks in kept.values()) == [15, 15]
