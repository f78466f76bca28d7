"""Steps of this runtime and of torch.distributed.pipelining, in turn in the same processes; and their messages.

steps           one workload, a step at a time
races           throughput of several runners
receive_bytes   peak bytes of receives posted and not consumed
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from datetime import timedelta
from functools import partial
from statistics import median
from typing import NamedTuple

import torch
import torch.distributed as dist

from ...cli.train.pipeline import gather
from ...comm import ProcessGroupTransport, TensorSpec
from ...schedules import Message, Op, simulate
from ...schedules.messages import AHEAD_BYTES
from ...schedules.wording import duration
from ..jobs.case import Case
from ..jobs.figure import Figure, How, Judged, Target, repeated
from ..measure.models import Workload, make_problem
from ..measure.sides import WARM_UP_STEPS, OurSide, Side, TorchSide, warm_up
from ..measure.timing import compared, cpu_of, in_turn, median_of, off, slowest

_PAUSE = 0.002  # [s] before each answer of a paced ping-pong
_FEW, _MANY = 8, 64  # microbatches
_CPU_STEPS = 20  # of a repetition


def steps(case: Case, repetitions: int) -> Iterator[Figure]:
    """A workload by both sides: torch, ours, torch, ours, ...

    The simulator uses our own costs and the latency of a message by ping-pong. `limit`: of ours over torch's;
    `cpu_limit`: the same of CPU seconds; `ideal_limit`: over the ideal; `error_limit`: of the prediction. `steps`: of a
    repetition, whose value is their median (short steps need several).
    """
    workload = Workload.of(case)
    problem = make_problem(workload)  # a new one for each side: both train the same weights separately
    theirs, ours = TorchSide(workload, problem), OurSide.of_stages(workload, make_problem(workload))
    sides: dict[str, Side] = {"torch": theirs, "ours": ours}
    warm_up(str(workload), sides)
    ours.pipe.forget_measurements()
    makespans: list[float] = []

    runs = {name: partial(median_of, side.step, case.count("steps", 1)) for name, side in sides.items()}
    name = f"{case.text('case')} {workload}"
    seconds = in_turn(name, runs, repetitions=repetitions, after=lambda: makespans.append(ours.timeline.makespan))
    costs, schedule = ours.pipe.measured_costs(), ours.pipe.schedule
    cpu: dict[str, list[float]] = {}
    if "cpu_limit" in case:
        runs = {side: partial(cpu_of, each.step, _CPU_STEPS) for side, each in sides.items()}
        cpu = in_turn(f"{name}, CPU", runs, repetitions=repetitions)
    ours.pipe.close()
    latency = median(ping_pong(problem.boundary, rounds=50)["paced"])
    predicted = simulate(schedule, replace(costs, latency=latency)).makespan

    how = How.EMULATED if workload.model == "sleep" else How.MEASURED
    raw = Case.of({"run": str(workload), "model": workload.model})
    for name, values in {**seconds, "makespan": makespans}.items():
        yield from repeated(values, case=raw, name=f"step, {name}", unit="s", how=how)
    if workload.model == "tiny":
        for name, values in ping_pong(problem.boundary, rounds=500).items():
            yield from repeated(values, case=raw, name=f"message, {name}", unit="s", how=how)
    shown = Case.of({"case": case.text("case"), "run": str(workload)})
    if workload.model == "sleep":
        table, ideal = costs.table(num_stages=schedule.num_stages), workload.ideal_makespan
        yield from repeated(
            [took / ideal for took in seconds["ours"]],
            case=shown,
            name="step, ours / ideal",
            unit="ratio",
            how=how,
            target=Target(limit=case.number("ideal_limit")),
            note=f"ideal {duration(ideal)}; torch / ideal {median(seconds['torch']) / ideal:.3f}; "
            f"F {duration(median(table.means(Op.F)))}, B {duration(median(table.means(Op.B)))}",
        )
    yield from compared(
        (seconds["ours"], seconds["torch"]),
        case=shown,
        name="step, ours / torch",
        how=how,
        target=Target(limit=case.number("limit"), judged=Judged.BEST if workload.model == "sleep" else Judged.MEDIAN),
    )
    if cpu:
        yield from compared(
            (cpu["ours"], cpu["torch"]),
            case=shown,
            name="CPU per step and rank, ours / torch",
            how=how,
            target=Target(limit=case.number("cpu_limit")),
        )
    if "error_limit" in case:
        run = f"{workload} GPT" if workload.model == "gpt" else str(workload)
        yield from off(
            predicted,
            makespans,
            case=Case.of({"case": "prediction", "run": run, "predicted": "simulated"}),
            name="error of the makespan",
            how=how,
            target=Target(limit=case.number("error_limit")),
            note=f", latency {duration(latency)} for {problem.boundary.nbytes} bytes",
        )


class Entry(NamedTuple):
    """One runner of a race; `at_least`: the first entry's least throughput as a multiple of this one's (None: no
    target); `ideal`: that multiple with equal stages, free messages and free updates."""

    runner: str
    schedule: str
    chunks: int = 1
    warmup: str = "plain"
    at_least: float | None = None
    ideal: float | None = None

    def __str__(self) -> str:
        eager = " eager" if self.warmup == "eager" else ""
        return f"{self.runner} {self.schedule}{eager}{f' V={self.chunks}' if self.chunks > 1 else ''}"


def entries_of(case: Case) -> Sequence[Entry]:
    if case.text("model") == "sleep":
        ranks, at_least = case.count("ranks"), case.number("at_least")
        others = [Entry(who, "1f1b", at_least=at_least, ideal=(2 * ranks - 1) / ranks) for who in ("ours", "torch")]
        return [Entry("ours", "2bw"), *others]  # ideal: (M + P - 1) / M
    return [
        Entry("ours", "2bw"),
        Entry("torch", "1f1b", at_least=1.42, ideal=1.5),
        Entry("torch", "interleaved", 2, at_least=1.22),
        Entry("ours", "2bw", warmup="eager"),
        Entry("ours", "1f1b"),
        Entry("ours", "interleaved", 2),
    ]


def races(case: Case, repetitions: int) -> Iterator[Figure]:
    """Throughput of all entries, which train the same stages batch after batch in turn.

    A step of an asynchronous schedule returns with a full pipeline. So the time of many `batches` in a row is measured
    on each rank, from its return from one step to its return from a later one.
    """
    sides: dict[Entry, Side] = {}
    for entry in entries_of(case):
        workload = Workload.of(case, schedule=entry.schedule, num_chunks=entry.chunks, warmup=entry.warmup)
        make = OurSide.of_stages if entry.runner == "ours" else TorchSide
        sides[entry] = make(workload, make_problem(workload))
    (first, own), *_ = sides.items()
    assert isinstance(own, OurSide)
    for side in sides.values():
        for _ in range(WARM_UP_STEPS):
            side.step()
    own.pipe.measured_costs()  # measures the link's latency, while nothing is in flight
    own.pipe.forget_measurements()
    for _ in range(WARM_UP_STEPS):
        own.step()
    bubbles: list[float] = []

    runs = {str(entry): partial(seconds_a_batch, side.step, case.count("batches")) for entry, side in sides.items()}
    run = str(Workload.of(case, schedule=first.schedule))
    name = f"{case.text('case')} {run}"
    seconds = in_turn(name, runs, repetitions=repetitions, after=lambda: bubbles.append(own.timeline.bubble))
    predicted = simulate(own.pipe.schedule, own.pipe.measured_costs()).batch_seconds
    for side in sides.values():
        if isinstance(side, OurSide):
            side.pipe.close()

    how = How.EMULATED if case.text("model") == "sleep" else How.MEASURED
    shown, taken = Case.of({"case": case.text("case"), "run": run}), seconds[str(first)]
    for entry, values in zip(sides, seconds.values(), strict=True):
        yield from repeated(values, case=Case.of({"run": run}), name=f"batch, {entry}", unit="s", how=how)
        if entry is not first:
            ideal = "" if entry.ideal is None else f", ideal {entry.ideal:.3f}"
            yield from compared(
                (values, taken),
                case=shown,
                name=f"throughput / {entry}",
                how=how,
                target=None if entry.at_least is None else Target(limit=entry.at_least, at_least=True),
                note=f" a batch{ideal}",
            )
    yield from off(
        predicted,
        taken,
        case=shown.also(predicted="simulated"),
        name="error of the period",
        how=how,
        note=f", bubble {median(bubbles):.1%}",
    )


def seconds_a_batch(step: Callable[[], object], batches: int) -> float:
    """The slowest rank's seconds per batch over many in a row, from its own return from a few before them.

    After a barrier the ranks of an asynchronous pipeline first return to their offsets of a few forwards per rank,
    which belongs to no batch.
    """
    dist.barrier()
    for _ in range(WARM_UP_STEPS):
        step()
    start = time.perf_counter()
    for _ in range(batches):
        step()
    return slowest((time.perf_counter() - start) / batches)


def ping_pong(tensor: torch.Tensor, *, rounds: int) -> dict[str, list[float]]:
    """One-way times between ranks 0 and 1 over a gloo group, from just before the send to just after the wait [s].

    tight: each side answers at once. paced: each side sleeps first, so that the receiver is asleep. The other ranks
    are idle.
    """
    group = dist.new_group(backend="gloo", timeout=timedelta(seconds=60))
    tight = _one_way_times(group, tensor, rounds=rounds, pause=0.0)
    paced = _one_way_times(group, tensor, rounds=max(20, rounds // 5), pause=_PAUSE)
    dist.barrier()
    return {"tight": tight, "paced": paced}


def _one_way_times(group: dist.ProcessGroup, tensor: torch.Tensor, *, rounds: int, pause: float) -> list[float]:
    """[2 * rounds] seconds from before the send to after the wait, without a warm-up."""
    rank = dist.get_rank()
    stamps: list[float] = []  # of sends on rank 0 and receives on rank 1, and vice versa, in turn
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
    everyone = gather(stamps)
    return [abs(a - b) for a, b in zip(everyone[0], everyone[1], strict=True)]


def receive_bytes(case: Case, repetitions: int) -> Iterator[Figure]:
    """Peak over a step of any rank, sampled at every posting, for many microbatches over that for few, or 16 MiB.

    torch's are the receive buffers of its stages, which it makes for all microbatches at once.
    """
    del repetitions  # bytes are the same in each
    found = [_receive_bytes(Workload.of(case, num_microbatches=M)) for M in (_FEW, _MANY)]
    (few, few_torch), (many, many_torch) = found
    yield Figure(
        case=Case.of({"case": case.text("case"), "run": f"{case.text('schedule')} M={_FEW}, {_MANY}"}),
        name="peak bytes, large M / small M, or 16 MiB",
        value=many / max(few, AHEAD_BYTES),
        unit="ratio",
        how=How.MEASURED,
        target=Target(limit=1.0),
        note=f"{many} / {few} bytes; torch holds {many_torch} / {few_torch}",
    )


def _receive_bytes(workload: Workload) -> tuple[int, int]:
    ours = OurSide.of_stages(workload, make_problem(workload))
    theirs = TorchSide(workload, make_problem(workload))
    peak = _watch_receives(ours)
    for side in (theirs, ours):
        side.step()
        side.step()
    most = torch.tensor([peak(), theirs.receive_bytes])
    dist.all_reduce(most, op=dist.ReduceOp.MAX)
    ours.pipe.close()
    return int(most[0]), int(most[1])


def _watch_receives(side: OurSide) -> Callable[[], int]:
    """Sample the transport's count after every posting, where it grows. Returns a function for the peak."""
    transport = side.pipe._building.built("the transport").engine.ranks[0].transport
    assert isinstance(transport, ProcessGroupTransport), transport
    post, peak = transport.post, 0

    def watched(message: Message, peer: int, specs: Sequence[TensorSpec]) -> None:
        nonlocal peak
        post(message, peer, specs)
        peak = max(peak, transport.unconsumed_bytes)

    setattr(transport, "post", watched)  # noqa: B010 - mypy allows no assignment to a method
    return lambda: peak
