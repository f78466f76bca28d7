"""Cuts of a graph against all subsets of its nodes."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given, settings
from support.inside import Cuts, all_cuts, pipedream_cuts, thinned

from stagewright.partition import Node, Profile, read_pipedream_profile

from .small import crossing, down_sets, profiles

DATA = Path(__file__).parents[1] / "data" / "pipedream"
steady = settings(max_examples=100, deadline=None, derandomize=True)


def node(name: str, seconds: float = 1.0, size: float = 1.0) -> Node:
    return Node(name=name, forward_seconds=seconds, backward_seconds=0.0, activation_bytes=size)


def sets_of(cuts: Cuts, profile: Profile) -> list[frozenset[str]]:
    return [frozenset(n.name for n, held in zip(profile.nodes, row, strict=True) if held) for row in cuts.members]


@pytest.mark.thorough
@steady
@given(profiles())
def test_all_cuts_are_all_down_sets(profile: Profile) -> None:
    cuts = all_cuts(profile)
    found, expected = sets_of(cuts, profile), down_sets(profile)
    assert len(set(found)) == len(found)
    assert set(found) <= set(expected)
    free = {n.name for n in profile.nodes if n.seconds + n.activation_bytes + n.stash_bytes + n.parameter_bytes == 0}
    if not free:
        assert set(found) == set(expected)
    assert found[0] == frozenset()
    assert len(found[-1]) == len(profile.nodes)
    for i, a in enumerate(found):
        assert cuts.seconds[i] == pytest.approx(sum(n.seconds for n in profile.nodes if n.name in a))
        assert cuts.crossing[i] == pytest.approx(crossing(profile, a))
        assert [a < b for b in found] == cuts.inside[i].tolist()


def test_a_source_that_costs_nothing_joins_its_first_consumer() -> None:
    profile = Profile(nodes=(node("a"), node("b"), node("flag", 0.0, 0.0)), edges=(("a", "b"), ("flag", "b")))
    assert sets_of(all_cuts(profile), profile) == [frozenset(), {"a"}, {"a", "b", "flag"}]


def test_of_many_cuts_those_with_the_least_bytes_stay() -> None:
    """A chain of eight equal nodes: the empty cut, one in each half of the work, and the whole."""
    sizes = [9, 1, 9, 9, 2, 9, 9, 9]  # bytes of node i cross cut i + 1
    nodes = tuple(node(f"n{i}", size=size) for i, size in enumerate(sizes))
    cuts = all_cuts(Profile(nodes=nodes))
    assert thinned(cuts, 4) == [0, 2, 5, 8]
    assert thinned(cuts, 9) == list(range(9))


def branches(width: int, depth: int, blocks: int) -> Profile:
    """Blocks of parallel branches, as in Inception."""
    nodes, edges, joint = [node("in")], [], "in"
    for block in range(blocks):
        ends = []
        for branch in range(width):
            before = joint
            for step in range(depth):
                name = f"b{block}.{branch}.{step}"
                nodes.append(node(name))
                edges.append((before, name))
                before = name
            ends.append(before)
        joint = f"join{block}"
        nodes.append(node(joint))
        edges += [(end, joint) for end in ends]
    return Profile(nodes=tuple(nodes), edges=tuple(edges))


def test_too_many_cuts_are_taken_in_one_order_and_said_so() -> None:
    profile = branches(width=4, depth=5, blocks=3)  # 6^4 cuts a block
    cuts = all_cuts(profile, limit=2000)
    assert len(cuts) <= 2000
    (note,) = cuts.notes
    assert "more than 2000 cuts: 2 of its stretches" in note
    assert f"leaves {len(cuts)} cuts" in note
    assert set(sets_of(cuts, profile)) <= set(sets_of(all_cuts(profile, limit=10_000), profile))
    assert all_cuts(profile, limit=10_000).notes == ()
    with pytest.raises(ValueError, match="more than 6000 cuts: expected fewer parallel branches for PipeDream's model"):
        pipedream_cuts(branches(width=5, depth=5, blocks=1))


@pytest.mark.parametrize(
    ("model", "states"),
    [("vgg16", 40), ("alexnet", 22), ("gnmt", 99), ("resnet18", 100), ("resnet50", 240), ("squeezenet1_0", 99)],
)
def test_states_of_the_published_profiles(model: str, states: int) -> None:
    assert len(pipedream_cuts(read_pipedream_profile(DATA / f"{model}.txt"))) == states + 1


def test_pipedream_counts_a_fork_until_its_branches_join() -> None:
    edges = (("a", "b"), ("a", "c"), ("b", "d"), ("c", "d"))
    profile = Profile(
        nodes=tuple(node(name, size=s) for name, s in zip("abcd", (1, 10, 100, 1000), strict=True)), edges=edges
    )
    assert all_cuts(profile).crossing.tolist() == [0, 1, 11, 101, 110, 0]
    assert pipedream_cuts(profile).crossing.tolist() == [0, 1, 11, 101, 111, 1000]
