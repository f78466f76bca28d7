"""Memory of a rank over time, by data structure: the one place that says so, for `partition()` and `plan()` alike.

    parameters     W versions
    gradients      W, once a backward has left some, or (after the batch) where that is more than all that ran
    optimizer      W ratio, or a share of it where it is divided over the replicas
    buffers        of the nodes
    activations    of every microbatch in flight what is kept from F to B; of one what is made again (`stage_cost`)
    workspace      of the node that needs most, and the gradients of the stage's output and input
    communication  receives posted ahead, sends not yet known to be received, between ranks; after a stage's last
                   backward of the batch a bucket of small gradients being summed, and where the optimizer is divided,
                   the parts of other ranks, of gradients and then of weights; in a stream always the gradients that
                   replicas send each other

`InFlightCounts` are counted in the schedule's own programs: how much of which is there, whenever that may be most.
`recompute` weighs them under each treatment of the memory, and chooses one. `stage_bytes` gives the same figures of one
stage each, of which `memory_curves` makes memory over time. `bytes_by_in_flight` is the closed form for stages between
any two cuts, elementwise, never less: with it the dynamic programs know what does not fit.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Callable, Sequence
from dataclasses import astuple, dataclass, fields, replace

import numpy as np

from ..schedules.families.registry import family
from ..schedules.families.warmup import ChunkOrder
from ..schedules.ir import BACKWARD_OPS, LAST_USES, MOVE_OPS, Action, Op, Schedule
from ..schedules.liveness import activation_counts, activations
from ..schedules.messages import AHEAD_BYTES, BUCKET_BYTES, RECEIVES_AHEAD
from ..schedules.placement import chunk_of_stages
from ..schedules.timing.memory import StageBytes
from ..schedules.timing.timeline import Timeline
from ..schedules.versions import derive_versions
from .stage_cost import Figures, StageSums
from .strict import check_figures
from .topology import Floats, Indices

GRADIENTS_SENT = 2  # that are not yet known to be received, at most
_PARTS = 1 << 20  # of a microbatch, in which slices are counted
_FEW = 256  # moments that are compared all with all
_GPUS = ("cuda", "nvidia", "tesla", "geforce", "a100", "a10", "h100", "h200", "b200", "v100", "p100", "l4", "t4")
_CUDA_CONTEXT = 300e6  # at least, with PyTorch's kernels: github.com/pytorch/pytorch issues 107667 and 28113


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryUse:
    """Bytes on one device at the peak of the schedule.

    Arguments:
        parameters: all weight versions.
        gradients: one set.
        optimizer: state, such as Adam's two averages.
        buffers: of the model, such as BatchNorm's statistics.
        activations: kept from F to B, of all microbatches in flight.
        workspace: that F or B needs for itself while it runs.
        communication: messages that were received ahead of their use, or are not yet sent.

    Raises ValueError for anything but finite numbers of at least 0.

    >>> (MemoryUse(parameters=4, gradients=4) + MemoryUse(activations=2)).total
    10.0
    """

    parameters: float = 0.0
    gradients: float = 0.0
    optimizer: float = 0.0
    buffers: float = 0.0
    activations: float = 0.0
    workspace: float = 0.0
    communication: float = 0.0

    def __post_init__(self) -> None:
        check_figures(self, "memory")

    @property
    def total(self) -> float:
        """All of it [bytes]."""
        return float(sum(astuple(self)))

    def __add__(self, other: MemoryUse) -> MemoryUse:
        """Both on one device; they do not need their workspace at once."""
        added = {field.name: getattr(self, field.name) + getattr(other, field.name) for field in fields(self)}
        return MemoryUse(**{**added, "workspace": max(self.workspace, other.workspace)})


def context_bytes(device: str) -> float:
    """Least bytes that a device holds besides its tensors, of which no plan can use one; 0 on a CPU and for a name that
    says nothing.

    >>> context_bytes("A100-80GB"), context_bytes("cpu"), context_bytes("device")
    (300000000.0, 0.0, 0.0)
    """
    name = device.lower()
    return _CUDA_CONTEXT if not name.startswith("cpu") and any(word in name for word in _GPUS) else 0.0


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class InFlightCounts:
    """Counts of all that one rank with V stages holds at every moment at which it may hold most."""

    # [moments, 4 V], of each stage: microbatches between F and the end of B (or W); 1 where a backward has left
    # gradients by then; 1 where these may be on their way to other replicas, after its last backward; 1 while its own
    # backward runs, which makes anew what is recomputed. Those without a backward come first.
    counts: Floats
    num_forwards: int  # how many these are
    versions: int  # of the weights

    @property
    def microbatches(self) -> Floats:
        """[forwards, V] microbatches between F and the end of B, while no backward runs."""
        return self.counts[: self.num_forwards, : self.counts.shape[1] // 4]


def count_in_flight(schedule: Schedule, parts: Sequence[float] = ()) -> tuple[InFlightCounts, ...]:
    """[P] what each rank holds while it runs its program, in O(actions). `parts`: the part of a microbatch that each of
    its slices holds; empty: there are no slices."""
    versions = derive_versions(schedule).peak_live if schedule.is_asynchronous else (1,) * schedule.num_ranks
    streams, known, found = schedule.is_asynchronous, dict[object, InFlightCounts](), []
    for program, stages, version in zip(schedule.programs, schedule.placement, versions, strict=True):
        # Replicas run the same actions of other microbatches, which all take as much.
        alike = program if parts or streams else tuple((stage, op) for stage, op, _ in program)
        key = alike, tuple(stages), version
        if key not in known:
            known[key] = _in_flight_of_program(program, stages, version, parts, streams=streams)
        found.append(known[key])
    return tuple(found)


def count_over_time(timeline: Timeline) -> tuple[InFlightCounts, ...]:
    """[P] `count_in_flight` of a simulated step: an activation that is offloaded counts until its transfer has ended,
    together with what is loaded again by then."""
    programs = []
    for trace, program in zip(timeline.ranks, timeline.schedule.programs, strict=True):
        spans = {span.what: span for span in (*trace.compute, *trace.moves)}
        steps = [action for action in program if action.op is not Op.OFFLOAD]
        starts = [spans[action].start for action in steps]
        gone: dict[int, list[Action]] = {}
        for span in spans.values():
            if span.what.op is Op.OFFLOAD:
                gone.setdefault(bisect_left(starts, span.end), []).append(span.what)
        programs.append(tuple(each for at, own in enumerate(steps) for each in (*gone.get(at, ()), own)))
    return count_in_flight(replace(timeline.schedule, programs=tuple(programs), overlapped=()))


def steady_in_flight(schedule: str, counts: Sequence[int], num_microbatches: int | None) -> tuple[InFlightCounts, ...]:
    """The closed form by stage, for stages of so many replicas, in the steady state: never less than what is counted.
    Stage s holds ceil(D_s + .. + D_P-1 / D_s) microbatches, and under a flush no more than its share of the batch."""
    found, rule = [], family(schedule).rule
    for at, count in enumerate(counts):
        depth = -(-sum(counts[at:]) // count)
        if not (rule.is_asynchronous or num_microbatches is None):
            depth = min(depth, -(-num_microbatches // count))
        rows = [[depth, 1, rule.is_asynchronous, in_backward] for in_backward in (0, 1)]
        found.append(
            InFlightCounts(
                counts=np.array(rows, dtype=np.float64),
                num_forwards=1,
                versions=rule.versions_kept(depth),
            )
        )
    return tuple(found)


def most_of_replicas(ranks: Sequence[InFlightCounts]) -> InFlightCounts:
    """The most that any of these ranks holds: replicas of one stage."""
    forwards = [rank.counts[: rank.num_forwards] for rank in ranks]
    backwards = [rank.counts[rank.num_forwards :] for rank in ranks]
    return InFlightCounts(
        counts=np.concatenate([*forwards, *backwards]),
        num_forwards=sum(map(len, forwards)),
        versions=max(rank.versions for rank in ranks),
    )


def in_flight_of_chunk_order(order: ChunkOrder, *, num_chunks: int) -> tuple[InFlightCounts, ...]:
    """The same of an order in figures, without its programs. Before a rank's forward k are k - warm-up backwards,
    before its backward j are warm-up + j + 1 forwards."""
    forwards, backwards = (
        np.array([chunk for chunk, _ in pairs], dtype=np.intp) for pairs in (order.forwards, order.backwards)
    )
    begun, done = (_counts_of_first(chunks, num_chunks) for chunks in (forwards, backwards))
    states = np.concatenate([done > 0, done == done[-1]], axis=1).astype(done.dtype)  # gradients, their sums
    at = np.arange(len(forwards))
    found = []
    for warmup in order.warmups:
        done_before, begun_by = np.maximum(at - warmup, 0), np.minimum(at + warmup + 1, len(at))
        in_forwards = np.concatenate([begun[1:] - done[done_before], states[done_before]], axis=1)
        in_backwards = np.concatenate([begun[begun_by] - done[:-1], states[:-1]], axis=1)
        counts, num_forwards = _fullest_moments(in_forwards, in_backwards, backwards, streams=False)
        found.append(InFlightCounts(counts=counts, num_forwards=num_forwards, versions=1))
    return tuple(found)


def _counts_of_first(chunks: Indices, num_chunks: int) -> Indices:
    """[n + 1, V] of the first 0, 1, .. n of these, how many are of each chunk."""
    one_hot = np.zeros((len(chunks) + 1, num_chunks), dtype=np.intp)
    one_hot[np.arange(1, len(one_hot)), chunks] = 1
    return np.asarray(np.cumsum(one_hot, axis=0))


def _in_flight_of_program(
    program: Sequence[Action], stages: Sequence[int], versions: int, parts: Sequence[float], *, streams: bool
) -> InFlightCounts:
    # What comes back may peak before a backward that still waits.
    steps = [action for action in program if action.op is Op.RELOAD or action.op not in MOVE_OPS]
    if streams or any(op in MOVE_OPS for _, op, _ in program):
        rows = ((action.op, alive) for action, alive in activations(program))
        counts = [[alive.get(s, 0) for s in stages] for op, alive in rows if op is Op.RELOAD or op not in MOVE_OPS]
        alive = np.array(counts, dtype=np.int64).reshape(-1, len(stages))
    else:
        alive = activation_counts(program, stages, [math.ceil(each * _PARTS) for each in parts] or (1,))
    chunk_of = {stage: chunk for chunk, stage in enumerate(stages)}
    chunks = np.array([chunk_of[stage] for stage, _, _ in steps], dtype=np.intp)
    forward = np.array([op in (Op.F, Op.RELOAD) for _, op, _ in steps], dtype=bool)
    # An update drops the gradients; without a flush those of the next batch are there already.
    graded, summed = np.full_like(alive, int(streams)), np.full_like(alive, int(streams))
    ends = np.array([op in LAST_USES for _, op, _ in steps], dtype=bool)
    for chunk in range(len(stages)):
        own = np.flatnonzero(ends & (chunks == chunk))
        if len(own):
            graded[int(own[0]) + 1 :, chunk] = 1
            summed[int(own[-1]) + 1 :, chunk] = 1
    backward = np.array([op in BACKWARD_OPS for _, op, _ in steps], dtype=bool)
    every = np.concatenate([alive, graded, summed], axis=1)
    found, num_forwards = _fullest_moments(every[forward], every[backward], chunks[backward], streams=streams)
    found[:, : len(stages)] /= _PARTS if parts else 1
    return InFlightCounts(counts=found, num_forwards=num_forwards, versions=max(1, versions))


def _fullest_moments(forward: Indices, backward: Indices, chunks: Indices, *, streams: bool) -> tuple[Floats, int]:
    """`InFlightCounts.counts` and the number of forwards, of [moments, 3 V] held, gradients and sums while each action
    runs."""
    V = forward.shape[1] // 3
    nothing = np.concatenate([np.zeros((1, V), dtype=np.intp), np.full((1, 2 * V), int(streams))], axis=1)
    held = _without_smaller(np.concatenate([nothing, _corners(forward)]))
    # The chunk comes first, in descending order: no two of different ones are one above the other.
    width = max(V, 1)  # a rank may have no stage
    of_chunk = np.eye(width, dtype=np.intp)[::-1][np.concatenate([[0], chunks])]
    in_backward = _without_smaller(_corners(np.concatenate([of_chunk, np.concatenate([nothing, backward])], axis=1)))
    counts = np.concatenate(
        [
            np.concatenate([held, np.zeros((len(held), V), dtype=np.intp)], axis=1),
            np.concatenate([in_backward[:, width:], in_backward[:, :width][:, ::-1][:, :V]], axis=1),
        ]
    )
    return counts.astype(np.float64), len(held)


def _corners(moments: Indices) -> Indices:
    """Moments less those half way between the one before and the next: for any size of a microbatch, one of these two
    takes as much or more."""
    if len(moments) < 3:
        return moments
    bends = (moments[2:] - 2 * moments[1:-1] + moments[:-2]).any(axis=1)
    return np.asarray(moments[np.concatenate([[True], bends, [True]])])


def _without_smaller(moments: Indices) -> Indices:
    """[largest, figures] of these moments in order, less those at which nothing is more than at another."""
    left = np.array(sorted(set(map(tuple, moments.tolist()))), dtype=np.intp)
    if len(left) <= _FEW:
        return np.asarray(left[(left[:, None] <= left).all(axis=2).sum(axis=1) == 1])
    found = []
    while len(left):
        top = left[left.sum(axis=1).argmax()]
        found.append(tuple(top.tolist()))
        left = left[(left > top).any(axis=1)]
    return np.array(sorted(found), dtype=np.intp)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class RankMemory:
    """One rank at its peak."""

    recompute: tuple[str, ...]  # [V] what is recomputed of each stage
    shards: tuple[int, ...]  # [V] replicas that divide its optimizer's state
    bytes_held: Floats  # [6, V] bytes of its stages, in the order of `MemoryUse`, messages apart
    messages: float  # bytes of messages, of all stages together
    in_flight: tuple[int, ...]  # [V] the most microbatches of each stage that are there at once
    limit: float = math.inf  # of its device [bytes]
    too_many: float = 0.0  # bytes beyond that; 0 where it fits

    @property
    def total(self) -> float:
        """Bytes on the rank, all together; its stages do not need their workspace at once."""
        return total_bytes(self.bytes_held) + self.messages

    @property
    def uses(self) -> tuple[MemoryUse, ...]:
        """[V] bytes of each stage by data structure; the rank's messages are counted in the first stage."""
        names = [field.name for field in fields(MemoryUse)]
        rows = [[*row, 0.0 if v else self.messages] for v, row in enumerate(self.bytes_held.T.tolist())]
        return tuple(MemoryUse(**dict(zip(names, row, strict=True))) for row in rows)


