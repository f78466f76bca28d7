"""From a profile and a cluster to a plan: which cuts, how many replicas, on which ranks."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

import numpy as np

from ..cluster import Cluster
from ..planner.looped import LOOPING, partition_looped
from ..plans.plan import Plan, PlanStage, RunnerUp
from ..profile import Profile
from ..strict import count, number
from .antichains import MAX_CUTS, Cuts, all_cuts, pipedream_cuts
from .dynamic import MAX_STEPS, Solution, num_steps, piece_ranks, solve
from .orders import node_orders, total_speed
from .pipedream_model import Block, PipeDreamModel
from .rerank import Simulated, simulate_solution
from .stage_costs import SCHEDULES, Memory, StageCosts
from .thresholds import solve_large

COST_MODELS = ("default", "pipedream")


def partition(
    profile: Profile,
    cluster: Cluster,
    *,
    cost_model: str = "default",
    schedule: str | None = None,
    num_microbatches: int | None = None,
    num_chunks: int = 1,
    activation_compression_ratio: float | None = None,
    straight: bool = False,
    memory_limit: float | None = None,
    optimizer_bytes: float = 2.0,
    num_candidates: int = 8,
    max_cuts: int = MAX_CUTS,
) -> Plan:
    """Cut `profile` into stages, and give each as many replicas on `cluster` as the slowest stage needs.

    Arguments:
        cost_model: "default" (module `stage_costs`), or "pipedream": as PipeDream's optimizer shipped
            (module `pipedream_model`), which knows no memory, and fills all devices.
        schedule: "1f1b" (the default), "2bw" or "pipedream": in-flight microbatches and weight versions in memory. Or
            "interleaved" or "looped-bfs", with V = `num_chunks` stages a rank and equal replicas (module `chunks`);
            these need `num_microbatches`.
        num_microbatches: of a batch, M; the best candidates are then simulated, and the least step time wins. None:
            replicas share gradients once each of them has had a microbatch, and nothing is simulated.
        activation_compression_ratio: divides the bytes across cuts. Under "pipedream" None leaves transfers out.
        straight: no replicas.
        memory_limit: of a device [bytes]; None: the cluster's own, if it has one.
        optimizer_bytes: of optimizer state a byte of parameters (2 for Adam).
        num_candidates: to find by each way, and to name in the plan.
        max_cuts: beyond which a graph is simplified, see `all_cuts`.

    Where the exact dynamic program would take too long (some thousand cuts or very many devices), a search over
    thresholds stands in for it; `Plan.gap` then says how far the plan may be from the best one, and a note that it was
    so. Where nodes are of several kinds, all their orders along the pipeline are tried, or, where these are too many,
    a few (a note says so); a stage is as slow as its slowest device, and the bound is that of the work alone. Ties: see
    `solve` and `pipedream_model`; the same input always gives the same plan.

    Raises ValueError for options that do not fit, and where no plan fits the memory: which node is too large, by how
    much, and what would make it fit. Source: Narayanan et al., SOSP 2019, section 3.1.

    >>> from stagewright.partition import Cluster, Node, Profile
    >>> nodes = [Node(name=n, forward_seconds=f, backward_seconds=0) for n, f in [("a", 3), ("b", 1)]]
    >>> plan = partition(Profile(nodes=nodes), Cluster.from_levels([(4, 1e9)]))
    >>> plan.predicted_step_time, plan.replicas
    (1.0, (4,))
    """
    if cost_model not in COST_MODELS:
        raise ValueError(f"cost_model={cost_model!r}: expected one of {', '.join(COST_MODELS)}")
    _check_numbers(
        counts={"num_microbatches": num_microbatches, "num_candidates": num_candidates},
        figures={"activation_compression_ratio": activation_compression_ratio, "memory_limit": memory_limit},
    )
    if num_chunks != 1 and schedule not in LOOPING:
        raise ValueError(f"num_chunks={num_chunks} with schedule={schedule!r}: expected 1, or {' or '.join(LOOPING)}")
    if cost_model == "pipedream":
        _refuse_for_pipedream(cluster, schedule=schedule, memory_limit=memory_limit)
        return _as_pipedream(profile, cluster, activation_compression_ratio, straight)
    schedule = "1f1b" if schedule is None else schedule
    if schedule in LOOPING:
        return partition_looped(
            profile,
            cluster,
            schedule=schedule,
            num_chunks=num_chunks,
            num_microbatches=num_microbatches,
            compression=activation_compression_ratio,
            straight=straight,
            memory_limit=memory_limit,
            optimizer_bytes=optimizer_bytes,
            num_candidates=num_candidates,
            max_cuts=max_cuts,
        )
    if schedule not in SCHEDULES:
        raise ValueError(f"schedule={schedule!r}: expected one of {', '.join((*SCHEDULES, *LOOPING))}")
    memory = Memory(limit=memory_limit, optimizer=number("optimizer_bytes", optimizer_bytes))
    if len(cluster.used_kinds) == 1 and memory_limit is None:
        memory = replace(memory, limit=cluster.used_kinds[0].memory_bytes)
    cuts = all_cuts(profile, limit=max_cuts)
    plans = []
    orders, note = node_orders(cluster)
    for order in orders:
        costs = StageCosts(
            cuts,
            cluster.reordered(order),
            schedule=schedule,
            num_microbatches=num_microbatches,
            compression=1.0 if activation_compression_ratio is None else activation_compression_ratio,
            memory=memory,
        )
        found = _default(profile, cluster, order, costs, straight=straight, num_candidates=num_candidates)
        if found is not None:
            plans.append(found)
    if not plans:
        raise ValueError(_why_nothing_fits(profile, costs, max(kind.memory_bytes or 0 for kind in cluster.used_kinds)))
    best = min(plans, key=_rank)
    return best if note is None else replace(best, notes=(*best.notes, note))


def _refuse_for_pipedream(cluster: Cluster, **options: object) -> None:
    for name, given in options.items():
        if given is not None:
            raise ValueError(f"{name}={given!r} with cost_model='pipedream': expected None, it knows no memory")
    for kind in cluster.used_kinds:
        if kind.speed != 1 or len(cluster.used_kinds) > 1:
            raise ValueError(
                f"device kind {kind.name!r} of speed {kind.speed} with cost_model='pipedream': expected devices of "
                f"one kind, that of the profile (speed 1); cost_model='default' knows others"
            )


def _check_numbers(*, counts: Mapping[str, int | None], figures: Mapping[str, float | None]) -> None:
    for name, value in counts.items():
        if value is not None:
            count(name, value)
    for name, figure in figures.items():
        if figure is not None:
            number(name, figure, positive=True)


def _rank(plan: Plan) -> tuple[float, float]:
    simulated = plan.simulated_step_time
    return float("inf") if simulated is None else simulated, plan.predicted_step_time


def _default(
    profile: Profile,
    own_cluster: Cluster,
    order: Sequence[int],
    costs: StageCosts,
    *,
    straight: bool,
    num_candidates: int,
) -> Plan | None:
    cluster = own_cluster.reordered(order)
    notes = list(costs.cuts.notes)
    solutions: list[Solution] = []
    if num_steps(costs, straight=straight) <= MAX_STEPS:
        wanted = num_candidates if costs.num_microbatches is not None else min(num_candidates, 3)
        solutions = solve(costs, straight=straight, num_candidates=wanted)
        if costs.num_microbatches is not None and solutions:
            solutions += _with_even_work(costs, solutions, straight=straight, num_candidates=wanted)
    elif len(cluster.used_kinds) > 1:
        raise ValueError(
            f"{len(costs.cuts)} cuts on {costs.num_devices} devices of several kinds: too large for unequal devices; "
            f"expected one kind, fewer devices, or a smaller max_cuts"
        )
    else:
        found = solve_large(costs, straight=straight)
        notes.append("too large for the exact dynamic program: found by a search over thresholds")
        if found is not None:
            solutions = [found]
    if not solutions:
        return None
    simulated = [simulate_solution(each, costs, cluster, profile) for each in solutions]
    if costs.num_microbatches is not None:
        notes += dict.fromkeys(each for each in simulated if isinstance(each, str))
    ranking = sorted(range(len(solutions)), key=lambda i: (_seconds(simulated[i]), i))
    best, outcome = solutions[ranking[0]], simulated[ranking[0]]
    # With fewer cuts than the graph has, only the work itself bounds what might have been.
    # So it does on unequal devices, whose order was chosen.
    bound = best.bound
    if costs.cuts.notes or len(cluster.used_kinds) > 1:
        bound = float(costs.cuts.seconds[-1]) / total_speed(cluster)
    return Plan(
        stages=_stages(profile, costs, best, piece_ranks(costs, best, order, own_cluster)),
        num_devices=costs.num_devices,
        cost_model="default",
        schedule=costs.schedule,
        num_microbatches=costs.num_microbatches,
        predicted_step_time=best.seconds,
        bound=min(bound, best.seconds),
        simulated_step_time=outcome.seconds if isinstance(outcome, Simulated) else None,
        simulated_bubble=outcome.bubble if isinstance(outcome, Simulated) else None,
        runners_up=tuple(_runner_up(costs, solutions[i], simulated[i]) for i in ranking[1:num_candidates]),
        notes=tuple(notes),
    )


def _with_even_work(costs: StageCosts, known: list[Solution], *, straight: bool, num_candidates: int) -> list[Solution]:
    """More candidates: the best where M is left out, so that no replica has a microbatch more than another.

    Where M is hardly more than the replicas, the bottleneck jumps with each of them; the simulator tells which is best.
    """
    seen = {solution.replicas for solution in known}
    more = []
    for other in solve(costs.per_replica(), straight=straight, num_candidates=num_candidates):
        shapes = [costs.shape(piece.replicas, piece.devices) for piece in other.pieces]
        ends = [(piece.first, piece.last) for piece in other.pieces]
        seconds = max(float(costs.seconds(*end, shape)) for end, shape in zip(ends, shapes, strict=True))
        if other.replicas not in seen and np.isfinite(seconds):
            more.append(replace(other, seconds=seconds, bound=known[0].bound))
    return more


def _seconds(outcome: Simulated | str) -> float:
    return outcome.seconds if isinstance(outcome, Simulated) else float("inf")


def _runner_up(costs: StageCosts, solution: Solution, outcome: Simulated | str) -> RunnerUp:
    sizes = costs.cuts.members.sum(axis=1)
    return RunnerUp(
        replicas=tuple(piece.replicas for piece in solution.pieces),
        num_nodes=tuple(int(sizes[piece.last] - sizes[piece.first]) for piece in solution.pieces),
        predicted_step_time=solution.seconds,
        simulated_step_time=outcome.seconds if isinstance(outcome, Simulated) else None,
        memory_bytes=outcome.memory_bytes if isinstance(outcome, Simulated) else None,
    )


def _stages(
    profile: Profile, costs: StageCosts, solution: Solution, ranks: Sequence[tuple[int, ...]]
) -> tuple[PlanStage, ...]:
    stages = []
    for piece, own_ranks in zip(solution.pieces, ranks, strict=True):
        shape = costs.shape(piece.replicas, piece.devices)
        forward, backward = _own_seconds(costs.cuts, piece.first, piece.last)
        speed = costs.fastest / costs.slowness(piece.replicas, piece.devices)
        stages.append(
            PlanStage(
                nodes=_names(profile, costs.cuts, piece.first, piece.last),
                ranks=own_ranks,
                forward_seconds=forward / speed,
                backward_seconds=backward / speed,
                step_seconds=float(costs.seconds(piece.first, piece.last, shape)),
                parameter_bytes=_bytes_of(profile, costs.cuts, piece.first, piece.last),
                memory=costs.memory_use(piece.first, piece.last, int(shape.in_flight)),
                in_flight=int(shape.in_flight),
            )
        )
    return tuple(stages)


def _names(profile: Profile, cuts: Cuts, first: int, last: int) -> tuple[str, ...]:
    own = cuts.members[last] & ~cuts.members[first]
    return tuple(profile.nodes[at].name for at in profile.order() if own[at])


def _bytes_of(profile: Profile, cuts: Cuts, first: int, last: int) -> float:
    """Parameters of the nodes between two cuts, exactly as the profile adds them up [bytes]."""
    own = cuts.members[last] & ~cuts.members[first]
    return sum(node.parameter_bytes for at, node in enumerate(profile.nodes) if own[at])


def _own_seconds(cuts: Cuts, first: int, last: int) -> tuple[float, float]:
    """F and B of the nodes between two cuts [s]."""
    forward, backward = (max(0.0, float(each[last] - each[first])) for each in (cuts.forward, cuts.backward))
    return forward, backward


def _why_nothing_fits(profile: Profile, costs: StageCosts, largest_device: float) -> str:
    limit = largest_device if costs.memory.limit is None else costs.memory.limit
    copies = costs.rule.versions_kept(1) + 1 + costs.memory.optimizer
    alone = [node.parameter_bytes * copies + node.buffer_bytes + node.stash_bytes for node in profile.nodes]
    largest = max(range(len(alone)), key=lambda i: alone[i])
    if alone[largest] > limit:
        return (
            f"node {profile.nodes[largest].name!r} needs {alone[largest]:,.0f} bytes on a device of {limit:,.0f}, "
            f"{alone[largest] - limit:,.0f} too many, with a single microbatch in flight: expected a device with more "
            f"memory, a smaller microbatch, a profile that splits the node, or an optimizer with less state"
        )
    return (
        f"no cut into stages on {costs.num_devices} devices of {limit:,.0f} bytes fits: all nodes together need "
        f"{sum(alone):,.0f} bytes with a single microbatch in flight: expected more devices, devices with more memory, "
        f"a smaller microbatch, or a schedule with fewer weight versions than {costs.schedule!r}"
    )


def _as_pipedream(profile: Profile, cluster: Cluster, compression: float | None, straight: bool) -> Plan:
    cuts = pipedream_cuts(profile)
    levels = [(level.size, level.bandwidth) for level in cluster.levels]
    model = PipeDreamModel(cuts, levels, compression=compression, straight=straight)
    if not np.isfinite(model.seconds):
        raise ValueError(
            f"no plan without replicas for {len(cuts) - 1} cuts on {cluster.num_devices} devices: expected "
            f"straight=False, or fewer devices (PipeDream's model fills them all)"
        )
    stages = []
    whole = Block(first=0, last=len(cuts) - 1, machines=1, offset=0)
    groups: list[tuple[int, Block, tuple[int, ...]]] = [(len(levels) - 1, whole, (0,))]
    while groups:
        level, outer, offsets = groups.pop()
        if level < 0:
            forward, backward = _own_seconds(cuts, outer.first, outer.last)
            stages.append(
                PlanStage(
                    nodes=_names(profile, cuts, outer.first, outer.last),
                    ranks=offsets,
                    forward_seconds=forward,
                    backward_seconds=backward,
                    step_seconds=(forward + backward) / len(offsets),
                )
            )
            continue
        size = int(np.prod([machines for machines, _ in levels[:level]], dtype=int))
        inner = [
            (level - 1, block, tuple(o + (block.offset + m) * size for o in offsets for m in range(block.machines)))
            for block in model.blocks(level, outer.first, outer.last)
        ]
        groups += inner[::-1]
    return Plan(
        stages=tuple(stages),
        num_devices=cluster.num_devices,
        cost_model="pipedream",
        predicted_step_time=model.seconds,
        bound=model.seconds,
    )
