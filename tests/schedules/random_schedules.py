"""Schedules by hand, and random valid ones with costs for hypothesis.

Any placement, with replicas in any order; skips; edges without gradient; split backwards; any order that the
data allow. And the names of all builders.
"""

from collections.abc import Sequence
from dataclasses import replace

import networkx as nx
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.strategies import DrawFn
from support.inside import chain

from stagewright.schedules import FAMILIES, Action, Costs, Edge, Op, RankTrace, Schedule, Span, Timeline

# The same examples in every run; take derandomize away and max_examples up to search for more.
steady = settings(max_examples=60, deadline=None, derandomize=True)

# Quarters add up without rounding, so that times can be compared exactly.
quarters = st.integers(0, 12).map(lambda n: n / 4)


def parsed(program: str) -> tuple[Action, ...]:
    return tuple(Action.parse(word) for word in program.split())


def by_hand(
    *programs: str,
    microbatches: int,
    batches: int = 1,
    rule: str = "flush",
    placement: Sequence[Sequence[int]] | None = None,
    owners: Sequence[Sequence[int]] = (),
) -> Schedule:
    """A schedule from programs as text; rank r holds stage r unless placed otherwise."""
    placed = placement or [[rank] for rank in range(len(programs))]
    return Schedule(
        name="by hand",
        placement=tuple(tuple(stages) for stages in placed),
        programs=tuple(map(parsed, programs)),
        num_microbatches=microbatches,
        num_batches=batches,
        weight_rule=rule,
        owners=tuple(map(tuple, owners)),
    )


def with_updates(schedule: Schedule, num_batches: int) -> Schedule:
    """The schedule batch after batch, with the updates of each rank behind each batch."""
    M = schedule.num_microbatches
    programs = tuple(
        tuple(
            action
            for t in range(num_batches)
            for action in (
                *(Action(stage, op, t * M + k) for stage, op, k in program),
                *(Action(stage, Op.U, t) for stage in schedule.placement[rank]),
            )
        )
        for rank, program in enumerate(schedule.programs)
    )
    return replace(schedule, programs=programs, num_batches=num_batches)


def window_of(timeline: Timeline, first: int, last: int) -> Timeline:
    """The batches from `first` to before `last`, cut on each rank at their first forwards: what a stream records."""
    M = timeline.schedule.num_microbatches
    ranks = []
    for trace in timeline.ranks:
        begins = [
            next(at for at, s in enumerate(trace.compute) if isinstance(s.what, Action) and s.what[1:] == (Op.F, t * M))
            for t in (first, last)
        ]
        compute = trace.compute[begins[0] : begins[1]]
        comm = tuple(s for s in trace.comm if compute[0].start <= s.end <= compute[-1].end)
        ranks.append(RankTrace(compute=compute, comm=comm))
    return Timeline(schedule=timeline.schedule, ranks=tuple(ranks), measured=True)


@st.composite
def costs_for(draw: DrawFn, num_stages: int, num_microbatches: int = 1) -> Costs:
    """Costs with a number for each stage, zeros included; some with rows by microbatch, or with factors."""
    row = st.lists(quarters, min_size=num_microbatches, max_size=num_microbatches)

    def numbers() -> list[float]:
        return draw(st.lists(quarters, min_size=num_stages, max_size=num_stages))

    def rows() -> list[float | list[float]]:
        by_stage: list[float | list[float]] = [*numbers()]
        if draw(st.integers(0, 5)) == 0:
            by_stage[draw(st.integers(0, num_stages - 1))] = draw(row)
        return by_stage

    return Costs(
        forward=rows(),
        backward=rows(),
        input_grad=rows(),
        weight_grad=rows(),
        latency=numbers(),
        update=numbers(),
        index_factors=draw(row) if draw(st.integers(0, 4)) == 0 else None,
    )


@st.composite
def placements(draw: DrawFn, *, replicas: bool) -> tuple[tuple[int, ...], ...]:
    """Up to 6 stages on up to 4 ranks: in turn, or in any order."""
    num_ranks = draw(st.integers(1, 4))
    num_stages = draw(st.integers(1, 6))
    most = min(num_ranks, 3) if replicas else 1
    if draw(st.booleans()):
        return tuple(tuple(range(rank, num_stages, num_ranks)) for rank in range(num_ranks))
    owners = [draw(st.sets(st.integers(0, num_ranks - 1), min_size=1, max_size=most)) for _ in range(num_stages)]
    return tuple(tuple(stage for stage in range(num_stages) if rank in owners[stage]) for rank in range(num_ranks))


