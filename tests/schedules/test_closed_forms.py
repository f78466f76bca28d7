"""Closed forms of papers about each schedule, exactly, from the event simulator. F and B: seconds of a stage action."""

from collections.abc import Callable
from dataclasses import dataclass
from itertools import product

import pytest
from support.inside import microbatch_groups

from stagewright.schedules import FAMILIES, Costs, Family, build, check, lower_bound, simulate

Peaks = tuple[int, ...] | None


@dataclass(frozen=True, slots=True, kw_only=True)
class EqualStages:
    """P, M, V, slices of a microbatch, seconds of one stage action where all are equal, and of a message."""

    num_ranks: int
    num_microbatches: int
    num_chunks: int = 1
    num_slices: int = 1
    forward: float = 1.0
    input_grad: float = 1.0
    weight_grad: float = 1.0
    latency: float = 0.0

    @property
    def both(self) -> float:
        """F + B [s]."""
        return self.forward + self.input_grad + self.weight_grad

    @property
    def work(self) -> float:
        """Work of a rank, M n V (F + B) with n slices a microbatch [s]."""
        return self.num_microbatches * self.num_slices * self.num_chunks * self.both


def falling(equal: EqualStages, most: int, first: int, step: int) -> Peaks:
    """Each rank `step` fewer than the one before it, and no more than there are."""
    return tuple(min(most, first - step * rank) for rank in range(equal.num_ranks))


def alike(equal: EqualStages, peak: int) -> Peaks:
    return (peak,) * equal.num_ranks


def interleaved(equal: EqualStages) -> Peaks:
    P, M, V = equal.num_ranks, equal.num_microbatches, equal.num_chunks
    return None if M % P else falling(equal, M * V, (V - 1) * P + 2 * (P - 1) + 1, 2)


def of_rounds(equal: EqualStages, *, step: int) -> Peaks:
    P, M, V = equal.num_ranks, equal.num_microbatches, equal.num_chunks
    return None if V > 1 and M % P else falling(equal, M * V, V * P, step)


