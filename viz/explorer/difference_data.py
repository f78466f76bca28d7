"""Departures of a measured step from its prediction, and who straggles."""

from __future__ import annotations

from typing import Any

from ...schedules import Straggler, Timeline, compare, find_stragglers


def difference_columns(predicted: Timeline | None, measured: Timeline) -> dict[str, Any]:
    """Actions that depart most as [rank, action, predicted, measured], causes as [name, seconds more] of the mean rank,
    stragglers by name; without a prediction the stragglers among their peers alone."""
    if predicted is None:
        return {"departures": [], "causes": [], "stragglers": [_straggler(s) for s in find_stragglers(measured)]}
    found = compare(predicted, measured)
    return {
        "departures": [[each.rank, str(each.action), each.before, each.after] for each in found.departures],
        "causes": [[change.name.replace("_", " "), change.seconds] for change in found.causes],
        "stragglers": [_straggler(each) for each in found.stragglers],
        "notes": list(found.notes),
    }


def _straggler(each: Straggler) -> dict[str, Any]:
    rank = each.who if isinstance(each.who, int) else each.who[1]
    against = each.against.replace("the other timeline", "predicted")
    return {"name": each.name, "rank": rank, "ratio": each.ratio, "seconds": each.seconds, "against": against}
