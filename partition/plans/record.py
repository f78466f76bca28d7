"""Records of a plan: which nodes make a stage, on which ranks, and what that is predicted to take."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from numbers import Integral, Real
from operator import add
from statistics import fmean

from ...schedules.families.registry import family
from ...schedules.ir import Op, Schedule
from ...schedules.placement import chunk_of_stages
from ...schedules.timing.costs import Costs, Row, by_stage
from ...schedules.timing.links import Links, PlaceNetwork
from ...schedules.timing.memory import StageBytes
from ...schedules.wording import duration
from ..memory import MemoryUse
from ..profile import SAMPLES, SPLITS
from ..stage_cost import OFFLOAD, RULES, count_again
from ..strict import count

SEARCHES = ("named", "joint")  # for a plan
OWN = "auto"  # the schedule of a plan whose stages and order a search found together
JOINT, ORDERED = "joint search", "ordered for its costs"  # names of such a plan, and of one whose order alone was found


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanStage:
    """One stage.

    Arguments:
        nodes: names, each after what it needs.
        ranks: that run it: replicas, each of `tensor` ranks in a row; microbatch k runs on replica `k % replicas`.
        tensor: ranks over which each of its matrices is split; stages may have other sizes.
        step_seconds: that the stage needs a microbatch with all its replicas, communication included [s].
        spread: of an action's seconds, relative (half the interquartile range over the median); 0 when unknown.
        parameter_bytes: of its nodes, as the profile has them [bytes]; None where not asked for.
        memory: predicted on each of its ranks; None under PipeDream's model, which has none.
        memory_limit: of the smallest device among its ranks [bytes]; None where there is none.
        held: bytes of the stage on one of its ranks, of which memory over time is made; None likewise, or in slices.
        in_flight: microbatches that one rank holds at once, warm-up + 1; None likewise.
        recompute: "none"; "full": only the stage's inputs are kept, and its forward runs again in the backward;
            "layer": each node keeps its own inputs and runs again alone; "selective": the same, but results of matrix
            products are kept; "keep_less": results of GELUs are not kept; "layer:3", "selective:3", "keep_less:3": the
            first 3 of the nodes that run again; "offload": all is kept, on the host while it waits (`with_offload`).
        optimizer_shards: replicas that divide the optimizer's state, with the members of their contexts (1: none).
        splits: of each node over the tensor ranks (`Node.split`); none: all are divided.
    """

    nodes: tuple[str, ...]
    ranks: tuple[int, ...]
    tensor: int = 1
    step_seconds: float
    spread: float = 0.0
    parameter_bytes: float | None = None
    memory: MemoryUse | None = None
    memory_limit: float | None = None
    held: StageBytes | None = None
    in_flight: int | None = None
    recompute: str = "none"
    optimizer_shards: int = 1
    splits: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        object.__setattr__(self, "nodes", tuple(self.nodes))
        object.__setattr__(self, "ranks", tuple(self.ranks))
        object.__setattr__(self, "splits", tuple(self.splits))
        if not self.nodes or not self.ranks:
            raise ValueError(f"stage with nodes={self.nodes}, ranks={self.ranks}: expected at least one of each")
        if self.tensor < 1 or len(self.ranks) % self.tensor:
            raise ValueError(
                f"stage on {len(self.ranks)} ranks with tensor={self.tensor}: expected a number that divides "
                f"{len(self.ranks)}"
            )
        if not 0 <= self.spread < math.inf:
            raise ValueError(f"spread={self.spread!r}: expected a finite number, at least 0")
        if self.recompute != OFFLOAD:
            count_again(self.recompute, expected=f"{RULES}, or {OFFLOAD!r}")
        fit = len(self.splits) == len(self.nodes) and {*self.splits} <= {*SPLITS[1:]} and self.tensor > 1
        if self.splits and not fit:
            known = ", ".join(SPLITS[1:])
            expected = f"one of {known} for each of {len(self.nodes)} nodes, over 2 tensor ranks or more"
            raise ValueError(f"splits={self.splits!r:.80} with tensor={self.tensor}: expected {expected}")
        if not 1 <= self.optimizer_shards <= self.replicas:
            raise ValueError(
                f"optimizer_shards={self.optimizer_shards} with {self.replicas} replicas: expected 1 to {self.replicas}"
            )

    @property
    def replicas(self) -> int:
        """Copies of the stage, each on its share of the microbatches."""
        return len(self.ranks) // self.tensor

    @property
    def split_summary(self) -> str:
        """For people: how many nodes have which split."""
        numbers = Counter("by samples" if split in SAMPLES else split for split in self.splits)
        return " and ".join(f"{number} {split}" for split, number in numbers.items())

    @property
    def memory_bytes(self) -> float | None:
        """Predicted on each of its ranks [bytes]."""
        return None if self.memory is None else self.memory.total


@dataclass(frozen=True, slots=True, kw_only=True)
class RunnerUp:
    """A plan that was not taken.

    Arguments:
        label: for people: what it does otherwise.
        replicas: by stage.
        num_nodes: by stage.
        bottleneck: of the slowest rank, or stage [s a microbatch].
        simulated_step_time: [s a batch]; None where it was not simulated.
        memory_bytes: the largest of any rank [bytes]; None where not asked for.
    """

    label: str = ""
    replicas: tuple[int, ...]
    num_nodes: tuple[int, ...]
    bottleneck: float
    simulated_step_time: float | None = None
    memory_bytes: float | None = None


NOT_SEARCHED = (
    "replicas that differ by stage, but for those that the dynamic program finds without tensor ranks",
    "stages on ranks that are not neighbours, but for replicas that each have a row of their own (on more than 64 "
    "devices within a node), and, on few (two nodes of four, three of two), for stages without tensor ranks and chunks",
    "layouts that leave more than an eighth of more than 64 devices idle, while others fit",
    "tensor ranks beyond the innermost links",
    "microbatches and chunks that differ by stage; tensor ranks that do, where there are replicas, chunks, streams or "
    "idle devices, or, on more than 8 devices, more than two sizes or two that take turns",
    "schedules that were not named",
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Searched:
    """A search over configurations: sizes of the parallelisms, microbatch, schedule, chunks.

    Each is cut in a few ways (the dynamic program's, equal numbers of nodes, the same with level ranks), unless bounds
    show that it can't win. Recomputation and sharding are chosen for each way.
    """

    considered: int  # configurations at all
    cut: int  # of these
    simulated: int  # of these
    unfit: int  # that were cut, and take more memory than there is or are refused by their schedule
    too_long: int  # to be simulated
    # no configuration that was not simulated takes less with the cuts that are tried [s a batch]; None where none was
    # left out
    least_left: float | None
    least: float  # no configuration takes less in its schedule's order, with any cuts and recomputation [s a batch]

    @classmethod
    def of_all(cls, every: Sequence[Searched]) -> Searched:
        left = [each.least_left for each in every if each.least_left is not None]
        counts = ("considered", "cut", "simulated", "unfit", "too_long")
        return cls(
            **{name: sum(getattr(each, name) for each in every) for name in counts},
            least_left=min(left, default=None),
            least=min(each.least for each in every),
        )

    def faster_left(self, seconds: float) -> float:
        """By which part of its time a plan of so many seconds a batch is slower, at most, than what was left out."""
        return 0.0 if not self.least_left else max(0.0, seconds / self.least_left - 1)

    def lines(self, seconds: float) -> list[str]:
        """For people: what was looked at, what of the rest may be faster than so many seconds a batch."""
        done = f"searched {self.considered:,} configurations: {self.cut:,} cut, {self.simulated:,} simulated"
        if self.unfit:
            done += f", {self.unfit:,} do not fit the memory or the schedule"
        if self.too_long:
            done += f", {self.too_long:,} too long to simulate"
        more = self.faster_left(seconds)
        rest = (
            "none of the rest is faster" if not more else f"the plan is at most {more:.2%} slower than any of the rest"
        )
        lines = [f"{done}; by their bounds {rest}, in the cuts that are tried"]
        if 0 < self.least <= seconds * (1 + 1e-9):  # pairs of actions, and other orders, may take less
            lines.append(
                f"with any cuts, no configuration takes less than {duration(self.least)} a batch in the order of its "
                f"schedule: the plan is at most {max(0.0, seconds / self.least - 1):.2%} slower"
            )
        return [*lines, f"not among them: {'; '.join(NOT_SEARCHED)}"]


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanRecord:
    """Stages in order, on ranks 0..num_devices-1; where a plan needs fewer, the rest stay idle.

    Raises ValueError for a node that is listed twice, a rank that is listed twice among the stages of one chunk or
    other ranks in another chunk, a rank outside the cluster, and costs or links of other stages.
    """

    # [S]; the first P are on the places 0 to P - 1, those of later chunks as the schedule has it. Under OWN they are on
    # any ranks, and places are these in the order of their first stages.
    stages: tuple[PlanStage, ...]
    num_devices: int
    num_chunks: int = 1  # V; of an order of its own the most stages of any place
    # context, expert: of its profile: parts of a sequence, of each stage's tensor ranks, and replicas in a row that
    # divide the experts
    context: int = 1
    expert: int = 1
    # that it is simulated from: of F, B, I, W of each stage on one rank, recomputation included, of updates, sums of
    # tied weights, the norm and the runtime; a row where its replicas differ (microbatch k runs on replica `k %
    # replicas`)
    costs: Costs
    # of one rank a place (`PlaceNetwork`), with bytes over each cut and sums over the replicas; None where they were
    # not kept: messages take no time, and the sums are a part of each update
    links: Links | None = None
    cost_model: str  # "default" or "pipedream"
    bottleneck: float  # of the slowest rank [s a microbatch]; a microbatch is what the profile ran at once
    bound: float  # no plan can have a smaller bottleneck under this model [s a microbatch]
    # that memory was counted for, or OWN where `order` is all there is; None under PipeDream's model
    schedule: str | None = None
    overlaps: bool = False  # whether forwards run together with the backwards directly after them (`with_overlap`)
    # actions of each rank of one pipeline in the order in which they run, of the share of M that one of the equal
    # replicas has; none: the schedule's own
    order: tuple[str, ...] = ()
    num_microbatches: int | None = None  # of a batch over all replicas, M; None where the plan does not depend on it
    slice_lengths: tuple[int, ...] = ()  # tokens of each slice of a microbatch; none: it passes whole
    microbatch_size: int | None = None  # samples of one; None where the profile does not say
    # [s a batch of M] under the schedule, warm-up and drain included where it flushes; None where it was not simulated
    simulated_step_time: float | None = None
    simulated_bubble: float | None = None  # of that simulation, a fraction
    # that a batch of this plan took in a trial, a median over its steps [s]; None untried
    tried_seconds: float | None = None
    runners_up: tuple[RunnerUp, ...] = ()  # what else was considered, the better ones first
    notes: tuple[str, ...] = ()  # what was left out or could not be done
    # how far, and what is known of the rest; None where configurations were not searched
    searched: Searched | None = None

    def __post_init__(self) -> None:
        for field in ("stages", "order", "slice_lengths", "runners_up", "notes"):
            object.__setattr__(self, field, tuple(getattr(self, field)))
        tried = self.tried_seconds or 0.0
        if not (isinstance(tried, Real) and 0 <= tried < math.inf):
            raise ValueError(f"tried_seconds={tried!r}: expected a finite number, at least 0")
        if not self.stages:
            raise ValueError("plan without stages: expected at least one")
        for tokens in self.slice_lengths:
            count("slice_lengths", tokens)
        M = self.num_microbatches and self.num_microbatches * (len(self.slice_lengths) or 1)
        self.costs.table(num_stages=len(self.stages), num_indices=M)  # refuses other stages
        if self.schedule == OWN and (self.num_microbatches is None or len(self.order) != len(self.firsts)):
            raise ValueError(
                f"schedule {OWN!r} with an order of {len(self.order)} ranks, num_microbatches={self.num_microbatches}: "
                f"expected an order of the {len(self.firsts)} ranks of its stages, and a number of microbatches"
            )
        if self.num_chunks < 1 or (self.schedule != OWN and len(self.stages) % self.num_chunks):
            raise ValueError(
                f"{len(self.stages)} stages in num_chunks={self.num_chunks}: expected a number that divides "
                f"{len(self.stages)}"
            )
        _refuse_twice("node", [node for stage in self.stages for node in stage.nodes])
        firsts = [self.stages[s] for s in self.firsts]
        for number, (stage, place) in enumerate(zip(self.stages, self.positions, strict=True)):
            first = firsts[place]
            if (stage.ranks, stage.tensor) != (first.ranks, first.tensor):
                raise ValueError(
                    f"stage {number} on ranks {stage.ranks} with tensor={stage.tensor} and stage {place}, of another "
                    f"chunk, on {first.ranks} with tensor={first.tensor}: expected the same ranks in the same groups"
                )
        ranks = [rank for stage in firsts for rank in stage.ranks]
        _refuse_twice("rank", ranks)
        for rank in ranks:
            if isinstance(rank, bool) or not isinstance(rank, Integral) or not 0 <= rank < self.num_devices:
                raise ValueError(f"rank {rank!r} on {self.num_devices} devices: expected 0 to {self.num_devices - 1}")
        self._check_links()

    def _check_links(self) -> None:
        if self.links is None:
            return
        network, sizes, places = self.links.network, self.links.activation_bytes, len(self.firsts)
        if not isinstance(network, PlaceNetwork) or network.places != tuple((p,) for p in range(places)):
            raise ValueError(f"links over {network!r:.80}: expected a PlaceNetwork of one rank each on {places} places")
        if isinstance(sizes, float | int) or len(sizes) != len(self.stages) - 1:
            raise ValueError(f"activation_bytes={sizes!r:.60}: expected one for each of {len(self.stages) - 1} cuts")
        lacking = {(min(pair), max(pair)) for pair in pairwise(self.positions) if len({*pair}) > 1} - {*network.routes}
        if lacking:
            raise ValueError(f"no route between the places {min(lacking)}: expected one in the network of the links")
        for each in self.links.sums:
            if not 0 <= each.stage < len(self.stages) or len(self.stages[each.stage].ranks) == 1:
                raise ValueError(f"a sum of {each.seconds} s of stage {each.stage}: expected a stage with replicas")

    @property
    def positions(self) -> tuple[int, ...]:
        """[S] place of each stage: the stage of the first chunk that is on the same ranks. ValueError for a
        schedule that no plans are made for."""
        if self.schedule == OWN:
            places = {ranks: place for place, ranks in enumerate(dict.fromkeys(stage.ranks for stage in self.stages))}
            return tuple(places[stage.ranks] for stage in self.stages)
        if self.num_chunks == 1:
            return tuple(range(len(self.stages)))
        own = family(self.schedule or "interleaved")
        if not (own.is_planned or own.takes_slices):
            raise ValueError(f"a plan of schedule {own.name!r}: expected stages of one rank each, and whole sequences")
        return own.rank_of_stages(num_ranks=len(self.stages) // self.num_chunks, num_chunks=self.num_chunks)

    @property
    def firsts(self) -> tuple[int, ...]:
        """[P] number of the first stage of each place."""
        return tuple(s for s, chunk in enumerate(chunk_of_stages(self.positions)) if chunk == 0)

    @property
    def is_asynchronous(self) -> bool:
        """Whether its batches follow each other without a flush."""
        return self.schedule not in (None, OWN) and family(self.schedule or "").rule.is_asynchronous

    @property
    def tensor(self) -> int:
        """T, the largest number of ranks over which a stage's matrices are split."""
        return max(stage.tensor for stage in self.stages)

    @property
    def tensor_groups(self) -> tuple[tuple[int, ...], ...]:
        """For each rank of `schedule_of`, its tensor group: the plan's ranks that run it together, which are in a row.

        With one size T the groups begin at multiples of T, and fewer than T devices at the end are in none. Where
        stages have sizes of their own, their groups and each idle rank alone, ascending. ValueError for others."""
        size, is_even = self.tensor, len({stage.tensor for stage in self.stages}) == 1
        rows = [
            stage.ranks[begin : begin + stage.tensor]
            for stage in (self.stages[s] for s in self.firsts)
            for begin in range(0, len(stage.ranks), stage.tensor)
        ]
        for row in rows:
            if row != tuple(range(row[0], row[0] + len(row))) or (is_even and row[0] % size):
                begin, from_a = min(row) // size * size if is_even else min(row), f" from a multiple of {size} on"
                raise ValueError(
                    f"the plan splits tensors over the ranks {row}: expected groups of {len(row)} in a row"
                    f"{from_a if is_even else ''}, such as {tuple(range(begin, begin + len(row)))}"
                )
        if is_even:
            return tuple(tuple(range(at, at + size)) for at in range(0, self.num_devices - size + 1, size))
        used = {rank for row in rows for rank in row}
        return tuple(sorted([*rows, *((rank,) for rank in range(self.num_devices) if rank not in used)]))

    @property
    def replicas(self) -> tuple[int, ...]:
        """[S] replicas of each stage; (15, 1) is what the papers write as 15-1."""
        return tuple(stage.replicas for stage in self.stages)

    @property
    def gap(self) -> float:
        """Distance of the bottleneck from the bound: their ratio, less one."""
        return self.bottleneck / self.bound - 1 if self.bound > 0 else 0.0

    @property
    def bubble(self) -> float:
        """Idle fraction of the ranks in use: simulated, or, if it was not, of a stream at the bottleneck's pace."""
        if self.simulated_bubble is not None:
            return self.simulated_bubble
        table = replace(self.costs, index_factors=None).table(num_stages=len(self.stages))
        work = sum(map(add, table.means(Op.F), table.means(Op.B)))
        room = sum(self.replicas) / self.num_chunks * self.bottleneck
        return 1 - work / room if room > 0 else 0.0

    @property
    def memory(self) -> dict[int, MemoryUse]:
        """Predicted memory by rank in use; empty under PipeDream's model."""
        found: dict[int, MemoryUse] = {}
        for stage in self.stages:
            for rank in stage.ranks if stage.memory is not None else ():
                assert stage.memory is not None
                found[rank] = found[rank] + stage.memory if rank in found else stage.memory
        return found

    @property
    def memory_bytes(self) -> dict[int, float]:
        """Predicted bytes by rank in use; empty under PipeDream's model."""
        return {rank: memory.total for rank, memory in self.memory.items()}

    @property
    def stage_bytes(self) -> tuple[StageBytes, ...]:
        """[S] for `memory_curves`; empty where the plan does not say it of every stage."""
        found = tuple(stage.held for stage in self.stages if stage.held is not None)
        return found if len(found) == len(self.stages) else ()

    def replica_seconds(self, op: Op) -> list[Row]:
        """[S] seconds of an action, the runtime's around it apart, by replica in the order of their ranks; one number
        where these are alike."""
        costs = replace(self.costs.free_of_overhead, index_factors=None)  # of a microbatch, not of its slices
        rows = costs.table(num_stages=len(self.stages)).rows[op]
        return [row[: stage.replicas] if len(row) > 1 else row for row, stage in zip(rows, self.stages, strict=True)]

    def seconds(self, op: Op) -> list[float]:
        """[S] seconds of an action, the mean of a stage's replicas, without the runtime's overhead."""
        return list(map(fmean, self.replica_seconds(op)))

    @property
    def update_seconds(self) -> tuple[float, ...]:
        """[S] seconds of an update: gradients summed over the replicas, optimizer's step, weights gathered."""
        sums = {} if self.links is None else {each.stage: each.seconds + each.gather for each in self.links.sums}
        steps, added = (by_stage(each, len(self.stages)) for each in (self.costs.update, self.costs.reduce_grad))
        return tuple(sums.get(stage, own) + step for stage, (own, step) in enumerate(zip(added, steps, strict=True)))

    @property
    def memory_limits(self) -> dict[int, float]:
        """Bytes of the device by rank in use, where it is known: the least of any device that runs the same stage."""
        stages = [stage for stage in self.stages if stage.memory_limit is not None]
        return {rank: stage.memory_limit for stage in stages for rank in stage.ranks if stage.memory_limit is not None}

    def by_group(self, figures: Mapping[int, float], firsts: Sequence[int] | None = None) -> tuple[float, ...] | None:
        """Figures of the first of each tensor group of `schedule_of`, or of `firsts`; None where one is missing."""
        firsts = [group[0] for group in self.tensor_groups] if firsts is None else firsts
        found = tuple(figures[rank] for rank in firsts if rank in figures)
        return found if len(found) == len(firsts) else None


def order_of(schedule: Schedule) -> tuple[str, ...]:
    """A schedule's programs as text, for `PlanRecord.order`."""
    return tuple(" ".join(map(str, program)) for program in schedule.programs)


def _refuse_twice(what: str, values: Sequence[object]) -> None:
    seen: set[object] = set()
    for value in values:
        if value in seen:
            raise ValueError(f"{what} {value!r} is listed twice in the plan: expected each once")
        seen.add(value)
