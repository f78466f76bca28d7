"""Five models on this machine, each profiled, planned and run: what a step does with time, links and memory, and where.

After TBD (Zhu et al., 2018), "Benchmarking and Analyzing Deep Neural Network Training". Of a rank in a measured step:

    compute     share of the step in F, B, I and W
    links       share in which a message that somebody waited for, or a sum, came or went: one that came while its
                receiver computed is not seen to travel
    parts       bytes by stage at the rank's peak, each tensor by what it is (`parts_at_peak`); buffers are with weights
    peak        by the allocator over the whole step, whatever the parts say
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, Any

from ...schedules import MemoryPart, Timeline
from ...viz.palette import MEMORY_HUES, SERIES_HUES
from ..jobs.case import Case
from ..jobs.figure import Figure, How, Target, repeated

if TYPE_CHECKING:
    from ..measure.sides import OurSide

PARTS = {
    "weights": (MemoryPart.WEIGHTS, MemoryPart.BUFFERS),
    "gradients": (MemoryPart.GRADIENTS,),
    "activations": (MemoryPart.ACTIVATIONS,),
    "optimizer": (MemoryPart.OPTIMIZER,),
    "workspace": (MemoryPart.WORKSPACE,),
    "communication": (MemoryPart.MESSAGES,),
}
_ADD_UP = 0.05  # parts beside the peak
_WARM_UP = 3


def trained(case: Case, repetitions: int) -> Iterator[Figure]:
    """Figures of a `model` in `microbatches` of so many `samples`; a repetition is a step. Runs on all ranks."""
    import torch
    import torch.distributed as dist

    from ...partition.plans.as_text import describe
    from ...partition.plans.simulated import expected
    from ..measure.sides import OurSide
    from ..measure.suite import TASKS
    from ..measure.timing import say, timed
    from .bench_plans import plan_by_measuring

    M, P = case.count("microbatches"), dist.get_world_size()
    torch.manual_seed(1)
    task = TASKS[case.text("model")](M * case.count("samples"))
    say(f"{case.text('model')}: profiling and planning")
    plan = plan_by_measuring(task.problem, num_microbatches=M, pipeline_sizes=(P,), data_sizes=(1,))
    planned = expected(plan)
    assert planned is not None
    side = OurSide.of_model(task.problem, schedule=plan)
    for _ in range(_WARM_UP):
        side.step()
    seconds, lines = [], []
    for _ in range(repetitions):
        seconds.append(timed(side.step))
        lines.append(side.timeline)
    mine = _memory(side)
    ranks = [mine] * P
    dist.all_gather_object(ranks, mine)
    schedule = side.pipe.schedule
    side.pipe.close()

    work = len(task.problem.inputs) * task.per_sample
    speed: dict[str, Any] = {"name": "throughput", "unit": task.unit, "note": f"{schedule.name} {describe(plan)}"}
    yield from repeated([work / each for each in seconds], case=case, how=How.MEASURED, **speed)
    yield Figure(case=case, value=work / planned[0], how=How.SIMULATED, **speed)
    for rank, (parts, peak) in enumerate(ranks):
        own: dict[str, Any] = {"case": case.also(rank=rank), "how": How.MEASURED}
        yield from repeated(
            [each.ranks[rank].busy / each.batch_seconds for each in lines], name="compute", unit="fraction", **own
        )
        yield from repeated([on_links(each, rank) for each in lines], name="links", unit="fraction", **own)
        yield Figure(name="peak", value=peak, unit="bytes", **own)
        yield Figure(name="peak", value=plan.memory_bytes[rank], unit="bytes", **{**own, "how": How.SIMULATED})
        yield Figure(
            name="parts / peak", value=sum(parts.values()) / peak, unit="ratio", target=Target(limit=1 + _ADD_UP), **own
        )
        for stage in schedule.placement[rank]:
            for name, kinds in PARTS.items():
                value = sum(parts.get((stage, kind), 0) for kind in kinds)
                yield Figure(name=name, value=value, unit="bytes", **{**own, "case": case.also(rank=rank, stage=stage)})
    everything = sum(sum(parts.values()) for parts, _ in ranks)
    kept = sum(size for parts, _ in ranks for (_, part), size in parts.items() if part is MemoryPart.ACTIVATIONS)
    share = kept / everything
    yield Figure(case=case, name="share of activations", value=share, unit="fraction", how=How.MEASURED)


def _memory(side: OurSide) -> tuple[Mapping[tuple[int, MemoryPart], int], int]:
    """Parts and peak of this process in one more step."""
    from ...partition.profiler.memory import cpu_peaks
    from ...pipe.run.memory import parts_at_peak

    held = side.pipe.held_bytes()
    with cpu_peaks() as (found, mark), side.pipe.watch_memory() as watched, mark():
        watched.mark = mark
        side.step()
    return parts_at_peak(watched, found[1:]), held + found[0][0]


def on_links(timeline: Timeline, rank: int) -> float:
    """Share of the step in which something comes to this rank or goes from it, seen as the module says."""
    owner, lines = timeline.schedule.owner, timeline.ranks
    spans = [(each.start, each.end) for each in (*lines[rank].comm, *lines[rank].collectives)]
    spans += [
        (start, end)
        for other in lines
        for message, start, end in other.comm
        if owner(message.src, message.index) == rank
    ]
    busy, until = 0.0, 0.0
    for start, end in sorted(spans):
        busy += max(0.0, end - max(start, until))
        until = max(until, end)
    return busy / timeline.batch_seconds
