"""Cut, placement and schedule together: against every cut there is, and never behind partition first."""

from __future__ import annotations

from itertools import accumulate, combinations, pairwise
from random import Random

import pytest
from support.inside import ChainSearch, Request

from stagewright.schedules import Costs, Layer, MemoryLimitError, Op, check, simulate, synthesize, synthesize_jointly

ORDERS = 40


def drawn(random: Random, num: int) -> list[Layer]:
    """Layers of all sizes, the last one large."""
    layers = []
    for at in range(num):
        size = random.uniform(0.3, 2.0) * (2.5 if at == num - 1 else 1.0)
        layers.append(
            Layer(forward=size, input_grad=1.1 * size, weight_grad=0.7 * size, activation=random.uniform(0.5, 2))
        )
    return layers


def schedule_of(
    layers: list[Layer], cut: tuple[int, ...], placement: str, *, P: int, M: int, latency: float, limit: float
):  # type: ignore[no-untyped-def]
    parts = [layers[start:end] for start, end in pairwise(cut)]
    costs = Costs(
        forward=[sum(each.forward for each in part) for part in parts],
        input_grad=[sum(each.input_grad for each in part) for part in parts],
        weight_grad=[sum(each.weight_grad for each in part) for part in parts],
        latency=latency,
    )
    held = [sum(each.activation for each in part) for part in parts]
    found = synthesize(
        num_ranks=P,
        num_microbatches=M,
        costs=costs,
        memory_limit=limit,
        placement=placement,
        activations=held,
        evaluations=ORDERS,
    )
    return found, costs, held


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("seed", "num", "P", "M", "latency"), [(1, 8, 3, 2, 0.0), (2, 7, 3, 4, 0.2), (3, 8, 2, 3, 0.1)]
)
def test_it_reaches_the_best_of_all_cuts_and_placements(seed: int, num: int, P: int, M: int, latency: float) -> None:
    layers = drawn(Random(seed), num)
    limit = 1.2 * sum(each.activation for each in layers)
    best, even = {}, {}
    for placement, S in (("plain", P), ("cyclic", 2 * P), ("v", 2 * P)):
        for inner in combinations(range(1, num), S - 1):
            cut = (0, *inner, num)
            try:
                found, costs, _ = schedule_of(layers, cut, placement, P=P, M=M, latency=latency, limit=limit)
            except MemoryLimitError:
                continue
            best[placement, cut] = found.value
            table = costs.table(num_stages=S)
            even[placement, cut] = max(f + b for f, b in zip(table.column(Op.F), table.column(Op.B), strict=True))
    got = synthesize_jointly(
        layers, num_ranks=P, num_microbatches=M, latency=latency, memory_limit=limit, cuts=20, evaluations=ORDERS
    )
    assert got.best.value <= min(best.values()) * (1 + 1e-9)
    assert got.separate.value >= got.best.value
    first = even[got.separate.placement, got.separate.cut]
    assert first == pytest.approx(min(size for (name, _), size in even.items() if name == got.separate.placement))
    assert got.separate.value <= best[got.separate.placement, got.separate.cut] * (1 + 1e-9)


@pytest.mark.thorough
def test_what_it_returns_is_a_schedule_of_its_cut_within_the_memory_and_the_same_again() -> None:
    layers = drawn(Random(5), 12)
    limit = 0.8 * sum(each.activation for each in layers)
    many = {"num_ranks": 4, "num_microbatches": 5, "latency": 0.1, "memory_limit": limit, "evaluations": 40, "cuts": 8}
    got = synthesize_jointly(layers, **many)  # type: ignore[arg-type]
    _, costs, held = schedule_of(layers, got.best.cut, got.best.placement, P=4, M=5, latency=0.1, limit=limit)
    schedule = got.best.synthesis.schedule
    check(schedule)
    assert simulate(schedule, costs).makespan == pytest.approx(got.best.value)
    assert [row[0] for row in got.best.synthesis.problem.held] == pytest.approx(held)
    assert all(peak <= limit for peak in _peaks(got.best.synthesis))
    assert got.gain > 0
    assert got.cuts_tried <= 3 + 8
    again = synthesize_jointly(layers, **many)  # type: ignore[arg-type]
    assert (again.best.cut, again.best.placement, again.best.value) == (
        got.best.cut,
        got.best.placement,
        got.best.value,
    )


