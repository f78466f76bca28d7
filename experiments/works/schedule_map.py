"""Which named schedule is best for a latency, a number of microbatches and a memory limit, and what a search gains.

Stages are equal, F = I = W = 1 of a whole rank and microbatch; a rank has one chunk, or two of half the work (cyclic or
V). Every family that keeps one copy of the weights and whole sequences is built in all its forms; those that fit the
memory are simulated, and the one with the least makespan wins. The search has the same memory on each of the three
placements; so many orders a placement, and no clock, so that it finds the same on every machine.

    memory    of a rank, in activations of one microbatch of a whole rank
    bubble    1 - work / makespan
    gain      makespan of the best named one over that of the search, less 1
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from ...schedules import FAMILIES, Costs, Schedule, simulate
from ...schedules.families.family import Family
from ...schedules.search.synthesize import synthesize
from ...viz.palette import SERIES_HUES
from ..jobs.case import Case
from ..jobs.figure import Figure, How

_ORDERS = 2000  # that are tried a placement
_PATIENCE = 120.0  # [s] a placement: only against hangs
_CHUNKS = (1, 2)
_NAMED, _AUTO, _BOUND, _GAIN, _LEFT = "bubble of the best named", "bubble of auto", "bubble of the bound", "gain", "gap"


class _Sizes(NamedTuple):
    num_ranks: int
    num_microbatches: int
    latency: float
    memory: float

    def costs(self, num_chunks: int) -> Costs:
        """Costs of the actions of one chunk."""
        part = 1.0 / num_chunks
        return Costs(forward=part, input_grad=part, weight_grad=part, latency=self.latency)

    def bubble(self, makespan: float) -> float:
        return 1.0 - 3.0 * self.num_microbatches / makespan


def simulated(case: Case, repetitions: int) -> Iterator[Figure]:
    """The best named schedule and what the search finds, with its bound.

    Cases have `ranks`, `microbatches per rank` (M / P), `latency` (over F) and `memory` (over P).
    """
    del repetitions
    ranks = case.count("ranks")
    sizes = _Sizes(
        ranks, ranks * case.count("microbatches_per_rank"), case.number("latency"), ranks * case.number("memory")
    )

    def figure(name: str, value: float, unit: str, note: str) -> Figure:
        return Figure(case=case, name=name, value=value, unit=unit, how=How.SIMULATED, note=note)

    makespan, winner = min((_seconds(each, sizes), each.name) for each in named(sizes))
    yield figure(_NAMED, sizes.bubble(makespan), "fraction", winner)
    found = []
    for placement, chunks in (("plain", 1), ("cyclic", 2), ("v", 2)):
        found.append(
            synthesize(
                num_ranks=ranks,
                num_microbatches=sizes.num_microbatches,
                costs=sizes.costs(chunks),
                memory_limit=sizes.memory * chunks,
                placement=placement,
                num_chunks=chunks,
                evaluations=_ORDERS,
                seconds=_PATIENCE,
            )
        )
    best = min(found, key=lambda each: each.value)
    bound = min(each.lower_bound for each in found)
    where = {1: "plain", 2: "cyclic"}[len(best.schedule.placement[0])]
    if best.schedule.placement[0] == (0, 2 * ranks - 1):
        where = "v"
    yield figure(_AUTO, sizes.bubble(best.value), "fraction", where)
    yield figure(_BOUND, sizes.bubble(bound), "fraction", "the least of the three placements")
    yield figure(_GAIN, makespan / best.value - 1.0, "fraction", winner)
    yield figure(_LEFT, best.value / bound - 1.0, "fraction", where)


def named(sizes: _Sizes) -> Iterator[Schedule]:
    """Named schedules that fit, in every form that their options give."""
    for family in FAMILIES.values():
        if family.rule.is_asynchronous or family.weight_copies > 1 or family.takes_slices:
            continue
        for schedule in _forms(family, sizes):
            chunks = len(schedule.placement[0])
            peaks = simulate(schedule, sizes.costs(chunks)).peak_activations
            if max(peaks) <= sizes.memory * chunks + 1e-9:
                yield schedule


def _forms(family: Family, sizes: _Sizes) -> Iterator[Schedule]:
    for chunks in _CHUNKS if family.takes_chunks else (family.num_chunks,):
        more: list[dict[str, object]] = [{}]
        if "costs" in family.options:
            more.append({"costs": sizes.costs(chunks)})
        if "memory_limit" in family.options:
            more.append({"costs": sizes.costs(chunks), "memory_limit": sizes.memory * chunks})
        if "group_size" in family.options:
            more.append({"group_size": -(-sizes.num_ranks // 2)})
        for options in more:
            if family.takes_chunks:
                options = {**options, "num_chunks": chunks}
            try:
                yield family.build(num_ranks=sizes.num_ranks, num_microbatches=sizes.num_microbatches, **options)
            except ValueError:
                continue  # sizes that it has no schedule for


def _seconds(schedule: Schedule, sizes: _Sizes) -> float:
    return simulate(schedule, sizes.costs(len(schedule.placement[0]))).makespan


def findings(figures: Sequence[Figure]) -> list[str]:
    """Who wins how often, what the search gains, and how far its schedules are from the bound."""
    gains = [each for each in figures if each.name == _GAIN]
    if not gains:
        return []
    order = sorted(Counter(each.note for each in gains).items(), key=lambda pair: (-pair[1], pair[0]))
    values = sorted(each.value for each in gains)
    gaps = sorted(each.value for each in figures if each.name == _LEFT)
    most = max(gains, key=lambda each: each.value)
    at = ", ".join(
        f"{key.replace('_', ' ')} {value:g}" for key, value in most.case.items if isinstance(value, int | float)
    )
    return [
        f"Of {len(gains)} cases " + ", ".join(f"{name} wins {number}" for name, number in order) + ".",
        f"`auto` is faster by {values[len(values) // 2]:.1%} (median), {values[0]:.1%} to {values[-1]:.1%}; "
        f"most against {most.note} ({at}).",
        f"Its makespan is {gaps[len(gaps) // 2]:.1%} above the bound (median), at most {gaps[-1]:.1%}; "
        f"in {sum(gap < 1e-9 for gap in gaps)} cases it meets it.",
    ]


def draw(figures: Sequence[Figure], folder: Path) -> list[tuple[str, str]]:
    """One panel a memory limit: M / P over latency, the winner's colour, and the gain of `auto` in each field."""
    from matplotlib.figure import Figure as Picture
    from matplotlib.patches import Rectangle

    gains = [each for each in figures if each.name == _GAIN]
    if not gains:
        return []

    def values(key: str) -> list[float]:
        return sorted({each.case.number(key) for each in gains})

    memories, latencies, counts = values("memory"), values("latency"), values("microbatches_per_rank")
    names = sorted({each.note for each in gains})
    hues = dict(zip(names, (SERIES_HUES[at % len(SERIES_HUES)] for at in range(len(names))), strict=True))
    picture = Picture(figsize=(3.1 * len(memories) + 0.6, 3.4), dpi=120, layout="constrained")
    panels: Any = picture.subplots(1, len(memories), sharey=True, squeeze=False)[0]
    for axes, memory in zip(panels, memories, strict=True):
        for each in gains:
            if each.case.number("memory") != memory:
                continue
            x, y = latencies.index(each.case.number("latency")), counts.index(each.case.number("microbatches_per_rank"))
            axes.add_patch(Rectangle((x, y), 1, 1, facecolor=hues[each.note], alpha=0.45, edgecolor="white"))
            axes.text(x + 0.5, y + 0.62, each.note, ha="center", va="center", fontsize=7)
            axes.text(x + 0.5, y + 0.34, f"+{each.value:.1%}", ha="center", va="center", fontsize=8, weight="bold")
        axes.set_xlim(0, len(latencies))
        axes.set_ylim(0, len(counts))
        axes.set_xticks([at + 0.5 for at in range(len(latencies))], [f"{each:g}" for each in latencies])
        axes.set_yticks([at + 0.5 for at in range(len(counts))], [f"{each:g}" for each in counts])
        axes.tick_params(length=0)
        axes.set_title(f"memory {memory:g} P", fontsize=9)
        axes.set_xlabel("latency / F")
    panels[0].set_ylabel("M / P")
    title = "The best named schedule, and how much faster auto is"
    picture.suptitle(f"{title}: P = {gains[0].case.count('ranks')}, F = I = W", fontsize=11)
    picture.savefig(folder / "map.png", metadata={"Software": None})
    return [(title, "map.png")]
