"""Closed forms of papers about each schedule, exactly, from the event simulator. F and B: seconds of a stage action."""

from collections.abc import Callable
from dataclasses import dataclass
from itertools import product

import pytest
from support.inside import microbatch_groups

from stagewright.schedules import FAMILIES, Costs, Family, build, check, lower_bound, simulate

Peaks = tuple[int, ...] | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Equal:
    """P ranks, M microbatches, V chunks a rank, n slices of a microbatch; of equal stages the seconds F, I and W of an
    action, and c of a message."""

    P: int
    M: int
    V: int = 1
    n: int = 1
    F: float = 1.0
    I: float = 1.0
    W: float = 1.0
    c: float = 0.0

    @property
    def back(self) -> float:
        return self.I + self.W

    @property
    def both(self) -> float:
        return self.F + self.back

    @property
    def work(self) -> float:
        return self.M * self.n * self.V * self.both

    @property
    def is_even(self) -> bool:
        """Whether F, I and W take as long, and messages no time."""
        return self.F == self.I == self.W and not self.c

    @property
    def is_filled(self) -> bool:
        """Whether a W fits into the gap of an F or I, and hides a message there and back."""
        return 2 * self.c <= self.W <= min(self.F, self.I)


def falling(e: Equal, most: int, first: int, step: int) -> Peaks:
    """Each rank `step` fewer than the one before it, and no more than there are."""
    return tuple(min(most, first - step * rank) for rank in range(e.P))


def alike(e: Equal, peak: int, *, holds: bool = True) -> Peaks:
    return (peak,) * e.P if holds else None


def interleaved(e: Equal) -> Peaks:
    return None if e.M % e.P else falling(e, e.M * e.V, (e.V - 1) * e.P + 2 * (e.P - 1) + 1, 2)


def of_rounds(e: Equal, *, step: int) -> Peaks:
    return None if e.V > 1 and e.M % e.P else falling(e, e.M * e.V, e.V * e.P, step)


