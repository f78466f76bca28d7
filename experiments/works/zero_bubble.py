"""Zero-bubble schedules on real processes, compared with torch.distributed.pipelining's, in turn in one run.

`emulated`: actions that sleep, any number of ranks. `gpt`: the example GPT with AdamW on two ranks. Schedules are made
and simulated for the seconds of actions and the latency of messages measured under zb-1p in the same run.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import replace
from functools import partial
from statistics import fmean, median
from typing import TYPE_CHECKING, Any

from ...schedules import Costs, Schedule, build, check, simulate, synthesize
from ...schedules.ir import Op
from ...schedules.timing.costs import CostTable
from ..jobs.case import Case
from ..jobs.figure import Figure, How, repeated

if TYPE_CHECKING:
    from ..measure.models import Workload
    from ..measure.sides import OurSide, TorchSide

FORWARD = INPUT_GRAD = WEIGHT_GRAD = 0.020  # [s] of a rank's whole work of one microbatch
_SEARCH = 10.0  # [s] of one synthesis
_RATIO = "batch, {how} / simulated"
_OVER_BEST = "best of torch's / best of ours"
THEIRS = ("torch gpipe", "torch 1f1b", "torch interleaved", "torch interleaved-zb", "torch zb-v")


def schedules_for(num_ranks: int, num_microbatches: int, costs_of_rank: Costs) -> dict[str, Schedule]:
    """Our schedules by name, for seconds of a rank's whole work (one number each), which chunks share evenly. "auto"
    may use as much memory as 1F1B."""
    named = partial(build, num_ranks=num_ranks, num_microbatches=num_microbatches)

    def made(placement: str, chunks: int) -> Schedule:
        return synthesize(
            num_ranks=num_ranks,
            num_microbatches=num_microbatches,
            costs=of_chunks(costs_of_rank, chunks),
            memory_limit=num_ranks * chunks,
            placement=placement,
            objective="makespan",
            seconds=_SEARCH,
            seed=0,
        ).schedule

    return {
        "1f1b": named("1f1b"),
        "interleaved": named("interleaved", num_chunks=2),
        "zb-1p": named("zb-1p", costs=costs_of_rank),
        "zb-v": named("zb-v", costs=of_chunks(costs_of_rank, 2)),
        "auto": made("plain", 1),
        "auto, V-shape": made("v", 2),
    }


def agreed(num_ranks: int, num_microbatches: int, costs_of_rank: Costs) -> tuple[dict[str, Schedule], Costs]:
    """The schedules of rank 0 on every rank, since searches with a time limit differ."""
    import torch.distributed as dist

    told: list[Any] = [None]
    if dist.get_rank() == 0:
        made = schedules_for(num_ranks, num_microbatches, costs_of_rank)
        told = [({name: each.to_json() for name, each in made.items()}, costs_of_rank.to_json())]
    dist.broadcast_object_list(told, src=0)
    schedules, costs = told[0]
    return {name: Schedule.from_json(text) for name, text in schedules.items()}, Costs.from_json(costs)


def of_chunks(costs: Costs, num_chunks: int) -> Costs:
    """Seconds of one of the chunks that share a rank's work evenly; overheads of actions and messages stay."""
    table = costs.free_of_overhead.table(num_stages=1)
    return Costs(
        forward=table.of(Op.F, 0, 0) / num_chunks,
        input_grad=table.of(Op.I, 0, 0) / num_chunks,
        weight_grad=table.of(Op.W, 0, 0) / num_chunks,
        overhead=costs.overhead,
        latency=costs.latency,
    )


def our_side(schedule: Schedule, workload: Workload) -> OurSide:
    from ..measure.models import make_problem
    from ..measure.sides import OurSide

    chunks = schedule.num_stages // schedule.num_ranks
    return OurSide.of_schedule(schedule, make_problem(replace(workload, num_chunks=chunks)))


def torch_side(name: str, workload: Workload) -> TorchSide:
    from ..measure.models import make_problem
    from ..measure.sides import TorchSide

    plain = name.removeprefix("torch ")
    own = replace(workload, schedule=plain, num_chunks=1 if plain in ("gpipe", "1f1b") else 2)
    return TorchSide(own, make_problem(own))


