"""Records that the processes of a bench pass on, a line of JSON each."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median
from typing import get_args


@dataclass(frozen=True, slots=True, kw_only=True)
class Measurement:
    """One workload, run by both sides in turn.

    Arguments:
        torch, ours: [repetitions] step times [s].
        makespans: [repetitions] of our timeline, first start to last end of any rank [s].
        forward, backward: [S] medians of our F and B, without waits [s].
        predicted: the simulator's makespan from these and `latency` [s].
        latency: of one message, from a ping-pong [s].
        boundary_bytes: of that message.
    """

    workload: str
    torch: list[float]
    ours: list[float]
    makespans: list[float]
    forward: list[float]
    backward: list[float]
    predicted: float
    latency: float
    boundary_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class RaceTimes:
    """One race.

    Arguments:
        seconds: by entry: [repetitions] seconds a batch, of many in a row.
        predicted: the simulator's seconds a batch of the first entry, from its own measured costs.
        bubbles: [repetitions] measured steady-state bubbles of the first entry.
    """

    race: str
    seconds: dict[str, list[float]]
    predicted: float
    bubbles: list[float]


@dataclass(frozen=True, slots=True, kw_only=True)
class PingPong:
    """One-way times over gloo, from just before the send to just after the wait [s].

    tight: each side answers at once. paced: each side sleeps first, so that the receiver is fast asleep.
    """

    num_bytes: int
    tight: list[float]
    paced: list[float]


@dataclass(frozen=True, slots=True, kw_only=True)
class ReceiveBytes:
    """The most bytes of receives posted and not consumed, of any rank.

    torch: the receive buffers that its stages hold (it makes them for all microbatches at once).
    """

    schedule: str
    num_microbatches: int
    ours: int
    torch: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Breakdown:
    """Breakdown of a step at no compute; seconds a microbatch, both ranks' work together.

    Arguments:
        in_process: [repetitions] a step with the in-process transport, by M.
        autograd: [repetitions] the same forwards and backwards in a bare loop, by M.
        profile: the most expensive functions of the in-process step; empty if not asked for.
    """

    schedule: str
    in_process: list[float]
    autograd: list[float]
    profile: str


@dataclass(frozen=True, slots=True, kw_only=True)
class SimulatorSpeed:
    """One process's measurement of the simulator.

    Arguments:
        actions_per_second: of `simulate` alone.
        build_check_simulate: of the large schedule [s].
        num_actions: of that schedule.
        peak_bytes: resident, of the whole process.
    """

    actions_per_second: float
    build_check_simulate: float
    num_actions: int
    peak_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanningSpeed:
    """Seconds of one process for one problem of the partitioner or the planner.

    Arguments:
        case: "partitioner" or "planner".
        problem: for people.
        variant: what the same problem was solved by or for.
        seconds: [runs] of it, profile read and modules imported before [s].
        limit: asked of it [s].
        plan: what was found, for people.
        peak_bytes: resident, of the whole process, at its end.
    """

    case: str
    problem: str
    variant: str
    seconds: list[float]
    limit: float
    plan: str
    peak_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class PlannedTimes:
    """A planned run's step time.

    Arguments:
        plan: what ran, for people.
        predicted: by the plan [s].
        measured: [repetitions] from one instant to the end of the last rank [s].
        makespans: [repetitions] first start to last end of any action, without the update [s].
        simulated: makespan of the same schedule from costs that were measured while it ran [s].
        planned_work, measured_work: F + B of all stages for one microbatch [s].
    """

    run: str
    plan: str
    predicted: float
    measured: list[float]
    makespans: list[float]
    simulated: float
    planned_work: float
    measured_work: float


@dataclass(frozen=True, slots=True, kw_only=True)
class PlannedMemory:
    """A planned run's memory in one set of fresh processes.

    Arguments:
        kind: a MemoryKind.
        predicted: by rank, by the plan [bytes].
        measured: by rank, peak growth of resident memory from before the model was made [bytes].
    """

    run: str
    kind: str
    predicted: list[float]
    measured: list[int]


@dataclass(frozen=True, slots=True, kw_only=True)
class CutTimes:
    """One contest.

    Arguments:
        cuts: by contestant: the stages, for people.
        seconds: by contestant: [repetitions] step times [s].
        predicted: of the profile's cut, by its plan [s].
    """

    contest: str
    cuts: dict[str, str]
    seconds: dict[str, list[float]]
    predicted: float


@dataclass(frozen=True, slots=True, kw_only=True)
class OverlapTimes:
    """Steps with sums of gradients beside the backwards that follow ("beside"), and behind all of them ("behind").

    Arguments:
        seconds: by side: [repetitions] step times [s].
        predicted: by side, from the costs that were measured [s].
    """

    seconds: dict[str, list[float]]
    predicted: dict[str, float]


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckpointTimes:
    """The same steps "without" a checkpoint, with one "beside" them, and with a save that they wait for ("blocking").

    Arguments:
        seconds: by side: [repetitions] of all steps [s].
        steps: of a repetition.
        num_bytes: of a checkpoint, that rank 0 writes.
        shares: [repetitions] of undisturbed training that checkpoints took with an interval found for 3.5%.
        every: [repetitions] that interval at the end, in steps.
    """

    seconds: dict[str, list[float]]
    steps: int
    num_bytes: int
    shares: list[float]
    every: list[int]


@dataclass(frozen=True, slots=True, kw_only=True)
class HalvesTimes:
    """One stage whose backward is "whole", and split by "ours" and by "torch".

    Arguments:
        stage: for people.
        forward: by side: [repetitions] of F [s].
        backward: by side: [repetitions] of B, or of I and W together [s].
    """

    stage: str
    forward: dict[str, list[float]]
    backward: dict[str, list[float]]


Record = (
    Measurement
    | RaceTimes
    | PingPong
    | ReceiveBytes
    | Breakdown
    | SimulatorSpeed
    | PlanningSpeed
    | PlannedTimes
    | PlannedMemory
    | CutTimes
    | OverlapTimes
    | CheckpointTimes
    | HalvesTimes
)
_TYPES: dict[str, type[Record]] = {kind.__name__: kind for kind in get_args(Record)}


def write_records(path: Path, records: Iterable[Record]) -> None:
    """A line each: {"type": ..., its fields}."""
    path.write_text(
        "".join(json.dumps({"type": type(r).__name__, **asdict(r)}) + "\n" for r in records), encoding="utf-8"
    )


def read_records(path: Path) -> list[Record]:
    """Records of a file that `write_records` wrote."""
    records = []
    for line in path.read_text(encoding="utf-8").splitlines():
        fields = json.loads(line)
        records.append(_TYPES[fields.pop("type")](**fields))
    return records


@dataclass(frozen=True, slots=True, kw_only=True)
class Spread:
    """The median of some samples, with the smallest and the largest."""

    median: float
    low: float
    high: float

    @classmethod
    def of(cls, samples: Sequence[float]) -> Spread:
        """Spread of at least one sample."""
        return cls(median=median(samples), low=min(samples), high=max(samples))

    @classmethod
    def of_ratios(cls, numerators: Sequence[float], denominators: Sequence[float]) -> Spread:
        """Spread of the ratios pair by pair: what disturbs a whole repetition disturbs both sides of it.

        >>> Spread.of_ratios([1.0, 2.0, 6.0], [2.0, 4.0, 4.0])
        Spread(median=0.5, low=0.5, high=1.5)
        """
        return cls.of([a / b for a, b in zip(numerators, denominators, strict=True)])
