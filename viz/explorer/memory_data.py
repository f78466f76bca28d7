"""Bytes that ranks hold over time, as columns: whole `unit`s, a number alone for a part that stays as it is."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from ...schedules import MemoryCurve, MemoryPart, Timeline
from ..exhibit import Exhibit

_STEPS = 20_000  # from nothing to the highest line: finer than any row is drawn
_PARTS = list(MemoryPart)


def memory_columns(exhibit: Exhibit, timeline: Timeline, ticks: Callable[[float], int]) -> dict[str, Any] | None:
    """Curves, limits and peaks by rank; None where nothing is known of them."""
    curves = exhibit.curves(timeline)
    lines = {
        "limit": exhibit.memory_limit,
        "predicted_peak": exhibit.predicted_peak,
        "measured_peak": exhibit.measured_peak,
    }
    known = {name: values for name, values in lines.items() if values is not None}
    if curves is None:
        return None
    most = max([0.0, *(curve.peak for curve in curves)])
    unit = max(1.0, most / _STEPS)
    return {
        "unit": unit,
        "rows": [None if rank in timeline.missing else _row(curve, unit, ticks) for rank, curve in enumerate(curves)],
        **{name: [round(value) for value in values] for name, values in known.items()},
    }


def _row(curve: MemoryCurve, unit: float, ticks: Callable[[float], int]) -> dict[str, Any]:
    times = [ticks(time) for time in curve.times]
    return {
        "steps": [after - before for before, after in zip([0, *times], times, strict=False)],
        "parts": [[_PARTS.index(part), _units(values, unit)] for part, values in curve.parts.items()],
        "peak": round(curve.peak),
    }


def _units(values: Sequence[float], unit: float) -> list[int] | int:
    """Whole units at each time, or one number for all."""
    units = [round(value / unit) for value in values]
    return units[0] if len(set(units)) == 1 else units
