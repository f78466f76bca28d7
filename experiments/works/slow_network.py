"""PipeDream's claim: on slow links a pipeline, or a mix, beats data parallelism; does the planner pick what is fastest?

The model is in the manner of VGG: its first units take the time and send much, its last ones hold the weights. Units
sleep, so that a few cores stand in for many devices, but their weights and what they pass on are real: sums of
gradients and messages travel over gloo through the shaped links. The links are measured in the same processes, the
planner gets what was measured, and all ways then take turns.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

from ...partition import Cluster, Node, Plan, Profile, plan
from ..jobs.case import Case, wanted
from ..jobs.figure import Figure, How, repeated

if TYPE_CHECKING:
    import torch
    from torch import Tensor

MICROBATCHES = 12  # of a batch, of one sample each
_BATCH, _PLANNER, _AS_PLANNED = "batch", "planner", "batch, emulated / planned"
_WARM_UP = 1
_TIMEOUT = 120.0  # [s]
_MEGABYTE = 1e6


@dataclass(frozen=True, slots=True, kw_only=True)
class Unit:
    """A unit: seconds of a forward of one microbatch (a backward takes twice as long), bytes passed on, and held."""

    seconds: float
    sent: float
    held: float


UNITS = tuple(
    Unit(seconds=milliseconds * 1e-3, sent=sent * _MEGABYTE, held=held * _MEGABYTE)
    for milliseconds, sent, held in [
        (6.0, 4.0, 0.1),
        (6.0, 2.0, 0.2),
        (6.0, 1.0, 0.5),
        (6.0, 0.5, 1.0),
        (6.0, 0.25, 2.0),
        (6.0, 0.12, 2.0),
        (3.0, 0.02, 16.0),
        (1.0, 0.02, 8.0),
        (0.5, 0.02, 2.0),
    ]
)
WAYS: Mapping[str, Mapping[str, Any]] = {  # by name, restrictions of the planner's search
    "data parallel": {"pipeline_sizes": [1], "schedules": ["1f1b"]},
    "pipeline": {"data_sizes": [1], "schedules": ["1f1b"]},
    _PLANNER: {"schedules": ["1f1b", "interleaved"]},
    "planner, 2bw": {"schedules": ["2bw"]},
}
DDP = "DistributedDataParallel"


def profile_of_units() -> Profile:
    """Profile of the units as a profiler would find it, exactly."""
    return Profile(
        nodes=tuple(
            Node(
                name=str(number),
                forward_seconds=unit.seconds,
                backward_seconds=2 * unit.seconds,
                activation_bytes=unit.sent,
                parameter_bytes=unit.held,
                stash_bytes=unit.sent,
            )
            for number, unit in enumerate(UNITS)
        ),
        microbatch_size=1,
        optimizer_ratio=0.0,
    )


def ways_of(cluster: Cluster) -> dict[str, Plan]:
    return {
        way: plan(
            profile_of_units(),
            cluster,
            global_batch=MICROBATCHES,
            recompute=["none"],
            optimizer_sharding=["none"],
            chunk_sizes=(2,),
            runnable=True,
            **restrictions,
        )
        for way, restrictions in WAYS.items()
    }


def emulated(case: Case, repetitions: int) -> Iterator[Figure]:
    """Seconds of a batch by each way, in turn; runs on all ranks."""
    import torch
    import torch.distributed as dist

    from ...comm import join_world
    from ...comm.links import measure_links
    from ...pipe.auto.layout import cluster_of
    from ..measure.timing import timed
    from .links import BANDWIDTH, LATENCY

    world = join_world(device=torch.device("cpu"), timeout=_TIMEOUT)
    measured = measure_links(world, device=torch.device("cpu"), timeout=_TIMEOUT)
    how = How.MEASURED if wanted(case).shape.is_plain else How.EMULATED
    for level in measured.levels:
        yield Figure(case=case, name=LATENCY, value=level.latency, unit="s", how=how)
        yield Figure(case=case, name=BANDWIDTH, value=8e-9 * level.bandwidth, unit="Gbit/s", how=how)
    texts: list[Any] = [None]
    if dist.get_rank() == 0:
        found = ways_of(cluster_of(measured, memory_bytes=64e9))
        texts = [{way: each.to_json() for way, each in found.items()}]
    dist.broadcast_object_list(texts)
    plans = {way: Plan.from_json(text) for way, text in texts[0].items()}
    sides: dict[str, _Side] = {DDP: _ddp()}
    sides |= {way: _planned(each) for way, each in plans.items()}
    for _ in range(_WARM_UP):
        for side in sides.values():
            timed(side.step)
    rounds = [{way: _seconds(side) for way, side in sides.items()} for _ in range(repetitions)]
    for way in sides:
        shown, note = case.also(way=way), _note(plans[way]) if way in plans else "torch's own, buckets of 25 MB"
        took = [seconds[way] for seconds in rounds]
        slower = [seconds[way] / seconds[_PLANNER] for seconds in rounds]
        yield from repeated(took, case=shown, name=_BATCH, unit="s", how=how, note=note)
        yield from repeated(slower, case=shown, name="batch / planner's", unit="ratio", how=how)
        if way in plans:
            planned = plans[way].simulated_step_time
            assert planned is not None
            over = [each / planned for each in took]
            yield from repeated(over, case=shown, name=_AS_PLANNED, unit="ratio", how=how)
            yield Figure(case=shown, name=_BATCH, value=planned, unit="s", how=How.SIMULATED)
    for side in sides.values():
        side.close()


def _note(found: Plan) -> str:
    replicas = "-".join(str(stage.replicas) for stage in found.stages)
    return f"{found.schedule}, replicas of each stage {replicas}"


class _Side(NamedTuple):
    """One way to train, over all ranks: a batch, to its end on this rank; the batches of one repetition."""

    step: Callable[[], None]
    close: Callable[[], None]
    batches: int = 1


def _seconds(side: _Side) -> float:
    """Seconds of a batch over all ranks."""
    from ..measure.timing import timed

    def several() -> None:
        for _ in range(side.batches):
            side.step()

    return timed(several) / side.batches


def _model() -> torch.nn.Module:
    from torch import nn

    return nn.Sequential(*(_unit(unit) for unit in UNITS))


def _unit(unit: Unit) -> torch.nn.Module:
    """Sleeps and passes on so many bytes; a gradient for each of its weights."""
    import torch
    from torch import nn

    from ..measure.models import sleep_until

    class Sleep(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
            end = time.perf_counter() + unit.seconds * len(x)
            ctx.shapes = x.shape, weight
            out = x.new_zeros(len(x), int(unit.sent) // 4)
            sleep_until(end)
            return out

        @staticmethod
        def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, Tensor]:
            shape, weight = ctx.shapes
            end = time.perf_counter() + 2 * unit.seconds * shape[0]
            into = gradient.new_zeros(shape) if ctx.needs_input_grad[0] else None
            of_weight = torch.zeros_like(weight)
            sleep_until(end)
            return into, of_weight

    class SleepingUnit(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.zeros(int(unit.held) // 4))

        def forward(self, x: Tensor) -> Tensor:
            out: Tensor = Sleep.apply(x, self.weight)  # type: ignore[no-untyped-call]
            return out

    return SleepingUnit()


def _planned(found: Plan) -> _Side:
    """A PipelineModule that carries out a plan."""
    from ...pipe import PipelineModule

    batch = _batch()
    pipe = PipelineModule(
        _model(),
        schedule=found,
        loss_fn=_loss,
        optimizer=_sgd,
        example_inputs=batch[:1],
        timeout=_TIMEOUT,
        verify=False,
    )

    def step() -> None:
        pipe.train_step(*batch)

    return _Side(step, pipe.close, batches=4 if pipe.schedule.is_asynchronous else 1)  # of a stream several in a row


def _ddp() -> _Side:
    """torch's DistributedDataParallel, whose all-reduces of gradients go on beside the last microbatch's backward."""
    import torch.distributed as dist
    from torch.nn.parallel import DistributedDataParallel

    model = DistributedDataParallel(_model())
    optimizer = _sgd(model.parameters())
    inputs, targets = (each.tensor_split(dist.get_world_size())[dist.get_rank()] for each in _batch())
    parts = [(inputs[k : k + 1], targets[k : k + 1]) for k in range(len(inputs))]

    def step() -> None:
        with model.no_sync():
            for x, y in parts[:-1]:
                _loss(model(x), y).backward()  # type: ignore[no-untyped-call]
        _loss(model(parts[-1][0]), parts[-1][1]).backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        optimizer.zero_grad()

    return _Side(step, close=lambda: None)


def _batch() -> tuple[Tensor, Tensor]:
    import torch

    return torch.zeros(MICROBATCHES, 8), torch.zeros(MICROBATCHES, 1)


def _loss(output: Tensor, target: Tensor) -> Tensor:
    return (output[:, :1] - target).square().mean()


def _sgd(parameters: Any) -> torch.optim.Optimizer:
    import torch

    return torch.optim.SGD(parameters, lr=1e-6)