def emulated(case: Case, repetitions: int) -> Iterator[Figure]:
    """Seconds of a batch of each schedule with sleeping actions, over the simulated ones; runs on all of its ranks."""
    from ..measure.models import Workload
    from ..measure.sleeping import ours_asleep, put_asleep
    from ..measure.timing import in_turn, timed

    def asleep(step: Callable[[], object], table: CostTable) -> float:
        with ours_asleep(table):
            return timed(step)

    P, M = case.count("ranks"), case.count("microbatches")
    told = Costs(forward=FORWARD, input_grad=INPUT_GRAD, weight_grad=WEIGHT_GRAD)
    workload = Workload(model="tiny", schedule="1f1b", num_ranks=P, num_microbatches=M)
    with ours_asleep(told.table(num_stages=P)):
        measured = _measured(workload)
    ours, rank_costs = agreed(P, M, measured)
    runs: dict[str, Callable[[], float]] = {}
    with ExitStack() as stack:
        for name, schedule in ours.items():
            side = our_side(schedule, workload)
            stack.callback(side.pipe.close)
            table = of_chunks(told, schedule.num_stages // P).table(num_stages=schedule.num_stages)
            runs[name] = partial(asleep, side.step, table)
        for name in THEIRS[3:]:
            theirs = torch_side(name, workload)
            for stage in theirs.stages:
                put_asleep(stage, of_chunks(told, 2).table(num_stages=2 * P))
            runs[name] = partial(timed, theirs.step)
        for run_once in runs.values():  # connects groups, finds shapes
            run_once()
        times = in_turn(str(case), runs, repetitions=repetitions)
    yield from _figures(case, times, ours, rank_costs, How.EMULATED)


def gpt(case: Case, repetitions: int) -> Iterator[Figure]:
    """The same for a GPT with AdamW on two ranks, with the seconds of its own actions under zb-1p."""
    from ..measure.models import Workload
    from ..measure.timing import in_turn, timed

    M = case.count("microbatches")
    workload = Workload(model="gpt", schedule="1f1b", num_ranks=2, num_microbatches=M)
    ours, costs = agreed(2, M, _measured(workload))
    runs: dict[str, Callable[[], float]] = {}
    with ExitStack() as stack:
        for name, schedule in ours.items():
            side = our_side(schedule, workload)
            stack.callback(side.pipe.close)
            runs[name] = partial(timed, side.step)
        for name in THEIRS:
            runs[name] = partial(timed, torch_side(name, workload).step)
        for run_once in runs.values():
            run_once()
            run_once()
        times = in_turn(str(case), runs, repetitions=repetitions)
    yield from _figures(case, times, ours, costs, How.MEASURED)


def _measured(workload: Workload) -> Costs:
    """Seconds of actions and the latency of messages in a few batches under zb-1p, as means over stages, since
    schedules are made for equal ones."""
    S = workload.num_ranks
    side = our_side(build("zb-1p", num_ranks=S, num_microbatches=workload.num_microbatches), workload)
    for _ in range(4):
        side.step()
    costs = side.pipe.measured_costs()
    side.pipe.close()
    table, whole = costs.free_of_overhead.table(num_stages=S), costs.table(num_stages=S)

    def mean(op: Op, table: CostTable = table) -> float:
        return fmean(table.of(op, stage, 0) for stage in range(S))

    return Costs(
        forward=mean(Op.F),
        input_grad=mean(Op.I),
        weight_grad=mean(Op.W),
        overhead=mean(Op.F, whole) - mean(Op.F),
        latency=max(table.latency),
    )


def _figures(
    case: Case, times: Mapping[str, Sequence[float]], ours: Mapping[str, Schedule], costs_of_rank: Costs, how: How
) -> Iterator[Figure]:
    for name, seconds in times.items():
        own = case.also(schedule=name)
        yield from repeated(seconds, case=own, name="batch", unit="s", how=how)
        schedule = ours.get(name)
        if schedule is None:
            continue
        chunks = schedule.num_stages // schedule.num_ranks
        predicted = simulate(schedule, of_chunks(costs_of_rank, chunks)).makespan
        yield Figure(case=own, name="batch", value=predicted, unit="s", how=How.SIMULATED)
        held = max(check(schedule).peak_activations) / chunks
        yield Figure(case=own, name="activations", value=held, unit="microbatches", how=How.SIMULATED)
        over = [value / predicted for value in seconds]
        yield from repeated(over, case=own, name=_RATIO.format(how=how.value), unit="ratio", how=how)
    best, theirs = (
        [
            min(row)
            for row in zip(*(seconds for name, seconds in times.items() if (name in ours) is is_ours), strict=True)
        ]
        for is_ours in (True, False)
    )
    over = [other / own for other, own in zip(theirs, best, strict=True)]
    yield from repeated(over, case=case, name=_OVER_BEST, unit="ratio", how=how)


def findings(figures: Sequence[Figure]) -> Iterator[str]:
    over: dict[tuple[str, str], list[float]] = defaultdict(list)
    for figure in figures:
        if figure.name.startswith("batch, "):
            over[figure.how.value, str(figure.case.get("ranks"))].append(figure.value)
    for (how, ranks), values in sorted(over.items()):
        yield (
            f"{how} on {ranks} ranks, a batch takes {median(values):.3f} of the simulated time "
            f"(median; worst {max(values):.3f})."
        )
    beside: dict[str, list[float]] = defaultdict(list)
    for figure in figures:
        if figure.name == _OVER_BEST:
            beside[f"{figure.how.value}, {figure.case}"].append(figure.value)
    for what, values in beside.items():
        yield f"{what}: the best of torch's schedules takes {median(values):.3f} of the best of ours (median)."
