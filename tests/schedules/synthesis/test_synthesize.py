"""Answers of `synthesize` against named families, published figures, its own bound, and the promises of its budget."""

from random import Random

import pytest
from support.grids import nightly
from support.inside import Budget, Lister, Objective, OrderingSearch, SlideSearch, Synthesis, changed, first_policies
from support.inside import SynthesisEvaluateEvaluator as Evaluator
from support.inside import bounds_least_seconds as least_seconds

from stagewright.schedules import FAMILIES, Costs, Link, Links, Op, Schedule, build, check, simulate, synthesize

from .instances import pose, published, random_problem, read_optima, request

SLOPED = Costs(
    forward=[1.0, 1.5, 1.0, 1.25], input_grad=[1.5, 1.0, 1.0, 1.0], weight_grad=[0.75, 0.5, 1.0, 0.5], latency=0.25
)


def named(num_ranks: int, num_microbatches: int, num_chunks: int) -> list[Schedule]:
    """Every named flush schedule of these sizes with one copy of each stage."""
    found = []
    for family in FAMILIES.values():
        chunks = {"num_chunks": num_chunks} if family.takes_chunks else {}
        try:
            schedule = build(family.name, num_ranks=num_ranks, num_microbatches=num_microbatches, **chunks)  # type: ignore[arg-type]
        except ValueError:
            continue
        if not schedule.is_asynchronous and family.weight_copies == 1 and schedule.num_slices == 1:
            found.append(schedule)
    return found


@pytest.mark.thorough
@pytest.mark.parametrize("objective", ["makespan", "span"])
@pytest.mark.parametrize(("placement", "num_chunks"), [("plain", 1), ("cyclic", 2), ("v", 2)])
def test_no_named_schedule_that_fits_the_memory_is_better(
    objective: Objective, placement: str, num_chunks: int
) -> None:
    ran = 0
    for num_microbatches in (3, 8):
        costs = SLOPED if num_chunks == 1 else Costs(input_grad=1.25, weight_grad=0.75, latency=0.25)
        for limit in (2, 4, 6, None):
            found = synthesize(
                num_ranks=4,
                num_microbatches=num_microbatches,
                costs=costs,
                memory_limit=limit,
                placement=placement,
                objective=objective,
                evaluations=60,
            )
            assert limit is None or max(found.timeline.peak_activations) <= limit
            assert found.value == getattr(found.timeline, objective) >= found.lower_bound * (1 - 1e-12)
            check(found.schedule)
            ran += num_no_better(found, named(4, num_microbatches, num_chunks), limit or 99, objective)
    assert ran >= 4


def num_no_better(
    found: Synthesis, named: list[Schedule], limit: float, objective: Objective, links: Links | None = None
) -> int:
    """How many of the named schedules are on its placement and fit; none of them is better."""
    ran = 0
    for schedule in named:
        other = simulate(schedule, found.costs, links) if schedule.placement == found.schedule.placement else None
        if other is not None and max(other.peak_activations) <= limit:
            ran += 1
            assert found.value <= getattr(other, objective), schedule.name
    return ran


