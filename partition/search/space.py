"""Configurations that a planner may choose from: sizes of the three parallelisms, microbatches, schedules, chunks.

rank = (p D + d) T + t        tensor ranks t < T are neighbours, then data replicas d < D, then pipeline p < P
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate, permutations, product

from ...schedules.families.family import Family
from ...schedules.families.registry import family
from ...schedules.ir import Schedule
from ...schedules.placement import chunk_of_stages
from ..plans.record import JOINT, ORDERED, OWN
from ..solve.orders import own_ranks

_OWN = Family(name=OWN, build=Schedule, splits_backward=True)
MIXED_SIZES = 8  # devices up to which tensor sizes of stages are mixed in every way
ALL_SIZES = 64  # devices up to which plans that leave more than an eighth of them idle are always looked at, too


@dataclass(frozen=True, slots=True, kw_only=True)
class Configuration:
    """All that is decided before the cuts.

    Arguments:
        pipeline, data, tensor: P, D, T.
        schedule: canonical name, or OWN.
        num_chunks: V; of a schedule of its own the most of any place.
        microbatch_size: samples in one; 1 where a profile does not say what it ran.
        num_microbatches: of a batch over all replicas, M; None: open, each replica updates with each microbatch.
        ranks: of each of P stages, where these are not D T in a row each (unequal replicas, unequal nodes moved).
        by_replica: without `ranks`, each replica's P T ranks are in a row, in place of each stage's.
        sizes: T of each of P stages, where these differ, on neighbours in a row; `tensor` is the largest then, and D 1.
        lengths: tokens of each slice of a microbatch; none: it passes whole.
        shares: of each slice, its part of a microbatch's seconds.
        overlaps: whether forwards run together with the backwards directly after them (`with_overlap`).
        own: an order made for the costs of its cuts, of one pipeline; under OWN, where no family has its stages, these
            are on places in the order of their first stages.
    """

    pipeline: int
    data: int
    tensor: int
    schedule: str
    num_chunks: int
    microbatch_size: int
    num_microbatches: int | None
    ranks: tuple[tuple[int, ...], ...] | None = None
    by_replica: bool = False
    sizes: tuple[int, ...] | None = None
    lengths: tuple[int, ...] = ()
    shares: tuple[float, ...] = ()
    overlaps: bool = False
    own: Schedule | None = None

    @property
    def family(self) -> Family:
        return _OWN if self.schedule == OWN else family(self.schedule)

    @property
    def parts(self) -> tuple[float, ...]:
        """Each slice's part of a microbatch's bytes."""
        return tuple(tokens / sum(self.lengths) for tokens in self.lengths)

    @property
    def least_slice(self) -> float:
        """Part of a microbatch's seconds, and of its bytes, that each slice has at least."""
        return min((*self.shares, *self.parts), default=1.0)

    @property
    def tensors(self) -> tuple[int, ...]:
        """[P] T of each place."""
        return self.sizes or (self.tensor,) * self.pipeline

    @property
    def num_stages(self) -> int:
        return self.pipeline * self.num_chunks if self.own is None else self.own.num_stages

    @property
    def positions(self) -> tuple[int, ...]:
        """[S] which of the P places each stage has."""
        if self.own is not None:
            return tuple(rank for (rank,) in self.own.owners)
        return family(self.schedule).rank_of_stages(num_ranks=self.pipeline, num_chunks=self.num_chunks)

    @property
    def chunks(self) -> tuple[int, ...]:
        """[S] which of its place's stages each is."""
        return chunk_of_stages(self.positions)

    @property
    def num_devices(self) -> int:
        if self.ranks is not None:
            return sum(map(len, self.ranks))
        return sum(self.tensors) * self.data

    @property
    def counts(self) -> tuple[int, ...]:
        if self.ranks is None:
            return (self.data,) * self.pipeline
        return tuple(len(ranks) // size for ranks, size in zip(self.ranks, self.tensors, strict=True))

    def message_tensor(self, p: int) -> int:
        """The fewest tensor ranks over which a message of place p is divided."""
        return min(self.tensors[max(0, p - 1) : p + 2])

    def num_messages(self, p: int) -> float:
        """Messages of a batch that come to a rank of place p from one side, at most."""
        M = self.num_microbatches
        return math.inf if M is None else -(-M // self.counts[p]) * self.num_chunks

    @property
    def is_equal(self) -> bool:
        """True where all stages have D replicas, of which one is simulated for all: the one with the most microbatches.
        Where they have different numbers, under a flush alone."""
        replicas, *others = set(self.counts)
        known = self.family
        may_differ = known.takes_replicas and not known.rule.is_asynchronous and replicas < self.batch
        return not others and (self.batch % replicas == 0 or may_differ)

    @property
    def batch(self) -> int:
        assert self.num_microbatches is not None
        return self.num_microbatches

    @property
    def stage_ranks(self) -> tuple[Sequence[int], ...]:
        """[P] ranks of each stage of the first chunk: ranges where nothing else was said."""
        if self.ranks is not None:
            return self.ranks
        if self.by_replica:
            t, row = self.tensor, self.pipeline * self.tensor
            firsts = [range(begin, self.data * row, row) for begin in range(0, row, t)]
            return tuple(own if t == 1 else tuple(at + rank for at in own for rank in range(t)) for own in firsts)
        ends = [*accumulate(size * self.data for size in self.tensors)]
        return tuple(range(end - size * self.data, end) for end, size in zip(ends, self.tensors, strict=True))

    @property
    def key(self) -> tuple[object, ...]:
        """The order of configurations that are otherwise equal: the simplest first."""
        counts = () if self.ranks is None else self.counts
        sizes = (self.tensor, self.pipeline, self.num_chunks, -self.microbatch_size)
        rows = (self.by_replica, self.ranks or ())
        return (self.num_devices, *sizes, self.schedule, counts, rows, self.sizes or (), self.lengths)

    def label(self, *, context: int = 1, expert: int = 1) -> str:
        """For people; `context` and `expert` are those of its profile.

        >>> Configuration(pipeline=4, data=2, tensor=4, schedule="interleaved", num_chunks=2, microbatch_size=2,
        ...               num_microbatches=16).label(context=2)
        'pipe 4 x data 2 x context 2 x tensor 2, interleaved V=2, microbatch 2'
        """
        counts = self.counts
        parts = [f"pipe {self.pipeline}"]
        if len(set(counts)) > 1:
            parts = [f"stages on {'-'.join(map(str, counts))}"]
        elif counts[0] > 1:
            parts.append(f"data {counts[0]}")
        parts += [f"context {context}"] if context > 1 else []
        if self.tensor > context:
            parts.append(f"tensor {'-'.join(str(size // context) for size in self.sizes or (self.tensor,))}")
        parts += [f"experts over {expert}"] if expert > 1 else []
        schedule = self.schedule + (f" V={self.num_chunks}" if self.num_chunks > 1 else "")
        if self.own is not None:
            is_joint = self.schedule == OWN
            schedule = f"{JOINT}, {self.num_stages} stages" if is_joint else f"{schedule}, {ORDERED}"
        schedule += f", slices of {'-'.join(map(str, self.lengths))} tokens" if self.lengths else ""
        schedule += " in pairs" if self.overlaps else ""
        return ", ".join([" x ".join(parts), schedule, f"microbatch {self.microbatch_size}"])


@dataclass(frozen=True, slots=True, kw_only=True)
class Runs:
    """Whether a configuration can be carried out on these devices, as `plans.as_schedule` does, and, where it is to be
    `runnable`, the runtime: there groups of T divide the devices, streams leave none idle, and sequences or experts
    are divided over equal replicas. `context` and `expert` are those of the profiles."""

    num_devices: int
    order: Sequence[int]
    node_size: int
    runnable: bool
    context: int = 1
    expert: int = 1

    def __call__(self, c: Configuration) -> bool:
        if any(count % self.expert for count in c.counts):
            return False
        if self.runnable and self.context * self.expert > 1:
            is_whole = c.num_devices == self.num_devices and list(self.order) == sorted(self.order)
            is_even = c.ranks is None and c.sizes is None and not c.batch % c.data
            return is_whole and is_even  # T is a multiple of the context
        if c.sizes is not None:  # in a row, each within the innermost links
            return all(ranks[0] // self.node_size == ranks[-1] // self.node_size for ranks in c.stage_ranks)
        idle = c.num_devices < self.num_devices and c.family.rule.is_asynchronous
        if self.runnable and (idle or self.num_devices % c.tensor):
            return False
        if self.node_size % c.tensor == 0 or (c.ranks is None and list(self.order) == sorted(self.order)):
            return True
        ranks = [rank for own in c.stage_ranks for rank in own_ranks(self.order, self.node_size, own)]
        rows = (ranks[begin : begin + c.tensor] for begin in range(0, len(ranks), c.tensor))
        return all(row[0] % c.tensor == 0 and row == list(range(row[0], row[0] + c.tensor)) for row in rows)


@dataclass(frozen=True, slots=True, kw_only=True)
class SearchSpace:
    """The axes: `configurations` is their product, less what does not fit together; sizes of None are all that fit.

    With `all_layouts` those as well that leave more than an eighth of more than ALL_SIZES devices idle; with
    `mixed_sizes` those whose stages have tensor sizes of their own: under a flush, a stage a rank, without replicas.
    `slicings`: those of a configuration under a schedule over slices.
    """

    num_devices: int
    global_batch: int
    schedules: Sequence[tuple[str, Sequence[int]]]
    microbatch_sizes: Sequence[int]
    tensor_sizes: Sequence[int]
    pipeline_sizes: Sequence[int] | None = None
    data_sizes: Sequence[int] | None = None
    max_stages: int
    slicings: Callable[[Configuration], Iterable[Configuration]] = lambda whole: ()
    all_layouts: bool = False
    mixed_sizes: bool = True

    def configurations(self) -> Iterator[Configuration]:
        """Configurations with equal replicas: D T P devices; where D does not divide M, some have one more."""
        for tensor in self.tensor_sizes:
            for size in self.microbatch_sizes:
                if self.global_batch % size:
                    continue
                for data, pipeline in self._layouts(self.global_batch // size, tensor):
                    yield from self._of_layout(pipeline, data, tensor, size)
        unequal = list(self._unequal_sizes()) if self.mixed_sizes else []
        for size, (schedule, chunk_sizes) in product(self.microbatch_sizes, self.schedules):
            is_flushed = not family(schedule).rule.is_asynchronous and not family(schedule).takes_slices
            if self.global_batch % size or 1 not in (self.data_sizes or (1,)) or tuple(chunk_sizes) != (1,):
                continue
            for sizes in unequal if is_flushed else ():
                yield Configuration(
                    pipeline=len(sizes),
                    data=1,
                    tensor=max(sizes),
                    schedule=schedule,
                    num_chunks=1,
                    microbatch_size=size,
                    num_microbatches=self.global_batch // size,
                    sizes=sizes,
                )

    def _unequal_sizes(self) -> Iterator[tuple[int, ...]]:
        """Tensor sizes of stages that together take all devices; of many devices two sizes, all stages of one first."""
        most = min(self.max_stages, self.num_devices)
        allowed = [pipeline for pipeline in self.pipeline_sizes or range(2, most + 1) if pipeline <= most]
        if self.num_devices <= MIXED_SIZES:
            for pipeline in allowed:
                for sizes in product(self.tensor_sizes, repeat=pipeline):
                    if sum(sizes) == self.num_devices and len({*sizes}) > 1:
                        yield sizes
            return
        for one, other in permutations(self.tensor_sizes, 2):
            for number in range(1, self.num_devices // one + 1):
                rest, over = divmod(self.num_devices - number * one, other)
                if rest and not over and number + rest in allowed:
                    yield (one,) * number + (other,) * rest

    def _layouts(self, num_microbatches: int, tensor: int) -> Iterator[tuple[int, int]]:
        """(D, P); without tensor ranks with D a divisor of M, else the dynamic program finds them. On many devices, of
        all D that leave the busiest replica as many microbatches, the least and divisors of M."""
        room, is_large = self.num_devices // tensor, self.num_devices > ALL_SIZES
        skips_few = is_large and self.pipeline_sizes is None and not self.all_layouts
        for data in range(1, min(num_microbatches, room) + 1) if self.data_sizes is None else self.data_sizes:
            if data > room or (tensor == 1 and num_microbatches % data):
                continue
            longest = min(room // data, self.max_stages)
            for pipeline in range(1, longest + 1) if self.pipeline_sizes is None else self.pipeline_sizes:
                few = (7 * room - 1) // (8 * pipeline) if skips_few else 0  # replicas: more than an eighth is idle
                is_least = data - 1 <= few or -(-num_microbatches // (data - 1)) > -(-num_microbatches // data)
                is_least |= not is_large or self.data_sizes is not None or num_microbatches % data == 0
                if pipeline <= longest and data > few and is_least:
                    yield data, pipeline

    def _of_layout(self, pipeline: int, data: int, tensor: int, size: int) -> Iterator[Configuration]:
        for schedule, chunk_sizes in self.schedules:
            for num_chunks in chunk_sizes:
                if num_chunks > 1 and pipeline == 1 and (data == 1 or not family(schedule).takes_chunks):
                    continue  # chunks of one rank follow each other; with replicas sums overlap with the next one's
                if num_chunks * pipeline > self.max_stages:
                    continue
                if self.global_batch // size % data and schedule != "1f1b":
                    continue  # of no other one have replicas different numbers of microbatches
                whole = Configuration(
                    pipeline=pipeline,
                    data=data,
                    tensor=tensor,
                    schedule=schedule,
                    num_chunks=num_chunks,
                    microbatch_size=size,
                    num_microbatches=self.global_batch // size,
                )
                sliced = family(schedule).takes_slices
                yield from (whole,) if not sliced else self.slicings(whole) if tensor == 1 else ()
