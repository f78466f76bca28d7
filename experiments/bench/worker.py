"""One rank of a bench: a process with one thread, in which both sides run in turn.

    stagewright bench -> launcher -> P x `python -m stagewright.experiments.bench.worker` -> records of rank 0

How a step is timed, the same for both sides. Rank 0 names an instant a few milliseconds ahead; all ranks
wait for it, then run one step; the step took from that instant to the end of the last rank. The processes
share one host and so one monotonic clock. This is what a step takes when nothing of it overlaps with its
neighbours. Steps in a row would say the same: under a flush schedule rank 0 has the first forward and the
last backward, so that no rank can begin a batch in earnest before rank 0 is through with the one before.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from datetime import timedelta
from functools import partial
from pathlib import Path
from statistics import median

import torch
import torch.distributed as dist
import tyro

from ...schedules import Op, simulate
from ..launcher import report_to_launcher
from .checkpoints import run_checkpoints
from .cuts import run_contest
from .models import StagesProblem, make_problem
from .overlap import run_overlap
from .plan_workloads import CONTESTS, MEMORY_JOBS, PLANNED_RUNS, plan_file
from .planned import run_memory, run_planned
from .races import RACES, Race, Runner
from .records import Measurement, PingPong, RaceTimes, ReceiveBytes, Record, write_records
from .sides import OurSide, Side, TorchSide, check_same_work
from .timing import in_turn, say, timed
from .workloads import CHECKPOINTS, OVERLAP, PING_PONG, RECEIVE_BYTES, WORKLOADS, ModelKind, Workload

_PAUSE = 0.002  # [s] before each answer of a paced ping-pong
_WARM_UP_STEPS = 2


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerOptions:
    """Jobs of a rank of a bench."""

    jobs: tuple[str, ...]
    """Names of workloads, races, planned runs or contests, ping-pong or receive-bytes, in order."""
    repetitions: int
    """Repetitions of each workload and side."""
    out: Path
    """Rank 0 writes the records here."""


def main(argv: Sequence[str] | None = None) -> None:
    """Run the jobs as one rank of a launched group."""
    options = tyro.cli(WorkerOptions, args=argv)
    torch.set_num_threads(1)
    with report_to_launcher():
        dist.init_process_group("gloo", timeout=timedelta(seconds=120))
        records: list[Record] = []
        folder = options.out.parent
        for job in options.jobs:
            if job == PING_PONG:
                records.append(ping_pong(torch.zeros(1, 8), rounds=500))
            elif job == RECEIVE_BYTES:
                records += receive_bytes()
            elif job == OVERLAP:
                records.append(run_overlap(repetitions=options.repetitions))
            elif job == CHECKPOINTS:
                records.append(run_checkpoints(repetitions=options.repetitions))
            elif job in RACES:
                records.append(run_race(RACES[job], repetitions=options.repetitions))
            elif job in PLANNED_RUNS:
                run = PLANNED_RUNS[job]
                records.append(run_planned(run, repetitions=options.repetitions, file=plan_file(folder, run)))
            elif job in MEMORY_JOBS:
                run, kind = MEMORY_JOBS[job]
                records.append(run_memory(run, kind, file=plan_file(folder, run)))
            elif job in CONTESTS:
                records.append(run_contest(CONTESTS[job], repetitions=options.repetitions))
            else:
                records.append(measure(WORKLOADS[job], repetitions=options.repetitions))
        if dist.get_rank() == 0:
            write_records(options.out, records)
        dist.barrier()
        dist.destroy_process_group()


# Workloads


def measure(workload: Workload, *, repetitions: int) -> Measurement:
    """Both sides in turn: torch, ours, torch, ours, ..."""
    problem = make_problem(workload)  # fresh for each side: both train the same weights by themselves
    boundary = problem.boundary
    torch_side, our_side = TorchSide(workload, problem), OurSide.of_stages(workload, make_problem(workload))
    _warm_up(workload, torch_side, our_side)
    our_side.pipe.forget_measurements()
    makespans: list[float] = []

    def note_makespan() -> None:
        assert our_side.result is not None
        makespans.append(our_side.result.timeline().makespan)

    runs = {"torch": partial(_repetition, workload, torch_side), "ours": partial(_repetition, workload, our_side)}
    times = in_turn(workload.name, runs, repetitions=repetitions, after=note_makespan)
    costs = our_side.pipe.measured_costs()
    schedule = our_side.pipe.schedule
    table = costs.table(num_stages=schedule.num_stages)
    our_side.pipe.close()
    latency = median(ping_pong(boundary, rounds=50).paced)
    return Measurement(
        workload=workload.name,
        torch=times["torch"],
        ours=times["ours"],
        makespans=makespans,
        forward=list(table.means(Op.F)),
        backward=list(table.means(Op.B)),
        predicted=simulate(schedule, replace(costs, latency=latency)).makespan,
        latency=latency,
        boundary_bytes=boundary.nbytes,
    )


def _warm_up(workload: Workload, torch_side: Side, our_side: Side) -> None:
    """First steps (torch infers its shapes in one), and a look whether both sides do the same work."""
    for _ in range(_WARM_UP_STEPS):
        for side in (torch_side, our_side):
            timed(side.step)
        check_same_work(workload.name, {"torch": torch_side.loss, "ours": our_side.loss})


def _repetition(workload: Workload, side: Side) -> float:
    return median(timed(side.step) for _ in range(workload.steps))


# Races


def run_race(race: Race, *, repetitions: int) -> RaceTimes:
    """All entries in turn, many batches in a row each."""
    sides: dict[str, Side] = {}
    for entry in race.entries:
        make = OurSide.of_stages if entry.runner is Runner.OURS else TorchSide
        sides[entry.label] = make(entry.workload, make_problem(entry.workload))
    first = next(iter(sides.values()))
    assert isinstance(first, OurSide)
    for side in sides.values():
        for _ in range(_WARM_UP_STEPS):
            side.step()
    first.pipe.measured_costs()  # the link's latency, while nothing is under way
    first.pipe.forget_measurements()
    for _ in range(_WARM_UP_STEPS):
        first.step()
    bubbles: list[float] = []

    def note_bubble() -> None:
        assert first.result is not None
        bubbles.append(first.result.timeline().bubble)

    runs = {label: partial(_seconds_a_batch, side, race.batches) for label, side in sides.items()}
    seconds = in_turn(race.name, runs, repetitions=repetitions, after=note_bubble)
    predicted = simulate(first.pipe.schedule, first.pipe.measured_costs()).batch_seconds
    for side in sides.values():
        if isinstance(side, OurSide):
            side.pipe.close()
    return RaceTimes(race=race.name, seconds=seconds, predicted=predicted, bubbles=bubbles)


def _seconds_a_batch(side: Side, batches: int) -> float:
    """The slowest rank's seconds a batch over many in a row, from its own return from a few before them.

    A barrier brings all ranks to the same instant; an asynchronous pipeline's ranks then fall back into step, each a
    few forwards behind the one before, which belongs to no batch.
    """
    dist.barrier()
    for _ in range(_WARM_UP_STEPS):
        side.step()
    start = time.perf_counter()
    for _ in range(batches):
        side.step()
    seconds = torch.tensor((time.perf_counter() - start) / batches, dtype=torch.float64)
    dist.all_reduce(seconds, op=dist.ReduceOp.MAX)
    return float(seconds)


# Messages


def ping_pong(tensor: torch.Tensor, *, rounds: int) -> PingPong:
    """One-way times between ranks 0 and 1 over a gloo group, as the runtime uses them; the other ranks look on."""
    group = dist.new_group(backend="gloo", timeout=timedelta(seconds=60))
    tight = _one_way_times(group, tensor, rounds=rounds, pause=0.0)
    paced = _one_way_times(group, tensor, rounds=max(20, rounds // 5), pause=_PAUSE)
    dist.barrier()
    return PingPong(num_bytes=tensor.nbytes, tight=tight, paced=paced)


def _one_way_times(group: dist.ProcessGroup, tensor: torch.Tensor, *, rounds: int, pause: float) -> list[float]:
    """[2 * rounds] seconds from before the send to after the wait, without a warm-up."""
    rank = dist.get_rank()
    stamps: list[float] = []  # of sends on rank 0 and receives on rank 1, and the other way round, in turn
    if rank < 2:
        peer, buffer, warm_up = 1 - rank, torch.empty_like(tensor), rounds // 5
        for number in range(warm_up + rounds):
            receive = group.recv([buffer], peer, number)
            for is_send in (rank == 0, rank == 1):
                if is_send:
                    if pause:
                        time.sleep(pause)
                    stamps.append(time.perf_counter())
                    send = group.send([tensor], peer, number)
                else:
                    receive.wait()
                    stamps.append(time.perf_counter())
            send.wait()
        del stamps[: 2 * warm_up]
    everyone: list[list[float]] = [[] for _ in range(dist.get_world_size())]
    dist.all_gather_object(everyone, stamps)
    return [abs(a - b) for a, b in zip(everyone[0], everyone[1], strict=True)]


# Receive buffers


def receive_bytes() -> list[ReceiveBytes]:
    """The peak over a step, sampled at every posting, for M=8 and M=64."""
    records = []
    for schedule in ("gpipe", "1f1b", "interleaved"):
        for M in (8, 64):
            workload = Workload(
                name=f"{RECEIVE_BYTES}-{schedule}-{M}",
                model=ModelKind.TINY,
                schedule=schedule,
                num_ranks=dist.get_world_size(),
                num_microbatches=M,
                num_chunks=2 if schedule == "interleaved" else 1,
            )
            records.append(_receive_bytes(workload, make_problem(workload)))
            say(f"{workload.name}: ours {records[-1].ours} bytes, torch {records[-1].torch} bytes")
    return records


def _receive_bytes(workload: Workload, problem: StagesProblem) -> ReceiveBytes:
    ours, theirs = OurSide.of_stages(workload, make_problem(workload)), TorchSide(workload, problem)
    peak = _watch_receives(ours)
    for side in (theirs, ours):
        side.step()
        side.step()
    largest = torch.tensor([peak(), theirs.receive_bytes])
    dist.all_reduce(largest, op=dist.ReduceOp.MAX)
    ours.pipe.close()
    return ReceiveBytes(
        schedule=workload.schedule,
        num_microbatches=workload.num_microbatches,
        ours=int(largest[0]),
        torch=int(largest[1]),
    )


def _watch_receives(side: OurSide) -> Callable[[], int]:
    """Look at the transport's count behind every posting, where alone it grows; returns the peak's reader."""
    transport = side.pipe._building.built("the transport").engine.ranks[0].transport
    post, peak = transport.post, 0

    def watched(*arguments: object) -> None:
        nonlocal peak
        post(*arguments)  # type: ignore[arg-type]
        peak = max(peak, transport.unconsumed_bytes)  # type: ignore[attr-defined]

    setattr(transport, "post", watched)  # noqa: B010 - mypy allows no assignment to a method
    return lambda: peak


if __name__ == "__main__":
    main()
