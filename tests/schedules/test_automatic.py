"""Schedules made for costs and memory: what was published of them, what they must not exceed, and mistakes."""

import csv
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from stagewright.schedules import Costs, build, check, lower_bound, simulate

from .random_schedules import steady
from .synthesis.instances import published, request

DATA = Path(__file__).parents[1] / "data" / "zero_bubble"
AUTOMATIC = ("zb-1p", "zb-2p", "zb-v")


def rows(name: str) -> list[dict[str, float]]:
    with (DATA / name).open(encoding="utf-8") as file:
        return [{key: float(value) for key, value in row.items()} for row in csv.DictReader(file)]


def part_kept(hidden: float, heads: float) -> float:
    """Bytes that W needs, of those that I needs."""
    return 32 * hidden / (34 * hidden + 5 * heads * 1024)


@pytest.mark.thorough
@pytest.mark.parametrize("row", rows("bubbles.csv"), ids=lambda row: f"P{row['ranks']:.0f}M{row['microbatches']:.0f}")
def test_published_bubbles(row: dict[str, float]) -> None:
    """Fixed orders to the four digits of the paper; automatic ones at or below its own."""
    costs = Costs(**{each: row[each] for each in ("forward", "input_grad", "weight_grad", "latency")})
    sizes = {"num_ranks": int(row["ranks"]), "num_microbatches": int(row["microbatches"])}
    for name in ("1f1b", "zb-h1"):
        assert round(simulate(build(name, **sizes), costs).makespan_bubble, 4) == row[name]
    assert round(simulate(build("zb-h2", **sizes), costs).span_bubble, 4) == row["zb-h2"]
    kept = part_kept(row["hidden"], row["heads"])
    one, two = (simulate(build(name, **sizes, costs=costs, kept=kept), costs) for name in ("zb-1p", "zb-2p"))
    assert round(one.span_bubble, 4) == row["zb-1p"]
    assert round(two.span_bubble, 4) <= row["zb-2p"]


def curve(*fast: float) -> list[object]:
    """Rows of the memory curve; those that are not `fast` are tried nightly."""
    return [
        pytest.param(row, id=f"{row['limit']:g}P", marks=() if row["limit"] in fast else pytest.mark.nightly)
        for row in rows("memory_curve.csv")
    ]


@pytest.mark.thorough
@pytest.mark.parametrize("row", curve(1.125, 1.25, 1.875))
def test_published_bubbles_over_memory(row: dict[str, float]) -> None:
    costs = Costs(forward=2 * 14.407, input_grad=2 * 14.380, weight_grad=2 * 9.676, latency=1.610)
    sizes = {"num_ranks": 16, "num_microbatches": 48, "memory_limit": 16 * row["limit"]}
    schedule = build("zb-2p", **sizes, costs=costs, kept=part_kept(5120, 40))
    assert round(simulate(schedule, costs).span_bubble, 4) <= row["one_chunk"]


@pytest.mark.thorough(but=["1-1"])
@pytest.mark.parametrize(("P", "M"), [(1, 1), (3, 3), (4, 8), (5, 11)])
def test_with_p_activations_it_is_zb_h1(P: int, M: int) -> None:
    """The least span there is, for any W that takes no more than F and I."""
    for F, I, W in ((1, 1, 1), (10, 11, 7), (2, 1, 1), (1, 2, 1)):
        costs = Costs(forward=F, input_grad=I, weight_grad=W)
        found, known = (
            simulate(build(name, num_ranks=P, num_microbatches=M, **options), costs).span
            for name, options in (("zb-1p", {"costs": costs}), ("zb-h1", {}))
        )
        assert found == known


@pytest.mark.thorough
def test_published_bubble_of_the_v() -> None:
    """The paper's own order has 0.0712 under these costs; with its W where they fit it has what was published."""
    costs = Costs(forward=14.407, input_grad=14.380, weight_grad=9.676, latency=1.610)
    published = rows("memory_curve.csv")[0]["v"]
    sizes = {"num_ranks": 16, "num_microbatches": 48}
    assert round(simulate(build("zb-v", **sizes, costs=costs), costs).span_bubble, 4) == published
    assert round(simulate(build("zb-v", **sizes), costs).span_bubble, 4) == 0.0712


@pytest.mark.thorough
@pytest.mark.parametrize("row", curve(1.25, 1.375, 1.5))  # where each of the rules for W decides
def test_published_bubbles_of_the_v_over_memory(row: dict[str, float]) -> None:
    """At or below the authors' search for each limit, which counts halves of what a rank has of a microbatch."""
    costs = Costs(forward=14.407, input_grad=14.380, weight_grad=9.676, latency=1.610)
    sizes = {"num_ranks": 16, "num_microbatches": 48, "memory_limit": 32 * row["limit"]}
    schedule = build("zb-v", **sizes, costs=costs, kept=part_kept(5120, 40))
    assert round(simulate(schedule, costs).span_bubble, 4) <= row["v"]


