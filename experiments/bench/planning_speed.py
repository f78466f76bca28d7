"""Speed of the partitioner and the planner, in a process of its own with one thread and without torch."""

from __future__ import annotations

import json
import random
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import tyro

from ...partition import Cluster, Node, Plan, Profile, partition, plan, read_pipedream_profile
from ...partition.formulas import Transformer, TransformerSource
from ...partition.formulas.device_model import DeviceModel
from ...partition.plans.as_text import describe
from ..host import peak_resident_bytes
from .plan_workloads import PIPEDREAM_DATA, PUBLISHED, SCALE, SCALES
from .records import PlanningSpeed, write_records

PARTITIONER, PLANNER = "partitioner", "planner"

_FLAT = [[16, 1.25e9]]
_TWO_LEVEL = [[4, 1e10], [4, 1.25e9]]
_RUNS = 5  # of a short problem, in one process


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanningOptions:
    """Options of the measurement."""

    case: str
    """partitioner, planner or planning-scale."""
    number: int = 0
    """Key of one of SCALES."""
    out: Path
    """Records go here."""


def main(argv: Sequence[str] | None = None) -> None:
    """Measure once and write."""
    options = tyro.cli(PlanningOptions, args=argv)
    match options.case:
        case "partitioner":
            records = [*published(), *large_chain()]
        case "planner":
            records = [large_transformer()]
        case _:
            cluster, layers, batch, limit = SCALES[options.number]
            records = [at_scale(cluster, num_layers=layers, global_batch=batch, limit=limit)]
    peak = peak_resident_bytes()
    write_records(options.out, [replace(record, peak_bytes=peak) for record in records])


def published(models: Sequence[str] = PUBLISHED) -> Iterator[PlanningSpeed]:
    """Each published profile on 16 devices, flat, and resnet50 on 4x4, by both cost models.

    Flat, 1/20 of what PipeDream's optimizer took is asked, or 20 ms; on 4x4 a second.
    """
    walls = _recorded_walls()
    for model in models:
        profile = read_pipedream_profile(PIPEDREAM_DATA / f"{model}.txt")
        problems = [(f"{model} on 16", _FLAT, max(0.02, walls[model] / 20))]
        if model == "resnet50":
            problems.append((f"{model} on 4x4", _TWO_LEVEL, 1.0))
        for problem, levels, limit in problems:
            cluster = Cluster.from_levels([(int(size), bandwidth) for size, bandwidth in levels])
            for cost_model in ("default", "pipedream"):
                yield _measured(
                    PARTITIONER,
                    problem,
                    f"{cost_model} model",
                    limit,
                    lambda profile=profile, cluster=cluster, cost_model=cost_model: partition(  # type: ignore[misc]
                        profile, cluster, cost_model=cost_model, activation_compression_ratio=1.0
                    ),
                    runs=_RUNS,
                )


def large_chain(*, num_layers: int = 1000, cluster: str = "128x8") -> Iterator[PlanningSpeed]:
    """A chain of layers on two levels of links: with a given M, and for a stream of microbatches."""
    draw = random.Random(0)
    nodes = []
    for number in range(num_layers):
        seconds, activation = draw.uniform(1e-3, 3e-3), draw.uniform(1e6, 3e7)
        nodes.append(
            Node(
                name=f"layer{number}",
                forward_seconds=seconds,
                backward_seconds=2 * seconds,
                activation_bytes=activation,
                parameter_bytes=draw.uniform(1e6, 1e8),
                stash_bytes=4 * activation,
            )
        )
    profile = Profile(nodes=tuple(nodes), origin="formula")
    devices = Cluster.parse(f"{cluster}:nvlink=300GB/s,net=12GB/s:80GB")
    for num_microbatches in (512, None):
        yield _measured(
            PARTITIONER,
            f"{num_layers:,} layers on {cluster}",
            "any M" if num_microbatches is None else f"M={num_microbatches}",
            10.0,
            lambda M=num_microbatches: partition(profile, devices, num_microbatches=M),  # type: ignore[misc]
        )


def large_transformer(*, num_layers: int = 100, cluster: str = "128x8", global_batch: int = 1536) -> PlanningSpeed:
    """A whole plan: sizes, schedule, microbatch and cuts for a transformer of 80 billion parameters on A100s."""
    source, devices = _transformer(num_layers, cluster)
    return _measured(
        PLANNER,
        f"{num_layers} layers on {cluster}",
        f"batch of {global_batch:,}",
        60.0,
        lambda: plan(source, devices, global_batch=global_batch),
    )


def at_scale(cluster: str, *, num_layers: int, global_batch: int, limit: float) -> PlanningSpeed:
    """Seconds of CPU of a whole plan, of profiles from formulas on, and what is known of the rest."""
    source, devices = _transformer(num_layers, cluster)
    start = time.process_time()
    found = plan(source, devices, global_batch=global_batch)
    seconds = time.process_time() - start
    searched, step = found.searched, found.simulated_step_time
    assert searched is not None
    assert step is not None
    return PlanningSpeed(
        case=SCALE,
        problem=f"{devices.num_devices:,} devices, {num_layers} layers",
        variant=f"CPU, batch of {global_batch:,}",
        seconds=[seconds],
        limit=limit,
        plan=f"{searched.considered:,} configurations, {searched.cut:,} cut, {searched.simulated:,} simulated, "
        f"the rest at most {searched.faster_left(step):.1%} faster, with any cuts {step / searched.least - 1:.1%}",
        peak_bytes=0,
    )


def _transformer(num_layers: int, cluster: str) -> tuple[TransformerSource, Cluster]:
    devices = Cluster.parse(f"{cluster}:nvlink=300GB/s@5us,infiniband=25GB/s@10us:80GB")
    shape = Transformer(layers=num_layers, hidden=8192, heads=64, vocabulary=51200, length=2048)
    return TransformerSource(transformer=shape, device=DeviceModel.preset("A100-80GB"), cluster=devices), devices


def _measured(
    case: str, problem: str, variant: str, limit: float, solve: Callable[[], Plan], *, runs: int = 1
) -> PlanningSpeed:
    seconds = []
    for _ in range(runs):
        start = time.perf_counter()
        found = solve()
        seconds.append(time.perf_counter() - start)
    width = len(found.stages) // found.num_chunks
    shape = describe(found) if width <= 16 else f"{width} stages, {sum(found.replicas[:width])} ranks in use"
    return PlanningSpeed(
        case=case,
        problem=problem,
        variant=variant,
        seconds=seconds,
        limit=limit,
        plan=f"{shape}, gap {found.gap:.2%}" if found.cost_model == "default" else shape,
        peak_bytes=0,
    )


def _recorded_walls() -> dict[str, float]:
    """By model: what PipeDream's own optimizer took on 16 devices, flat [s]."""
    runs = json.loads((PIPEDREAM_DATA / "runs.json").read_text(encoding="utf-8"))["runs"]
    return {
        model: wall
        for model, levels, compressed, straight, _, _, wall in runs
        if levels == _FLAT and compressed and not straight
    }


if __name__ == "__main__":
    main()
