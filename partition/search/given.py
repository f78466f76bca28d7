"""`evaluate`: what a plan that is given costs, and what its ranks hold, wherever it came from."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import NamedTuple

import numpy as np

from ...schedules.families.registry import FAMILIES, canonical_name, family
from ...schedules.kinds import above_zero, one_of, option
from ...schedules.slice_lengths import slice_seconds
from ..cluster import Cluster
from ..plans.as_text import CHOSEN
from ..plans.plan import Plan
from ..plans.record import PlanStage
from ..profile import Profile
from ..solve.antichains import MAX_CUTS
from ..stage_cost import OFFLOAD, count_again, kind_of
from ..strict import count
from ..topology import Topology
from .evaluate import Ends, MisfitError, PlanEvaluator
from .model import Model
from .plan import SLICED, models_of, norm_seconds
from .result import as_plan, label
from .source import MeasuredProfiles, ProfileSource, as_source
from .space import Configuration


class GivenStage(NamedTuple):
    """A stage of a plan that was made elsewhere.

    Arguments:
        nodes: their names.
        ranks: T neighbours a replica.
        tensor: T.
        recompute: see `PlanStage`.
        optimizer_shards: ranks over which its optimizer's state is divided.
    """

    nodes: Sequence[str]
    ranks: Sequence[int]
    tensor: int = 1
    recompute: str = "none"
    optimizer_shards: int = 1


def evaluate(
    source: Profile | Mapping[int, Profile] | Sequence[Profile] | ProfileSource,
    cluster: Cluster,
    stages: Sequence[GivenStage | PlanStage],
    *,
    num_microbatches: int,
    schedule: str = "1f1b",
    microbatch_size: int | None = None,
    slice_lengths: Sequence[int] = (),
    memory_limit: float | None = None,
) -> Plan:
    """A plan that is given, simulated as the planner's own are, with the memory of its ranks.

    Arguments:
        source, cluster, memory_limit: as of `plan`.
        stages: in order, a `GivenStage` each, or the `stages` of a Plan; those on the same ranks are its chunks.
        num_microbatches: of a batch over all replicas, M.
        microbatch_size: samples of one; None: as the only profile has.
        slice_lengths: tokens of each slice, under a schedule over slices.

    A note says where it exceeds the memory, and by how much. Raises ValueError for stages that do not have all nodes
    once, in an order of the graph; for ranks that the cluster has not, or that two places share; and for sizes that the
    schedule does not take.

    >>> from stagewright.partition import Cluster, Node, Profile
    >>> nodes = [Node(name=n, forward_seconds=1, backward_seconds=2) for n in "abc"]
    >>> stages = [GivenStage(["a", "b"], [0]), GivenStage(["c"], [1])]
    >>> evaluate(Profile(nodes=nodes), Cluster.parse("2:net=1GB/s"), stages, num_microbatches=4).simulated_step_time
    25.0
    """
    source, name = as_source(source, cluster), canonical_name(schedule)
    option("schedule", name, one_of([*(each.name for each in FAMILIES.values() if each.is_planned), *SLICED]))
    count("num_microbatches", num_microbatches)
    size = _size(source, microbatch_size)
    ranks = tuple(dict.fromkeys(tuple(each.ranks) for each in stages))
    _check_ranks(stages, ranks, cluster.num_devices)
    topology = Topology(
        cluster, memory_limit=memory_limit and option("memory_limit", memory_limit, above_zero("bytes above 0"))
    )
    kinds = tuple(dict.fromkeys(each.recompute for each in stages))
    model_of = models_of(source, None, kinds, ("none",), MAX_CUTS)
    tensors = tuple(next(each.tensor for each in stages if tuple(each.ranks) == own) for own in ranks)
    model = model_of(size, min(tensors))
    _refuse_unknown(model.profile, cluster, kinds, name, tuple(slice_lengths))
    c = _configuration(model, ranks, tensors, num_chunks=len(stages) // len(ranks), lengths=tuple(slice_lengths))
    c = replace(c, schedule=name, microbatch_size=size, num_microbatches=num_microbatches)
    if [ranks[p] for p in c.positions] != [tuple(each.ranks) for each in stages]:
        raise ValueError(
            f"ranks of the stages under {name!r}: expected places {list(c.positions)}, one after the other"
        )
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
    except MisfitError as error:
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


def _size(source: ProfileSource, wanted: int | None) -> int:
    sizes = source.sizes if isinstance(source, MeasuredProfiles) else ()
    size = sizes[0] if wanted is None and len(sizes) == 1 else wanted
    if size is None or (sizes and size not in sizes):
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
    """Of these places, before its schedule and sizes are known."""
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


def _refuse_unknown(
    profile: Profile, cluster: Cluster, kinds: Sequence[str], schedule: str, lengths: Sequence[int]
) -> None:
    """ValueError for what nobody knows the cost of, and for slices that do not make a sequence, or run again."""
    if OFFLOAD in kinds and not all(kind.host_bandwidth for kind in cluster.used_kinds):
        raise ValueError(f"recompute={OFFLOAD!r}: expected a cluster with DeviceKind(host_bandwidth=), as 25e9 bytes/s")
    for kind in kinds:
        if kind != OFFLOAD and not all(map(profile.knows, kind_of(kind).split("+"))):
            raise ValueError(f"recompute={kind!r}: the profile has no figures for it: expected 'none', 'full', 'layer'")
    takes = family(schedule).takes_slices
    if takes != bool(lengths) or (takes and (sum(lengths) != profile.sequence_tokens or {*kinds} != {"none"})):
        raise ValueError(
            f"slice_lengths={tuple(lengths)} under {schedule!r}: expected lengths that add up to the profile's "
            f"sequence_tokens={profile.sequence_tokens} and stages of recompute='none' under {', '.join(SLICED)}, "
            f"and none under others"
        )


def _check_ranks(stages: Sequence[GivenStage | PlanStage], ranks: Sequence[Sequence[int]], num_devices: int) -> None:
    every = [rank for own in ranks for rank in own]
    if not stages or not all(ranks) or len({*every}) < len(every) or not {*every} <= {*range(num_devices)}:
        raise ValueError(
            f"ranks of the stages: {list(map(list, ranks))}: expected some of 0 to {num_devices - 1} a place, each once"
        )
    for at, each in enumerate(stages):
        replicas = len(each.ranks) // count(f"tensor of stage {at}", each.tensor)
        if len(each.ranks) % each.tensor:
            raise ValueError(f"stage {at}: {len(each.ranks)} ranks with tensor={each.tensor}: expected a multiple")
        if each.optimizer_shards not in (1, replicas):
            raise ValueError(
                f"stage {at}: optimizer_shards={each.optimizer_shards}: expected 1, or its {replicas} replicas"
            )
        if each.recompute != OFFLOAD:
            count_again(each.recompute)
    if len(stages) % len(ranks):
        raise ValueError(f"{len(stages)} stages on {len(ranks)} places: expected as many on each")


def _ends(model: Model, stages: Sequence[GivenStage | PlanStage]) -> Ends:
    """Cuts of the model between them."""
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
