"""Durations that vary: samples against the simulator and against cases by hand, and the spread that steps tell."""

import itertools
import json
from dataclasses import replace
from math import exp, inf, log, nan
from random import Random
from statistics import fmean

import pytest
from support.inside import LEAST_STEPS, Dependencies, RankRecord, TimedAction, assemble_timeline
from support.noisy_machine import Machine
from support.replay_cases import cases

from stagewright.schedules import (
    Action,
    Collective,
    Costs,
    Message,
    Op,
    Span,
    Spread,
    StepSamples,
    Timeline,
    build,
    estimate_spread,
    simulate,
    simulate_spread,
)

FIXED = Spread(actions={})
LEAST_OF_600, MOST_OF_600 = 518, 561  # at 90% within, fewer or more lie there once in 250 times


@pytest.mark.thorough
def test_a_sample_is_what_the_simulator_says() -> None:
    """With ratios of 1 to the last bit, of any schedule, links that queue, sums, norms, streams and replicas included;
    and with others what costs times these give."""
    random = Random(3)
    for case in cases(40, seed=11):
        S = case.schedule.num_stages
        exact = simulate_spread(case.schedule, case.costs, FIXED, case.links, samples=1)
        timeline = simulate(case.schedule, case.costs, case.links)
        assert exact.seconds == (timeline.batch_seconds,)
        assert exact.bubbles == (timeline.bubble,)
        ratios = {op: [random.uniform(0.5, 2.0) for _ in range(S)] for op in (Op.F, Op.B, Op.I, Op.W, Op.U)}
        step = {op: [[0.625]] * S for op in ratios}
        spread = Spread(actions={op: [[r] for r in row] for op, row in ratios.items()}, steps=[step])
        table = case.costs.table_for(case.schedule)
        rows = {
            op: [[each * 0.625 * r for each in table.row(op, s)] for s, r in enumerate(row)]
            for op, row in ratios.items()
        }
        costs = replace(
            case.costs,
            forward=rows[Op.F],
            backward=rows[Op.B],
            input_grad=rows[Op.I],
            weight_grad=rows[Op.W],
            update=[row[0] for row in rows[Op.U]],
            overhead=0.0,
            index_factors=None,
        )
        costs = replace(costs, **{name: _short(getattr(costs, name)) for name in ROWS})
        again = simulate(case.schedule, costs, case.links).batch_seconds
        (sampled,) = simulate_spread(case.schedule, case.costs, spread, case.links, samples=1).seconds
        assert sampled == pytest.approx(again, rel=1e-9, abs=1e-12)


ROWS = ("forward", "backward", "input_grad", "weight_grad")


def _short(rows: list[list[float]]) -> list[float | list[float]]:
    return [row[0] if len(row) == 1 else row for row in rows]


@pytest.mark.thorough
def test_each_factor_is_drawn_as_often_as_it_stands_for() -> None:
    """One microbatch through two ranks, F then B: the distribution of the sum, enumerated."""
    schedule = build("gpipe", num_ranks=2, num_microbatches=1)
    costs = Costs(forward=[1.0, 10.0], backward=[100.0, 1000.0])

    def seconds(spread: Spread) -> list[float]:
        return sorted({round(s, 6) for s in simulate_spread(schedule, costs, spread, samples=300).seconds})

    own = seconds(Spread(actions={op: [[0.5, 1.5]] * 2 for op in (Op.F, Op.B)}))
    assert own == sorted(sum(pick) for pick in itertools.product((0.5, 1.5), (5, 15), (50, 150), (500, 1500)))
    rows = [[0.5, 1.5], [1.5, 0.5], [1.5, 0.5], [1.5, 0.5]] * 2500  # so many are hardly drawn wider
    steps = [{op: [[ratio] for ratio in row] for op in (Op.F, Op.B)} for row in rows]
    whole = simulate_spread(schedule, costs, Spread(actions={}, steps=steps), samples=400).seconds
    fast = [each for each in whole if each == pytest.approx(1.5 * 101 + 0.5 * 1010, rel=0.02)]
    slow = [each for each in whole if each == pytest.approx(0.5 * 101 + 1.5 * 1010, rel=0.02)]
    assert len(fast) + len(slow) == 400
    assert len(fast) == pytest.approx(300, abs=30)
    mean = simulate_spread(schedule, costs, Spread(actions={Op.B: [[1.0], [0.5, 1.5]]}), samples=600).mean
    assert mean == pytest.approx(1111, rel=0.05)


def _paced(ratio: float) -> dict[Op, list[list[float]]]:
    return {op: [[ratio]] for op in (Op.F, Op.B)}


