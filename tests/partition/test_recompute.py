"""Recomputation of whole stages, by layer and selectively: what is kept, what is made again, what it costs."""

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.inside import (
    COUNTED,
    RECOMPUTE,
    InFlightCounts,
    MemoryRules,
    Model,
    RankMemory,
    RankPlace,
    Recomputed,
    StageSums,
)

from stagewright.partition import Cluster, Node, Profile, plan

from .small import TENTHS, profiles

CHAIN = Profile(
    nodes=tuple(
        Node(
            name=name,
            forward_seconds=forward,
            backward_seconds=2 * forward,
            activation_bytes=output,
            stash_bytes=stash,
            runs_again=name != "d",
            selective_bytes=None if name == "d" else selective,
            selective_seconds=None if name == "d" else forward / 4,
            keep_less_bytes=250 if name == "b" else None,
            keep_less_seconds=0.5 if name == "b" else None,
        )
        for name, forward, output, stash, selective in [
            ("a", 1, 10, 100, 40),
            ("b", 2, 20, 300, 50),
            ("c", 4, 30, 200, 70),
            ("d", 8, 0, 500, 0),
        ]
    ),
    microbatch_size=1,
)


def rows(profile: Profile, first: int, last: int) -> dict[str, tuple[float, float, float]]:
    sums = Model(profile, MemoryRules(optimizer_ratio=2.0)).cuts.stages(first, last)
    found = {name: sums.under(name) for name in RECOMPUTE}
    return {name: (float(row.kept), float(row.again), float(row.seconds)) for name, row in found.items()}


def test_the_first_ones_of_a_stage() -> None:
    """Nodes a, b and c, of which one or two run again; of a count beyond them all do, and d never does."""
    sums = Model(CHAIN, MemoryRules(optimizer_ratio=2.0)).stages((0, 3, 4))
    found = [[column.tolist() for column in sums.under(f"layer:{number}")] for number in (1, 2, 3, 9)]
    assert found[0] == [[500, 500], [100, 0], [1, 0]]
    assert found[1] == [[10 + 200, 500], [300, 0], [3, 0]]
    assert found[2] == found[3] == [[10 + 20, 500], [300, 0], [7, 0]]
    one, two, every = ([column.tolist() for column in sums.under(f"selective:{number}")] for number in (1, 2, 3))
    assert one == [[40 + 300 + 200, 500], [60, 0], [0.25, 0]]
    assert two == [[40 + 50 + 200, 500], [250, 0], [0.75, 0]]
    assert every == [column.tolist() for column in sums.under("selective")]
    none, some = ([column.tolist() for column in sums.under(f"keep_less:{number}")] for number in (1, 2))
    assert none == [[600, 500], [0, 0], [0, 0]]
    assert some == [[550, 500], [50, 0], [0.5, 0]]


@st.composite
def graphs(draw: st.DrawFn) -> Profile:
    """Random graphs, with nodes that do not run again and figures of selective recompute."""
    profile = draw(profiles(max_nodes=5))
    return replace(
        profile,
        nodes=tuple(
            replace(
                node,
                runs_again=draw(st.integers(0, 3)) > 0,
                selective_bytes=draw(TENTHS),
                selective_seconds=draw(TENTHS) / 4,
            )
            for node in profile.nodes
        ),
    )


