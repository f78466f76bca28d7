"""A Plan of what was found, and the same with pairs of forwards and backwards (`schedules.overlap`).

    found, the best first -> those whose stages exchange something -> the same with pairs, simulated -> all by seconds

Bounds are those of actions one after the other, so pairs are tried for what was simulated, and not searched for.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import replace
from itertools import pairwise

from ...schedules.ir import ScheduleError
from ...schedules.timing.memory import StageBytes
from ...schedules.wording import duration
from ..memory import RankMemory, context_bytes, stage_bytes
from ..plans.plan import Plan
from ..plans.record import PlanStage, RunnerUp, Searched, order_of
from ..profile import Node
from ..solve.orders import own_ranks
from ..stage_cost import OFFLOAD, RECOMPUTE, kind_of
from ..topology import Topology
from .bounds import stage_paces
from .climb import may_pair
from .evaluate import Candidate, PlanEvaluator
from .simulated import SizesError

MAX_PAIRED_ACTIONS = 30_000  # of a batch: all of it is simulated


def distinct(found: Iterable[Candidate]) -> list[Candidate]:
    """Each of them once: of those that differ in nothing but which of the devices their stages are on, the first."""
    seen: dict[object, Candidate] = {}
    for e in found:
        figures = (e.bottleneck, e.simulated_seconds, e.memory_bytes)
        seen.setdefault((label(e), e.configuration.counts, e.ends, *(f"{figure:.9g}" for figure in figures)), e)
    return list(seen.values())


def as_plan(
    found: Sequence[Candidate],
    topology: Topology,
    *,
    order: Sequence[int],
    bound: float,
    says_size: bool,
    num_runners_up: int,
    notes: Sequence[str],
    searched: Searched | None = None,
) -> Plan:
    """The first of `found` as a plan, the next ones as its runners-up.

    Arguments:
        order: of the cluster's nodes in `topology`.
        bound: of the bottleneck of any plan [s a microbatch].
        says_size: whether the profile says how many samples a microbatch has.
    """
    e, c = found[0], found[0].configuration
    is_simulated = math.isfinite(e.simulated_seconds)
    if idle := (of := topology.num_devices) - c.num_devices:
        notes = [*notes, f"{idle} of {of} devices stay idle: nothing that was looked at is faster with them"]
    if 8 * idle > 7 * of:
        warnings.warn(f"{notes[-1]}: expected a larger batch, more nodes, or fewer devices", stacklevel=3)
    return Plan(
        stages=plan_stages(e, order, topology.level_sizes[0]),
        num_devices=topology.num_devices,
        num_chunks=c.num_chunks,
        context=e.model.profile.context,
        expert=e.model.profile.expert,
        costs=e.costs,
        links=e.links,
        cost_model="default",
        schedule=c.schedule,
        overlaps=c.overlaps,
        order=() if c.own is None else order_of(c.own),
        num_microbatches=c.num_microbatches,
        slice_lengths=c.lengths,
        microbatch_size=c.microbatch_size if says_size else None,
        bottleneck=e.bottleneck,
        bound=min(e.bottleneck, bound),
        simulated_step_time=e.simulated_seconds if is_simulated else None,
        simulated_bubble=e.bubble if is_simulated else None,
        runners_up=tuple(_runner_up(each) for each in found[1 : num_runners_up + 1]),
        notes=tuple(notes),
        searched=searched,
    )


def plan_stages(e: Candidate, order: Sequence[int], node_size: int) -> tuple[PlanStage, ...]:
    """The stages in order, each on all its ranks of the cluster as its user lists it."""
    c, ranks = e.configuration, e.configuration.stage_ranks
    paces = stage_paces(c, e.seconds)
    streams = c.family.rule.is_asynchronous
    fewest = [min(c.tensors[p], c.tensors[q]) for p, q in pairwise([*c.positions, c.positions[-1]])]
    held: Sequence[StageBytes | None] = (
        [None] * c.num_stages
        if c.lengths
        else stage_bytes(e.sums, e.memories, positions=c.positions, replicas=c.counts, tensor=fewest, streams=streams)
    )
    nodes = {node.name: node for node in e.model.profile.nodes}
    stages = []
    for s in range(c.num_stages):
        p, v = c.positions[s], c.chunks[s]
        memory, first, last = e.memories[p], e.ends[s], e.ends[s + 1]
        split_of = {node.name: node.split for node in e.models[c.tensors[p]].profile.nodes}
        splits = tuple(split_of[name] for name in e.model.names(first, last))
        stages.append(
            PlanStage(
                nodes=e.model.names(first, last),
                ranks=own_ranks(order, node_size, ranks[p]),
                tensor=c.tensors[p],
                step_seconds=float(paces[s]),
                spread=_spread([nodes[name] for name in e.model.names(first, last)]),
                parameter_bytes=e.models[c.tensors[p]].parameter_bytes(first, last),
                memory=memory.uses[v],
                memory_limit=memory.limit if math.isfinite(memory.limit) else None,
                held=held[s],
                in_flight=max(1, memory.in_flight[v]),
                recompute=memory.recompute[v],
                optimizer_shards=memory.shards[v],
                splits=splits if c.tensors[p] > 1 and {*splits} != {"divided"} else (),
            )
        )
    return tuple(stages)


def _spread(nodes: Sequence[Node]) -> float:
    """Spread of an action of these nodes: what slows one of them slows those around it, too."""
    seconds = sum(node.forward_seconds + node.backward_seconds for node in nodes)
    varied = sum((node.forward_seconds + node.backward_seconds) * node.spread for node in nodes)
    return varied / seconds if seconds > 0 else 0.0


def label(e: Candidate) -> str:
    """The configuration and what was done about its memory."""
    c, profile = e.configuration, e.model.profile
    parts = [c.label(context=profile.context, expert=profile.expert)]
    chosen = [kind_of(name) for memory in e.memories for name in memory.recompute]
    for name in (each for each in RECOMPUTE[1:] if each in chosen):
        times = chosen.count(name)
        parts.append(f"recompute {name}" + ("" if times == c.num_stages else f" in {times} of {c.num_stages} stages"))
    if (times := chosen.count(OFFLOAD)) > 0:
        parts.append("offload" + ("" if times == c.num_stages else f" in {times} of {c.num_stages} stages"))
    shards = sum(each > 1 for memory in e.memories for each in memory.shards)
    if shards:
        parts.append("optimizer sharded" + ("" if shards == c.num_stages else f" in {shards} of {c.num_stages} stages"))
    return ", ".join(parts)


def _runner_up(e: Candidate) -> RunnerUp:
    sizes = e.model.cuts.members.sum(axis=1)
    return RunnerUp(
        label=label(e),
        replicas=tuple(e.configuration.counts[p] for p in e.configuration.positions),
        num_nodes=tuple(int(sizes[b] - sizes[a]) for a, b in zip(e.ends[:-1], e.ends[1:], strict=True)),
        bottleneck=e.bottleneck,
        simulated_step_time=e.simulated_seconds if math.isfinite(e.simulated_seconds) else None,
        memory_bytes=e.memory_bytes,
    )


def with_pairs(evaluator: PlanEvaluator, found: Sequence[Candidate], *, runnable: bool) -> list[Candidate]:
    """These, and those that are faster with pairs, the best first. `runnable`: only where the runtime hides one's
    exchanges behind the other, which is experts' on the CPU."""
    pairs = [pair for each in found for pair in _paired(evaluator, each, runnable=runnable)]
    every = [*found, *pairs]
    return sorted(every, key=lambda each: float(f"{each.simulated_seconds:.8e}")) if pairs else every