@pytest.mark.thorough
def test_few_steps_widen_what_differs_between_steps() -> None:
    schedule = build("gpipe", num_ranks=1, num_microbatches=1)
    steps = [_paced(exp(0.1 * n)) for n in (-2, -1, 0, 1, 2)]

    def width(times: int) -> float:
        """The range's ends, as logarithms apart."""
        low, high = simulate_spread(schedule, Costs(), Spread(actions={}, steps=steps * times), samples=400).range()
        return log(high / low)

    assert width(1000) == pytest.approx(0.4, rel=0.05)
    assert width(1) > 1.3 * width(1000)


def test_quantiles() -> None:
    taken = StepSamples(seconds=tuple(float(n) for n in range(1, 100)), bubbles=(0.1,) * 99)
    assert taken.median == taken.mean == taken.quantile(0.5) == 50.0
    assert taken.range() == pytest.approx((5.0, 95.0))
    assert taken.quantile(0.001) == 1.0  # no further than the samples
    assert str(taken) == "50.0 s (90%: 5.00 s .. 95.0 s)"
    one = StepSamples(seconds=(2.0,), bubbles=(0.0,))
    assert one.range() == (2.0, 2.0)
    with pytest.raises(ValueError, match="from 0 to 1"):
        taken.quantile(90)
    for wrong in ((), (2.0, 1.0), (nan,), (1.0, inf)):
        with pytest.raises(ValueError, match="expected ascending finite numbers"):
            StepSamples(seconds=wrong, bubbles=(0.0,))


def test_the_same_seed_gives_the_same_samples() -> None:
    schedule = build("1f1b", num_ranks=4, num_microbatches=8)
    noise = Spread(actions={Op.F: [[0.5, 1.0, 2.0]] * 4})
    one, same, other = (simulate_spread(schedule, Costs(), noise, samples=20, seed=seed) for seed in (1, 1, 2))
    assert one == same != other


SCHEDULE = build("1f1b", num_ranks=2, num_microbatches=3)
COSTS = Costs(forward=[1.0, 1.5], backward=[2.0, 3.0], latency=0.05)


class Network:
    """Steps of two stages, by a plain recursion: messages, sums of two replicas and the norm vary, actions do not; but
    behind one in four of them, `pause`, the runtime takes its time before it sends."""

    SCHEDULE = build("1f1b", num_ranks=3, num_microbatches=4, replicas=(2, 1))
    COSTS = Costs(forward=[1.0, 0.75], backward=[2.0, 1.5], latency=0.5, reduce_grad=2.0, update=0.25, norm=1.0)

    def __init__(self, seed: int, *, pause: float = 0.0) -> None:
        self.random, self.pause = Random(seed), pause

    def draw(self) -> Timeline:
        return self.step()[0]

    def step(self) -> tuple[Timeline, dict[Action, float]]:
        """One step as its ranks record it: each waits for its message, then for the sums and the norm."""
        table, needs = self.COSTS.table_for(self.SCHEDULE), Dependencies(self.SCHEDULE)
        ends: dict[Action, float] = {}
        ways: dict[Message, float] = {}
        lanes: list[list[Span[Action]]] = [[] for _ in self.SCHEDULE.programs]
        waits: list[list[tuple[Message, float, float]]] = [[] for _ in lanes]
        left = {rank: list(program) for rank, program in enumerate(self.SCHEDULE.compute_programs)}
        behind = {
            each: self.random.choice((0.0, 0.0, 0.0, self.pause)) if self.pause else 0.0
            for program in left.values()
            for each in program[:-1]  # the last one's is a part of no overhead
        }
        while any(left.values()):
            for rank, program in left.items():
                while program and all(need in ends for need in needs.of(program[0])):
                    action, free = program.pop(0), 0.0
                    if lanes[rank]:
                        free = lanes[rank][-1].end + behind[lanes[rank][-1].what]
                    start = free
                    for each in needs.arrivals(action):
                        ways[each.message] = ends[each.maker] + behind.get(each.maker, 0.0)
                        ways[each.message] += 0.5 * self.random.lognormvariate(0, 0.5)
                        waits[rank].append((each.message, free, max(free, ways[each.message])))
                        start = max(start, ways[each.message])
                    ends[action] = start + table.of(action.op, action.stage, action.index)
                    lanes[rank].append(Span(action, start, ends[action]))
        begun = [lane[-1].end for lane in lanes]
        through = max(begun[:2]) + 2.0 * self.random.lognormvariate(0, 0.3)
        known = max(through, *begun) + self.random.lognormvariate(0, 0.4)
        records = []
        for rank, lane in enumerate(lanes):
            stage = self.SCHEDULE.placement[rank][0]
            update = Span(Action(stage, Op.U, 0), known, known + 0.25)
            sums = (Span(Collective((0,), Op.REDUCE_GRAD, 0), begun[rank], through),) if stage == 0 else ()
            records.append(RankRecord(compute=(*lane, update), arrivals=tuple(waits[rank]), collectives=sums))
        return assemble_timeline(self.SCHEDULE, records), behind


