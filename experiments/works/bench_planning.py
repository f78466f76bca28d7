"""Speed and memory of simulator, partitioner and planner, without torch, so that the peak is Python's."""

from __future__ import annotations

import json
import random
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from statistics import median

from ...cli.host import peak_resident_bytes
from ...partition import Cluster, Node, Plan, Profile, partition, plan, read_pipedream_profile
from ...partition.analytic import Transformer, TransformerSource
from ...partition.analytic.device_model import DeviceModel
from ...partition.plans.as_text import describe
from ...schedules import Costs, build, check, simulate
from ...schedules.wording import size
from ..jobs.case import Case
from ..jobs.figure import Figure, How, Judged, Target, repeated

PIPEDREAM_DATA = Path(__file__).parents[2] / "tests" / "data" / "pipedream"
PUBLISHED = ("alexnet", "gnmt", "resnet18", "resnet50", "squeezenet1_0", "vgg16")

_COSTS = Costs(forward=1.0, backward=2.0, latency=0.01)
_FLAT = [[16, 1.25e9]]
_TWO_LEVEL = [[4, 1e10], [4, 1.25e9]]
_RUNS = 5  # of short problems, in one process


def check_pipedream_data() -> None:
    """Raise ValueError without the published profiles, which are in the repository but not in a wheel."""
    for file in (PIPEDREAM_DATA / "runs.json", *(PIPEDREAM_DATA / f"{model}.txt" for model in PUBLISHED)):
        if not file.exists():
            raise ValueError(
                f"the case partitioner needs PipeDream's published profiles, and {file} is not there: expected a "
                f"checkout of the repository (an installed package does not bring its tests), or name the other cases "
                f"with --only"
            )


def simulator(case: Case, repetitions: int) -> Iterator[Figure]:
    """The simulator's rate on a schedule of ordinary size, then build, check and simulation of the case's large one."""
    del repetitions
    rate = _rate()
    sizes = {"num_ranks": case.count("p"), "num_chunks": case.count("v"), "num_microbatches": case.count("m")}
    start = time.perf_counter()
    schedule = build("interleaved", **sizes)
    check(schedule)
    timeline = simulate(schedule, _COSTS)
    seconds = time.perf_counter() - start
    num_actions = sum(len(rank.compute) for rank in timeline.ranks)
    words = f"P={sizes['num_ranks']} V={sizes['num_chunks']} M={sizes['num_microbatches']}"
    large = f"interleaved {words}, {num_actions:,} actions"
    for run, name, value, unit, target in (
        ("interleaved P=8 V=2 M=512", "simulate", rate, "actions/s", Target(limit=200_000, at_least=True)),
        (large, "build, check, simulate", seconds, "s", Target(limit=5.0)),
        (large, "peak memory", peak_resident_bytes() / 1e9, "GB", Target(limit=1.0)),
    ):
        shown = Case.of({"case": case.text("case"), "run": run})
        yield Figure(case=shown, name=name, value=value, unit=unit, how=How.MEASURED, target=target)


def _rate() -> float:
    schedule = build("interleaved", num_ranks=8, num_microbatches=512, num_chunks=2)
    num_actions = sum(map(len, schedule.programs))
    times = []
    for _ in range(_RUNS):
        start = time.perf_counter()
        simulate(schedule, _COSTS)
        times.append(time.perf_counter() - start)
    return num_actions / median(times)


def partitioner(case: Case, repetitions: int) -> Iterator[Figure]:
    """Published profiles, and a long chain; then the peak of the whole process."""
    del repetitions
    yield from published(case)
    yield from large_chain(case)
    yield _peak(case, Target(limit=2.0, judged=Judged.WORST))


def published(case: Case, models: Sequence[str] = PUBLISHED) -> Iterator[Figure]:
    """Each published profile on 16 devices, flat, and resnet50 on 4x4, by both cost models.

    The limit is 1/20 of the time of PipeDream's optimizer, or 20 ms, if flat; on 4x4 a second.
    """
    runs = json.loads((PIPEDREAM_DATA / "runs.json").read_text(encoding="utf-8"))["runs"]
    walls = {  # by model: time of PipeDream's own optimizer on 16 devices, flat [s]
        model: wall
        for model, levels, compressed, straight, _, _, wall in runs
        if levels == _FLAT and compressed and not straight
    }
    for model in models:
        profile = read_pipedream_profile(PIPEDREAM_DATA / f"{model}.txt")
        problems = [(f"{model} on 16", _FLAT, max(0.02, walls[model] / 20))]
        if model == "resnet50":
            problems.append((f"{model} on 4x4", _TWO_LEVEL, 1.0))
        for problem, levels, limit in problems:
            cluster = Cluster.from_levels([(int(size), bandwidth) for size, bandwidth in levels])
            for cost_model in ("default", "pipedream"):

                def solve(profile: Profile = profile, cluster: Cluster = cluster, by: str = cost_model) -> Plan:
                    return partition(profile, cluster, cost_model=by, activation_compression_ratio=1.0)

                yield from _measured(case, problem, f"{cost_model} model", limit, solve, runs=_RUNS)


