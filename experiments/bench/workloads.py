"""Tables of workloads and cases: the runs, and the questions that they answer. No torch.

A workload is one model under one schedule, run by both sides in turn. A case is a question put to one or more
workloads: `prediction` looks at the same repetitions as `sleep-1f1b`, which are made once.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from enum import StrEnum

from .plan_workloads import CONTESTS, PLANNED_RUNS

# Jobs of a worker beside the workloads.
PING_PONG, RECEIVE_BYTES, OVERLAP, CHECKPOINTS = "ping-pong", "receive-bytes", "overlap", "checkpoints"
HALVES = "split-backward"  # a process of its own


class ModelKind(StrEnum):
    """Kind of stages."""

    TINY = "tiny"  # a linear layer of width 8: no compute to speak of
    SLEEP = "sleep"  # sleeps for a given time: P can exceed the number of cores
    GPT = "gpt"  # the example GPT, with its optimizer


@dataclass(frozen=True, slots=True, kw_only=True)
class Workload:
    """One model under one schedule.

    Arguments:
        num_ranks: P; every rank is a process with one thread.
        num_microbatches: M.
        num_chunks: V.
        forward, backward: of one stage action, where the stages sleep [s].
        warmup: of 2bw.
        steps: of one repetition, whose value is their median (short steps need several).
    """

    name: str
    model: ModelKind
    schedule: str
    num_ranks: int
    num_microbatches: int
    num_chunks: int = 1
    forward: float = 0.0
    backward: float = 0.0
    warmup: str = "plain"
    steps: int = 1

    @property
    def num_stages(self) -> int:
        """S = P * V."""
        return self.num_ranks * self.num_chunks

    @property
    def ideal_makespan(self) -> float:
        """(M*V + P - 1)(F + B): free messages, equal stages, 1F1B or interleaved with P dividing M [s]."""
        actions = self.num_microbatches * self.num_chunks + self.num_ranks - 1
        return actions * (self.forward + self.backward)

    @property
    def shape(self) -> str:
        """P, V and M for people."""
        chunks = f" V={self.num_chunks}" if self.num_chunks > 1 else ""
        return f"P={self.num_ranks}{chunks} M={self.num_microbatches}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """A question: a name for `--only`, and what it needs of each table (nothing: it measures by itself)."""

    name: str
    summary: str
    workloads: tuple[str, ...] = ()
    races: tuple[str, ...] = ()
    planned_runs: tuple[str, ...] = ()
    contests: tuple[str, ...] = ()


def _tiny(schedule: str, num_chunks: int) -> Workload:
    return Workload(
        name=f"overhead-{schedule}",
        model=ModelKind.TINY,
        schedule=schedule,
        num_ranks=2,
        num_microbatches=32,
        num_chunks=num_chunks,
        steps=20,
    )


def _sleep(schedule: str, num_ranks: int) -> Workload:
    num_chunks = 2 if schedule == "interleaved" else 1
    return Workload(
        name=f"sleep-{schedule}-{num_ranks}",
        model=ModelKind.SLEEP,
        schedule=schedule,
        num_ranks=num_ranks,
        num_microbatches=2 * num_ranks,
        num_chunks=num_chunks,
        forward=0.020 / num_chunks,
        backward=0.040 / num_chunks,
    )


def _gpt(schedule: str, num_microbatches: int) -> Workload:
    return Workload(
        name=f"gpt-{schedule}-{num_microbatches}",
        model=ModelKind.GPT,
        schedule=schedule,
        num_ranks=2,
        num_microbatches=num_microbatches,
        num_chunks=2 if schedule == "interleaved" else 1,
    )


WORKLOADS: dict[str, Workload] = {
    workload.name: workload
    for workload in (
        _tiny("1f1b", 1),
        _tiny("interleaved", 2),
        _sleep("1f1b", 4),
        _sleep("1f1b", 8),
        _sleep("interleaved", 4),
        _sleep("interleaved", 8),
        *(_gpt(schedule, M) for M in (8, 4) for schedule in ("gpipe", "1f1b", "interleaved")),
    )
}

_SLEEPING = tuple(name for name, workload in WORKLOADS.items() if workload.model is ModelKind.SLEEP)
_GPT = tuple(name for name, workload in WORKLOADS.items() if workload.model is ModelKind.GPT)

CASES: dict[str, Case] = {
    case.name: case
    for case in (
        Case(
            name="overhead-1f1b",
            summary="step time at no compute, 1F1B: at most 1.1 of torch's",
            workloads=("overhead-1f1b",),
        ),
        Case(
            name="overhead-interleaved",
            summary="step time at no compute, interleaved: at most half of torch's",
            workloads=("overhead-interleaved",),
        ),
        Case(
            name="sleep-1f1b",
            summary="stages that sleep, 1F1B: within 1.02 of the ideal, not behind torch",
            workloads=("sleep-1f1b-4", "sleep-1f1b-8"),
        ),
        Case(
            name="sleep-interleaved",
            summary="stages that sleep, interleaved: within 1.03 of the ideal, not behind torch",
            workloads=("sleep-interleaved-4", "sleep-interleaved-8"),
        ),
        Case(
            name="prediction",
            summary="the simulator beside measured steps: 2% where stages sleep, 3% on the GPT",
            workloads=(*_SLEEPING, *_GPT),
        ),
        Case(
            name="gpt",
            summary="a GPT with AdamW on two ranks: at least as fast as torch, schedule by schedule",
            workloads=_GPT,
        ),
        Case(
            name="async-sleep",
            summary="throughput of 2bw, stages that sleep: 1.68 (P=4) and 1.8 (P=8) times 1F1B, ours and torch's",
            races=("async-sleep-4", "async-sleep-8"),
        ),
        Case(
            name="async-gpt",
            summary="throughput of 2bw, a GPT with AdamW, M=2: 1.42 times torch's 1F1B, 1.22 times its interleaved",
            races=("async-gpt",),
        ),
        Case(name="receive-bytes", summary="receives posted and not consumed: the same for M=8 and M=64"),
        Case(
            name=OVERLAP,
            summary="gradients summed over a slow wire: beside the backwards that follow, and behind them",
        ),
        Case(
            name=CHECKPOINTS,
            summary="a GPT with AdamW on two ranks: checkpoints beside training and saves it waits for; 3.5% by auto",
        ),
        Case(
            name=HALVES,
            summary="I and W over the whole backward: at most 1.05 on a GPT's stage and 1.25 on small linears",
        ),
        Case(name="simulator", summary="the simulator's own speed and memory"),
        Case(
            name="partitioner",
            summary="its speed: published profiles in 1/20 of PipeDream's time, 1,000 layers on 1,024 devices in 10 s",
        ),
        Case(name="planner", summary="its speed: a transformer of 100 layers on 1,024 GPUs in 60 s"),
        Case(
            name="planning-scale", summary="seconds of CPU and memory of plans for 1,000 to 100,000 devices, each once"
        ),
        Case(
            name="planned-run",
            summary="plans carried out: step time within 10% (a GPT) and 5% (layers that sleep), memory within 10%",
            planned_runs=tuple(PLANNED_RUNS),
        ),
        Case(
            name="uneven-cut",
            summary="uneven models on two ranks: cut by profile, faster than equal layers or equal parameters",
            contests=tuple(CONTESTS),
        ),
    )
}


def select_cases(names: Sequence[str]) -> list[Case]:
    """The cases of these names (none: all), in the table's order; ValueError for an unknown one."""
    for name in names:
        if name not in CASES:
            near = difflib.get_close_matches(name, CASES, n=2, cutoff=0.3)
            hint = f"; did you mean {' or '.join(near)}?" if near else ""
            raise ValueError(f"--only {name}: no such case{hint}\ncases: {', '.join(CASES)}")
    return [case for case in CASES.values() if not names or case.name in names]


def workloads_of(cases: Iterable[Case]) -> list[Workload]:
    """Workloads of these cases, each once, in the table's order."""
    needed = {name for case in cases for name in case.workloads}
    return [workload for name, workload in WORKLOADS.items() if name in needed]
