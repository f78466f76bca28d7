"""Arguments of `plan`, `partition` and `evaluate`, each checked here and returned in the form that a search takes.

ValueError names the argument, what was given and what is expected.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import product
from numbers import Integral
from typing import Any, NamedTuple

import numpy as np

from ...schedules.families.registry import FAMILIES, family
from ..cluster import Cluster
from ..plans.record import OWN, PlanStage
from ..profile import Profile
from ..solve.antichains import MAX_CUTS
from ..solve.dynamic import SCHEDULES as WITH_REPLICAS
from ..stage_cost import OFFLOAD, RECOMPUTE, count_again, kind_of
from ..strict import count, fail, number
from .simulated import MAX_ACTIONS
from .source import MeasuredProfiles, ProfileSource

SCHEDULES = ("1f1b", "interleaved")
SLICED = ("terapipe", "seq1f1b")
PLANNED = (*(name for name, each in FAMILIES.items() if each.is_planned), *SLICED)
LOOPING = tuple(each.name for each in FAMILIES.values() if each.is_planned and each.takes_chunks)
CHUNK_SIZES = tuple(range(2, 9))
SHARDING = ("none", "full")
COST_MODELS = ("default", "pipedream")
MAX_MICROBATCH = 64  # samples, where a source can profile any size


class GivenStage(NamedTuple):
    """A stage of a plan that was made elsewhere.

    Arguments:
        nodes: their names.
        ranks: T neighbours a replica.
        tensor: T.
        recompute: see `PlanStage`.
        optimizer_shards: replicas that divide its optimizer's state, with the members of their contexts.
    """

    nodes: Sequence[str]
    ranks: Sequence[int]
    tensor: int = 1
    recompute: str = "none"
    optimizer_shards: int = 1


Given = GivenStage | PlanStage


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
        figure("activation_compression_ratio", self.activation_compression_ratio, positive=True)
        figure("memory_limit", self.memory_limit, positive=True)
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
        elif schedule is not None and schedule not in WITH_REPLICAS:
            raise ValueError(f"schedule={schedule!r}: expected one of {', '.join((*WITH_REPLICAS, *LOOPING))}")


def figure(what: str, value: float | None, *, positive: bool = False) -> float | None:
    return None if value is None else number(what, value, positive=positive)


def counts(what: str, values: Sequence[int] | None) -> tuple[int, ...] | None:
    if values is None:
        return None
    if not values:
        raise ValueError(f"{what}=(): expected at least one size, or None for all")
    return tuple(dict.fromkeys(count(what, value) for value in values))


def listed(values: Sequence[int] | None) -> str:
    return "None" if values is None else ", ".join(map(str, values))


def choices(what: str, values: Sequence[str], known: Sequence[str]) -> tuple[str, ...]:
    values = (values,) if isinstance(values, str) else tuple(values)
    for value in values:
        if value not in known:
            raise ValueError(f"{what}: {value!r}: expected some of {', '.join(known)}")
    return tuple(each for each in known if each in _names(what, values))


def _names(what: str, values: Sequence[str]) -> tuple[str, ...]:
    if not values:
        raise ValueError(f"{what}=(): expected at least one name")
    return tuple(dict.fromkeys(values))


def schedules_with_chunks(
    wanted: str | Sequence[str], chunk_sizes: Sequence[int]
) -> tuple[tuple[str, Sequence[int]], ...]:
    """Canonical names, each with the numbers of chunks to choose from."""
    asked = [wanted] if isinstance(wanted, str) else wanted
    names = _names("schedules", [family(each, listed=PLANNED).name for each in asked])
    for name in names:
        if not family(name).is_planned and name not in SLICED:
            raise ValueError(
                f"schedules: {name!r}: plans are for stages on one rank each, and for whole sequences or "
                f"slices with whole backwards: expected some of {', '.join(PLANNED)}"
            )
    sizes = counts("chunk_sizes", chunk_sizes) or ()
    if 1 in sizes:
        raise ValueError("chunk_sizes: 1: expected at least 2 (a schedule with one stage a rank is 1f1b)")
    own = [sizes if (each := family(name)).takes_chunks else (each.num_chunks,) for name in names]
    return tuple((name, (1, *some) if name == "seq1f1b" else some) for name, some in zip(names, own, strict=True))


def treatments(asked: Sequence[str] | None, cluster: Cluster) -> tuple[str, ...]:
    """Choices of what to do about memory. ValueError for activations on a host whose link is unknown."""
    knows_link = any(kind.host_bandwidth for kind in cluster.used_kinds)
    if asked is None:
        return (*RECOMPUTE, OFFLOAD) if knows_link else RECOMPUTE
    found = choices("recompute", asked, (*RECOMPUTE, OFFLOAD))
    if OFFLOAD in found and not knows_link:
        raise ValueError(
            f"recompute: {OFFLOAD!r} in a cluster that does not say how fast its devices reach their hosts: expected "
            f"DeviceKind(host_bandwidth=), as 25e9 bytes/s, or some of {', '.join(RECOMPUTE)}"
        )
    return found


def refuse_unknown(profiles: Iterable[Profile], asked: Sequence[str]) -> None:
    """ValueError for treatments that a profile has no figures for."""
    for profile, kind in product(profiles, asked):
        if not profile.knows(kind):
            lacks = next(node for node in profile.nodes if getattr(node, f"{kind}_bytes") is None)
            raise ValueError(
                f"recompute: {kind!r} with a profile whose node {lacks.name!r} has no {kind}_bytes and "
                f"{kind}_seconds: expected a profile with both, or some of none, full, layer"
            )


def tensor_sizes(source: ProfileSource, cluster: Cluster, wanted: Sequence[int] | None) -> tuple[int, ...]:
    known = tuple(source.tensor_sizes(cluster.num_devices))
    sizes = known if wanted is None else tuple(size for size in counts("tensor_sizes", wanted) or () if size in known)
    if not sizes:
        raise ValueError(
            f"tensor_sizes={listed(wanted)}: expected some of {listed(known) or 'the sizes of other profiles'}: what "
            f"profiles and cluster allow, whose innermost links join {cluster.levels[0].size} devices"
        )
    return sizes


def microbatch_sizes(source: ProfileSource, global_batch: int, wanted: Sequence[int] | None) -> tuple[int, ...]:
    """Sizes to try: divisors of the batch that were measured (or, of a formula, up to MAX_MICROBATCH).

    Raises ValueError where there are none.
    """
    known = source.sizes if isinstance(source, MeasuredProfiles) else None
    if wanted is not None:
        sizes = tuple(dict.fromkeys(count("microbatch_sizes", size) for size in wanted))
        missing = [size for size in sizes if known is not None and size not in known]
        if missing:
            raise ValueError(
                f"microbatch_sizes: no profile of {missing[0]} samples: expected some of "
                f"{', '.join(map(str, known or ()))}, or one more profile"
            )
    else:
        sizes = known if known is not None else tuple(range(1, min(global_batch, MAX_MICROBATCH) + 1))
    fitting = tuple(sorted(size for size in sizes if global_batch % size == 0))
    if not fitting:
        least = min(sizes, default=1)
        raise ValueError(
            f"global_batch={global_batch} is no multiple of any microbatch size ({', '.join(map(str, sizes))}): "
            f"expected one such as {max(1, round(global_batch / least)) * least}, or a profile of another size"
        )
    return fitting


def refuse_endless(what: str, value: int, schedules: Iterable[str], num_devices: int, *, largest: int = 1) -> None:
    """ValueError for a batch that none of these schedules can be simulated over, whole or by a short one."""
    most, families = MAX_ACTIONS // 2 * num_devices * largest, map(family, schedules)
    if value > most and all(each.full_after is None or each.rule.is_asynchronous for each in families):
        raise ValueError(
            f"{what}={value}: expected at most {most:,} on {num_devices} devices in microbatches of up to {largest}; a "
            f"batch of more than {MAX_ACTIONS:,} actions is too long to simulate"
        )


def refuse_given(
    profile: Profile, cluster: Cluster, kinds: Sequence[str], schedule: str, lengths: Sequence[int]
) -> None:
    """ValueError for treatments of unknown cost, and for slices that do not make a sequence, or run again."""
    if not isinstance(lengths, list | tuple):
        fail("slice_lengths", lengths, "a list of whole numbers")
    lengths = tuple(count("slice_lengths", each) for each in lengths)
    if OFFLOAD in kinds and not all(kind.host_bandwidth for kind in cluster.used_kinds):
        raise ValueError(f"recompute={OFFLOAD!r}: expected a cluster with DeviceKind(host_bandwidth=), as 25e9 bytes/s")
    for kind in kinds:
        if kind != OFFLOAD and not profile.knows(kind_of(kind)):
            raise ValueError(f"recompute={kind!r}: the profile has no figures for it: expected 'none', 'full', 'layer'")
    takes = schedule != OWN and family(schedule).takes_slices
    if takes and profile.context > 1:
        fail(f"schedule={schedule!r} with context", profile.context, "1: a slice's keys and values come from all parts")
    if takes != bool(lengths) or (takes and (sum(lengths) != profile.sequence_tokens or {*kinds} != {"none"})):
        raise ValueError(
            f"slice_lengths={lengths} under {schedule!r}: expected lengths that add up to the profile's "
            f"sequence_tokens={profile.sequence_tokens} and stages of recompute='none' under {', '.join(SLICED)}, "
            f"and none under others"
        )


def places_of(stages: object) -> tuple[tuple[int, ...], ...]:
    """Ranks of each place; ValueError for non-stages, and for ranks that are no whole numbers."""
    every: Any = stages if isinstance(stages, list | tuple) else [stages]
    for at, each in enumerate(every):
        if not isinstance(each, GivenStage | PlanStage):
            fail("stages", each, "a GivenStage(nodes, ranks) each, or the `stages` of a Plan")
        numbers = isinstance(each.ranks, Sequence | np.ndarray) and all(
            isinstance(rank, Integral) for rank in each.ranks
        )
        if not numbers or any(isinstance(rank, bool) for rank in each.ranks):
            fail(f"ranks of stage {at}", each.ranks, "a list of whole numbers")
    return tuple(dict.fromkeys(tuple(each.ranks) for each in every))


def check_ranks(stages: Sequence[Given], ranks: Sequence[Sequence[int]], num_devices: int) -> None:
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
        if each.tensor != next(other.tensor for other in stages if tuple(other.ranks) == tuple(each.ranks)):
            raise ValueError(f"stage {at}: tensor={each.tensor}: expected that of the other stages on its ranks")
        if each.recompute != OFFLOAD:
            count_again(each.recompute)
