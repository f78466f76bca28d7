"""Two groups of ranks behind a link of 20 to 100 ms: which schedule, which cut and which warm-up keep their speed?

    ranks 0 .. P/2-1  ====== latency L ======  ranks P/2 .. P-1       T = F + B, of a rank and microbatch

1F1B lets each rank run one forward further ahead than the next. So of the two ranks beside the link, the first one has
room for two microbatches while one of them goes over the link, through the second rank, and back: 2 T + 2 L. From one
microbatch to the next that is T + L, however many ranks and microbatches there are. Two things help:

    warm-up   "eager": each rank two forwards further ahead than the next: (2 T + 2 L) / 3, as long as that is above T
              "deep":  each rank in front of the link ceil(2 L / T) forwards further ahead than without a link: T
    cut       "light": ranks beside the link have less work t, the others more: t + L

The same ways are simulated at any P, and emulated on ranks in namespaces, whose stages sleep. Messages are small here:
latency alone is looked at (`internet` has bandwidths).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from ...partition.strict import fail
from ...schedules import Costs, Link, Links, Op, Schedule, Timeline, build, simulate
from ...schedules.families.registry import family
from ...schedules.families.warmup import pair_up, plain_warmup
from ..jobs.case import Case
from ..jobs.figure import Figure, How, repeated

FORWARD, BACKWARD = 0.015, 0.030  # [s] a rank and microbatch; of the split backward, I and W are half each
_CHUNKS = 2  # of a rank, where chunks interleave
_LOCAL = 10e-6  # [s] within a site
_BATCHES = 2  # of a stream in a row, behind one that fills it
_TRIPS = 3
_BATCH, _EFFICIENCY, _KEPT, _HELD, _VERSIONS = (
    "batch",
    "efficiency",
    "speed kept",
    "peak activations",
    "weight versions",
)
_AS_SIMULATED, _FOUND = "batch, emulated / simulated", "latency between sites"


@dataclass(frozen=True, slots=True, kw_only=True)
class Recipe:
    """A way to run the pipeline.

    Arguments:
        warm_up: "plain", "eager" or "deep", see above.
        cut: "equal" or "light", see above.
    """

    schedule: str
    warm_up: str = "plain"
    cut: str = "equal"


WAYS: Mapping[str, Recipe] = {
    "gpipe": Recipe(schedule="gpipe"),
    "1f1b": Recipe(schedule="1f1b"),
    "1f1b light": Recipe(schedule="1f1b", cut="light"),
    "1f1b deep": Recipe(schedule="1f1b", warm_up="deep"),
    "interleaved": Recipe(schedule="interleaved"),
    "zb-h1": Recipe(schedule="zb-h1"),
    "pipedream": Recipe(schedule="pipedream"),
    "2bw": Recipe(schedule="2bw"),
    "2bw light": Recipe(schedule="2bw", cut="light"),
    "2bw eager": Recipe(schedule="2bw", warm_up="eager"),
    "2bw deep": Recipe(schedule="2bw", warm_up="deep"),
}


EMULATED: Mapping[int, Sequence[str]] = {  # by M; each takes seconds to connect over a slow link
    8: ("gpipe", "1f1b", "1f1b deep", "interleaved", "2bw", "2bw eager", "2bw deep"),
    32: ("gpipe", "2bw deep"),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """Case to run: a schedule, and the work of each rank, 1 on average."""

    schedule: Schedule
    work: tuple[float, ...]

    @property
    def costs(self) -> Costs:
        """Seconds of its stage actions: FORWARD and BACKWARD of a rank with work of 1."""
        num_ranks, num_stages = self.schedule.num_ranks, self.schedule.num_stages
        share = [self.work[stage % num_ranks] * num_ranks / num_stages for stage in range(num_stages)]
        half = [BACKWARD / 2 * each for each in share]
        return Costs(forward=[FORWARD * each for each in share], input_grad=half, weight_grad=half)

    def timeline(self, latency: float, *, local: float = _LOCAL) -> Timeline:
        """Simulated, with this latency between the sites and within them [s]."""
        return simulate(self.schedule, self.costs, links_of(self.schedule.num_ranks, latency, local=local))


def links_of(num_ranks: int, latency: float, *, local: float = _LOCAL) -> Links:
    """Ways between all neighbours in the ring of ranks, of which the first half is the first site."""
    half = num_ranks // 2
    pairs = {(a, b) for a in range(num_ranks) for b in ((a + 1) % num_ranks, (a - 1) % num_ranks)}
    return Links(
        network={(a, b): Link(latency=local if (a < half) == (b < half) else latency) for a, b in sorted(pairs)}
    )


def run_of(way: str, *, num_ranks: int, num_microbatches: int, latency: float) -> Run:
    """A way's run, made for this latency between the sites [s]; ValueError for a way or ranks that cannot be."""
    if way not in WAYS:
        fail("way", way, f"one of {'; '.join(WAYS)}")
    if num_ranks % 2:
        fail("ranks", num_ranks, "an even number, half of them at each site")
    recipe = WAYS[way]
    make = _scheduler(recipe, num_ranks, latency)
    work = (1.0,) * num_ranks
    if recipe.cut == "light":
        searched = make(num_ranks)  # of a stream the number of microbatches does not matter
        if not searched.is_asynchronous:
            searched = make(min(num_microbatches, 2 * num_ranks))
        work = _light(searched, latency)
    return Run(schedule=make(num_microbatches), work=work)


