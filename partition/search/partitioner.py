"""From a profile and a cluster to a plan: which cuts, how many replicas, on which ranks."""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import partial
from typing import Any

from ...schedules.families.registry import FAMILIES, family
from ...schedules.timing.costs import Costs
from ..analytic.pipedream import PipeDreamModel
from ..cluster import Cluster
from ..memory import certain, steady_in_flight
from ..plans.plan import Plan
from ..plans.record import PlanStage
from ..profile import Profile
from ..recompute import MemoryRules
from ..solve.antichains import MAX_CUTS, pipedream_cuts
from ..solve.cut_sums import node_names
from ..solve.orders import canonical_order
from ..solve.ranges import SCHEDULES
from ..strict import count, made_of, number
from ..topology import Topology
from .cuts import candidates
from .evaluate import Ends, Evaluated, MisfitError, PlanEvaluator
from .layouts import all_rows
from .model import Model
from .plan import plan
from .result import as_plan, distinct
from .search import PlanSearch
from .simulated import SizesError, num_actions
from .space import Configuration

COST_MODELS = ("default", "pipedream")
LOOPING = tuple(each.name for each in FAMILIES.values() if each.is_planned and each.takes_chunks)
MAX_ACTIONS = 200_000  # of the simulation of a candidate


@dataclass(frozen=True, slots=True, kw_only=True)
class PartitionOptions:
    """Options of `partition`, which says what they mean. Raises ValueError for those that do not fit each other."""

    cost_model: str = "default"
    schedule: str | None = None
    num_microbatches: int | None = None
    num_chunks: int = 1
    activation_compression_ratio: float | None = None
    straight: bool = False
    memory_limit: float | None = None
    optimizer_bytes: float = 2.0
    num_candidates: int = 8
    max_cuts: int = MAX_CUTS

    def __post_init__(self) -> None:
        if self.cost_model not in COST_MODELS:
            raise ValueError(f"cost_model={self.cost_model!r}: expected one of {', '.join(COST_MODELS)}")
        if self.num_microbatches is not None:
            count("num_microbatches", self.num_microbatches)
        count("num_candidates", self.num_candidates)
        for name in ("activation_compression_ratio", "memory_limit"):
            if getattr(self, name) is not None:
                number(name, getattr(self, name), positive=True)
        schedule, num_chunks = self.schedule, self.num_chunks
        if num_chunks != 1 and schedule not in LOOPING:
            raise ValueError(
                f"num_chunks={num_chunks} with schedule={schedule!r}: expected 1, or {' or '.join(LOOPING)}"
            )
        if self.cost_model == "pipedream":
            for name in ("schedule", "memory_limit"):
                if (given := getattr(self, name)) is not None:
                    raise ValueError(f"{name}={given!r} with cost_model='pipedream': expected None, it knows no memory")
            return
        number("optimizer_bytes", self.optimizer_bytes)
        if schedule in LOOPING:
            if self.num_microbatches is None or self.activation_compression_ratio is not None:
                raise ValueError(
                    f"schedule={schedule!r} with num_microbatches={self.num_microbatches}, activation_compression_"
                    f"ratio={self.activation_compression_ratio}: expected a number of microbatches, and no compression"
                )
            if count("num_chunks", num_chunks) < 2:
                raise ValueError(
                    f"num_chunks={num_chunks} with schedule={schedule!r}: expected at least 2 (a schedule with one "
                    f"stage a rank is 1f1b)"
                )
        elif schedule is not None and schedule not in SCHEDULES:
            raise ValueError(f"schedule={schedule!r}: expected one of {', '.join((*SCHEDULES, *LOOPING))}")


def partition(profile: Profile, cluster: Cluster, **options: Any) -> Plan:
    """Cut `profile` into stages, and give each as many replicas on `cluster` as the slowest stage needs.

    Options:
        cost_model: "default" (modules `stage_cost`, `memory`), or "pipedream": as PipeDream's optimizer shipped
            (module `pipedream`), which knows no memory, and fills all devices.
        schedule: "1f1b" (the default), "2bw", "paci" or "pipedream": what is in flight, and weight versions kept. Or
            "interleaved" or "looped-bfs", with V = `num_chunks` stages a rank and equal replicas (module
            `solve.chunks`); these need `num_microbatches`.
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
    Ties: see `solve` and `pipedream`; the same input always gives the same plan.

    Raises ValueError for options that do not fit, and where no plan fits the memory: which node is too large, by how
    much, and what would make it fit. Source: Narayanan et al., SOSP 2019, section 3.1.

    >>> from stagewright.partition import Cluster, Node, Profile
    >>> nodes = [Node(name=n, forward_seconds=f, backward_seconds=0) for n, f in [("a", 3), ("b", 1)]]
    >>> plan = partition(Profile(nodes=nodes), Cluster.from_levels([(4, 1e9)]))
    >>> plan.predicted_step_time, plan.replicas
    (1.0, (4,))
    """
    given = made_of(PartitionOptions, options, "partition")
    if given.cost_model == "pipedream":
        return _as_pipedream(profile, cluster, given.activation_compression_ratio, given.straight)
    if given.schedule not in LOOPING:
        return _by_ranges(profile, cluster, given, given.schedule or "1f1b")
    return plan(
        profile,
        cluster,
        global_batch=(given.num_microbatches or 1) * (profile.microbatch_size or 1),
        memory_limit=given.memory_limit,
        schedules=(given.schedule,),
        chunk_sizes=(given.num_chunks,),
        data_sizes=(1,) if given.straight else None,
        recompute=("none",),
        optimizer_sharding=("none",),
        optimizer_bytes=given.optimizer_bytes,
        num_runners_up=given.num_candidates,
        max_cuts=given.max_cuts,
    )


