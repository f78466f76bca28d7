"""Bytes at the peak of a GPT with AdamW on two ranks: measured, predicted, and beside torch.distributed.pipelining's.

measured      storages of tensors that a process holds at once within a step, above what it holds between two steps
              (weights, the optimizer's state): activations, gradients, messages. Counted alike on both sides, so
              with the receive buffers that torch's stages keep.
predicted     the same parts of `memory_curves` of the simulated schedule, from bytes of stages. These were seen under
              other schedules: 1F1B, or interleaved 1F1B where a rank has two chunks.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import TYPE_CHECKING

from ...schedules import Costs, MemoryPart, Schedule, StageBytes, build, memory_curves, simulate
from ..jobs.case import Case
from ..jobs.figure import Figure, How
from . import zero_bubble
from .zero_bubble import FORWARD, INPUT_GRAD, THEIRS, WEIGHT_GRAD, agreed, of_chunks, our_side, torch_side

if TYPE_CHECKING:
    from torch import Tensor

    from ..measure.models import Workload

_BYTES = "bytes at peak"
_OVER = "bytes at peak, measured / simulated"
_BETWEEN_STEPS = (MemoryPart.WEIGHTS, MemoryPart.OPTIMIZER, MemoryPart.BUFFERS)


def gpt(case: Case, repetitions: int) -> Iterator[Figure]:
    """The rank with most: ours by schedule, measured and predicted, and torch's, measured; on two ranks."""
    del repetitions  # bytes are the same in each
    from ..measure.models import Workload

    M = case.count("microbatches")
    workload = Workload(model="gpt", schedule="1f1b", num_ranks=2, num_microbatches=M)
    ours, costs = agreed(2, M, Costs(forward=FORWARD, input_grad=INPUT_GRAD, weight_grad=WEIGHT_GRAD))
    stages = {chunks: _bytes_of_stages(workload, chunks) for chunks in (1, 2)}
    for name, schedule in ours.items():
        chunks = schedule.num_stages // 2
        side = our_side(schedule, workload)
        found = _most(side.step, side.pipe.parameters())
        side.pipe.close()
        expected = predicted(schedule, of_chunks(costs, chunks), stages[chunks])
        yield from _figures(case.also(schedule=name), found, expected)
    for name in THEIRS:
        theirs = torch_side(name, workload)
        parameters = [parameter for stage in theirs.stages for parameter in stage.submod.parameters()]
        theirs.step()  # makes its receive buffers
        found = _most(theirs.step, parameters, beside=theirs.receive_bytes)
        yield from _figures(case.also(schedule=name), found, None)


def predicted(schedule: Schedule, costs: Costs, stages: Sequence[StageBytes]) -> float:
    """Bytes of the rank with most, without what is there between two steps."""
    curves = memory_curves(simulate(schedule, costs), stages)
    most: list[float] = []
    for curve in curves:
        parts = [values for part, values in curve.parts.items() if part not in _BETWEEN_STEPS]
        most.append(max(map(sum, zip(*parts, strict=True))))
    return max(most)


def _bytes_of_stages(workload: Workload, chunks: int) -> Sequence[StageBytes]:
    """[S] seen in one step of plain or interleaved 1F1B."""
    name = "1f1b" if chunks == 1 else "interleaved"
    schedule = build(name, num_ranks=2, num_microbatches=workload.num_microbatches, num_chunks=chunks)
    side = our_side(schedule, workload)
    side.step()
    with side.pipe.watch_memory() as watched:
        side.step()
    found = side.pipe.stage_bytes(watched)
    side.pipe.close()
    return found


def _most(step: Callable[[], None], parameters: Iterable[Tensor], *, beside: int = 0) -> int:
    """Bytes of tensors at the peak of a step, of the rank with most; the steps before made the optimizer's state.

    Arguments:
        beside: bytes that lie there between two steps, and are for the pipeline.
    """
    import torch
    import torch.distributed as dist

    from ...partition.profiler.memory import LiveBytes, bytes_of

    step()
    step()
    gradients = [parameter.grad for parameter in parameters if parameter.grad is not None]
    with LiveBytes(gradients) as live:
        step()
    most = torch.tensor(live.most + bytes_of(gradients) + beside)
    dist.all_reduce(most, op=dist.ReduceOp.MAX)
    return int(most)


def _figures(case: Case, found: int, expected: float | None) -> Iterator[Figure]:
    yield Figure(case=case, name=_BYTES, value=found, unit="bytes", how=How.MEASURED)
    if expected is not None:
        yield Figure(case=case, name=_BYTES, value=expected, unit="bytes", how=How.SIMULATED)
        yield Figure(case=case, name=_OVER, value=found / expected, unit="ratio", how=How.MEASURED)


def findings(figures: Sequence[Figure]) -> Iterator[str]:
    """Sentences for the report: those about seconds, then those about bytes."""
    yield from zero_bubble.findings(figures)
    over = [figure.value for figure in figures if figure.name == _OVER]
    if over:
        yield f"Bytes at the peak of the GPT are {min(over):.3f} to {max(over):.3f} of the predicted ones."
    by_case: dict[str, dict[str, float]] = defaultdict(dict)
    for figure in figures:
        if figure.name == _BYTES and figure.how is How.MEASURED:
            by_case[str(figure.case.get("microbatches"))][str(figure.case.get("schedule"))] = figure.value
    for microbatches, found in sorted(by_case.items()):
        least, name = min((value, name) for name, value in found.items() if name in THEIRS)
        yield (
            f"At M={microbatches} `auto` holds {found['auto'] / least:.3f} of the bytes of {name}, the least of "
            f"torch's, and zb-v {found['zb-v'] / found['torch zb-v']:.3f} of those of torch's."
        )