def total_bytes(held: Floats) -> float:
    *kept, workspace = held
    return float(sum(kept[1:], start=kept[0]).sum() + workspace.max())


@dataclass(frozen=True, slots=True, kw_only=True)
class RankPlace:
    """A rank as its memory sees it: its V stages, replicas D, tensor ranks T, memory of its device [bytes]."""

    stages: tuple[int, ...]
    replicas: Figures
    tensor: int
    limit: float
    streams: bool = False  # whether batches follow each other without a flush
    context_bytes: float = 0.0  # of its memory, what others than tensors take at least (`context_bytes`) [bytes]
    # that come to it from one side in a batch, at most; where it is unknown, four are posted ahead
    num_messages: Figures = math.inf
    is_whole: bool = False  # whether microbatches pass in one piece, and their backwards run in one


def weight_copies(versions: Figures, optimizer_ratio: float, shards: Figures = 1) -> Figures:
    """Times that a device holds its weights: their versions, gradients, the optimizer's state or a share of it."""
    return versions + 1 + optimizer_ratio / shards


def bytes_by_in_flight(
    sums: StageSums,
    place: RankPlace,
    *,
    versions: tuple[Figures, Figures],
    optimizer_ratio: float,
    divides: bool = False,
    recompute: str = "none",
) -> Callable[[Figures], Floats]:
    """Bytes on a device of each stage, elementwise, of so many microbatches in flight; after the batch it may be more.

    What the V stages of a rank share counts with a V-th.

    Arguments:
        place: of its stages the number alone counts.
        versions: of the weights, in any case and for each microbatch in flight.
        optimizer_ratio: bytes of optimizer state a byte of parameters.
        divides: whether that may be divided over the replicas.
    """
    num_chunks, replicas, streams = len(place.stages), place.replicas, place.streams
    share = place.tensor * num_chunks
    sent = sums.before * GRADIENTS_SENT
    for size in (sums.before, sums.after):  # never less than `receives_ahead` of the largest of all stages
        ahead = np.maximum(RECEIVES_AHEAD, np.isfinite(place.num_messages) * AHEAD_BYTES / np.maximum(size, 1))
        sent = sent + size * np.minimum(ahead, place.num_messages + streams)
    workspace = sums.workspace / num_chunks + sums.before + sums.after
    under = sums.under(recompute)
    passing, one = workspace + sent / share + under.again, sums.after / share + under.kept
    shards, (always, for_each) = sums.holders(replicas) if divides else 1, versions
    bucket = _bytes_while_summing(sums, replicas=replicas, shards=shards, streams=streams, share=num_chunks)
    kept = sums.weights * weight_copies(always, optimizer_ratio, shards) + sums.buffers
    # With one stage a rank and a flush nothing else is under way while gradients are summed.
    fixed, each = kept + passing + (0.0 if num_chunks == 1 and not streams else bucket), one + for_each * sums.weights
    return lambda in_flight: np.maximum(fixed + in_flight * each, kept + bucket)