@st.composite
def stage_graphs(draw: DrawFn, num_stages: int) -> tuple[Edge, ...]:
    """The chain with skips, some of them (and of the chain) without gradient."""
    pairs = [(a, b) for a in range(num_stages) for b in range(a + 1, num_stages)]
    skips = draw(st.sets(st.sampled_from(pairs), max_size=5)) if pairs else set()
    edges = sorted({(edge.src, edge.dst) for edge in chain(num_stages)} | skips)
    return tuple(Edge(src, dst, draw(st.integers(0, 4)) > 0) for src, dst in edges)


def ordered(
    placement: Sequence[Sequence[int]],
    edges: Sequence[Edge],
    actions: Sequence[Action],
    rank_of: dict[Action, int],
    priority: Sequence[int],
) -> tuple[tuple[Action, ...], ...]:
    """Programs that follow one order of all actions, random among those that the data allow."""
    key = dict(zip(actions, priority, strict=True))
    dag = nx.DiGraph()
    dag.add_nodes_from(actions)
    present = set(actions)
    for stage, op, k in actions:
        if op is Op.W:
            dag.add_edge(Action(stage, Op.I, k), Action(stage, op, k))
        elif op in (Op.B, Op.I):
            dag.add_edge(Action(stage, Op.F, k), Action(stage, op, k))
    for src, dst, grad in edges:
        for stage, op, k in actions:
            if stage == src and op is Op.F:
                dag.add_edge(Action(src, op, k), Action(dst, op, k))
            elif stage == src and op in (Op.B, Op.I) and grad:
                maker = next(Action(dst, o, k) for o in (Op.B, Op.I) if Action(dst, o, k) in present)
                dag.add_edge(maker, Action(src, op, k))
    programs: list[list[Action]] = [[] for _ in placement]
    for action in nx.lexicographical_topological_sort(dag, key=lambda a: (key[a], a)):
        programs[rank_of[action]].append(action)
    return tuple(tuple(program) for program in programs)


@st.composite
def schedules(draw: DrawFn, *, replicas: bool = True, forward_only: bool | None = None, split: bool = True) -> Schedule:
    """A schedule that runs to its end: its programs follow a random order of all actions."""
    placement = draw(placements(replicas=replicas))
    num_stages = 1 + max(stage for stages in placement for stage in stages)
    edges = draw(stage_graphs(num_stages))
    num_microbatches = draw(st.integers(1, 4))
    without_backward = draw(st.integers(0, 7)) == 0 if forward_only is None else forward_only
    actions: list[Action] = []
    for stage in range(num_stages):
        for k in range(num_microbatches):
            ops = [Op.F]
            if not without_backward:
                ops += [Op.I, Op.W] if split and draw(st.booleans()) else [Op.B]
            actions += [Action(stage, op, k) for op in ops]
    owners = [
        draw(st.permutations([rank for rank, stages in enumerate(placement) if stage in stages]))
        for stage in range(num_stages)
    ]
    rank_of = {action: owners[action.stage][action.index % len(owners[action.stage])] for action in actions}
    size = len(actions)
    priority = draw(st.lists(st.integers(0, 50), min_size=size, max_size=size))
    return Schedule(
        name="random",
        placement=placement,
        programs=ordered(placement, edges, actions, rank_of, priority),
        num_microbatches=num_microbatches,
        edges=edges,
        owners=tuple(map(tuple, owners)),
    )


@st.composite
def schedules_with_costs(draw: DrawFn, **options: bool) -> tuple[Schedule, Costs]:
    schedule = draw(schedules(**options))
    return schedule, draw(costs_for(schedule.num_stages, schedule.num_microbatches))


@st.composite
def disordered(draw: DrawFn, **options: bool) -> Schedule:
    """A valid schedule in which a few neighbours, or all the actions of a rank, have changed places."""
    schedule = draw(schedules(**options))
    programs = [list(program) for program in schedule.programs]
    if draw(st.integers(0, 4)) == 0:
        programs = [draw(st.permutations(program)) for program in programs]
    for _ in range(draw(st.integers(1, 3))):
        program = draw(st.sampled_from(programs))
        if len(program) > 1:
            at = draw(st.integers(0, len(program) - 2))
            program[at], program[at + 1] = program[at + 1], program[at]
    return replace(schedule, programs=tuple(map(tuple, programs)))


@st.composite
def paused(draw: DrawFn, timeline: Timeline) -> list[RankTrace]:
    """What ranks record that pause anywhere, by clocks that disagree."""
    ranks = []
    for trace in timeline.ranks:
        shift = draw(quarters) - 1
        spans = []
        for what, start, end in trace.compute:
            shift += draw(quarters)
            spans.append(Span(what, start + shift, end + shift))
        ranks.append(RankTrace(compute=tuple(spans), comm=trace.comm))
    return ranks


ASYNC = tuple(name for name, each in FAMILIES.items() if each.rule.is_asynchronous)
FLUSH = tuple(name for name in FAMILIES if name not in ASYNC)
