"""`evaluate`: what a plan that is given costs, and what its ranks hold, wherever it came from."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from typing import Any, NamedTuple

import numpy as np

from ...schedules.families.registry import family
from ...schedules.ir import Schedule
from ...schedules.kinds import above_zero, one_of, option
from ...schedules.slice_lengths import slice_seconds
from ...schedules.transform import on_ranks, replicate
from ..cluster import Cluster
from ..plans.as_text import CHOSEN
from ..plans.plan import Plan
from ..plans.record import OWN
from ..profile import Node, Profile
from ..solve.antichains import MAX_CUTS
from ..stage_cost import OFFLOAD
from ..strict import count, fail
from ..topology import Topology
from .arguments import PLANNED, Given, check_ranks, places_of, refuse_given
from .evaluate import DoesNotFitError, Ends, PlanEvaluator
from .model import Model
from .plan import models_of, norm_seconds
from .result import as_plan, label
from .source import MeasuredProfiles, ProfileSource, as_source, difference
from .space import Configuration

Source = Profile | Mapping[int, Profile] | Sequence[Profile] | ProfileSource


class KindProfiles(NamedTuple):
    """Profiles of a plan's stages, each node's of the devices and over the tensor ranks that run it, for any size
    asked for; of several kinds the longest seconds.

    Arguments:
        sources: by kind of device.
        stages: (names of nodes, kinds, tensor groups) of each.
    """

    sources: Mapping[str, ProfileSource]
    stages: Sequence[tuple[Sequence[str], Sequence[str], Sequence[Sequence[int]]]]

    def profile(self, *, microbatch_size: int, tensor: int) -> Profile:
        found, nodes = list[Profile](), dict[str, Node]()
        for names, kinds, groups in self.stages:
            every = [self._of(kind, microbatch_size, groups) for kind in kinds]
            for kind, each in zip(kinds, every, strict=True):
                for other in {other.tensor: other for other in found}.values():
                    if (differs := difference(other, replace(each, device=other.device))) is not None:
                        raise ValueError(f"profile of {kind!r}: {differs}: expected profiles of one model")
                found.append(each)
            by_name = [{node.name: node for node in each.nodes} for each in every]
            nodes |= {name: _slowest([each[name] for each in by_name]) for name in names if name in by_name[0]}
        most: Any = {name: max(getattr(each, name) for each in found) for name in ("action_seconds", "around_seconds")}
        return replace(found[0], nodes=tuple(nodes.get(node.name, node) for node in found[0].nodes), **most)

    def _of(self, kind: str, size: int, groups: Sequence[Sequence[int]]) -> Profile:
        source = self.sources[kind]
        if isinstance(source, MeasuredProfiles):
            source = source.decided(chooses=source.chooses is not False, groups=groups)
        return source.profile(microbatch_size=size, tensor=len(groups[0])).typical()

    def tensor_sizes(self, limit: int) -> Sequence[int]:
        return next(iter(self.sources.values())).tensor_sizes(limit)


def _slowest(nodes: Sequence[Node]) -> Node:
    """The first with the longest seconds of all; with none where one lacks what others know: of I and W, or of a
    treatment."""
    found: dict[str, Any] = {}
    for name in (name for name in Node.__dataclass_fields__ if name.endswith("_seconds")):
        every = [getattr(node, name) for node in nodes]
        found[name] = None if None in every else max(every) if all(every) or "grad" not in name else 0.0
        if found[name] is None:
            found[name.replace("_seconds", "_bytes")] = None
    return replace(nodes[0], **found)


def _of_kinds(source: Source | Mapping[str, Source], cluster: Cluster, stages: Sequence[Given]) -> ProfileSource:
    """Source of what each stage's own devices take, where these have profiles or links of their own."""
    kinds = [kind.name for kind in cluster.used_kinds]
    given: Any = source
    if not (isinstance(given, Mapping) and any(isinstance(key, str) for key in given)):
        if not cluster.node_links:
            return as_source(given, cluster)
        given = dict.fromkeys(kinds, given)
    if lacking := sorted({*kinds} - {*given}):
        raise ValueError(f"profiles of the kinds {', '.join(map(str, given))}: expected one of {lacking[0]!r}, too")
    if unknown := sorted({*map(str, given)} - {kind.name for kind in cluster.kinds}):
        raise ValueError(f"a profile of {unknown[0]!r}: expected those of the cluster's kinds, {', '.join(kinds)}")
    size, nodes = cluster.levels[0].size, cluster.nodes or ()
    return KindProfiles(
        {kind: as_source(given[kind], cluster) for kind in kinds},
        [
            (
                each.nodes,
                list(dict.fromkeys(nodes[rank // size] for rank in each.ranks)),
                [each.ranks[at : at + each.tensor] for at in range(0, len(each.ranks), each.tensor)],
            )
            for each in stages
        ],
    )


def evaluate(
    source: Source | Mapping[str, Source],
    cluster: Cluster,
    stages: Sequence[Given],
    *,
    num_microbatches: int,
    schedule: str | Schedule = "1f1b",
    microbatch_size: int | None = None,
    slice_lengths: Sequence[int] = (),
    memory_limit: float | None = None,
) -> Plan:
    """A plan that is given, simulated as the planner's own are, with the memory of its ranks.

    Arguments:
        source, cluster, memory_limit: as of `plan`; or by name of each kind of device a source of its own; the
            kind's `speed` still counts.
        stages: in order, a `GivenStage` each, or the `stages` of a Plan; those on the same ranks are its chunks.
        num_microbatches: of a batch over all replicas, M.
        schedule: a name, or that of a plan with an order of its own (`Plan.build_schedule`), over equal replicas.
        microbatch_size: samples of one; None: as the only profile has.
        slice_lengths: tokens of each slice, under a schedule over slices.

    A note says where it exceeds the memory, and by how much. Raises ValueError for stages that do not have all nodes
    once, in an order of the graph; for ranks that the cluster has not, or that two places share; and for sizes that the
    schedule does not take.

    >>> from stagewright.partition import Cluster, GivenStage, Node, Profile
    >>> nodes = [Node(name=n, forward_seconds=1, backward_seconds=2) for n in "abc"]
    >>> stages = [GivenStage(["a", "b"], [0]), GivenStage(["c"], [1])]
    >>> evaluate(Profile(nodes=nodes), Cluster.parse("2:net=1GB/s"), stages, num_microbatches=4).simulated_step_time
    25.0
    """
    name = OWN if isinstance(schedule, Schedule) else _planned(schedule)
    num_microbatches = count("num_microbatches", num_microbatches)
    ranks = places_of(stages)
    check_ranks(stages, ranks, cluster.num_devices)
    source = _of_kinds(source, cluster, stages)
    size = _size(source, microbatch_size)
    if memory_limit is not None:
        option("memory_limit", memory_limit, above_zero("bytes above 0"))
    topology = Topology(cluster, memory_limit=memory_limit)
    kinds = tuple(dict.fromkeys(each.recompute for each in stages))
    model_of = models_of(source, None, kinds, ("none",), MAX_CUTS)
    tensors = tuple(next(each.tensor for each in stages if tuple(each.ranks) == own) for own in ranks)
    model = model_of(size, min(tensors))
    refuse_given(model.profile, cluster, kinds, name, slice_lengths)
    c = _configuration(model, ranks, tensors, num_chunks=len(stages) // len(ranks), lengths=tuple(slice_lengths))
    c = replace(c, schedule=name, microbatch_size=size, num_microbatches=num_microbatches)
    c = _over_places(c, schedule, [tuple(each.ranks) for each in stages])
    one = source.profile(microbatch_size=size, tensor=min(tensors))
    evaluator = PlanEvaluator(topology, model_of, norm=norm_seconds(None, one, topology))
    found = evaluator.given(
        c,
        _ends(model, stages),
        recompute=[each.recompute for each in stages],
        shards=[each.optimizer_shards for each in stages],
    )
    try:
        found = evaluator.simulate(found)
    except DoesNotFitError as error:
        raise ValueError(
            f"{OFFLOAD!r}: on stage {error.stage_group} {error}: the link to the host is too slow"
        ) from None
    over = [(p, memory.too_many) for p, memory in enumerate(found.memories) if memory.too_many]
    return as_plan(
        [found],
        topology,
        order=range(cluster.num_devices // cluster.levels[0].size),
        bound=evaluator.work_of_all(c) / topology.total_speed,
        says_size=one.microbatch_size is not None,
        num_runners_up=0,
        notes=[
            f"{CHOSEN}{label(found)}",
            *model.notes,
            *(f"on rank {ranks[p][0]} it takes {most:,.0f} bytes more than there are" for p, most in over),
        ],
    )


def _over_places(c: Configuration, schedule: str | Schedule, owners: Sequence[tuple[int, ...]]) -> Configuration:
    """The configuration under a schedule, if need be of its own: that of the first of equal replicas. Raises ValueError
    where it has other microbatches, stages on other ranks than these, or another order on another replica."""
    if isinstance(schedule, str):
        if len(owners) % c.pipeline:
            raise ValueError(f"{len(owners)} stages on {c.pipeline} places: expected as many on each")
        if [c.stage_ranks[p] for p in c.positions] != owners:
            raise ValueError(
                f"ranks of the stages under {c.schedule!r}: expected places {list(c.positions)}, one after the other"
            )
        return c
    data, groups = c.counts[0], [rank // c.tensor for own in c.stage_ranks for rank in sorted(own)[:: c.tensor]]
    with suppress(ValueError):
        rows = [first for first, *_ in dict.fromkeys(schedule.owners)]  # of the first replica
        own = Schedule(
            name=schedule.name,
            placement=tuple(schedule.placement[row] for row in rows),
            programs=tuple(tuple(a._replace(index=a.index // data) for a in schedule.programs[row]) for row in rows),
            num_microbatches=c.batch // data,
        )
        if on_ranks(replicate(own, data), groups, num_ranks=schedule.num_ranks) == schedule:
            return replace(c, own=own, num_chunks=max(map(len, own.placement)))
    raise ValueError(
        f"schedule={schedule!r}, of {schedule.num_microbatches} microbatches, whose stages run on "
        f"{list(map(list, schedule.owners))}: expected {c.batch} microbatches, whole, of one batch, and the ranks "
        f"of the stages, {list(map(list, owners))}, in one order on all replicas, as of Plan.build_schedule()"
    )


def _planned(schedule: str) -> str:
    """Full name of a schedule. Raises ValueError for one whose plans cannot be evaluated."""
    if schedule == OWN:
        fail("schedule", OWN, "the schedule itself, plan.build_schedule() of a plan with an order of its own")
    name = family(schedule, listed=PLANNED).name
    if not family(name).is_planned:
        option("schedule", name, one_of(PLANNED))
    return name


def _size(source: ProfileSource, wanted: int | None) -> int:
    if isinstance(source, KindProfiles):
        every = {_size(each, wanted) for each in source.sources.values()}
        if len(every) > 1:
            fail("microbatch sizes of the kinds' profiles", sorted(every), "one of the same size a kind")
        return every.pop()
    sizes = source.sizes if isinstance(source, MeasuredProfiles) else ()
    size = sizes[0] if wanted is None and len(sizes) == 1 else wanted
    if size is None or isinstance(size, bool | float) or (sizes and size not in sizes):
        known = ", ".join(map(str, sizes)) or "any"
        raise ValueError(f"microbatch_size={size!r}: expected one of the profiles' sizes, {known}")
    return size


def _configuration(
    model: Model,
    ranks: tuple[tuple[int, ...], ...],
    tensors: tuple[int, ...],
    *,
    num_chunks: int,
    lengths: tuple[int, ...],
) -> Configuration:
    """The configuration on these places, before its schedule and sizes are known."""
    seconds = slice_seconds(lengths, model.profile.slice_cost) if lengths else []
    return Configuration(
        pipeline=len(ranks),
        data=min(len(own) // tensor for own, tensor in zip(ranks, tensors, strict=True)),
        tensor=max(tensors),
        schedule="1f1b",
        num_chunks=num_chunks,
        microbatch_size=1,
        num_microbatches=None,
        ranks=ranks,
        sizes=tensors if len({*tensors}) > 1 else None,
        lengths=lengths,
        shares=tuple(each / (sum(seconds) or 1.0) for each in seconds),
    )


def _ends(model: Model, stages: Sequence[Given]) -> Ends:
    """The cuts of the model after each of the given stages, from cut 0 on."""
    names = [node.name for node in model.profile.nodes]
    every = sorted(name for each in stages for name in each.nodes)
    if every != sorted(names):
        wrong = sorted({*every} ^ {*names}) or [name for name in names if every.count(name) > 1]
        raise ValueError(f"nodes of the stages: {wrong[:5]}: expected each node of the profile once")
    found, each = [0], set[str]()
    for number, stage in enumerate(stages):
        each |= {*stage.nodes}
        same = np.flatnonzero((model.cuts.members == [name in each for name in names]).all(axis=1))
        if not len(same):
            raise ValueError(f"stage {number} ends where the graph has no cut: expected all that its nodes need before")
        found.append(int(same[0]))
    return tuple(found)