@pytest.mark.thorough
@settings(max_examples=60, deadline=None, derandomize=True)
@given(graphs())
def test_each_tensor_that_enters_a_node_counts_once(profile: Profile) -> None:
    """All stages between all cuts, by sets of names; a tensor that only skips over the stage may count as well."""
    cuts = Model(profile, MemoryRules(optimizer_ratio=2.0)).cuts
    names = np.array([node.name for node in profile.nodes])
    for first, last in zip(*np.nonzero(cuts.inside), strict=True):
        own = {*names[cuts.members[last]]} - {*names[cuts.members[first]]}
        again = [node for node in profile.nodes if node.name in own and node.runs_again]
        other = [node for node in profile.nodes if node.name in own and not node.runs_again]
        takers = {node.name for node in profile.nodes if node.runs_again}
        entering = {src for src, dst in profile.edges or () if dst in {node.name for node in again}}
        skipping = {
            src
            for src, dst in profile.edges or ()
            if src in names[cuts.members[first]] and dst in takers and dst not in names[cuts.members[last]]
        }
        size = {node.name: node.activation_bytes for node in profile.nodes}
        still = sum(node.stash_bytes for node in other)
        layer, selective = (
            rows(profile, int(first), int(last))["layer"],
            rows(profile, int(first), int(last))["selective"],
        )
        least = sum(size[name] for name in entering) + still
        assert least - 1e-9 <= layer[0] <= least + sum(size[name] for name in skipping - entering) + 1e-9
        assert layer[1] == max([0.0, *(node.stash_bytes for node in again)])
        assert layer[2] == pytest.approx(sum(node.forward_seconds for node in again))
        counts = cuts.stages(np.array([first]), np.array([last])).counts(0)
        order = [profile.nodes[at].name for at in profile.order() if profile.nodes[at] in again]
        assert len(counts.kept) == 1 + len(again)
        for number, (kept, made, seconds) in enumerate(zip(*counts, strict=True)):
            some = [node for node in again if node.name in order[:number]]
            entering = {src for src, dst in profile.edges or () if dst in order[:number]}
            keeping = [node.stash_bytes for node in profile.nodes if node.name in own - {*order[:number]}]
            assert kept == pytest.approx(sum(size[name] for name in entering) + sum(keeping))
            assert made == max([0.0, *(node.stash_bytes for node in some)])
            assert seconds == pytest.approx(sum(node.forward_seconds for node in some))
        assert selective[0] == pytest.approx(sum(node.selective_bytes or 0.0 for node in again) + still)
        made = [node.stash_bytes - (node.selective_bytes or 0.0) for node in again]
        assert selective[1] == pytest.approx(max([0.0, *made]))
        assert selective[2] == pytest.approx(sum(node.selective_seconds or 0.0 for node in again))


# What a rank chooses.


BYTES = st.integers(0, 20).map(float)


@st.composite
def ranks(draw: st.DrawFn, num_chunks: int) -> tuple[StageSums, InFlightCounts, float]:
    """One rank with V stages, what is in flight on it, and a device that is just large enough for some choice."""

    def column() -> np.ndarray:
        return np.array([draw(BYTES) for _ in range(num_chunks)])

    known = {name: Recomputed(kept=column(), again=column(), seconds=column()) for name in COUNTED}
    nothing = np.zeros(num_chunks)
    sums = StageSums(
        forward=column(),
        backward=nothing,
        update=nothing,
        weights=nothing,
        buffers=nothing,
        stash=column(),
        before=column(),
        after=nothing,
        workspace=nothing,
        largest=nothing,
        small=nothing,
        by_node=known.__getitem__,
    )
    moments = draw(st.integers(1, 4))
    held = np.array([[draw(st.integers(0, 3)) for _ in range(num_chunks)] for _ in range(moments)], dtype=float)
    running = np.array([draw(st.integers(0, num_chunks - 1)) for _ in range(moments)])
    for moment, chunk in enumerate(running):
        held[moment, chunk] = max(1.0, held[moment, chunk])
    nobody = np.zeros_like(held)
    in_backward = np.concatenate([held, nobody, nobody, np.eye(num_chunks)[running]], axis=1)
    in_forward = np.concatenate([held, nobody, nobody, nobody], axis=1)
    counts = np.concatenate([in_forward, in_backward])
    flight = InFlightCounts(counts=counts, num_forwards=moments, versions=1)
    tightest = [draw(st.sampled_from(RECOMPUTE))] * num_chunks
    if draw(st.booleans()):
        tightest = [draw(st.sampled_from(RECOMPUTE)) for _ in tightest]
    return sums, flight, total_by_hand((sums, flight, 0.0), tuple(tightest))


def fitted(case: tuple[StageSums, InFlightCounts, float], recompute: tuple[str, ...]) -> RankMemory:
    sums, flight, limit = case
    place = RankPlace(stages=tuple(range(len(sums.stash))), replicas=1, tensor=1, limit=limit)
    return MemoryRules(optimizer_ratio=2.0, recompute=recompute).front(sums, flight, place)[0]


