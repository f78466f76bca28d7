"""Two exhibits side by side, or the prediction and the measurement of one."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from ...schedules import Difference, Timeline, compare
from ...viz import Exhibit
from ...viz.headline import HeadFigure, headline
from .configuration import configuration

NUM_DEPARTURES = 10


@dataclass(frozen=True, slots=True, kw_only=True)
class Side:
    """One of the two.

    Arguments:
        name: for people.
        caption: of the timeline that is compared: "predicted", "measured, step 43".
        peaks: [P] bytes at the peak of each rank, None where nobody knows them; peaks_are: how they were found.
        configuration: what it was set up with, by name.
    """

    name: str
    caption: str
    timeline: Timeline
    figures: tuple[HeadFigure, ...]
    peaks: tuple[float, ...] | None
    peaks_are: str
    configuration: dict[str, str]


@dataclass(frozen=True, slots=True, kw_only=True)
class Comparison:
    """Two sides, and what lies between them.

    Arguments:
        notes: what could not be read or compared.
    """

    before: Side
    after: Side
    difference: Difference
    notes: tuple[str, ...]

    @property
    def changed(self) -> dict[str, tuple[str | None, str | None]]:
        """Configuration that differs, by name; None where one side does not say."""
        old, new = self.before.configuration, self.after.configuration
        return {name: (old.get(name), new.get(name)) for name in {**old, **new} if old.get(name) != new.get(name)}


def compare_exhibits(exhibits: Sequence[Exhibit], sources: Sequence[str]) -> Comparison:
    """The comparison of two exhibits, or of one's prediction with its measurement.

    Arguments:
        sources: the names under which they were read.

    Raises ValueError for an exhibit without what is to be compared.
    """
    notes = [note for exhibit in exhibits for note in exhibit.notes]
    first, last = exhibits[0], exhibits[-1]
    if len(exhibits) == 1:
        captions = ("predicted", "measured")
        lacking = "prediction" if first.predicted is None else "measurement" if not first.measured else ""
        if lacking:
            raise ValueError(f"{first.name} has no {lacking} to compare with: expected a second run, plan or schedule")
    elif first.measured and last.measured:
        captions = ("measured", "measured")
    elif first.predicted is not None and last.predicted is not None:
        captions = ("predicted", "predicted")
        alone = [each.name for each in exhibits if each.measured]
        notes += [f"only {alone[0]} was measured: what was predicted of both is compared"] if alone else []
    else:
        captions = tuple("measured" if each.measured else "predicted" for each in exhibits)  # type: ignore[assignment]
        notes.append(f"{captions[0]} figures of {first.name} beside {captions[1]} ones of {last.name}")
    before = _side(first, sources[0], captions[0])
    after = _side(last, sources[-1], captions[1])
    difference = compare(before.timeline, after.timeline, num_departures=NUM_DEPARTURES)
    return Comparison(before=before, after=after, difference=difference, notes=(*notes, *difference.notes))


def _side(exhibit: Exhibit, source: str, which: str) -> Side:
    caption, timeline = which, exhibit.predicted
    if which == "measured":
        # The step in the middle: the newest may be an odd one. The first ones may have had a flush, and later ones not.
        schedules = [step.timeline.schedule for step in exhibit.measured]
        kinds = [schedule.name if schedule.is_asynchronous else "" for schedule in schedules]
        same = [step for step, kind in zip(exhibit.measured, kinds, strict=True) if kind == kinds[-1]]
        steps = sorted(same, key=lambda step: step.timeline.batch_seconds)
        number, timeline = steps[(len(steps) - 1) // 2]
        caption = f"measured, step {number}" + (f", the median of {len(steps)}" if len(steps) > 1 else "")
    assert timeline is not None
    peaks, peaks_are = _peaks(exhibit, timeline)
    return Side(
        name=exhibit.name,
        caption=caption,
        timeline=timeline,
        figures=headline(exhibit),
        peaks=peaks,
        peaks_are=peaks_are,
        configuration=configuration(source, timeline),
    )


def _peaks(exhibit: Exhibit, timeline: Timeline) -> tuple[tuple[float, ...] | None, str]:
    """Bytes by rank, the surest first."""
    if timeline.measured and exhibit.measured_peak is not None:
        return exhibit.measured_peak, "measured"
    if exhibit.predicted_peak is not None:
        return exhibit.predicted_peak, "predicted by the plan"
    curves = exhibit.curves(timeline)
    return (None, "") if curves is None else (tuple(curve.peak for curve in curves), "of the timeline")