def _paired(evaluator: PlanEvaluator, e: Candidate, *, runnable: bool) -> Iterator[Candidate]:
    c, profile = e.configuration, e.model.profile
    runs = not runnable or (profile.expert > 1 and profile.device.startswith("cpu"))
    if not (may_pair(e) and runs) or 2 * c.num_stages * c.batch > MAX_PAIRED_ACTIONS:
        return
    pair = replace(e, configuration=replace(c, overlaps=True), memories=tuple(map(_with_both, e.memories)))
    beside = context_bytes(profile.device)
    if all(each.total + beside <= each.limit for each in pair.memories):
        with suppress(SizesError, ScheduleError):
            pair = evaluator.simulate(pair)
            if pair.simulated_seconds < e.simulated_seconds:
                yield pair


def _with_both(memory: RankMemory) -> RankMemory:
    """With the workspace of a forward and a backward of two stages at once, counted in the stage that needs most."""
    held = memory.bytes_held.copy()
    workspace = held[-1]
    workspace[workspace.argmax()] = sum(sorted(workspace)[-2:])
    return replace(memory, bytes_held=held)


def gain(found: Sequence[Candidate], best: Candidate) -> list[str]:
    """A note on what the pairs of the best gain, if it has some."""
    alone = min((each for each in found if not each.configuration.overlaps), key=lambda each: each.simulated_seconds)
    if not best.configuration.overlaps:
        return []
    seconds = alone.simulated_seconds
    return [
        f"forwards in pairs with backwards: {1 - best.simulated_seconds / seconds:.2%} less than the best of actions "
        f"one after the other, {label(alone)}, {duration(seconds)} a batch; bounds are of those"
    ]
