"""Closed forms of papers about each schedule, exactly, from the event simulator. F and B: seconds of a stage action."""

from __future__ import annotations

from itertools import product

import pytest
from support.inside import microbatch_groups

from stagewright.schedules import FAMILIES, Costs, Family, build, check, lower_bound, simulate

from .closed_forms import PEAKS, SECONDS, SPANS, EqualStages

RANKS = (1, 2, 3, 4, 7)
MICROBATCHES = (1, 2, 3, 4, 5, 8, 13)
FB = [(1.0, 1.0), (1.0, 2.0), (3.0, 1.0), (0.25, 0.75)]  # all sums exact


def makespan(name: str, P: int, M: int, costs: Costs, V: int | None = None) -> float:
    return simulate(build(name, num_ranks=P, num_microbatches=M, num_chunks=V), costs).makespan


# F, I, W and latency: sums are exact.
COSTS = [(1.0, 1.0, 1.0, 0.0), (1.0, 0.5, 0.75, 0.0), (2.0, 2.5, 1.0, 0.5), (1.0, 3.0, 1.0, 2.0)]
WITH_A_FORM = [f for f in FAMILIES.values() if f.name in SECONDS | SPANS | PEAKS]


@pytest.mark.parametrize("each", WITH_A_FORM, ids=lambda each: each.name)
def test_what_a_family_says_of_itself(each: Family) -> None:
    """Seconds, spans and peaks by its own formulas, wherever these hold, and each of them somewhere."""
    forms = {"seconds": SECONDS.get(each.name), "span": SPANS.get(each.name), "peaks": PEAKS.get(each.name)}
    held: set[str] = set()
    for P in (1, 2, 3, 5):
        for M in sorted({1, P - 1, P, P + 1, 2 * P - 1, 2 * P, 3 * P} - {0}):
            chunks = (1, 2, 3) if each.takes_chunks else (each.num_chunks,)
            for V, n in product(chunks, (1, 2, 5) if each.takes_slices else (1,)):
                sizes = {"num_ranks": P, "num_microbatches": M, "num_chunks": V, "num_slices": n}
                try:
                    schedule = build(each.name, **sizes)
                except ValueError:
                    continue  # sizes that do not fit
                for F, I, W, c in COSTS:
                    timeline = simulate(schedule, Costs(forward=F, input_grad=I, weight_grad=W, latency=c))
                    equal = EqualStages(**sizes, forward=F, input_grad=I, weight_grad=W, latency=c)
                    for name, found in (
                        ("seconds", timeline.batch_seconds),
                        ("span", timeline.span),
                        ("peaks", timeline.peak_activations),
                    ):
                        form = forms[name]
                        if form is not None and (said := form(equal)) is not None:
                            held.add(name)
                            assert found == said, (name, equal)
    assert held == {name for name, form in forms.items() if form is not None}


@pytest.mark.parametrize("name", ["gpipe", "1f1b"])
@pytest.mark.parametrize("P", RANKS)
@pytest.mark.parametrize("M", MICROBATCHES)
def test_one_stage_a_rank(name: str, P: int, M: int) -> None:
    schedule = build(name, num_ranks=P, num_microbatches=M)
    for F, B in FB:
        timeline = simulate(schedule, Costs(forward=F, backward=B))
        assert timeline.makespan == (M + P - 1) * (F + B)
        assert timeline.bubble == timeline.makespan_bubble == pytest.approx((P - 1) / (M + P - 1), abs=1e-15)
        assert timeline.span == timeline.makespan  # rank 0 is there from the first to the last
        assert lower_bound(schedule, Costs(forward=F, backward=B)) == timeline.makespan


@pytest.mark.parametrize("P", RANKS)
@pytest.mark.parametrize("M", MICROBATCHES)
def test_activations_in_flight(P: int, M: int) -> None:
    for name, peaks in (
        ("1f1b", tuple(min(M, P - r) for r in range(P))),
        ("gpipe", (M,) * P),
    ):
        schedule = build(name, num_ranks=P, num_microbatches=M)
        assert check(schedule).peak_activations == peaks
        assert simulate(schedule, Costs(latency=0.5)).peak_activations == peaks


@pytest.mark.parametrize("P", RANKS)
@pytest.mark.parametrize("V", [1, 2, 3, 4])
@pytest.mark.parametrize("rounds", [1, 2, 3])
def test_interleaved_of_whole_rounds(P: int, V: int, rounds: int) -> None:
    M = P * rounds
    schedule = build("interleaved", num_ranks=P, num_microbatches=M, num_chunks=V)
    for F, B in FB:
        timeline = simulate(schedule, Costs(forward=F, backward=B))
        assert timeline.makespan == (M * V + P - 1) * (F + B)
    peaks = tuple(min(M * V, (V - 1) * P + 2 * (P - 1 - r) + 1) for r in range(P))
    assert check(schedule).peak_activations == timeline.peak_activations == peaks


@pytest.mark.parametrize("P", RANKS)
@pytest.mark.parametrize("V", [1, 2, 3])
def test_interleaved_is_the_best_order_of_any_batch(P: int, V: int) -> None:
    """With equal stages and free links, fewer microbatches than ranks and remainders included."""
    for M in range(1, 3 * P + 2):
        schedule = build("interleaved", num_ranks=P, num_microbatches=M, num_chunks=V)
        check(schedule)
        for F, B in FB:
            costs = Costs(forward=F, backward=B)
            assert simulate(schedule, costs).makespan == lower_bound(schedule, costs)
        if M >= P:
            assert lower_bound(schedule, costs) == (M * V + P - 1) * (F + B)


