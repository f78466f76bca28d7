"""From a profile and a cluster to a plan: which cuts, how many replicas, on which ranks."""

from __future__ import annotations

import math
from collections.abc import Mapping

from ..schedules.registry import FAMILIES, family
from ..schedules.timing.costs import Costs
from .allocator import certain
from .cluster import Cluster
from .memory import steady_in_flight
from .planner.built import RefusedError
from .planner.cuts import candidates
from .planner.evaluate import Evaluator, MisfitError
from .planner.evaluated import Ends
from .planner.model import Model
from .planner.plan import plan
from .planner.result import Found, as_plan, distinct
from .planner.simulated import num_actions
from .planner.space import Configuration
from .plans.plan import Plan
from .plans.record import PlanStage
from .profile import Profile
from .recompute import MemoryRules
from .solver.antichains import MAX_CUTS, pipedream_cuts
from .solver.cut_sums import node_names
from .solver.orders import canonical_order
from .solver.pipedream_model import LevelStage, PipeDreamModel
from .solver.ranges import SCHEDULES
from .strict import count, number
from .topology import Topology

COST_MODELS = ("default", "pipedream")
LOOPING = tuple(each.name for each in FAMILIES.values() if each.is_planned and each.takes_chunks)
MAX_ACTIONS = 200_000  # of the simulation of a candidate


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
        cost_model: "default" (modules `stage_cost`, `memory`), or "pipedream": as PipeDream's optimizer shipped
            (module `solver.pipedream_model`), which knows no memory, and fills all devices.
        schedule: "1f1b" (the default), "2bw", "paci" or "pipedream": what is in flight, and weight versions kept. Or
            "interleaved" or "looped-bfs", with V = `num_chunks` stages a rank and equal replicas (module
            `solver.chunks`); these need `num_microbatches`.
        num_microbatches: of a batch, M; the best candidates are then simulated, and the least step time wins. None:
            replicas share gradients once each of them has had a microbatch, and nothing is simulated.
        activation_compression_ratio: divides the bytes across cuts. Under "pipedream" None leaves transfers out.
        straight: no replicas.
        memory_limit: of a device [bytes]; None: the cluster's own, if it has one.
        optimizer_bytes: of optimizer state a byte of parameters (2 for Adam).
        num_candidates: to find by each way, and to name in the plan.
        max_cuts: beyond which a graph is simplified, see `all_cuts`.

    Where the exact dynamic program would take too long (some thousand cuts or very many devices), it looks at some of
    the cuts and at replicas on whole nodes; `Plan.gap` then says how far the plan may be from the best one, and a note
    that it was so. Where nodes are of several kinds, all their orders along the pipeline are tried, or, where these are
    too many, a few (a note says so); a stage is as slow as its slowest device, and the bound is that of the work alone.
    Ties: see `solve` and `pipedream_model`; the same input always gives the same plan.

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
    ratio = number("optimizer_bytes", optimizer_bytes)
    if schedule in LOOPING:
        _check_looped(schedule, num_chunks, num_microbatches, activation_compression_ratio)
        return plan(
            profile,
            cluster,
            global_batch=(num_microbatches or 1) * (profile.microbatch_size or 1),
            memory_limit=memory_limit,
            schedules=(schedule,),
            chunk_sizes=(num_chunks,),
            data_sizes=(1,) if straight else None,
            recompute=("none",),
            optimizer_sharding=("none",),
            optimizer_bytes=ratio,
            num_runners_up=num_candidates,
            max_cuts=max_cuts,
        )
    if schedule not in SCHEDULES:
        raise ValueError(f"schedule={schedule!r}: expected one of {', '.join((*SCHEDULES, *LOOPING))}")
    model = Model(profile, optimizer_ratio=ratio, max_cuts=max_cuts, compression=activation_compression_ratio or 1.0)
    order = canonical_order(cluster)
    topology = Topology(cluster.reordered(order), memory_limit=memory_limit)
    options = candidates(
        model,
        topology.cluster,
        schedule=schedule,
        microbatch_size=profile.microbatch_size or 1,
        num_microbatches=num_microbatches,
        memory_limit=memory_limit,
        straight=straight,
        wanted=num_candidates if num_microbatches is not None else min(num_candidates, 3),
    )
    evaluator = Evaluator(topology, lambda _: MemoryRules(optimizer_ratio=ratio), lambda _size, _tensor: model)
    found, why_not = [], []
    for configuration, ends in options.found:
        try:
            one, reason = _evaluated(evaluator, configuration, ends)
        except MisfitError:
            continue
        found.append(one)
        why_not += [reason] if reason is not None else []
    if not found:
        raise ValueError(_why_nothing_fits(profile, schedule, ratio, topology))
    found.sort(key=lambda each: (each.seconds, each.evaluated.bottleneck))
    # With fewer cuts than the graph has, only the work itself bounds what might have been.
    # So it does on unequal devices, whose order was chosen.
    by_work = bool(model.cuts.notes) or not topology.is_uniform
    return as_plan(
        distinct(found),
        topology,
        order=order,
        bound=model.seconds / topology.total_speed if by_work else options.bound,
        says_size=profile.microbatch_size is not None,
        num_runners_up=num_candidates - 1,
        notes=(*model.notes, *options.notes, *dict.fromkeys(why_not)),
    )


