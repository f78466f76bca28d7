"""From a profile and a cluster to a plan: which cuts, how many replicas, on which ranks."""

from __future__ import annotations

import math
from contextlib import suppress
from dataclasses import replace
from typing import Any

from ...schedules.families.registry import family
from ...schedules.timing.costs import Costs
from ..analytic.pipedream import PipeDreamModel
from ..cluster import Cluster
from ..memory import context_bytes, steady_in_flight, weight_copies
from ..plans.plan import Plan
from ..plans.record import PlanStage
from ..profile import Profile
from ..recompute import MemoryRules
from ..solve.antichains import pipedream_cuts
from ..solve.cut_sums import node_names
from ..solve.orders import canonical_order
from ..strict import made_of
from ..topology import Topology
from .arguments import CHUNK_SIZES, LOOPING, PartitionOptions, refuse_endless
from .cuts import candidates
from .evaluate import Candidate, DoesNotFitError, PlanEvaluator
from .model import Model
from .plan import plan
from .result import as_plan, distinct

_MOST_STEADY = 3  # candidates that are found by each way


def partition(profile: Profile, cluster: Cluster, **options: Any) -> Plan:
    """Cut `profile` into stages, and give each as many replicas on `cluster` as the slowest stage needs.

    Options:
        cost_model: "default" (modules `stage_cost`, `memory`), or "pipedream": as PipeDream's optimizer shipped
            (module `pipedream`), which knows no memory, and fills all devices.
        schedule: "1f1b" (the default), "2bw", "paci" or "pipedream": what is in flight, and weight versions kept. Or
            "interleaved" or "looped-bfs", with V = `num_chunks` stages a rank and equal replicas (module
            `solve.chunks`); these need `num_microbatches`.
        num_microbatches: of a batch, M; the plan is then what `plan` finds under this schedule, simulated, with nothing
            recomputed and no optimizer divided. None: replicas share gradients once each of them has had a microbatch,
            and nothing is simulated.
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
    >>> plan.bottleneck, plan.replicas
    (1.0, (4,))
    """
    given = made_of(PartitionOptions, options, "partition")
    if given.cost_model == "pipedream":
        return _as_pipedream(profile, cluster, given.activation_compression_ratio, given.straight)
    if given.activation_compression_ratio not in (None, 1):
        profile = _compressed(profile, given.activation_compression_ratio)
    if given.num_microbatches is None:
        return _steady(profile, cluster, given)
    schedule = given.schedule or "1f1b"
    refuse_endless("num_microbatches", given.num_microbatches, (schedule,), cluster.num_devices)
    return plan(
        profile,
        cluster,
        global_batch=given.num_microbatches * (profile.microbatch_size or 1),
        memory_limit=given.memory_limit,
        schedules=(schedule,),
        chunk_sizes=(given.num_chunks,) if schedule in LOOPING else CHUNK_SIZES,
        data_sizes=(1,) if given.straight else None,
        recompute=("none",),
        optimizer_sharding=("none",),
        optimizer_bytes=given.optimizer_bytes,
        num_runners_up=given.num_candidates - 1,
        max_cuts=given.max_cuts,
    )


def _compressed(profile: Profile, ratio: float) -> Profile:
    """The profile with so many times fewer bytes across cuts."""
    nodes = (replace(node, activation_bytes=node.activation_bytes / ratio) for node in profile.nodes)
    return replace(profile, nodes=tuple(nodes))


def _steady(profile: Profile, cluster: Cluster, options: PartitionOptions) -> Plan:
    """The best candidate of the dynamic program, by its bottleneck: replicas share gradients once each of them has had
    a microbatch."""
    rules, schedule = MemoryRules(optimizer_ratio=options.optimizer_bytes), options.schedule or "1f1b"
    model, order = Model(profile, rules, max_cuts=options.max_cuts), canonical_order(cluster)
    topology = Topology(cluster.reordered(order), memory_limit=options.memory_limit)
    every, bound, notes = candidates(
        model,
        topology.cluster,
        schedule=schedule,
        microbatch_size=profile.microbatch_size or 1,
        num_microbatches=None,
        memory_limit=options.memory_limit,
        straight=options.straight,
        wanted=min(options.num_candidates, _MOST_STEADY),
    )
    evaluator, found = PlanEvaluator(topology, lambda _size, _tensor: model), list[Candidate]()
    for c, ends in every:
        with suppress(DoesNotFitError):
            found.append(evaluator.choices(c, ends, in_flight=steady_in_flight(schedule, c.counts, None))[0])
    if not found:
        raise ValueError(_why_nothing_fits(profile, schedule, rules.optimizer_ratio, topology))
    # With fewer cuts than the graph has, only the work itself bounds what might have been.
    # So it does on unequal devices, whose order was chosen.
    by_work = bool(model.cuts.notes) or not topology.is_uniform
    return as_plan(
        distinct(sorted(found, key=lambda each: each.bottleneck)),
        topology,
        order=order,
        bound=model.seconds / topology.total_speed if by_work else bound,
        says_size=profile.microbatch_size is not None,
        num_runners_up=options.num_candidates - 1,
        notes=(*model.notes, *notes),
    )


def _why_nothing_fits(profile: Profile, schedule: str, optimizer_ratio: float, topology: Topology) -> str:
    context, limit = context_bytes(profile.device), topology.largest_memory
    kept = f" ({context:,.0f} of them besides tensors, for the device's context)" if context else ""
    copies = weight_copies(family(schedule).rule.versions_kept(1), optimizer_ratio)
    tensors = [
        node.parameter_bytes * copies + node.buffer_bytes + node.stash_bytes + node.workspace_bytes
        for node in profile.nodes
    ]
    largest = max(range(len(tensors)), key=lambda i: tensors[i])
    needed = tensors[largest] + context
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
        bottleneck=model.seconds,
        bound=model.seconds,
    )