def _bytes_while_summing(
    sums: StageSums, *, replicas: Figures, shards: Figures, streams: bool, share: int = 1
) -> Floats:
    """Bytes of each stage besides its gradients while its replicas add them up, elementwise; 0 without replicas.

    Under a flush small gradients travel in buckets, as copies, of which one counts; a large one is summed where it is,
    or, where the optimizer is divided, leaves part by part: a copy of the largest, and the parts of the others. A
    stream sends copies of what others need, and gets as much (of a divided optimizer the weights that it has updated
    leave, too); of whole gradients those of one other replica count, since a dynamic program does not know how many
    there are. `shards`: ranks that divide the optimizer's state. `share`: V; a V-th counts of what stages share.
    """
    if streams:
        found = stream_copies(sums.weights, shards)
    else:
        small = np.minimum(sums.small, BUCKET_BYTES / share)
        divided = np.maximum(sums.largest / share, small) + sums.weights * (1 - 1 / np.asarray(shards))
        found = np.where(np.asarray(shards) > 1, divided, small)
    return np.asarray(np.where(np.asarray(replicas) * sums.rounds.context > 1, found, 0.0))


def stream_copies(weights: Floats, shards: Figures) -> Floats:
    shards = np.asarray(shards)
    return np.asarray(weights * np.where(shards > 1, 3 * (1 - 1 / shards), 2.0))