def seq1f1b(equal: EqualStages) -> Peaks:
    P, M, n, V = equal.num_ranks, equal.num_microbatches, equal.num_slices, equal.num_chunks
    if V == 1:
        return falling(equal, M * n, P - 1 + n, 1)
    group = n * microbatch_groups(at_least=-(-P // n), num_microbatches=M)[0]
    return falling(equal, M * n * V, (V - 1) * group + 2 * (P - 1) + n, 2)


def slimpipe(equal: EqualStages) -> Peaks:
    P, whole = equal.num_ranks, equal.num_slices * equal.num_chunks
    # A rank with one chunk need not run twice as far ahead as the next one: it waits for its backwards alone.
    ahead = 1 if equal.num_chunks == 1 else 2
    return falling(equal, equal.num_microbatches * whole, whole + ahead * (P - 1), ahead)


def chimera(equal: EqualStages) -> Peaks:
    P = equal.num_ranks
    return None if equal.num_microbatches % P else tuple(P // 2 + 1 + min(rank, P - 1 - rank) for rank in range(P))


def hanayo(equal: EqualStages) -> Peaks:
    P = equal.num_ranks
    is_one_wave = equal.num_chunks == 2 and equal.num_microbatches == P
    return tuple(min(2 * P, P + 1 + 3 * rank // 2) for rank in range(P)) if is_one_wave else None


def zb_v(equal: EqualStages) -> Peaks:
    P = equal.num_ranks
    return alike(equal, 2 * P) if equal.num_microbatches >= 2 * P - 1 else None


def v_half(equal: EqualStages) -> Peaks:
    P = equal.num_ranks
    return None if equal.num_microbatches < 2 * P else alike(equal, 2 * ((P + 2) // 2))


def v_min(equal: EqualStages) -> Peaks:
    P = equal.num_ranks
    return None if equal.num_microbatches < P or P % 3 == 2 else alike(equal, 2 * ((P + 4) // 3))


PEAKS: dict[str, Callable[[EqualStages], Peaks]] = {
    "gpipe": lambda e: alike(e, e.num_microbatches),
    "1f1b": lambda e: falling(e, e.num_microbatches, e.num_ranks, 1),
    "eager-1f1b": lambda e: falling(e, e.num_microbatches, 2 * (e.num_ranks - 1) + 1, 2),
    **dict.fromkeys(("pipedream", "2bw", "paci"), lambda e: falling(e, e.num_ranks, e.num_ranks, 1)),
    "zb-h1": lambda e: alike(e, min(e.num_microbatches, e.num_ranks)),
    "zb-h2": lambda e: alike(e, min(e.num_microbatches, 2 * e.num_ranks - 1)),
    "interleaved": interleaved,
    "gis": lambda e: of_rounds(e, step=1),
    "interleaved-zb": lambda e: of_rounds(e, step=0),
    "looped-bfs": lambda e: alike(e, e.num_microbatches * e.num_chunks),
    "terapipe": lambda e: alike(e, e.num_microbatches * e.num_slices),
    "seq1f1b": seq1f1b,
    "seq-zb-h1": lambda e: alike(e, min(e.num_microbatches * e.num_slices, e.num_ranks - 1 + e.num_slices)),
    "slimpipe": slimpipe,
    "chimera": chimera,
    "dualpipe": lambda e: alike(e, e.num_ranks + 1),
    "dualpipe-v": lambda e: alike(e, 2 * e.num_ranks + 1),
    "hanayo": hanayo,
    "zb-v": zb_v,
    "v-half": v_half,
    "v-min": v_min,
}


def zb_h2_span(equal: EqualStages) -> float | None:
    P, M = equal.num_ranks, equal.num_microbatches
    both = (M + P - 1) * (equal.forward + equal.input_grad)
    span = both + max(1, M - 2 * P + 2) * equal.weight_grad + 2 * (P - 1) * equal.latency
    return span if well_filled(equal) else None


def zb_v_span(equal: EqualStages) -> float | None:
    is_even = equal.forward == equal.input_grad == equal.weight_grad and not equal.latency
    return equal.work if is_even and equal.num_microbatches >= 2 * equal.num_ranks - 1 else None


def gpipe_seconds(equal: EqualStages) -> float:
    steps = equal.num_ranks - 1
    return (equal.num_microbatches + steps) * equal.both + 2 * steps * equal.latency


def one_f_one_b_seconds(equal: EqualStages) -> float:
    """(M + P - 1)(F + B); each message is waited for when the pipeline fills and drains, and in most rounds between."""
    P, M = equal.num_ranks, equal.num_microbatches
    return (M + P - 1) * equal.both + 2 * equal.latency * ((P - 1) + (M - 1) * (P - 1) // P)


def eager_seconds(equal: EqualStages) -> float | None:
    is_hidden = equal.latency <= min(equal.forward, equal.input_grad + equal.weight_grad)
    return gpipe_seconds(equal) if is_hidden else None


def looped_seconds(equal: EqualStages) -> float | None:
    """(M V + P - 1)(F + B), where M is at least P and links are free."""
    if equal.num_microbatches < equal.num_ranks or equal.latency:
        return None
    return equal.work + (equal.num_ranks - 1) * equal.both


def interleaved_seconds(equal: EqualStages) -> float | None:
    """The same, and 2c(PV - 1) for a latency c of at most F and B, where P divides M."""
    P, V, c = equal.num_ranks, equal.num_chunks, equal.latency
    if not c:
        return looped_seconds(equal)
    if V == 1 or equal.num_microbatches % P or c > min(equal.forward, equal.both - equal.forward):
        return None
    return equal.work + (P - 1) * equal.both + (2 * c * (P * V - 1) if P > 1 else 0.0)


def gis_seconds(equal: EqualStages) -> float | None:
    if equal.num_microbatches < equal.num_ranks or equal.latency:
        return None
    return equal.work + (equal.num_ranks - 1) * (equal.forward + equal.input_grad)


def split_seconds(equal: EqualStages) -> float | None:
    """(F+I-W) (P-1) beside the work of a rank, where ranks put off their W, over slices or whole microbatches."""
    few = (equal.num_microbatches - 1) * equal.num_slices < equal.num_ranks - 1
    if few or equal.latency or equal.weight_grad > min(equal.forward, equal.input_grad):
        return None
    return equal.work + (equal.num_ranks - 1) * (equal.both - 2 * equal.weight_grad)


def h1_seconds(equal: EqualStages) -> float | None:
    P, M, W, c = equal.num_ranks, equal.num_microbatches, equal.weight_grad, equal.latency
    if not well_filled(equal):
        return None
    waits = 2 * c * (P - 1 + max(0, min(M - 2, P - 1)))
    return (M + P - 1) * (equal.forward + equal.input_grad) + W + max(0, M - P) * W + waits


def well_filled(equal: EqualStages) -> bool:
    """Whether a W fits into the gap of an F or I, and hides a message there and back."""
    return 2 * equal.latency <= equal.weight_grad <= min(equal.forward, equal.input_grad)


def h2_seconds(equal: EqualStages) -> float | None:
    P, M = equal.num_ranks, equal.num_microbatches
    span = zb_h2_span(equal)
    holds = span is not None and not P < M < 2 * P - 1
    return max(span, equal.work + (P - 1) * (equal.forward + equal.latency)) if holds else None


def zb_v_seconds(equal: EqualStages) -> float | None:
    span = zb_v_span(equal)
    return None if span is None else span + (equal.num_ranks - 1) * equal.forward


def half_seconds(equal: EqualStages) -> float | None:
    P, M = equal.num_ranks, equal.num_microbatches
    if equal.latency or not equal.forward == equal.input_grad == equal.weight_grad or M < P:
        return None
    return equal.work + (0 if P == 1 else max(2, 3 * P - (4 if P % 2 else 5))) * equal.forward


def min_seconds(equal: EqualStages) -> float | None:
    P = equal.num_ranks
    if equal.latency or not equal.forward == equal.input_grad == equal.weight_grad:
        return None
    return equal.work + (0 if P == 1 else 4 * P - 5) * equal.forward


def hanayo_seconds(equal: EqualStages) -> float | None:
    backward = equal.input_grad + equal.weight_grad
    is_one_wave = equal.num_chunks == 2 and equal.num_microbatches == equal.num_ranks
    if not is_one_wave or equal.latency or backward < 2 * equal.forward:
        return None
    return equal.work + 2 * (equal.num_ranks - 1) * backward


def chimera_seconds(equal: EqualStages) -> float | None:
    units, left = divmod(equal.num_microbatches, equal.num_ranks)
    if left or equal.latency:
        return None
    forward, backward = equal.forward, equal.input_grad + equal.weight_grad
    waits = min(forward, backward) + units * abs(backward - forward)
    return equal.num_microbatches * equal.both + (equal.num_ranks - 2) * waits


def bubble_of_pairs(equal: EqualStages, ranks_behind: int) -> float | None:
    """Bubble of each rank [s], where `ranks_behind` lie between an end and the rank where its way turns, or meets the
    other; None where the form does not hold."""
    forward, input_grad, weight_grad = equal.forward, equal.input_grad, equal.weight_grad
    if weight_grad > min(forward, input_grad) or equal.latency:
        return None
    waits = (
        ranks_behind * (forward + input_grad - weight_grad),
        ranks_behind * 2 * (forward - weight_grad),
        ranks_behind * (2 * input_grad - weight_grad) - forward,
    )
    return max(waits) if ranks_behind else 0.0


def dualpipe_seconds(equal: EqualStages) -> float | None:
    bubble = bubble_of_pairs(equal, equal.num_ranks // 2 - 1)
    return None if bubble is None else equal.num_microbatches * equal.both + bubble


def dualpipe_v_seconds(equal: EqualStages) -> float | None:
    bubble = bubble_of_pairs(equal, equal.num_ranks - 1)
    return None if bubble is None else 2 * equal.num_microbatches * equal.both + bubble


def terapipe_seconds(equal: EqualStages) -> float:
    return equal.work + (equal.num_ranks - 1) * (equal.both + 2 * equal.latency)


def seq1f1b_seconds(equal: EqualStages) -> float | None:
    few = equal.num_microbatches * equal.num_slices < equal.num_ranks
    if equal.latency > 0 or (few and equal.num_chunks > 1):
        return None
    return equal.work + (equal.num_ranks - 1) * equal.both


SECONDS: dict[str, Callable[[EqualStages], float | None]] = {
    "gpipe": gpipe_seconds,
    "1f1b": one_f_one_b_seconds,
    "eager-1f1b": eager_seconds,
    **dict.fromkeys(("pipedream", "2bw", "paci"), lambda e: None if e.latency else e.work),
    "zb-h1": h1_seconds,
    "zb-h2": h2_seconds,
    "interleaved": interleaved_seconds,
    "gis": gis_seconds,
    "interleaved-zb": split_seconds,
    "looped-bfs": looped_seconds,
    "terapipe": terapipe_seconds,
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
        (4, 14, (5, 5, 4)),
        (4, 3, (3,)),
        (4, 7, (7,)),
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