def _scheduler(recipe: Recipe, num_ranks: int, latency: float) -> Callable[[int], Schedule]:
    """Makes the recipe's schedule, by M."""
    chunks = _CHUNKS if family(recipe.schedule).takes_chunks else None

    def make(num_microbatches: int) -> Schedule:
        def built(**options: object) -> Schedule:
            return build(
                recipe.schedule, num_ranks=num_ranks, num_microbatches=num_microbatches, num_chunks=chunks, **options
            )

        if recipe.warm_up == "plain":
            return built()
        if recipe.warm_up == "eager":
            return built(warmup="eager")
        depths = [min(depth, num_microbatches) for depth in deep_warm_up(num_ranks, latency)]
        if recipe.schedule == "2bw":
            return built(warmup=depths)
        plain = built()
        programs = zip(plain.programs, depths, strict=True)
        return replace(
            plain,
            name=f"{plain.name}-deep",
            programs=tuple(
                pair_up([a for a in p if a.op is Op.F], [a for a in p if a.op is Op.B], warmup=depth)
                for p, depth in programs
            ),
        )

    return make


def deep_warm_up(num_ranks: int, latency: float) -> list[int]:
    """Forwards ahead of the backwards by rank: those in front of the link ceil(2 L / T) more than 1F1B has.

    >>> deep_warm_up(4, 0.0), deep_warm_up(4, 0.05)  # 100 ms there and back, 45 ms a microbatch
    ([3, 2, 1, 0], [6, 5, 1, 0])
    """
    more = math.ceil(2 * latency / (FORWARD + BACKWARD))
    plain = [plain_warmup([1] * num_ranks, rank) for rank in range(num_ranks)]
    return [depth + (more if rank < num_ranks // 2 else 0) for rank, depth in enumerate(plain)]


def _light(schedule: Schedule, latency: float) -> tuple[float, ...]:
    """Work by rank for the shortest simulated batch: equal, or one or two ranks on either side with less."""
    num_ranks = schedule.num_ranks
    half = num_ranks // 2
    tried = [(1.0,) * num_ranks]
    for near in (each for each in (1, 2) if each < half):
        for part in (0.75, 0.5, 0.25):  # of what the others have
            full = num_ranks / (num_ranks - 2 * near * (1 - part))
            tried.append(tuple(full * (part if half - near <= r < half + near else 1.0) for r in range(num_ranks)))
    return min(tried, key=lambda work: Run(schedule=schedule, work=work).timeline(latency).batch_seconds)


def simulated(case: Case, repetitions: int) -> Iterator[Figure]:
    """A way's batch, its speed beside that without latency, and what its ranks hold.

    Cases have `way`, `ranks`, `microbatches` and `site_latency` ("20ms").
    """
    del repetitions
    latency, shown = case.seconds("site_latency"), _shown(case)
    sizes = {"num_ranks": case.count("ranks"), "num_microbatches": case.count("microbatches")}
    run = run_of(case.text("way"), **sizes, latency=latency)
    found = run.timeline(latency)
    near = found if latency == 0 else run_of(case.text("way"), **sizes, latency=0.0).timeline(0.0)
    note = _note(run)
    yield from _speeds(shown, [found.batch_seconds], How.SIMULATED, note=note)
    kept = near.batch_seconds / found.batch_seconds
    yield Figure(case=shown, name=_KEPT, value=kept, unit="fraction", how=How.SIMULATED, note=note)
    held = max(found.peak_activations) * run.schedule.num_ranks / run.schedule.num_stages
    yield Figure(case=shown, name=_HELD, value=held, unit="microbatches", how=How.SIMULATED)
    versions = max(found.peak_versions)
    yield Figure(case=shown, name=_VERSIONS, value=versions, unit="", how=How.SIMULATED)


def emulated(case: Case, repetitions: int) -> Iterator[Figure]:
    """Seconds of a batch of each way of `EMULATED` on stages that sleep, beside the simulated ones; on all ranks.

    Cases have `ranks` and `site_latency`; figures `way` and `microbatches`, too. The simulator gets the latencies that
    the ranks find. A repetition is a step of a flush schedule from one instant on all ranks, or some batches of a
    stream in a row.
    """
    from ..measure.sleeping import kept_groups
    from .links import latency_between

    num_ranks, asked = case.count("ranks"), case.seconds("site_latency")
    half = num_ranks // 2
    local, far = (latency_between(half - 1, peer, trips=_TRIPS) for peer in (half - 2, half))
    yield Figure(case=_shown(case), name=_FOUND, value=far, unit="s", how=How.EMULATED)
    with kept_groups() as next_pipe:
        for num_microbatches, ways in EMULATED.items():
            for way in ways:
                run = run_of(way, num_ranks=num_ranks, num_microbatches=num_microbatches, latency=asked)
                ideal = run.timeline(far, local=local).batch_seconds
                shown = _shown(case).also(way=way, microbatches=num_microbatches)
                yield from _speeds(shown, [ideal], How.SIMULATED, note=_note(run))
                next_pipe()
                took = _seconds(run, asked, repetitions)
                yield from _speeds(shown, took, How.EMULATED)
                over = [each / ideal for each in took]
                yield from repeated(over, case=shown, name=_AS_SIMULATED, unit="ratio", how=How.EMULATED)


def _seconds(run: Run, latency: float, repetitions: int) -> list[float]:
    """Seconds of a batch, by repetition."""
    import torch.distributed as dist

    from ..measure.sleeping import SleepingPipe
    from ..measure.timing import slowest, timed

    pipe = SleepingPipe(run.schedule, run.costs)

    def of_one() -> float:
        if not run.schedule.is_asynchronous:
            return timed(pipe.step, ahead=0.01 + 2 * latency)
        dist.barrier()
        return slowest(pipe.run(_BATCHES))

    try:
        pipe.step()  # groups connect, shapes are known
        return [of_one() for _ in range(repetitions)]
    finally:
        pipe.close()


def _shown(case: Case) -> Case:
    """The case with its latency as a number, for axes: `latency_ms`."""
    milliseconds = round(1e3 * case.seconds("site_latency"), 6)
    return case.also(latency_ms=int(milliseconds) if milliseconds.is_integer() else milliseconds)


def _speeds(case: Case, seconds: Sequence[float], how: How, *, note: str = "") -> Iterator[Figure]:
    """Seconds of a batch, and the part of the ideal speed, at which ranks never wait; by repetition."""
    yield from repeated(seconds, case=case, name=_BATCH, unit="s", how=how, note=note)
    ideal = case.count("microbatches") * (FORWARD + BACKWARD)
    parts = [ideal / each for each in seconds]
    yield from repeated(parts, case=case, name=_EFFICIENCY, unit="fraction", how=how, note=note)


def _note(run: Run) -> str:
    least, most = min(run.work), max(run.work)
    count = sum(each == least for each in run.work)
    return "" if least == most else f"{count} ranks beside the link have {least / most:.0%} of the others' work"
