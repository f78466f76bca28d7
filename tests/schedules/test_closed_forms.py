"""Closed forms of papers about each schedule, exactly, from the event simulator. F and B: seconds of a stage action."""

from __future__ import annotations

from itertools import product

import pytest
from support.inside import microbatch_groups

from stagewright.schedules import FAMILIES, Costs, Family, build, check, lower_bound, simulate

from .closed_forms import PEAKS, SECONDS, SPANS, EqualStages

RANKS = (1, 2, 3, 4, 7)
FB = [(1.0, 1.0), (1.0, 2.0), (3.0, 1.0), (0.25, 0.75)]  # all sums exact


# F, I, W and latency: sums are exact.
COSTS = [(1.0, 1.0, 1.0, 0.0), (1.0, 0.5, 0.75, 0.0), (2.0, 2.5, 1.0, 0.5), (1.0, 3.0, 1.0, 2.0)]
WITH_A_FORM = [f for f in FAMILIES.values() if f.name in SECONDS | SPANS | PEAKS]


@pytest.mark.thorough(but=["chimera"])
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


@pytest.mark.thorough(but=["1-1"])
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
