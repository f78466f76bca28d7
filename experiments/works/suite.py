"""Five models on this machine, each profiled, planned, tried and run, a stage per rank (after TBD, Zhu et al., 2018).

compute    share of a step in F, B, I and W
links      share of a step with a message in flight that a rank waited for; other messages are not observed
parts      bytes at the peak of a stage, by kind of tensor (`parts_at_peak`); buffers are with the weights
peak       bytes by the allocator over the step, independent of the parts
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence
from pathlib import Path
from statistics import median
from typing import Any

from ...schedules import MemoryPart, Timeline
from ...viz.palette import MEMORY_HUES, SERIES_HUES
from ..jobs.case import Case
from ..jobs.figure import Figure, How, repeated

_NAMES = {MemoryPart.BUFFERS: "weights", MemoryPart.MESSAGES: "communication"}  # others keep their names
PARTS = {_NAMES.get(part, str(part)): hue for part, hue in MEMORY_HUES.items() if part is not MemoryPart.BUFFERS}


def trained(case: Case, repetitions: int) -> Iterator[Figure]:
    """Figures of a `model` in `microbatches` of `samples` samples, a step per repetition; runs on all ranks."""
    import torch.distributed as dist

    from ...cli.train.pipeline import gather
    from ...partition.plans.as_schedule import expected
    from ...partition.plans.as_text import describe
    from ..measure.sides import OurSide
    from ..measure.suite import make_problem
    from ..measure.timing import timed
    from .bench_plans import plan_by_measuring

    M, ranks = case.count("microbatches"), dist.get_world_size()
    problem, unit, per_sample = make_problem(case.text("model"), M * case.count("samples"))
    restrictions: dict[str, Any] = {"pipeline_sizes": (ranks,), "data_sizes": (1,), "schedules": ("1f1b", "zb-h1")}
    plan, untried = plan_by_measuring(problem, num_microbatches=M, trials=1, **restrictions)
    planned, profiled = expected(plan), expected(untried)
    assert planned is not None
    assert profiled is not None
    side = OurSide.of_model(problem, schedule=plan)
    for _ in range(3):  # the first ones take longer
        side.step()
    seconds, lines = [], []
    for _ in range(repetitions):
        seconds.append(timed(side.step))
        lines.append(side.timeline)
    held = gather(memory(side))
    side.pipe.close()

    work = len(problem.inputs) * per_sample
    whole: dict[str, Any] = {"case": case, "how": How.MEASURED}
    speed = {**whole, "name": "throughput", "unit": unit, "note": describe(plan)}
    yield from repeated([work / each for each in seconds], **speed)
    yield Figure(**{**speed, "value": work / planned[0], "how": How.SIMULATED})
    alone = {"name": "throughput by the profile alone", "value": work / profiled[0], "how": How.SIMULATED}
    yield Figure(**{**speed, **alone})
    share = sum(parts["activations"] for parts, _ in held) / sum(sum(parts.values()) for parts, _ in held)
    yield Figure(name="share of activations", value=share, unit="fraction", **whole)
    for stage, (parts, peak) in enumerate(held):
        own = {**whole, "case": case.also(stage=stage)}
        busy = [each.ranks[stage].busy / each.batch_seconds for each in lines]
        yield from repeated(busy, name="compute", unit="fraction", **own)
        yield from repeated((on_links(each, stage) for each in lines), name="links", unit="fraction", **own)
        for name, size in {**parts, "peak": peak}.items():
            yield Figure(name=name, value=size, unit="bytes", **own)
        yield Figure(name="peak", value=plan.memory_bytes[stage], unit="bytes", **{**own, "how": How.SIMULATED})
        yield Figure(name="parts / peak", value=sum(parts.values()) / peak, unit="ratio", **own)


def memory(side: Any) -> tuple[dict[str, int], int]:
    from ...partition.profiler.memory import cpu_peaks
    from ...pipe.figures.memory import parts_at_peak

    held = side.pipe.held_bytes()
    with cpu_peaks() as (found, mark), side.pipe.watch_memory() as watched, mark():
        watched.mark = mark
        side.step()
    parts = dict.fromkeys(PARTS, 0)
    for (_, part), size in parts_at_peak(watched, found[1:]).items():
        parts[_NAMES.get(part, str(part))] += size
    return parts, held + found[0][0]


def on_links(timeline: Timeline, rank: int) -> float:
    """Share of the step in which a message to or from this rank is observed."""
    owner, ranks = timeline.schedule.owner, timeline.ranks
    spans = [(start, end) for _, start, end in (*ranks[rank].comm, *ranks[rank].collectives)]
    spans += [(start, end) for each in ranks for what, start, end in each.comm if owner(what.src, what.index) == rank]
    busy = until = 0.0
    for start, end in sorted(spans):
        busy += max(0.0, end - max(start, until))
        until = max(until, end)
    return busy / timeline.batch_seconds


def told(figures: Sequence[Figure]) -> list[dict[str, Any]]:
    """Medians by model, and in `stages` by stage, as JSON; simulated figures are "planned ..."."""
    samples: dict[tuple[str, Any, str], list[float]] = defaultdict(list)
    models: dict[str, dict[str, Any]] = {}
    for each in figures:
        model, name = each.case.text("model"), f"planned {each.name}" if each.how is How.SIMULATED else each.name
        samples[model, each.case.get("stage"), name].append(each.value)
        if each.name == "throughput":
            models[model] = {"model": model, "unit": each.unit, "plan": each.note, "stages": []}
    for (model, stage, name), values in samples.items():
        stages = models[model]["stages"]
        if stage == len(stages):
            stages.append({"stage": stage})
        (models[model] if stage is None else stages[stage])[name] = median(values)
    return list(models.values())


def draw(figures: Sequence[Figure], folder: Path) -> list[tuple[str, str]]:
    """A row per stage: throughput and the plan's, shares of the step, and stacked bytes with the peak."""
    from matplotlib.figure import Figure as Picture

    models = told(figures)
    rows, ranks = [(each, stage) for each in models for stage in each["stages"]], len(models[0]["stages"])
    at = [row + 0.6 * (row // ranks) for row in range(len(rows))]  # a gap between models
    middles = [(ranks - 1) / 2 + (ranks + 0.6) * number for number in range(len(models))]
    picture = Picture(figsize=(11.0, 1.3 + 0.34 * (at[-1] + 1)), dpi=120)
    picture.set_layout_engine("constrained", wspace=0.06)  # numbers under neighbouring axes stay apart
    speeds, shares, sizes = picture.subplots(1, 3, sharey=True, width_ratios=(1.1, 0.9, 1.7))
    parts = [100 * each["throughput"] / each["planned throughput"] for each in models]
    speeds.barh(middles, parts, 0.76, color=SERIES_HUES[5], label="measured")
    for y, part, each in zip(middles, parts, models, strict=True):
        speeds.text(max(part, 100) + 5, y, f"{each['throughput']:,.0f} {each['unit']}", va="center", fontsize=9)
    speeds.axvline(100, color="#202020", linestyle="--", linewidth=1, label="planned")
    speeds.set_xlim(0, 1.75 * max(100, *parts))
    for shift, name, hue in ((-0.2, "compute", SERIES_HUES[0]), (0.2, "links", SERIES_HUES[1])):
        shares.barh([y + shift for y in at], [100 * each[name] for _, each in rows], 0.38, color=hue, label=name)
    left = [0.0] * len(rows)
    for name, hue in PARTS.items():
        widths = [stage[name] / 1e6 for _, stage in rows]
        sizes.barh(at, widths, 0.76, left=left, color=hue, label=name)
        left = [a + b for a, b in zip(left, widths, strict=True)]
    peaks = [stage["peak"] / 1e6 for _, stage in rows]
    sizes.plot(peaks, at, "|", color="#202020", markersize=15, markeredgewidth=2, label="measured peak")
    words = ("throughput [% of the plan's]", "share of a step [%]", "memory at the peak [MB]")
    for axes, label, columns in zip((speeds, shares, sizes), words, (2, 2, 4), strict=True):
        axes.set(xlabel=label, axisbelow=True)
        axes.spines[["top", "right"]].set_visible(False)
        axes.grid(axis="x", alpha=0.25)
        axes.legend(loc="lower center", bbox_to_anchor=(0.5, 1.0), ncols=columns, frameon=False, fontsize=8)
    speeds.set_yticks(at, [f"{each['model']}, stage {stage['stage']}" for each, stage in rows])
    speeds.invert_yaxis()
    picture.savefig(folder / "suite.png", metadata={"Software": None})
    return [("Throughput, utilisation and memory of five models, stage by stage", "suite.png")]