@pytest.mark.nightly
@pytest.mark.parametrize("point", published("v of"), ids=lambda p: f"{p['ranks']}-{p['memory']}")
def test_published_bubbles_of_larger_models_over_memory(point: dict[str, str]) -> None:
    asked = request(point)
    sizes = {name: asked[name] for name in ("num_ranks", "num_microbatches", "memory_limit", "costs")}
    schedule = build("zb-v", **sizes, kept=asked["kept_share"])
    assert round(simulate(schedule, asked["costs"]).span_bubble, 4) <= float(point["bubble"])


@pytest.mark.thorough(but=["4-12-limits0"])
@pytest.mark.parametrize(
    ("P", "M", "limits"), [(4, 12, (4, 6, 8)), (8, 24, (10, 12, 14, 16)), (16, 48, (18, 20, 24, 32))]
)
def test_equal_steps_of_zb_v_take_as_long_as_is_proven(P: int, M: int, limits: tuple[int, ...]) -> None:
    """Qi et al. (2024, controllable memory): a span of at least 6M + 6P - 3k - 1 with k activations."""
    costs = Costs(forward=1, input_grad=1, weight_grad=1)
    for k in limits:
        schedule = build("zb-v", num_ranks=P, num_microbatches=M, costs=costs, memory_limit=k)
        assert simulate(schedule, costs).span == 6 * M + max(0, 6 * P - 3 * k - 1)


@pytest.mark.thorough
@pytest.mark.parametrize(("name", "limit"), [("zb-2p", 10), ("zb-v", 20), ("zb-v", 13)])
def test_the_unit_of_the_costs_decides_nothing(name: str, limit: int) -> None:
    """Sums that are equal in whole numbers differ in the last digits of other units."""
    whole = {"forward": 6783, "input_grad": 6984, "weight_grad": 5259, "latency": 758}
    programs = {
        build(
            name,
            num_ranks=8,
            num_microbatches=16,
            memory_limit=limit,
            costs=Costs(**{each: number * unit for each, number in whole.items()}),
        ).programs
        for unit in (1, 1e-3, 1e-6, 1e5)
    }
    assert len(programs) == 1


@pytest.mark.thorough
@steady
@given(st.data())
def test_zb_v_is_no_worse_than_the_blocks_that_fit(data: st.DataObject) -> None:
    P, M = data.draw(st.integers(1, 9)), data.draw(st.integers(1, 20))
    F, I, W = (data.draw(st.integers(1, 12)) / 4 for _ in range(3))
    costs = Costs(forward=F, input_grad=I, weight_grad=W, latency=data.draw(st.sampled_from([0.0, 0.25, 4.0])))
    sizes = {"num_ranks": P, "num_microbatches": M, "costs": costs}
    limit = data.draw(st.integers(2, 4 * P + 1))
    found = build("zb-v", **sizes, memory_limit=limit)
    assert max(check(found).peak_activations) <= limit
    for name in ("v-min", "v-half"):
        block = build(name, **sizes)
        if max(check(block).peak_activations) <= limit:
            assert simulate(found, costs).span <= simulate(block, costs).span


@pytest.mark.thorough
@steady
@given(st.data())
def test_any_costs_and_limits(data: st.DataObject) -> None:
    name = data.draw(st.sampled_from(AUTOMATIC))
    P, M = data.draw(st.integers(1, 5)), data.draw(st.integers(1, 9))
    chunks = 2 if name == "zb-v" else 1
    seconds = st.lists(st.integers(1, 12).map(lambda n: n / 4), min_size=P * chunks, max_size=P * chunks)
    drawn = {each: data.draw(seconds) for each in ("forward", "input_grad", "weight_grad")}
    costs = Costs(**drawn, latency=data.draw(st.sampled_from([0.0, 0.25, 4.0])))
    limit = data.draw(st.sampled_from([chunks, chunks + 0.5, P * chunks, 2 * P * chunks, 100]))
    if limit < chunks:
        return
    schedule = build(name, num_ranks=P, num_microbatches=M, costs=costs, memory_limit=limit)
    assert max(check(schedule).peak_activations) <= limit
    timeline = simulate(schedule, costs)
    assert timeline.makespan >= lower_bound(schedule, costs) * (1 - 1e-12)