def seq1f1b(e: Equal) -> Peaks:
    if e.V == 1:
        return falling(e, e.M * e.n, e.P - 1 + e.n, 1)
    group = e.n * microbatch_groups(at_least=-(-e.P // e.n), num_microbatches=e.M)[0]
    return falling(e, e.M * e.n * e.V, (e.V - 1) * group + 2 * (e.P - 1) + e.n, 2)


def slimpipe(e: Equal) -> Peaks:
    # A rank with one chunk need not run twice as far ahead as the next one: it waits for its backwards alone.
    whole, ahead = e.n * e.V, 1 if e.V == 1 else 2
    return falling(e, e.M * whole, whole + ahead * (e.P - 1), ahead)


def chimera(e: Equal) -> Peaks:
    return None if e.M % e.P else tuple(e.P // 2 + 1 + min(rank, e.P - 1 - rank) for rank in range(e.P))


def hanayo(e: Equal) -> Peaks:
    is_one_wave = e.V == 2 and e.M == e.P
    return tuple(min(2 * e.P, e.P + 1 + 3 * rank // 2) for rank in range(e.P)) if is_one_wave else None


PEAKS: dict[str, Callable[[Equal], Peaks]] = {
    "gpipe": lambda e: alike(e, e.M),
    "1f1b": lambda e: falling(e, e.M, e.P, 1),
    "eager-1f1b": lambda e: falling(e, e.M, 2 * (e.P - 1) + 1, 2),
    **dict.fromkeys(("pipedream", "2bw", "paci"), lambda e: falling(e, e.P, e.P, 1)),
    "zb-h1": lambda e: alike(e, min(e.M, e.P)),
    "zb-h2": lambda e: alike(e, min(e.M, 2 * e.P - 1)),
    "interleaved": interleaved,
    "gis": lambda e: of_rounds(e, step=1),
    "interleaved-zb": lambda e: of_rounds(e, step=0),
    "looped-bfs": lambda e: alike(e, e.M * e.V),
    "terapipe": lambda e: alike(e, e.M * e.n),
    "seq1f1b": seq1f1b,
    "seq-zb-h1": lambda e: alike(e, min(e.M * e.n, e.P - 1 + e.n)),
    "slimpipe": slimpipe,
    "chimera": chimera,
    "dualpipe": lambda e: alike(e, e.P + 1),
    "dualpipe-v": lambda e: alike(e, 2 * e.P + 1),
    "hanayo": hanayo,
    "zb-v": lambda e: alike(e, 2 * e.P, holds=e.M >= 2 * e.P - 1),
    "v-half": lambda e: alike(e, 2 * ((e.P + 2) // 2), holds=e.M >= 2 * e.P),
    "v-min": lambda e: alike(e, 2 * ((e.P + 4) // 3), holds=e.M >= e.P and e.P % 3 != 2),
}


def zb_h2_span(e: Equal) -> float | None:
    span = (e.M + e.P - 1) * (e.F + e.I) + max(1, e.M - 2 * e.P + 2) * e.W + 2 * (e.P - 1) * e.c
    return span if e.is_filled else None


def zb_v_span(e: Equal) -> float | None:
    return e.work if e.is_even and e.M >= 2 * e.P - 1 else None


def one_f_one_b_seconds(e: Equal) -> float:
    """(M + P - 1)(F + B); each message is waited for when the pipeline fills and drains, and in most rounds between."""
    return (e.M + e.P - 1) * e.both + 2 * e.c * ((e.P - 1) + (e.M - 1) * (e.P - 1) // e.P)


def gpipe_seconds(e: Equal) -> float:
    return (e.M + e.P - 1) * e.both + 2 * (e.P - 1) * e.c


def looped_seconds(e: Equal) -> float | None:
    """(M V + P - 1)(F + B), where M is at least P and links are free."""
    return None if e.M < e.P or e.c else e.work + (e.P - 1) * e.both


def interleaved_seconds(e: Equal) -> float | None:
    """The same, and 2c(PV - 1) for a latency c of at most F and B, where P divides M."""
    if not e.c:
        return looped_seconds(e)
    if e.V == 1 or e.M % e.P or e.c > min(e.F, e.back):
        return None
    return e.work + (e.P - 1) * e.both + (2 * e.c * (e.P * e.V - 1) if e.P > 1 else 0.0)


def gis_seconds(e: Equal) -> float | None:
    return None if e.M < e.P or e.c else e.work + (e.P - 1) * (e.F + e.I)


def split_seconds(e: Equal) -> float | None:
    """(F+I-W) (P-1) beside the work of a rank, where ranks put off their W, over slices or whole microbatches."""
    few = (e.M - 1) * e.n < e.P - 1
    return None if few or e.c or min(e.F, e.I) < e.W else e.work + (e.P - 1) * (e.both - 2 * e.W)


def h1_seconds(e: Equal) -> float | None:
    waits = 2 * e.c * (e.P - 1 + max(0, min(e.M - 2, e.P - 1)))
    return (e.M + e.P - 1) * (e.F + e.I) + e.W + max(0, e.M - e.P) * e.W + waits if e.is_filled else None


def h2_seconds(e: Equal) -> float | None:
    span = zb_h2_span(e)
    return None if span is None or e.P < e.M < 2 * e.P - 1 else max(span, e.work + (e.P - 1) * (e.F + e.c))


def zb_v_seconds(e: Equal) -> float | None:
    return None if zb_v_span(e) is None else e.work + (e.P - 1) * e.F


def half_seconds(e: Equal) -> float | None:
    waits = 0 if e.P == 1 else max(2, 3 * e.P - (4 if e.P % 2 else 5))
    return e.work + waits * e.F if e.is_even and e.M >= e.P else None


def min_seconds(e: Equal) -> float | None:
    return e.work + (0 if e.P == 1 else 4 * e.P - 5) * e.F if e.is_even else None


def hanayo_seconds(e: Equal) -> float | None:
    is_one_wave = e.V == 2 and e.M == e.P
    return e.work + 2 * (e.P - 1) * e.back if is_one_wave and not e.c and e.back >= 2 * e.F else None


def chimera_seconds(e: Equal) -> float | None:
    units, left = divmod(e.M, e.P)
    waits = min(e.F, e.back) + units * abs(e.back - e.F)
    return None if left or e.c else e.M * e.both + (e.P - 2) * waits


def bubble_of_pairs(e: Equal, ranks_behind: int) -> float | None:
    """Bubble of each rank [s], where `ranks_behind` lie between an end and the rank where its way turns, or meets the
    other; None where the form does not hold."""
    if min(e.F, e.I) < e.W or e.c:
        return None
    waits = (ranks_behind * (e.F + e.I - e.W), ranks_behind * 2 * (e.F - e.W), ranks_behind * (2 * e.I - e.W) - e.F)
    return max(waits) if ranks_behind else 0.0


def dualpipe_seconds(e: Equal) -> float | None:
    bubble = bubble_of_pairs(e, e.P // 2 - 1)
    return None if bubble is None else e.M * e.both + bubble


def dualpipe_v_seconds(e: Equal) -> float | None:
    bubble = bubble_of_pairs(e, e.P - 1)
    return None if bubble is None else 2 * e.M * e.both + bubble


def seq1f1b_seconds(e: Equal) -> float | None:
    few = e.M * e.n < e.P
    return None if e.c > 0 or (few and e.V > 1) else e.work + (e.P - 1) * e.both


SECONDS: dict[str, Callable[[Equal], float | None]] = {
    "gpipe": gpipe_seconds,
    "1f1b": one_f_one_b_seconds,
    "eager-1f1b": lambda e: gpipe_seconds(e) if e.c <= min(e.F, e.back) else None,
    **dict.fromkeys(("pipedream", "2bw", "paci"), lambda e: None if e.c else e.work),
    "zb-h1": h1_seconds,
    "zb-h2": h2_seconds,
    "interleaved": interleaved_seconds,
    "gis": gis_seconds,
    "interleaved-zb": split_seconds,
    "looped-bfs": looped_seconds,
    "terapipe": lambda e: e.work + (e.P - 1) * (e.both + 2 * e.c),
    "seq1f1b": seq1f1b_seconds,
    "seq-zb-h1": split_seconds,
    "slimpipe": seq1f1b_seconds,
    "chimera": chimera_seconds,
    "dualpipe": dualpipe_seconds,
    "dualpipe-v": dualpipe_v_seconds,
    "hanayo": hanayo_seconds,
    "zb-v": zb_v_seconds,
    "v-half": half_seconds,
    "v-min": min_seconds,
}

# V-half and V-min: as long as the makespan.
SPANS = {"zb-h2": zb_h2_span, "zb-v": zb_v_span} | {"v-half": half_seconds, "v-min": min_seconds}


RANKS = (1, 2, 3, 4, 7)
FB = [(1.0, 1.0), (1.0, 2.0), (3.0, 1.0), (0.25, 0.75)]  # all sums exact


# F, I, W and latency: sums are exact.
COSTS = [(1.0, 1.0, 1.0, 0.0), (1.0, 0.5, 0.75, 0.0), (2.0, 2.5, 1.0, 0.5), (1.0, 3.0, 1.0, 2.0)]
WITH_A_FORM = [f for f in FAMILIES.values() if f.name in SECONDS | SPANS | PEAKS]


@pytest.mark.thorough(but=["dualpipe"])
@pytest.mark.parametrize("each", WITH_A_FORM, ids=lambda each: each.name)
def test_what_a_family_says_of_itself(each: Family) -> None:
    """Seconds, spans and peaks by its own formulas, wherever these hold, and each of them somewhere."""
    forms = {"seconds": SECONDS.get(each.name), "span": SPANS.get(each.name), "peaks": PEAKS.get(each.name)}
    held: set[str] = set()
    for P in (1, 2, 3, 5):
        for M in sorted({1, P - 1, P, P + 1, 2 * P - 1, 2 * P, 3 * P} - {0}):
            chunks = (1, 2, 3) if each.takes_chunks else (each.num_chunks,)
            for V, n in product(chunks, (1, 2, 5) if each.takes_slices else (1,)):
                try:
                    schedule = build(each.name, num_ranks=P, num_microbatches=M, num_chunks=V, num_slices=n)
                except ValueError:
                    continue  # sizes that do not fit
                for F, I, W, c in COSTS:
                    timeline = simulate(schedule, Costs(forward=F, input_grad=I, weight_grad=W, latency=c))
                    equal = Equal(P=P, M=M, V=V, n=n, F=F, I=I, W=W, c=c)
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
    ("P", "M", "groups"), [(4, 8, (4, 4)), (4, 11, (6, 5)), (4, 14, (5, 5, 4)), (4, 3, (3,)), (4, 7, (7,))]
)
def test_microbatch_groups(P: int, M: int, groups: tuple[int, ...]) -> None:
    assert microbatch_groups(at_least=P, num_microbatches=M) == groups


def test_groups_of_at_least_half_of_the_ranks() -> None:
    costs = Costs(forward=1.0, backward=2.0)
    for groups in [(5, 4), (5, 5), (6, 3), (9,), (4, 4, 4), (6, 4, 5)]:
        M = sum(groups)
        schedule = build("interleaved", num_ranks=3, num_microbatches=M, num_chunks=2, groups=groups)
        check(schedule)
        assert simulate(schedule, costs).makespan == (M * 2 + 2) * 3
    # GIS-H: (V+1)/2V of the activations for (V-1) P/2 (F+I-W) seconds more.
    for P, V, rounds in ((2, 2, 4), (4, 2, 6), (4, 3, 5), (8, 2, 4)):
        M = rounds * P // 2
        schedule = build("gis", num_ranks=P, num_microbatches=M, num_chunks=V, group_size=P // 2)
        assert max(check(schedule).peak_activations) == (V - 1) * P // 2 + P
        for F, I, W in ((1, 1, 1), (1, 2, 1), (2, 1, 1), (3, 3, 1)):
            costs = Costs(forward=F, input_grad=I, weight_grad=W)
            waits = (P - 1) * (F + I) + (V - 1) * P // 2 * (F + I - W)
            assert simulate(schedule, costs).makespan == M * V * (F + I + W) + waits