@pytest.mark.thorough
@pytest.mark.parametrize(("objective", "share"), [("makespan", 0.5), ("span", 0.6)])
def test_any_placement_within_the_memory(objective: str, share: float) -> None:
    """Stages on any ranks, their order carried from cut to cut."""
    layers = drawn(Random(3), 14)
    limit = share * sum(each.activation for each in layers)
    sizes = {"num_ranks": 3, "num_microbatches": 6, "memory_limit": limit, "latency": 0.2, "objective": objective}
    many = {"cuts": 8, "evaluations": 300}
    got = synthesize_jointly(layers, placements=["any"], **sizes, **many)  # type: ignore[arg-type]
    named = synthesize_jointly(layers, placements=["plain"], **sizes, **many)  # type: ignore[arg-type]
    assert not isinstance(got.best.placement, str)
    assert got.lower_bound <= got.best.value < named.best.value
    assert got.separate.value == named.separate.value
    assert got.gap == pytest.approx(got.best.value / got.lower_bound - 1)
    check(got.best.synthesis.schedule)
    assert all(peak <= limit * (1 + 1e-9) for peak in _peaks(got.best.synthesis))
    assert got.best.synthesis.problem.placement == got.best.placement


@pytest.mark.thorough(but=["makespan"])
@pytest.mark.parametrize("objective", ["makespan", "span"])
def test_what_a_chain_says_is_what_the_simulator_says(objective: str) -> None:
    """From an order on another cut, through many cuts; the same again."""
    layers = drawn(Random(4), 12)
    limit, cut = 0.6 * sum(each.activation for each in layers), (0, 3, 5, 7, 8, 10, 12)
    found, _, _ = schedule_of(layers, cut, "cyclic", P=3, M=5, latency=0.2, limit=limit)
    request = Request(num_ranks=3, num_microbatches=5, costs=Costs(latency=0.2), objective=objective)  # type: ignore[arg-type]
    columns = [[getattr(each, name) for each in layers] for name in Layer.__slots__]

    def ends() -> list[tuple[float, tuple[int, ...], object]]:
        chains = ChainSearch(columns, request, [limit] * 3, Random(0))
        start = chains._begun(cut, found.problem, found.schedule)
        states = [start, chains._chain(start, 800)]
        assert states[1].value < start.value
        return [(state.value, *chains._written(state)[::2]) for state in states]

    for value, own, schedule in ends():
        check(schedule)
        _, costs, held = schedule_of(layers, own, schedule.placement, P=3, M=5, latency=0.2, limit=limit)
        assert getattr(simulate(schedule, costs), objective) == pytest.approx(value)
        for rank in schedule.programs:
            changes = [held[a.stage] * {Op.F: 1, Op.W: -1}.get(a.op, 0) for a in rank]
            assert max(accumulate(changes)) <= limit * (1 + 1e-9)
    assert ends() == ends()


def test_partition_first_is_the_least_largest_stage_even_where_another_cut_is_more_even() -> None:
    """Stages of 7, 14 and 14 before 15, 11 and 9, whose sum of squares is less."""
    layers = [Layer(forward=size, input_grad=size, weight_grad=size) for size in (3, 4, 8, 6, 5, 6, 3)]
    got = synthesize_jointly(layers, num_ranks=3, num_microbatches=2, placements=["plain"], evaluations=10, cuts=1)
    assert got.separate.cut == (0, 2, 4, 7)


def test_a_first_cut_that_exceeds_the_memory_gives_way() -> None:
    """Even in seconds, all activations are in the first half; then a limit that no cut meets."""
    layers = [Layer(forward=1, input_grad=1, weight_grad=1, activation=a) for a in (4, 4, 4, 1, 1, 1)]
    got = synthesize_jointly(layers, num_ranks=2, num_microbatches=3, memory_limit=8, evaluations=40)
    assert got.separate.value >= got.best.value
    assert all(peak <= 8 for peak in _peaks(got.best.synthesis))
    with pytest.raises(MemoryLimitError, match="expected at least 8"):
        synthesize_jointly(layers, num_ranks=2, num_microbatches=3, memory_limit=7, placements=["plain"])


def _peaks(found) -> list[float]:  # type: ignore[no-untyped-def]
    """By rank, the most that it holds, counted along its program."""
    peaks = []
    for rank in found.schedule.programs:
        now = most = 0.0
        for action in rank:
            held = found.problem.held[action.stage][0]
            now += {Op.F: held, Op.W: -held, Op.B: -held}.get(action.op, 0.0)
            most = max(most, now)
        peaks.append(most)
    return peaks


def test_bad_input() -> None:
    layers = drawn(Random(1), 3)
    for wrong, said in (
        ({"num_ranks": 4}, "expected 1 to 3"),
        ({"placements": []}, "expected at least one name"),
        ({"placements": ["w"]}, "placement='w'"),
        ({"cuts": 0}, "cuts=0"),
        ({"seconds": 0}, "seconds=0"),
        ({"memory_limit": [1.0]}, "or 2, one per rank"),
    ):
        with pytest.raises(ValueError, match=said):
            synthesize_jointly(layers, **{"num_ranks": 2, "num_microbatches": 2} | wrong)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="forward=0"):
        Layer(forward=0, input_grad=1, weight_grad=1)