def _ran(timeline: Timeline, behind: dict[Action, float]) -> list[list[TimedAction]]:
    return [[(a, end - start + behind.get(a, 0.0)) for a, start, end in rank.compute] for rank in timeline.ranks]


def test_ranges_hold_messages_sums_and_norms_that_vary() -> None:
    """Again 90% of fresh steps; without what is beside actions nearly none."""
    held, without = _held_by_networks(0.0)
    assert LEAST_OF_600 <= held <= MOST_OF_600
    assert without < 0.1


@pytest.mark.thorough
def test_what_the_runtime_takes_behind_an_action_is_no_part_of_its_message() -> None:
    """It is told with the action, once: counted twice it makes every step longer, and fewer of them are held."""
    assert LEAST_OF_600 <= _held_by_networks(3.0)[0] <= MOST_OF_600


def _held_by_networks(pause: float) -> tuple[int, float]:
    """How many of 600 fresh steps, and the share of those of one network without what is beside actions."""
    shares, without = [], []
    for seed in range(10):
        network = Network(seed, pause=pause)
        drawn = [network.step() for _ in range(50)]
        steps = [timeline for timeline, _ in drawn]
        ranks = [list(own) for own in zip(*(_ran(*each) for each in drawn), strict=True)]
        table = network.COSTS.table_for(network.SCHEDULE)
        fresh = [network.draw().batch_seconds for _ in range(60)]
        for timelines, found in ((steps, shares), ((), without)) if seed == 0 else ((steps, shares),):
            spread = estimate_spread(ranks, table, timelines)
            assert Spread.from_json(spread.to_json()) == spread
            found.append(simulate_spread(network.SCHEDULE, network.COSTS, spread, seed=seed).holds(fresh))
    return round(600 * fmean(shares)), without[0]


@pytest.mark.thorough
def test_messages_that_are_slow_together_are_drawn_from_one_step() -> None:
    """From all steps together they would be neither slow nor fast, and far fewer than 90% of fresh steps held."""
    schedule, costs = build("1f1b", num_ranks=3, num_microbatches=2), Costs(latency=0.5)
    table, shares, pooled = costs.table_for(schedule), [], []
    for seed in range(10):
        random = Random(seed)
        steps, fresh = (
            [simulate(schedule, replace(costs, latency=0.5 * random.lognormvariate(0, 0.5))) for _ in range(number)]
            for number in (100, 60)
        )
        ranks = [list(own) for own in zip(*(_ran(timeline, {}) for timeline in steps), strict=True)]
        spread = estimate_spread(ranks, table, steps)
        old = json.loads(spread.to_json())
        del old["step_messages"]  # as files of before have it
        for each, found in ((spread, shares), (Spread.from_json(json.dumps(old)), pooled)):
            taken = simulate_spread(schedule, costs, each, seed=seed)
            found.append(taken.holds([timeline.batch_seconds for timeline in fresh]))
    assert 0.85 <= fmean(shares) <= 0.95
    assert fmean(pooled) < 0.75


def test_messages_over_links_and_sums_in_them_vary() -> None:
    """Twice the ratios are twice the seconds of all ways, on links that queue, too."""
    for case in cases(20, seed=4):
        assume_links = case.links
        if assume_links is None or case.schedule.moves_activations:
            continue
        twice = Spread(actions={}, messages=[2.0], sums=[2.0], norm=[2.0])
        (taken,) = simulate_spread(case.schedule, case.costs, twice, case.links, samples=1).seconds
        assert isinstance(assume_links.network, dict)
        ways = {
            pair: replace(way, latency=2 * way.latency, seconds_per_byte=2 * way.seconds_per_byte)
            for pair, way in assume_links.network.items()
        }
        sums = tuple(replace(each, seconds=2 * each.seconds, gather=2 * each.gather) for each in assume_links.sums)
        table = case.costs.table_for(case.schedule)
        costs = replace(
            case.costs,
            latency=[2 * each for each in table.latency],
            reduce_grad=[2 * each for each in table.reduce_grad],
            tied=[(stages, 2 * seconds) for stages, seconds in table.tied.items()],
            norm=None if table.norm is None else 2 * table.norm,
        )
        links = replace(assume_links, network=ways, sums=sums)
        assert taken == pytest.approx(simulate(case.schedule, costs, links).batch_seconds)