@pytest.mark.thorough(but=["sizes2"])
@pytest.mark.parametrize("sizes", [(4, 12), (8, 16), (3, 3)])
def test_none_is_worse_than_a_named_one_that_fits(sizes: tuple[int, int]) -> None:
    """On the same placement, with what that one holds for a limit."""
    P, M = sizes
    for auto, names in {"zb-v": ("v-min", "v-half", "zb-v"), "zb-1p": ("zb-h1", "zb-h2")}.items():
        costs = Costs(forward=10, input_grad=11, weight_grad=7, latency=1)
        for name in names:
            given = {"costs": costs} if name.startswith("v-") else {}
            named = build(name, num_ranks=P, num_microbatches=M, **given)
            limit = max(check(named).peak_activations)
            found = build(auto, num_ranks=P, num_microbatches=M, costs=costs, memory_limit=limit)
            assert found.name == auto
            assert simulate(found, costs).span <= simulate(named, costs).span
            assert max(check(found).peak_activations) <= limit


@pytest.mark.parametrize(
    ("name", "sizes", "costs", "limit", "seconds"),
    [
        pytest.param("zb-1p", (4, 8), (3, 5, 1, 1), 5, (99, 99), id="a warm-up of one fewer on each rank"),
        pytest.param("zb-2p", (3, 5), (4, 2, 4, 1), 4, (54, 60), id="a W in a short gap where a rank idled most"),
        pytest.param("zb-v", (4, 4), (3, 4, 3, 2), 10, (108, 111), id="a W in every short gap"),
        pytest.param("zb-v", (3, 6), (5, 5, 3, 0), 9, (157, 167), id="a W that makes room for a forward"),
        pytest.param("zb-v", (3, 7), (5, 3, 4, 2), 7, (182, 187), id="a forward that ends late in the warm-up"),
        pytest.param("zb-v", (3, 5), (5, 3, 4, 1), 5, (143, 143), id="forwards in idle time"),
        pytest.param("zb-v", (3, 7), (6, 3, 4, 0), 5, (202, 202), id="of equal spans the least makespan"),
    ],
)
def test_each_rule_decides_somewhere(
    name: str, sizes: tuple[int, int], costs: tuple[int, int, int, int], limit: int, seconds: tuple[float, float]
) -> None:
    """The shortest span and makespan of a case in which nothing else reaches them."""
    (P, M), (F, I, W, latency) = sizes, costs
    given = Costs(forward=F, input_grad=I, weight_grad=W, latency=latency)
    schedule = build(name, num_ranks=P, num_microbatches=M, costs=given, memory_limit=limit)
    timeline = simulate(schedule, given)
    assert (timeline.span, timeline.makespan) == seconds


@pytest.mark.parametrize("name", ["zb-2p", "zb-v"])
def test_no_time_leaves_the_first_order(name: str) -> None:
    costs = Costs(forward=10, input_grad=11, weight_grad=7, latency=1)
    first, best = (build(name, num_ranks=4, num_microbatches=9, costs=costs, seconds=s) for s in (0.0, 400.0))
    check(first)
    assert simulate(first, costs).span > simulate(best, costs).span


@pytest.mark.parametrize("name", AUTOMATIC)
@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"memory_limit": 0.5}, r"memory_limit=0.5: no order can meet it, .* expected at least [12]$"),
        ({"memory_limit": float("nan")}, r"memory_limit=nan: no order"),
        ({"memory_limit": "8"}, r"memory_limit='8': expected a number"),
        ({"kept": 1.5}, r"kept=1.5: expected the part of an activation"),
        ({"costs": {"forward": 1}}, r"costs=.*: expected Costs\(forward=..., input_grad=..., "),
        ({"costs": Costs(forward=0.0, backward=2.0)}, r"costs with forward=0: expected more than 0 seconds"),
        ({"costs": Costs(forward=[1.0, 2.0])}, r"forward has 2 numbers for [36] stages"),
        ({"memory": 8}, r"has no option memory: its options are costs, kept, memory_limit"),
    ],
)
def test_mistakes(name: str, options: dict[str, object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        build(name, num_ranks=3, num_microbatches=4, **options)


@pytest.mark.parametrize("name", ["v-min", "v-half"])
def test_a_v_for_other_costs(name: str) -> None:
    """The W move with the costs; what is held does not grow."""
    costs = Costs(forward=2, input_grad=3, weight_grad=1, latency=0.5)
    sizes = {"num_ranks": 5, "num_microbatches": 12}
    plain, made = build(name, **sizes), build(name, **sizes, costs=costs)
    assert simulate(made, costs).span <= simulate(plain, costs).span
    assert max(check(made).peak_activations) <= max(check(plain).peak_activations)
    with pytest.raises(ValueError, match=r"costs with forward=0"):
        build(name, **sizes, costs=Costs(forward=0, backward=1))
