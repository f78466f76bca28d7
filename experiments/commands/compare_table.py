"""A comparison as a table for people."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from ...schedules import Change, Difference
from ...schedules.wording import count, duration, size
from .comparison import Comparison, Side

_WIDTH = 22  # of the first column
_LEAST = 0.0005  # share of the makespan: what is smaller in both is not listed
_DEPARTS = 0.01  # share of an action: smaller departures are not listed


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