def test_ranks_that_take_from_each_other_are_drawn_so() -> None:
    """Cores that two ranks share: one is fast when the other is slow, never both."""
    schedule = build("gpipe", num_ranks=2, num_microbatches=8)
    costs, random = Costs(), Random(1)
    table = costs.table_for(schedule)
    ranks: list[list[list[TimedAction]]] = [[], []]
    for _ in range(60):
        share = random.uniform(-0.3, 0.3)
        for own, sign, program in zip(ranks, (1, -1), schedule.programs, strict=True):
            own.append([(Action(s, op, k), table.of(op, s, k) * (1 + sign * share)) for s, op, k in program])
    spread = estimate_spread(ranks, table)
    pairs = [[own[0] for own in step[Op.F]] for step in spread.steps]
    assert all(one + other == pytest.approx(2.0, abs=1e-3) for one, other in pairs)
    assert max(one for one, _ in pairs) > 1.2
    assert max(other for _, other in pairs) > 1.2


def test_a_step_is_drawn_whole_and_within_it_for_another_number_of_microbatches() -> None:
    schedule, costs = build("1f1b", num_ranks=2, num_microbatches=3), Costs(forward=1.0, backward=2.0)
    step = {Op.F: [[1.0, 2.0, 3.0], [0.5, 0.25, 1.0]], Op.B: [[1.0, 1.5, 2.0], [2.0, 1.0, 0.5]]}
    spread = Spread(actions={}, steps=[step])
    own = Costs(forward=step[Op.F], backward=[[2 * ratio for ratio in row] for row in step[Op.B]])
    drawn = simulate_spread(schedule, costs, spread, samples=3).seconds
    assert drawn == pytest.approx([simulate(schedule, own).batch_seconds] * 3)
    more = build("1f1b", num_ranks=2, num_microbatches=6)
    steps = [{op: [[ratio] * 3] * 2 for op in step} for ratio in (0.25, 4.0) * 1000]
    once = simulate(more, costs).batch_seconds
    taken = simulate_spread(more, costs, Spread(actions={}, steps=steps), samples=50).seconds
    assert all(min(abs(seconds / once / ratio - 1) for ratio in (0.25, 4.0)) < 0.15 for seconds in taken)
    varied = simulate_spread(more, costs, spread, samples=50).seconds
    assert len(set(varied)) > 10


def test_ranks_that_recorded_few_steps() -> None:
    machine = Machine(SCHEDULE, COSTS, seed=1, step=0.1, rank=0.1, action=0.1)
    whole, short = machine.ranks(20)
    assert estimate_spread([whole, short[12:]], machine.table) is None
    spread = estimate_spread([whole, short[8:]], machine.table)
    assert spread == estimate_spread([whole[8:], short[8:]], machine.table)
    assert len(spread.steps) == 12
    assert simulate_spread(SCHEDULE, COSTS, spread).median > 0
    assert estimate_spread(machine.ranks(1), machine.table) is None
    assert estimate_spread(machine.ranks(LEAST_STEPS - 1), machine.table) is None
    assert estimate_spread(machine.ranks(LEAST_STEPS), machine.table) is not None


def test_a_spread_as_json_and_of_other_stages() -> None:
    machine = Machine(SCHEDULE, COSTS, seed=1, step=0.1, rank=0.1, action=0.1)
    spread = estimate_spread(machine.ranks(40), machine.table)
    assert Spread.from_json(spread.to_json()) == spread
    assert [len(own) for own in spread.steps[-1][Op.F]] == [3, 3]
    for text, why in [
        ('{"actions": {"F": [[1, 0]]}}', "above 0"),
        ('{"actions": {"X": []}}', "'X'"),
        ('{"actions": {"F": [[1]], "B": []}}', "as many for each op"),
        ('{"actions": {}, "step": []}', "step"),
        ('{"actions": {}, "steps": [{"F": [[-1]]}]}', "a ratio of F of stage 0 in step 0 is -1"),
        ('{"actions": {}, "norm": 1.5}', "ratios of norm are 1.5: expected a list of finite numbers above 0"),
        ('{"actions": {}, "sums": [1.0, -1.0]}', "a ratio of sums is -1.0"),
        ('{"actions": {}, "steps": [{}, {}]}', "a spread of 2 measured steps: expected at least 4"),
        ('{"actions": {}, "steps": [[0.9], [1.0], [1.1], [1.0]], "chance": 0.1}', "not a spread"),
        ('{"actions": {}, "step_messages": [[1.0]]}', "step_messages of 1 steps: expected one list for each of 0"),
        ("[]", "not a spread"),
    ]:
        with pytest.raises(ValueError, match=why):
            Spread.from_json(text)
    with pytest.raises(ValueError, match="a spread of 3 stages"):
        simulate_spread(SCHEDULE, COSTS, Spread(actions={Op.F: [[1.0]] * 3}))
    with pytest.raises(ValueError, match="a spread of 1 stages"):
        simulate_spread(SCHEDULE, COSTS, Spread(actions={}, steps=[{Op.F: [[1.0]]}]))
    with pytest.raises(ValueError, match="at least 1"):
        simulate_spread(SCHEDULE, COSTS, FIXED, samples=0)