@pytest.mark.thorough
@pytest.mark.parametrize("evaluations", [1, 60])
def test_links_that_queue_leave_no_named_schedule_ahead(evaluations: int) -> None:
    """Messages of 0.9 forwards, and cards that two ranks share."""
    costs = Costs(forward=1.0, input_grad=1.25, weight_grad=0.5)
    cards = {
        (a, b): Link(seconds_per_byte=0.9, sending=a // 2, receiving=b // 2)
        for a in range(4)
        for b in range(4)
        if a != b
    }
    links = Links(network=cards, activation_bytes=1.0)
    for placement, V in (("plain", 1), ("cyclic", 2)):
        found = synthesize(
            num_ranks=4,
            num_microbatches=6,
            costs=costs,
            links=links,
            placement=placement,
            memory_limit=8 * V,
            evaluations=evaluations,
        )
        check(found.schedule)
        timeline = simulate(found.schedule, found.costs, links)
        assert found.value == timeline.makespan == found.history[-1].value
        assert found.value >= found.lower_bound * (1 - 1e-12)
        assert max(timeline.peak_activations) <= 8 * V
        assert num_no_better(found, named(4, 6, V), 8 * V, "makespan", links) >= 2


def assert_at_or_below(point: dict[str, str], **budget: float) -> None:
    found = synthesize(**request(point), **budget)  # type: ignore[arg-type]
    assert round(found.timeline.span_bubble, 4) <= float(point["bubble"])
    assert found.lower_bound <= found.value * (1 + 1e-12)


TABLE = published("zb-")
QUICK = [point for point in TABLE if point["ranks"] == "8" and point["memory"] == "1.0"]


@pytest.mark.thorough(but=["zb-1p-6.2B-24"])
@pytest.mark.parametrize("point", QUICK, ids=lambda p: f"{p['source']} {p['microbatches']}".replace(" ", "-"))
def test_at_or_below_the_published_table(point: dict[str, str]) -> None:
    """At the memory of 1F1B; the others are tried nightly."""
    assert_at_or_below(point, seconds=300, evaluations=40)


@pytest.mark.nightly
@pytest.mark.parametrize(
    "point", [*TABLE, *published("curve")], ids=lambda p: f"{p['placement']}-{p['memory']}-{p['bubble']}"
)
def test_at_or_below_every_published_point(point: dict[str, str]) -> None:
    assert_at_or_below(point, seconds=60)


@pytest.mark.nightly
@pytest.mark.parametrize("objective", ["makespan", "span"])
@pytest.mark.parametrize("costs", [Costs(input_grad=1.0, weight_grad=1.0), Costs(input_grad=1.1, weight_grad=0.6)])
def test_32_ranks_and_256_microbatches(costs: Costs, objective: Objective) -> None:
    found = synthesize(
        num_ranks=32, num_microbatches=256, costs=costs, memory_limit=64, objective=objective, seconds=20
    )
    assert found.gap < 0.01


def found_of(number: int, evaluations: int) -> float:
    problem = random_problem(number)
    bound = least_seconds(problem)
    search = OrderingSearch(problem, Budget(evaluations=evaluations), bound=bound)
    value = search.evaluator.value(search.run())
    assert value == search.value >= max(bound, read_optima()[number]) * (1 - 1e-9)
    return value


@pytest.mark.thorough
@pytest.mark.parametrize(("step", "last", "evaluations", "most"), [(4, 100, 2500, 2), nightly(1, 300, 40_000, 15)])
def test_equal_to_the_optimum_of_small_problems(step: int, last: int, evaluations: int, most: int) -> None:
    """A sample; at night 95 in 100 of all."""
    optima = read_optima()
    missed = [n for n in range(0, last, step) if found_of(n, evaluations) > optima[n] * (1 + 1e-9)]
    assert len(missed) <= most, missed


@pytest.mark.thorough(but=["plain"])
@pytest.mark.parametrize("placement", ["plain", "v", "cyclic"])
def test_orders_of_any_policy_are_complete_and_fit(placement: str) -> None:
    """Also with the least memory there can be, and stages and ranks of different size."""
    random = Random(0)
    S = 3 if placement == "plain" else 6
    for _ in range(15):
        sizes = [random.choice([1.0, 2.0, 3.0]) for _ in range(S)]
        costs = Costs(
            forward=[random.randint(1, 5) for _ in range(S)],
            input_grad=[random.randint(1, 5) for _ in range(S)],
            weight_grad=[random.randint(1, 5) for _ in range(S)],
            latency=random.choice([0.0, 1.0, 3.0]),
            index_factors=[random.randint(1, 3) for _ in range(5)],
        )
        free = pose(num_ranks=3, num_microbatches=5, costs=costs, placement=placement, activations=sizes)
        limit = [least + random.choice([0.0, 0.0, 1.0, 4.0]) for least in free.smallest_memory]
        problem = pose(
            num_ranks=3,
            num_microbatches=5,
            costs=costs,
            placement=placement,
            activations=sizes,
            kept_share=random.choice([0.0, 0.5, 1.0]),
            memory_limit=limit,
        )
        evaluator = Evaluator(problem)
        policies = [policy for policy, _ in zip(first_policies(problem, random), range(30), strict=False)]
        policy = random.choice(policies)
        for _ in range(random.randint(0, 6)):
            policy = changed(policy, problem, random)
        orders = Lister(evaluator).build(policy)
        check(evaluator.schedule(orders))
        assert evaluator.fits(orders)
        for found in SlideSearch(evaluator).anneal(orders, random, steps=150):
            if found is not None:
                check(evaluator.schedule(found[1]))
                assert evaluator.value(found[1]) == found[0]
                assert evaluator.fits(found[1])


def test_a_given_start_is_never_lost() -> None:
    start = build("zb-h1", num_ranks=4, num_microbatches=6)
    found = synthesize(num_ranks=4, num_microbatches=6, costs=SLOPED, memory_limit=4, start=start, evaluations=1)
    assert (found.value, found.source) == (simulate(start, SLOPED).makespan, "given")
    with pytest.raises(ValueError, match="holds up to 4 on a rank: expected at most memory_limit"):
        synthesize(num_ranks=4, num_microbatches=6, costs=SLOPED, memory_limit=3, start=start)
    with pytest.raises(ValueError, match="is not one of 6 microbatches"):
        synthesize(num_ranks=4, num_microbatches=6, costs=SLOPED, start=build("1f1b", num_ranks=4, num_microbatches=8))
    for program in ("0F0,0B0,0F1,0W1,0I1", "0F0,0B0,0B1,0F1"):  # no time tells the first of them from a sound one
        with pytest.raises(ValueError, match=r"move 0(I1 before 0W1|F1 before 0B1)"):
            synthesize(num_ranks=1, num_microbatches=2, costs=SLOPED, start=Schedule.from_csv(program))


def test_a_bound_that_leaves_room_for_rounding_is_met() -> None:
    """Limits of memory leave 1e-9 of themselves for it, and a bound over several chunks is lower by as much."""
    thirds = Costs(forward=0.5, input_grad=0.5, weight_grad=0.5, latency=0.1)
    many = {"memory_limit": 8, "evaluations": 20_000, "seconds": 400}
    found = synthesize(num_ranks=4, num_microbatches=8, placement="v", costs=thirds, **many)
    assert found.lower_bound < found.value < found.lower_bound * (1 + 1e-9)
    assert found.is_optimal
    assert found.evaluations < 20_000


def test_time_that_is_over_leaves_the_best_so_far_and_says_so() -> None:
    told = []
    found = synthesize(
        num_ranks=8,
        num_microbatches=32,
        costs=Costs(latency=0.3),
        memory_limit=9,
        seconds=1e-6,
        on_progress=told.append,
    )
    check(found.schedule)
    assert (found.stopped, found.is_optimal) == ("seconds", False)
    assert "best so far, the time was over" in found.summary()
    assert tuple(told) == found.history
    assert [point.value for point in told] == sorted((point.value for point in told), reverse=True)
    assert found.gap == (found.value - found.lower_bound) / found.lower_bound > 0


def test_a_whole_backward_where_it_takes_no_longer() -> None:
    """One that is quicker than its halves is taken, too."""
    found = synthesize(
        num_ranks=1, num_microbatches=3, costs=Costs(input_grad=1.0, weight_grad=1.0, backward=1.5), seconds=5
    )
    assert found.value == 7.5
    assert "0B0" in str(found.schedule.programs[0])
    found = synthesize(
        num_ranks=4, num_microbatches=8, costs=Costs(input_grad=1.0, weight_grad=0.5), memory_limit=4, evaluations=50
    )
    assert (found.value, found.source) == (24.5, "policy")  # rank 0, where nobody waits for its gradients
    assert [sum(action.op is Op.B for action in program) for program in found.schedule.programs] == [8, 0, 0, 0]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"seconds": 0}, "seconds=0: expected a time budget above 0"),
        ({"seed": None}, "seed=None: expected a whole number"),
        ({"costs": 3}, r"costs=3: expected Costs\(forward="),
        ({"evaluations": 0}, "evaluations=0: expected a whole number above 0"),
    ],
)
def test_mistakes(options: dict[str, object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        synthesize(**{"num_ranks": 2, "num_microbatches": 3, "costs": Costs(), **options})  # type: ignore[arg-type]