def stage_bytes(
    sums: StageSums,
    memories: Sequence[RankMemory],
    *,
    positions: Sequence[int],
    replicas: Sequence[int],
    tensor: Sequence[int],
    streams: bool = False,
) -> tuple[StageBytes, ...]:
    """[S] bytes of each stage on one of its devices, as its rank treats it; memories and replicas by place, [P].
    `tensor`: [S] ranks over which the message to the next stage is divided."""
    found = []
    for stage, (weights, chunk) in enumerate(zip(sums.weights.tolist(), chunk_of_stages(positions), strict=True)):
        memory = memories[positions[stage]]
        use, row, shards = memory.uses[chunk], sums.under(memory.recompute[chunk]), sums.holders(memory.shards[chunk])
        summing = _bytes_while_summing(sums, replicas=replicas[positions[stage]], shards=shards, streams=streams)
        found.append(
            StageBytes(
                weights=weights,
                gradients=weights,
                optimizer=use.optimizer,
                buffers=use.buffers,
                activations=float(row.kept[stage]),
                again=float(row.again[stage]),
                workspace=float(sums.workspace[stage] + sums.before[stage] + sums.after[stage]),
                output=float(sums.after[stage]) / tensor[stage],
                summing=float(summing[stage]),
            )
        )
    return tuple(found)