def large_chain(case: Case) -> Iterator[Figure]:
    """A chain of `layers` on two levels of links, with a given M, and for a stream of microbatches."""
    draw = random.Random(0)
    nodes = []
    for number in range(case.count("layers")):
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
    devices = Cluster.parse(f"{case.text('cluster')}:nvlink=300GB/s,net=12GB/s:80GB")
    for num_microbatches in (512, None):

        def solve(M: int | None = num_microbatches) -> Plan:
            return partition(profile, devices, num_microbatches=M)

        variant = "any M" if num_microbatches is None else f"M={num_microbatches}"
        yield from _measured(case, f"{len(nodes):,} layers on {case.text('cluster')}", variant, 10.0, solve)


def planner(case: Case, repetitions: int) -> Iterator[Figure]:
    """A whole plan: sizes, schedule, microbatch and cuts for a transformer of 80 billion parameters on A100s."""
    del repetitions
    source, devices = _transformer(case)
    batch = case.count("batch")
    problem = f"{case.count('layers')} layers on {case.text('cluster')}"
    yield from _measured(case, problem, f"batch of {batch:,}", 60.0, lambda: plan(source, devices, global_batch=batch))
    yield _peak(case, None)


def scale(case: Case, repetitions: int) -> Iterator[Figure]:
    """CPU seconds of a whole plan, from formulas on, and the bound of the unsearched rest."""
    del repetitions
    source, devices = _transformer(case)
    start = time.process_time()
    found = plan(source, devices, global_batch=case.count("batch"))
    seconds = time.process_time() - start
    searched, step, peak = found.searched, found.simulated_step_time, _peak(case, None)
    assert searched is not None
    assert step is not None
    yield Figure(
        case=_shown(case, f"{devices.num_devices:,} devices, {case.count('layers')} layers", "CPU"),
        name=f"CPU, batch of {case.count('batch'):,}",
        value=seconds,
        unit="s",
        how=How.MEASURED,
        target=Target(limit=case.number("limit")),
        note=f"{searched.considered:,} configurations, {searched.cut:,} cut, {searched.simulated:,} simulated, "
        f"the rest at most {searched.faster_left(step):.1%} faster, with any cuts {step / searched.least - 1:.1%}, "
        f"{size(1e9 * peak.value)}",
    )
    yield peak


def _transformer(case: Case) -> tuple[TransformerSource, Cluster]:
    devices = Cluster.parse(f"{case.text('cluster')}:nvlink=300GB/s@5us,infiniband=25GB/s@10us:80GB")
    shape = Transformer(layers=case.count("layers"), hidden=8192, heads=64, vocabulary=51200, length=2048)
    return TransformerSource(transformer=shape, device=DeviceModel.preset("A100-80GB"), cluster=devices), devices


def _measured(
    case: Case, problem: str, variant: str, limit: float, solve: Callable[[], Plan], *, runs: int = 1
) -> Iterator[Figure]:
    """Seconds, without reading the profile and imports; in ms for limits below a second."""
    seconds = []
    for _ in range(runs):
        start = time.perf_counter()
        found = solve()
        seconds.append(time.perf_counter() - start)
    width = len(found.stages) // found.num_chunks
    shape = describe(found) if width <= 16 else f"{width} stages, {sum(found.replicas[:width])} ranks in use"
    unit, factor = ("ms", 1e3) if limit < 1 else ("s", 1.0)
    yield from repeated(
        [factor * each for each in seconds],
        case=_shown(case, problem, variant),
        name=variant,
        unit=unit,
        how=How.MEASURED,
        target=Target(limit=factor * limit),
        note=f"{shape}, gap {found.gap:.2%}" if found.cost_model == "default" else shape,
    )


def _shown(case: Case, problem: str, variant: str) -> Case:
    return Case.of({"case": case.text("case"), "run": problem, "variant": variant})


def _peak(case: Case, target: Target | None) -> Figure:
    shown = Case.of({"case": case.text("case"), "run": "the whole process"})
    peak = peak_resident_bytes() / 1e9
    return Figure(case=shown, name="peak memory", value=peak, unit="GB", how=How.MEASURED, target=target)