def _by_ranges(profile: Profile, cluster: Cluster, options: PartitionOptions, schedule: str) -> Plan:
    """The best candidate of the dynamic program."""
    rules = MemoryRules(optimizer_ratio=options.optimizer_bytes)
    compression = options.activation_compression_ratio or 1.0
    model = Model(profile, rules, max_cuts=options.max_cuts, compression=compression)
    order, wanted = canonical_order(cluster), options.num_candidates
    topology = Topology(cluster.reordered(order), memory_limit=options.memory_limit)
    every, bound, notes = candidates(
        model,
        topology.cluster,
        schedule=schedule,
        microbatch_size=profile.microbatch_size or 1,
        num_microbatches=options.num_microbatches,
        memory_limit=options.memory_limit,
        straight=options.straight,
        wanted=wanted if options.num_microbatches is not None else min(wanted, 3),
    )
    evaluator = PlanEvaluator(topology, lambda _size, _tensor: model)
    found, why_not = [], []
    for configuration, ends in every:
        try:
            one, reason = _evaluated(evaluator, configuration, ends)
        except MisfitError:
            continue
        found.append(one)
        why_not += [reason] if reason is not None else []
    if options.num_microbatches is not None and not (why_not or options.straight):
        search, size = PlanSearch(evaluator, wanted=1, max_simulated=8 * wanted), profile.microbatch_size or 1
        sizes: dict[str, int] = {"microbatch_size": size, "num_microbatches": options.num_microbatches}
        beside = search.least.beside(schedule, model)
        find = partial(all_rows, topology, model, beside, schedule=schedule, **sizes)
        found = search.improved(found, [(0.0, find)])
    if not found:
        raise ValueError(_why_nothing_fits(profile, schedule, rules.optimizer_ratio, topology))
    found.sort(key=lambda each: (each.simulated_seconds, each.bottleneck))
    # With fewer cuts than the graph has, only the work itself bounds what might have been.
    # So it does on unequal devices, whose order was chosen.
    by_work = bool(model.cuts.notes) or not topology.is_uniform
    return as_plan(
        distinct(found),
        topology,
        order=order,
        bound=model.seconds / topology.total_speed if by_work else bound,
        says_size=profile.microbatch_size is not None,
        num_runners_up=wanted - 1,
        notes=(*model.notes, *notes, *dict.fromkeys(why_not)),
    )


def _evaluated(evaluator: PlanEvaluator, c: Configuration, ends: Ends) -> tuple[Evaluated, str | None]:
    """A candidate, simulated where that can be, else why it is not; MisfitError where it does not fit the memory."""
    reason = None
    if c.num_microbatches is not None:
        try:
            if num_actions(c) <= MAX_ACTIONS:
                return evaluator.simulate(evaluator.evaluate(c, ends, exact=True)), None
            reason = f"not simulated: more than {MAX_ACTIONS:,} actions a batch"
        except SizesError as error:
            reason = f"not simulated: {error}"
    flights = steady_in_flight(c.schedule, c.counts, c.num_microbatches)
    return evaluator.evaluate(c, ends, flights=flights), reason


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
    whole, most = math.ceil(needed), math.floor(limit)
    if needed > limit:
        return (
            f"node {profile.nodes[largest].name!r} needs {whole:,} bytes{kept} on a device of {most:,}, "
            f"{whole - most:,} too many, with a single microbatch in flight: expected a device with more "
            f"memory, a smaller microbatch, a profile that splits the node, or an optimizer with less state"
        )
    return (
        f"no cut into stages on {topology.num_devices} devices of {limit:,.0f} bytes{kept} fits: tensors of all nodes "
        f"together take {sum(tensors):,.0f} bytes with a single microbatch in flight: expected more devices, devices "
        f"with more memory, a smaller microbatch, or a schedule with fewer weight versions than {schedule!r}"
    )


def _as_pipedream(profile: Profile, cluster: Cluster, compression: float | None, straight: bool) -> Plan:
    for kind in cluster.used_kinds:
        if kind.speed != 1 or len(cluster.used_kinds) > 1:
            raise ValueError(
                f"device kind {kind.name!r} of speed {kind.speed} with cost_model='pipedream': expected devices of "
                f"one kind, that of the profile (speed 1); cost_model='default' knows others"
            )
    cuts = pipedream_cuts(profile)
    levels = [(level.size, level.bandwidth) for level in cluster.levels]
    model = PipeDreamModel(cuts, levels, compression=compression, straight=straight)
    if not math.isfinite(model.seconds):
        raise ValueError(
            f"no plan without replicas for {len(cuts) - 1} cuts on {cluster.num_devices} devices: expected "
            f"straight=False, or fewer devices (PipeDream's model fills them all)"
        )
    stages, seconds = [], []
    groups: list[tuple[int, int, int, tuple[int, ...]]] = [(len(levels) - 1, 0, len(cuts) - 1, (0,))]
    while groups:
        level, first, last, offsets = groups.pop()
        if level < 0:
            sums = cuts.stages(first, last)
            seconds.append((float(sums.forward), float(sums.backward)))
            stages.append(
                PlanStage(
                    nodes=node_names(profile, cuts, first, last),
                    ranks=offsets,
                    step_seconds=float(sums.work) / len(offsets),
                )
            )
            continue
        size = math.prod(machines for machines, _ in levels[:level])
        inner = [
            (level - 1, start, end, tuple(o + (offset + m) * size for o in offsets for m in range(machines)))
            for start, end, machines, offset in model.blocks(level, first, last)
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