def total_by_hand(case: tuple[StageSums, InFlightCounts, float], choice: tuple[str, ...]) -> float:
    sums, flight, _ = case
    kept, again = (
        [float(getattr(sums.under(name), what)[v]) for v, name in enumerate(choice)] for what in ("kept", "again")
    )
    most = max(
        float(np.dot(row[: len(kept)], kept) + np.dot(row[-len(kept) :], again))
        for row in flight.counts[flight.num_forwards :]
    )
    received = float(sums.before[0]) * (4 + 2)  # ahead, and gradients sent back: of one rank the first stage alone
    return most + received + float(sums.before.max())  # the gradient of an input


def fitted_alone(case: tuple[StageSums, InFlightCounts, float], choice: tuple[str, ...]) -> RankMemory:
    """The same rank with one choice: as if each stage had "none" alone, with the figures of that choice."""
    sums, flight, limit = case
    kept = np.array([sums.under(name).kept[v] for v, name in enumerate(choice)])
    again = np.array([sums.under(name).again[v] for v, name in enumerate(choice)])
    alone = replace(sums, by_node=lambda _: Recomputed(kept=kept, again=again, seconds=np.zeros_like(kept)))
    return fitted((alone, flight, limit), ("layer",))


@settings(max_examples=50, deadline=None, derandomize=True)
@given(st.data())
def test_bytes_at_the_peak(data: st.DataObject) -> None:
    case = data.draw(ranks(data.draw(st.integers(1, 3))))
    choice = tuple(data.draw(st.sampled_from(RECOMPUTE)) for _ in case[0].stash)
    forced = fitted_alone((case[0], case[1], 0.0), choice)
    assert forced.total == pytest.approx(total_by_hand(case, choice))


def test_stages_of_one_rank_send_each_other_nothing() -> None:
    """Two neighbours: 10 bytes between them, of which there are no messages, and 20 to the next rank."""
    others = ("forward", "backward", "update", "weights", "buffers", "small", "stash", "workspace", "largest")
    none = np.zeros(2)
    known = Recomputed(kept=none, again=none, seconds=none)
    counts = np.array([[1.0, 2.0, *np.zeros(6)]])
    flight = InFlightCounts(counts=counts, num_forwards=1, versions=1)
    place = RankPlace(stages=(0, 1), replicas=1, tensor=1, limit=1e9)
    sums = StageSums(
        before=np.array([0.0, 10.0]),
        after=np.array([10.0, 20.0]),
        **dict.fromkeys(others, none),
        by_node=lambda _: known,
    )
    received_ahead, held = 4, 2
    assert MemoryRules(optimizer_ratio=0.0).front(sums, flight, place)[0].messages == 20 * (received_ahead + held)


# Plans.


OLD = Profile(nodes=tuple(Node(name=n, forward_seconds=1, backward_seconds=2, stash_bytes=100) for n in "ab"))


def test_selective_needs_figures_of_every_node_that_runs_again() -> None:
    cluster = Cluster.from_levels([(1, 1e9)])
    with pytest.raises(ValueError, match="recompute: 'selective' with a profile whose node 'a' has no selective_bytes"):
        plan(OLD, cluster, global_batch=2, recompute=("none", "selective"))
    with pytest.raises(ValueError, match="recompute: 'keep_less' with a profile whose node 'a' has no keep_less_bytes"):
        plan(OLD, cluster, global_batch=2, recompute=("none", "keep_less"))
    found = plan(OLD, cluster, global_batch=2, memory_limit=150)  # by itself it takes what is known
    assert found.stages[0].recompute == "layer"
    known = replace(OLD, nodes=tuple(replace(node, runs_again=False) for node in OLD.nodes))
    assert plan(known, cluster, global_batch=2, recompute="selective").stages[0].recompute == "selective"
    # The second of these nodes would keep all that it keeps; the runtime would not.
    known = replace(OLD.nodes[0], selective_bytes=1, selective_seconds=0.1)
    profile, cluster = replace(OLD, nodes=(known, OLD.nodes[1])), Cluster.from_levels([(1, 1e9)])
    found = plan(profile, cluster, global_batch=3, schedules="gpipe", memory_limit=450)
    assert found.stages[0].recompute == "layer:1"  # selectively it would be 3 * (1 + 100) + 99 bytes