@pytest.mark.parametrize("P", RANKS)
@pytest.mark.parametrize("V", [2, 3])
def test_looped_bfs(P: int, V: int) -> None:
    """(MV+P-1)(F+B) as interleaved when M >= P; all M*V chunk activations at once."""
    for M in (P, P + 1, 3 * P):
        schedule = build("looped-bfs", num_ranks=P, num_microbatches=M, num_chunks=V)
        for F, B in FB:
            assert simulate(schedule, Costs(forward=F, backward=B)).makespan == (M * V + P - 1) * (F + B)
        assert check(schedule).peak_activations == (M * V,) * P


@pytest.mark.parametrize("P", RANKS)
@pytest.mark.parametrize("M", MICROBATCHES)
@pytest.mark.parametrize("c", [0.25, 1.0, 8.0])
def test_1f1b_with_latency(P: int, M: int, c: float) -> None:
    """reference/schedules.md 1.1: a delay of c adds 2c[(P-1) + floor((M-1)(P-1)/P)]."""
    waiting = 2 * c * ((P - 1) + (M - 1) * (P - 1) // P)
    for F, B in FB:
        assert makespan("1f1b", P, M, Costs(forward=F, backward=B, latency=c)) == (M + P - 1) * (F + B) + waiting


@pytest.mark.parametrize("P", [2, 3, 4])
@pytest.mark.parametrize("V", [2, 3])
@pytest.mark.parametrize("rounds", [1, 2, 4])
def test_interleaved_with_latency(P: int, V: int, rounds: int) -> None:
    """reference/schedules.md 1.2: a delay c, at most F and B, adds 2c(PV-1) for any M that P divides."""
    M = P * rounds
    for F, B in FB:
        for c in (0.125, min(F, B)):
            costs = Costs(forward=F, backward=B, latency=c)
            assert makespan("interleaved", P, M, costs, V) == (M * V + P - 1) * (F + B) + 2 * c * (P * V - 1)


def test_update_comes_behind_each_rank() -> None:
    """Each chunk has its own update; the last rank to end, rank 0, ends with its updates."""
    costs = Costs(forward=1.0, backward=2.0, update=0.5)
    assert makespan("1f1b", 4, 8, costs) == (8 + 3) * 3 + 0.5
    assert makespan("interleaved", 4, 8, costs, 3) == (8 * 3 + 3) * 3 + 3 * 0.5


@pytest.mark.parametrize(
    ("P", "M", "groups"),
    [
        (4, 8, (4, 4)),
        (4, 11, (6, 5)),
        (4, 10, (5, 5)),
        (4, 14, (5, 5, 4)),
        (4, 3, (3,)),
        (4, 7, (7,)),
        (1, 3, (1, 1, 1)),
    ],
)
def test_microbatch_groups(P: int, M: int, groups: tuple[int, ...]) -> None:
    assert microbatch_groups(at_least=P, num_microbatches=M) == groups


def test_any_groups_of_at_least_one_a_rank_are_as_fast() -> None:
    costs = Costs(forward=1.0, backward=2.0)
    for groups in [(5, 4), (5, 5), (6, 3), (9,), (4, 4, 4), (6, 4, 5)]:
        M = sum(groups)
        schedule = build("interleaved", num_ranks=3, num_microbatches=M, num_chunks=2, groups=groups)
        check(schedule)
        assert simulate(schedule, costs).makespan == (M * 2 + 2) * 3


def test_groups_of_half_the_ranks() -> None:
    """GIS-H: (V+1)/2V of the activations for (V-1) P/2 (F+I-W) seconds more."""
    for P, V, rounds in ((2, 2, 4), (4, 2, 6), (4, 3, 5), (8, 2, 4)):
        M = rounds * P // 2
        schedule = build("gis", num_ranks=P, num_microbatches=M, num_chunks=V, group_size=P // 2)
        assert max(check(schedule).peak_activations) == (V - 1) * P // 2 + P
        for F, I, W in ((1, 1, 1), (1, 2, 1), (2, 1, 1), (3, 3, 1)):
            costs = Costs(forward=F, input_grad=I, weight_grad=W)
            waits = (P - 1) * (F + I) + (V - 1) * P // 2 * (F + I - W)
            assert simulate(schedule, costs).makespan == M * V * (F + I + W) + waits


@pytest.mark.parametrize(("P", "M"), [(4, 2), (4, 3), (8, 5), (3, 1)])
def test_zb_h1_of_few_microbatches_is_the_best(P: int, M: int) -> None:
    """The bound of any order: one microbatch down and up again, the others' F or I between, and a W."""
    schedule = build("zb-h1", num_ranks=P, num_microbatches=M)
    for F, I, W in ((10, 11, 7), (1, 1, 1), (2, 1, 1)):
        costs = Costs(forward=F, input_grad=I, weight_grad=W)
        assert simulate(schedule, costs).makespan == (M + P - 1) * (F + I) + W == lower_bound(schedule, costs)


def test_zero_bubble_is_one_of_the_span() -> None:
    """F = I = W: a rank works without a pause, the batch still takes P-1 forwards longer."""
    timeline = simulate(build("zb-h2", num_ranks=4, num_microbatches=12), Costs())
    assert timeline.span == 36
    assert timeline.makespan == 36 + 3
    costs = Costs(forward=10, input_grad=11, weight_grad=7)
    uneven = simulate(build("zb-h2", num_ranks=4, num_microbatches=12), costs)
    assert (uneven.span - 12 * 28, uneven.makespan - 12 * 28) == (21, 30)
