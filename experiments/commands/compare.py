"""`stagewright compare runs/gpt runs/gpt-2`: what changed, and where the time of the change came from.

stagewright compare runs/gpt                              a run's prediction beside what was measured
stagewright compare runs/gpt plan.json -o both.html       two of anything that `stagewright timeline` reads
stagewright compare gpipe zb-h1 --ranks 4 --microbatches 8
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated

import tyro

from ...schedules import Change, Difference
from ...schedules.wording import count, duration, size
from ...viz import FigureStyle
from ..options import check_out, plain_help, read
from .comparison import Comparison, Side, compare_exhibits
from .exhibits import read_exhibits
from .outputs import writer_of
from .schedule_options import CostOptions

_WIDTH = 22  # of the first column
_LEAST = 0.0005  # share of the makespan: what is smaller in both is not listed
_DEPARTS = 0.01  # share of an action: smaller departures are not listed


@plain_help
@dataclass(frozen=True, slots=True, kw_only=True)
class CompareOptions(CostOptions):
    """Compare two runs, plans or schedules; or, of one run, what was predicted with what was measured.

    Sizes and costs are for schedules, in seconds of ONE stage action; a run and a plan bring their own.
    """

    inputs: Annotated[tyro.conf.Positional[tuple[str, ...]], tyro.conf.arg(metavar="A [B]")]
    """Runs (folder or name), plans, schedules (file or name) and timelines (JSON): the one before, the one after."""
    out: Annotated[tyro.conf.UseAppendAction[tuple[Path, ...]], tyro.conf.arg(aliases=["-o"])] = ()
    """File to draw both in, by its end, as those of `stagewright timeline`; may be given several times."""
    json: tyro.conf.FlagCreatePairsOff[bool] = False
    """Print one JSON object."""


def run(argv: Sequence[str]) -> int:
    """Read both, compare, print, draw."""
    options = read(CompareOptions, argv, "compare")
    if not 1 <= len(options.inputs) <= 2:
        raise ValueError(
            f"{len(options.inputs)} inputs: expected two to compare, or a run alone, whose prediction is compared with "
            f"what was measured: `stagewright compare runs/gpt runs/gpt-2`"
        )
    for path in options.out:
        writer_of(path)
        check_out("-o", path)
    exhibits = read_exhibits(options.inputs, options)
    comparison = compare_exhibits(exhibits, options.inputs)
    for path in options.out:
        writer_of(path)(exhibits, path, FigureStyle())
    if options.json:
        print(json.dumps(as_json(comparison) | {"written": list(map(str, options.out))}))
        return 0
    print(table(comparison))
    for path in options.out:
        print(path)
    return 0


def as_json(comparison: Comparison) -> dict[str, object]:
    """Everything, by name."""
    found = comparison.difference
    return {
        "before": _side_json(comparison.before),
        "after": _side_json(comparison.after),
        "step_seconds": found.batch_seconds._asdict() | {"change": found.batch_seconds.seconds},
        "per_batch": found.per_batch,
        "makespan": found.makespan._asdict() | {"change": found.makespan.seconds},
        "bubble": found.bubble._asdict() | {"change": found.bubble.seconds},
        "causes": [each._asdict() | {"change": each.seconds} for each in found.causes],
        "largest_cause": found.largest_cause.name,
        "critical_path": [each._asdict() | {"change": each.seconds} for each in found.path],
        "ranks": [[each._asdict() | {"change": each.seconds} for each in rank] for rank in found.ranks],
        "departures": [
            {**each._asdict(), "action": str(each.action), "change": each.seconds} for each in found.departures
        ],
        "stragglers": [{**asdict(each), "name": each.name} for each in found.stragglers],
        "configuration": {name: list(pair) for name, pair in comparison.changed.items()},
        "notes": list(comparison.notes),
    }


def _side_json(side: Side) -> dict[str, object]:
    return {
        "name": side.name,
        "caption": side.caption,
        "figures": [figure._asdict() for figure in side.figures],
        "peak_bytes": side.peaks,
        "peak_bytes_are": side.peaks_are,
        "configuration": side.configuration,
    }


def table(comparison: Comparison) -> str:
    """Both sides, what changed between them, and who is to blame."""
    found = comparison.difference
    each = " a batch" if found.per_batch else ""
    parts = [
        _heading(comparison),
        _row("", "A", "B", "change"),
        *_figures(comparison),
        "",
        f"a rank's time{each} (mean of {_ranks(comparison)}): what it computes, and why it idles",
        *_changes(found.causes, found.makespan),
        _row(_makespan(found), *_seconds(found.makespan)),
        *_why(comparison),
        "",
        f"critical path{each}, by what it goes through",
        *_changes(found.path, found.makespan),
        *_changes(found.links, found.makespan, indent="  "),
        *_configuration(comparison),
        *_departures(comparison),
        *_stragglers(comparison),
        *(f"note: {note}" for note in comparison.notes),
    ]
    return "\n".join(line.rstrip() for line in parts)


def _heading(comparison: Comparison) -> str:
    lines = []
    for letter, side in (("A", comparison.before), ("B", comparison.after)):
        schedule = side.timeline.schedule
        lines.append(
            f"{letter}  {side.name} ({side.caption}): {schedule.name}, {count(schedule.num_ranks, 'rank')}, "
            f"{count(schedule.num_stages, 'stage')}, {count(schedule.num_microbatches, 'microbatch')}"
        )
    return "\n".join([*lines, ""])


def _row(name: str, before: str, after: str, change: str = "", share: str = "") -> str:
    return f"  {name:<{_WIDTH}} {before:>12} {after:>12} {change:>12} {share:>9}"


def _seconds(change: Change) -> tuple[str, str, str, str]:
    share = f"{change.seconds / change.before:+.1%}" if change.before > 0 else ""
    return duration(change.before), duration(change.after), _signed(change.seconds), share


def _signed(seconds: float) -> str:
    return f"{'+' if seconds > 0 else ''}{duration(seconds)}"


def _figures(comparison: Comparison) -> list[str]:
    found = comparison.difference
    rows = [_row("step", *_seconds(found.batch_seconds))]
    points = f"{100 * found.bubble.seconds:+.1f} points"
    rows.append(_row("bubble", f"{found.bubble.before:.1%}", f"{found.bubble.after:.1%}", points))
    figures = [{each.label: each for each in side.figures} for side in (comparison.before, comparison.after)]
    measured = comparison.before.timeline.measured or comparison.after.timeline.measured
    for label in (*(("predicted",) if measured else ()), "closed form", "lower bound"):
        before, after = ("" if label not in each else duration(each[label].seconds) for each in figures)
        rows += [_row(label, before, after)] if before or after else []
    return rows + _memory(comparison.before, comparison.after)


def _memory(before: Side, after: Side) -> list[str]:
    """Bytes on the fullest rank."""
    old, new = (None if side.peaks is None else max(side.peaks, default=0.0) for side in (before, after))
    if old is None and new is None:
        return []
    change = "" if old is None or new is None else f"{'+' if new > old else ''}{size(new - old)}"
    share = f"{new / old - 1:+.1%}" if old and new is not None else ""
    first, second = ("not known" if each is None else size(each) for each in (old, new))
    how = ", ".join(sorted({side.peaks_are for side in (before, after)} - {""}))
    return [f"{_row('memory, fullest rank', first, second, change, share)}  {how}"]


def _ranks(comparison: Comparison) -> str:
    old, new = (len(s.timeline.ranks) - len(s.timeline.missing) for s in (comparison.before, comparison.after))
    return count(old, "rank") if old == new else f"{count(old, 'rank')} and {new}"


def _changes(changes: Iterable[Change], whole: Change, *, indent: str = "") -> list[str]:
    """Rows of what is there at all."""
    least = _LEAST * max(whole.before, whole.after)
    return [
        _row(indent + each.name.replace("_", " "), *_seconds(each))
        for each in changes
        if max(each.before, each.after) > least
    ]


def _why(comparison: Comparison) -> list[str]:
    found = comparison.difference
    if abs(found.makespan.seconds) <= _LEAST * found.makespan.before:
        return []
    largest = found.largest_cause
    word = "longer" if found.makespan.seconds > 0 else "shorter"
    return [
        f"  the {_makespan(found)} is {duration(abs(found.makespan.seconds))} {word}, most of all for {_words(largest)}"
    ]


def _makespan(found: Difference) -> str:
    return "makespan a batch" if found.per_batch else "makespan"


def _words(change: Change) -> str:
    return f"{change.name.replace('_', ' ')} ({_signed(change.seconds)})"


def _configuration(comparison: Comparison) -> list[str]:
    changed = comparison.changed
    if not changed:
        return ["", "configuration: no difference"]
    rows = [(name, *("-" if each is None else each for each in pair)) for name, pair in changed.items()]
    widths = [max(len(row[column]) for row in rows) for column in range(2)]
    return ["", "configuration that differs", *(f"  {n:<{widths[0]}}  {b:<{widths[1]}}  {a}" for n, b, a in rows)]


def _departures(comparison: Comparison) -> list[str]:
    found = [each for each in comparison.difference.departures if abs(each.seconds) > _DEPARTS * each.before]
    if not found:
        return []
    rows = [
        _row(f"rank {each.rank}  {each.action}", *_seconds(Change("", each.before, each.after))) for each in found[:5]
    ]
    return ["", "actions that depart most", *rows]


def _stragglers(comparison: Comparison) -> Sequence[str]:
    found = comparison.difference.stragglers
    rows = [
        f"  {each.name} takes {each.ratio:.2f} times as long, {duration(each.seconds)} in all, beside {each.against}"
        for each in found
    ]
    return ["", "stragglers in B", *rows, ""] if rows else [""]