def _evaluated(evaluator: Evaluator, c: Configuration, ends: Ends) -> tuple[Found, str | None]:
    """A candidate, simulated where that can be, else why it is not; MisfitError where it does not fit the memory."""
    reason = None
    if c.num_microbatches is not None:
        try:
            if num_actions(c) <= MAX_ACTIONS:
                evaluated = evaluator.evaluate(c, ends, exact=True)
                return Found(evaluated=evaluated, simulated=evaluator.simulate(evaluated)), None
            reason = f"not simulated: more than {MAX_ACTIONS:,} actions a batch"
        except RefusedError as error:
            reason = f"not simulated: {error}"
    flights = steady_in_flight(c.schedule, c.counts, c.num_microbatches)
    return Found(evaluated=evaluator.evaluate(c, ends, flights=flights), simulated=None), reason


def _check_looped(schedule: str, num_chunks: int, num_microbatches: int | None, compression: float | None) -> None:
    if num_microbatches is None or compression is not None:
        raise ValueError(
            f"schedule={schedule!r} with num_microbatches={num_microbatches}, activation_compression_ratio="
            f"{compression}: expected a number of microbatches, and no compression"
        )
    if count("num_chunks", num_chunks) < 2:
        raise ValueError(
            f"num_chunks={num_chunks} with schedule={schedule!r}: expected at least 2 (a schedule with one stage a "
            f"rank is 1f1b)"
        )


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


def _why_nothing_fits(profile: Profile, schedule: str, optimizer_ratio: float, topology: Topology) -> str:
    beside, limit = certain(profile.device), topology.largest_memory
    kept = f" ({beside:,.0f} of them beside tensors, for the device's context)" if beside else ""
    copies = family(schedule).rule.versions_kept(1) + 1 + optimizer_ratio
    tensors = [
        node.parameter_bytes * copies + node.buffer_bytes + node.stash_bytes + node.workspace_bytes
        for node in profile.nodes
    ]
    largest = max(range(len(tensors)), key=lambda i: tensors[i])
    needed = tensors[largest] + beside
    if needed > limit:
        return (
            f"node {profile.nodes[largest].name!r} needs {needed:,.0f} bytes{kept} on a device of {limit:,.0f}, "
            f"{needed - limit:,.0f} too many, with a single microbatch in flight: expected a device with more "
            f"memory, a smaller microbatch, a profile that splits the node, or an optimizer with less state"
        )
    return (
        f"no cut into stages on {topology.num_devices} devices of {limit:,.0f} bytes{kept} fits: tensors of all nodes "
        f"together take {sum(tensors):,.0f} bytes with a single microbatch in flight: expected more devices, devices "
        f"with more memory, a smaller microbatch, or a schedule with fewer weight versions than {schedule!r}"
    )


def _as_pipedream(profile: Profile, cluster: Cluster, compression: float | None, straight: bool) -> Plan:
    cuts = pipedream_cuts(profile)
    levels = [(level.size, level.bandwidth) for level in cluster.levels]
    model = PipeDreamModel(cuts, levels, compression=compression, straight=straight)
    if not math.isfinite(model.seconds):
        raise ValueError(
            f"no plan without replicas for {len(cuts) - 1} cuts on {cluster.num_devices} devices: expected "
            f"straight=False, or fewer devices (PipeDream's model fills them all)"
        )
    stages, seconds = [], []
    whole = LevelStage(first=0, last=len(cuts) - 1, machines=1, offset=0)
    groups: list[tuple[int, LevelStage, tuple[int, ...]]] = [(len(levels) - 1, whole, (0,))]
    while groups:
        level, outer, offsets = groups.pop()
        if level < 0:
            sums = cuts.stages(outer.first, outer.last)
            seconds.append((float(sums.forward), float(sums.backward)))
            stages.append(
                PlanStage(
                    nodes=node_names(profile, cuts, outer.first, outer.last),
                    ranks=offsets,
                    step_seconds=float(sums.work) / len(offsets),
                )
            )
            continue
        size = math.prod(machines for machines, _ in levels[:level])
        inner = [
            (level - 1, block, tuple(o + (block.offset + m) * size for o in offsets for m in range(block.machines)))
            for block in model.blocks(level, outer.first, outer.last)
        ]
        groups += inner[::-1]
    return Plan(
        stages=tuple(stages),
        num_devices=cluster.num_devices,
        costs=Costs(forward=[f for f, _ in seconds], backward=[b for _, b in seconds]),
        cost_model="pipedream",
        predicted_step_time=model.seconds,
        bound=model.seconds,
    )
