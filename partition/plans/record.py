"""Records of a plan: which nodes make a stage, on which ranks, and what that is predicted to take."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise

from ...schedules.registry import family
from ...schedules.timing.costs import Costs, Ties
from ...schedules.timing.memory import StageBytes
from ..memory import MemoryUse
from ..stage_cost import RECOMPUTE, message_overheads
from .searched import Searched
from .traffic import StageTraffic


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanStage:
    """One stage.

    Arguments:
        nodes: names, each behind what it needs.
        ranks: that run it: replicas, each of `tensor` ranks in a row; microbatch k runs on replica `k % replicas`.
        tensor: ranks over which each of its matrices is split.
        forward_seconds, backward_seconds: of one microbatch on one rank, recomputation included [s].
        input_grad_seconds: those of the backward that make gradients of inputs, where it is split; None: half of them.
        update_seconds: gradients summed over the replicas, and the optimizer's step, behind a batch [s].
        step_seconds: that the stage needs a microbatch with all its replicas, communication included [s].
        action_seconds: that the runtime takes of a rank around each F, B, I and W, beside theirs and messages [s].
        spread: of an action's seconds, relative (half the interquartile range over the median); 0 when unknown.
        forward_ratios, backward_ratios: by replica, in the order of their ranks, how many times those seconds its F
            and its B (I, W) take; none: they are alike.
        traffic: its messages and the parts of its update, with which the plan can be simulated again; None where nobody
            kept it.
        parameter_bytes: of its nodes, as the profile has them [bytes]; None where nobody asked.
        memory: predicted on each of its ranks; None under PipeDream's model, which has none.
        memory_limit: of the smallest device among its ranks [bytes]; None where there is none.
        held: bytes of the stage on one of its ranks, of which memory over time is made; None likewise.
        in_flight: microbatches that one rank holds at once, warm-up + 1; None likewise.
        recompute: "none"; "full": only the stage's inputs are kept, and its forward runs again in the backward;
            "layer": each node keeps its own inputs and runs again by itself; "selective": the same, but results of
            matrix products are kept.
        optimizer_shards: ranks over which the optimizer's state is divided (1: each holds all of it).
    """

    nodes: tuple[str, ...]
    ranks: tuple[int, ...]
    tensor: int = 1
    forward_seconds: float
    backward_seconds: float
    update_seconds: float = 0.0
    step_seconds: float
    input_grad_seconds: float | None = None
    action_seconds: float = 0.0
    spread: float = 0.0
    forward_ratios: tuple[float, ...] = ()
    backward_ratios: tuple[float, ...] = ()
    traffic: StageTraffic | None = None
    parameter_bytes: float | None = None
    memory: MemoryUse | None = None
    memory_limit: float | None = None
    held: StageBytes | None = None
    in_flight: int | None = None
    recompute: str = "none"
    optimizer_shards: int = 1

    def __post_init__(self) -> None:
        object.__setattr__(self, "nodes", tuple(self.nodes))
        object.__setattr__(self, "ranks", tuple(self.ranks))
        if not self.nodes or not self.ranks:
            raise ValueError(f"stage with nodes={self.nodes}, ranks={self.ranks}: expected at least one of each")
        if self.tensor < 1 or len(self.ranks) % self.tensor:
            raise ValueError(
                f"stage on {len(self.ranks)} ranks with tensor={self.tensor}: expected a number that divides "
                f"{len(self.ranks)}"
            )
        if self.input_grad_seconds is not None and not 0 <= self.input_grad_seconds <= self.backward_seconds:
            raise ValueError(
                f"input_grad_seconds={self.input_grad_seconds} of a backward of {self.backward_seconds} s: expected a "
                f"part of it"
            )
        if not 0 <= self.spread < math.inf:
            raise ValueError(f"spread={self.spread!r}: expected a finite number, at least 0")
        for name in ("forward_ratios", "backward_ratios"):
            ratios = tuple(getattr(self, name))
            if ratios and (len(ratios) != self.replicas or not all(map(_is_ratio, ratios))):
                raise ValueError(
                    f"{name}={ratios!r:.80} of a stage with {self.replicas} replicas: expected as many finite numbers "
                    f"above 0, or none"
                )
            object.__setattr__(self, name, ratios)
        if self.recompute not in RECOMPUTE:
            raise ValueError(f"recompute={self.recompute!r}: expected one of {', '.join(RECOMPUTE)}")
        if not 1 <= self.optimizer_shards <= self.replicas:
            raise ValueError(
                f"optimizer_shards={self.optimizer_shards} with {self.replicas} replicas: expected 1 to {self.replicas}"
            )

        if self.traffic is not None and self.traffic.sum_seconds > 0 and self.replicas == 1:
            raise ValueError(
                f"traffic with sum_seconds={self.traffic.sum_seconds} of a stage without replicas: expected 0"
            )

    @property
    def replicas(self) -> int:
        """Copies of the stage, each on its share of the microbatches."""
        return len(self.ranks) // self.tensor

    @property
    def groups(self) -> tuple[tuple[int, ...], ...]:
        """Ranks of each replica, in the order in which they share the microbatches."""
        size = self.tensor
        return tuple(sorted(self.ranks[begin : begin + size] for begin in range(0, len(self.ranks), size)))

    @property
    def replica_ratios(self) -> tuple[float, ...]:
        """By replica, how many times F and B together take those of the stage; none: they are alike."""
        if not (self.forward_ratios or self.backward_ratios):
            return ()
        whole = self.forward_seconds + self.backward_seconds
        alike = (1.0,) * self.replicas
        pairs = zip(self.forward_ratios or alike, self.backward_ratios or alike, strict=True)
        return tuple((f * self.forward_seconds + b * self.backward_seconds) / whole if whole else 1.0 for f, b in pairs)

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
        predicted_step_time: [s a minibatch].
        simulated_step_time: [s a batch]; None where it was not simulated.
        memory_bytes: the largest of any rank [bytes]; None where nobody asked.
    """

    label: str = ""
    replicas: tuple[int, ...]
    num_nodes: tuple[int, ...]
    predicted_step_time: float
    simulated_step_time: float | None = None
    memory_bytes: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanRecord:
    """Stages in order, on ranks 0..num_devices-1; where a plan needs fewer, the rest stay idle.

    Arguments:
        stages: [S]; the first P stand on the places 0 to P - 1, those of later chunks as the schedule has it.
        num_chunks: V.
        cost_model: "default" or "pipedream".
        schedule: that memory was counted for; None under PipeDream's model.
        order: actions of each rank of one pipeline in the order in which they run, of the share of M that one of the
            equal replicas has; none: the schedule's own.
        num_microbatches: of a batch over all replicas, M; None where the plan does not depend on it.
        microbatch_size: samples of one; None where the profile does not say.
        predicted_step_time: the bottleneck [s a minibatch]; a minibatch is what the profile ran at once, and what the
            runtime calls a microbatch.
        bound: no plan can have a smaller bottleneck under this model [s a minibatch].
        around_seconds: that the runtime takes of a step beside actions, sums and updates [s].
        norm_seconds: of the global norm, for which all ranks wait before they update [s]; None: there is none, or
            nobody said so.
        tied: (stages, seconds) of sums of the gradients of weights that stages on different ranks share, over all ranks
            that hold them; what is in them is in no stage's own sum over its replicas.
        simulated_step_time: [s a batch of M] under the schedule, warm-up and drain included where it flushes; None
            where it was not simulated.
        simulated_bubble: of that simulation, a fraction.
        tried_seconds: that a batch of this plan took in a trial, a median over its steps [s]; None untried.
        runners_up: what else was considered, the better ones first.
        notes: what was left out or could not be done.
        searched: how far, and what is known of the rest; None where configurations were not searched.

    Raises ValueError for a node that stands twice, a rank that stands twice among the stages of one chunk or other
    ranks in another chunk, a rank outside the cluster, and traffic of some stages only or over other ways in another
    chunk.
    """

    stages: tuple[PlanStage, ...]
    num_devices: int
    num_chunks: int = 1
    cost_model: str
    predicted_step_time: float
    bound: float
    schedule: str | None = None
    order: tuple[str, ...] = ()
    num_microbatches: int | None = None
    microbatch_size: int | None = None
    around_seconds: float = 0.0
    norm_seconds: float | None = None
    tied: Ties = ()
    simulated_step_time: float | None = None
    simulated_bubble: float | None = None
    tried_seconds: float | None = None
    runners_up: tuple[RunnerUp, ...] = ()
    notes: tuple[str, ...] = ()
    searched: Searched | None = None

    def __post_init__(self) -> None:
        for field in ("stages", "order", "runners_up", "notes"):
            object.__setattr__(self, field, tuple(getattr(self, field)))
        for name in ("around_seconds", "norm_seconds", "tried_seconds"):
            value = getattr(self, name) or 0.0
            if not (isinstance(value, int | float) and 0 <= value < math.inf):
                raise ValueError(f"{name}={value!r}: expected a finite number, at least 0")
        if not self.stages:
            raise ValueError("plan without stages: expected at least one")
        sums = Costs(tied=self.tied)
        sums.table(num_stages=len(self.stages))  # refuses other stages
        object.__setattr__(self, "tied", sums.tied)
        if self.num_chunks < 1 or len(self.stages) % self.num_chunks:
            raise ValueError(
                f"{len(self.stages)} stages in num_chunks={self.num_chunks}: expected a number that divides "
                f"{len(self.stages)}"
            )
        _refuse_twice("node", [node for stage in self.stages for node in stage.nodes])
        width = len(self.stages) // self.num_chunks
        for number, (stage, place) in enumerate(zip(self.stages, self.positions, strict=True)):
            if stage.ranks != self.stages[place].ranks:
                raise ValueError(
                    f"stage {number} on ranks {stage.ranks} and stage {place}, of another chunk, on "
                    f"{self.stages[place].ranks}: expected the same ranks"
                )
        ranks = [rank for stage in self.stages[:width] for rank in stage.ranks]
        _refuse_twice("rank", ranks)
        for rank in ranks:
            if isinstance(rank, bool) or not isinstance(rank, int) or not 0 <= rank < self.num_devices:
                raise ValueError(f"rank {rank!r} on {self.num_devices} devices: expected 0 to {self.num_devices - 1}")

        self._check_traffic()

    def _check_traffic(self) -> None:
        known = [stage.traffic for stage in self.stages if stage.traffic is not None]
        if known and len(known) < len(self.stages):
            raise ValueError(f"traffic of {len(known)} of {len(self.stages)} stages: expected that of all, or of none")
        ways = [(each.latency, each.seconds_per_byte, each.message_seconds) for each in known[:-1]]
        first: dict[tuple[int, int], int] = {}
        for number, (way, pair) in enumerate(zip(ways, pairwise(self.positions), strict=False)):
            other = first.setdefault(pair, number)
            if way != ways[other]:
                raise ValueError(
                    f"stage {number} with traffic of latency, seconds_per_byte, message_seconds {way} and stage "
                    f"{other}, of another chunk on the same ranks, {ways[other]}: expected the same"
                )

    @property
    def positions(self) -> tuple[int, ...]:
        """[S] place of each stage: the stage of the first chunk that stands on the same ranks.

        ValueError for a schedule that no plans are made for.
        """
        if self.num_chunks == 1:
            return tuple(range(len(self.stages)))
        own = family(self.schedule or "interleaved")
        if not own.is_planned:
            raise ValueError(f"a plan of schedule {own.name!r}: expected stages of one rank each, and whole sequences")
        return own.rank_of_stages(num_ranks=len(self.stages) // self.num_chunks, num_chunks=self.num_chunks)

    @property
    def tensor(self) -> int:
        """T, the largest number of ranks over which a stage's matrices are split."""
        return max(stage.tensor for stage in self.stages)

    @property
    def replicas(self) -> tuple[int, ...]:
        """[S] replicas of each stage; (15, 1) is what the papers write as 15-1."""
        return tuple(stage.replicas for stage in self.stages)

    @property
    def gap(self) -> float:
        """Distance of the bottleneck from the bound: their ratio, less one."""
        return self.predicted_step_time / self.bound - 1 if self.bound > 0 else 0.0

    @property
    def bubble(self) -> float:
        """Idle fraction of the ranks in use: simulated, or, where it was not, of a stream at the bottleneck's pace."""
        if self.simulated_bubble is not None:
            return self.simulated_bubble
        work = sum(stage.forward_seconds + stage.backward_seconds for stage in self.stages)
        work += 2 * sum(self.overheads) + 2 * sum(self.message_overheads)
        room = sum(self.replicas) / self.num_chunks * self.predicted_step_time
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

    @property
    def traffic(self) -> tuple[StageTraffic, ...]:
        """[S] of its stages; empty where the plan does not say it."""
        return tuple(stage.traffic for stage in self.stages if stage.traffic is not None)

    @property
    def overheads(self) -> tuple[float, ...]:
        """[S] seconds of a rank around each action of the stage, on top of its own."""
        return tuple(stage.action_seconds for stage in self.stages)

    @property
    def message_overheads(self) -> tuple[float, ...]:
        """[S] seconds for which a rank is busy with the messages of an F, B or I of the stage."""
        busy = [each.message_seconds for each in self.traffic] or [0.0] * len(self.stages)
        return message_overheads(busy[:-1])

    @property
    def memory_limits(self) -> dict[int, float]:
        """Bytes of the device by rank in use, where it is known: the least of any device that runs the same stage."""
        stages = [stage for stage in self.stages if stage.memory_limit is not None]
        return {rank: stage.memory_limit for stage in stages for rank in stage.ranks if stage.memory_limit is not None}

    def by_group(self, figures: Mapping[int, float]) -> tuple[float, ...] | None:
        """Figures by rank of `schedule_of`: of each group of T ranks that of its first; None where one is missing."""
        firsts = range(0, self.num_devices - self.tensor + 1, self.tensor)
        found = tuple(figures[rank] for rank in firsts if rank in figures)
        return found if len(found) == len(firsts) else None


def _is_ratio(value: object) -> bool:
    return isinstance(value, int | float) and 0 < value < math.inf


def _refuse_twice(what: str, values: Sequence[object]) -> None:
    seen: set[object] = set()
    for value in values:
        if value in seen:
            raise ValueError(f"{what} {value!r} stands twice in the plan: expected each once")
        seen.add(value)
