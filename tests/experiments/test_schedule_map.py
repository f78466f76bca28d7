"""The map of schedules: who may stand on it, what it says, and its picture."""

from __future__ import annotations

from pathlib import Path

import pytest
from support.inside import Case, How, schedule_map
from support.inside import JobsFigureFigure as Figure


def case(latency: float, memory: float, ranks: int = 2) -> Case:
    return Case(items=(("ranks", ranks), ("microbatches_per_rank", 2), ("latency", latency), ("memory", memory)))


@pytest.mark.thorough
def test_the_search_is_never_behind_the_best_named_one(monkeypatch) -> None:  # type: ignore[no-untyped-def]
    """The last case: that of ZB-V with the W where these costs have gaps, which so few orders do not find otherwise."""
    monkeypatch.setattr(schedule_map, "_ORDERS", 100)
    for each in (case(0.1, 0.5), case(0.1, 1.0), case(0.3, 1.0, ranks=4)):
        found = {figure.name: figure for figure in schedule_map.simulated(each, 1)}
        assert found["gain"].value >= 0
        assert found["bubble of the bound"].value <= found["bubble of auto"].value
        assert found["bubble of auto"].value <= found["bubble of the best named"].value
        assert found["gap"].value >= 0


def test_named_ones_fit_the_memory_and_are_those_with_one_copy_of_the_weights() -> None:
    names = {each.name for each in schedule_map.named(schedule_map._Sizes(4, 8, 0.0, 4.0))}
    assert {"1f1b", "zb-h1", "zb-v", "v-half", "v-min", "interleaved-zb"} <= names
    assert not names & {"gpipe", "chimera", "dualpipe", "pipedream", "2bw", "terapipe", "zb-h2"}
    assert {each.name for each in schedule_map.named(schedule_map._Sizes(4, 8, 0.0, 1.0))} == {"zb-1p", "zb-2p", "zb-v"}


def test_picture(tmp_path: Path) -> None:
    def figures(latency: float, memory: float, winner: str, gain: float) -> list[Figure]:
        also = {"case": case(latency, memory), "how": How.SIMULATED, "unit": "fraction", "note": winner}
        return [Figure(name="gain", value=gain, **also), Figure(name="gap", value=0.0, **also)]  # type: ignore[arg-type]

    drawn = figures(0.0, 1.0, "zb-v", 0.0) + figures(0.5, 1.0, "zb-v", 0.02) + figures(0.0, 2.0, "zb-h2", 0.1)
    assert schedule_map.draw(drawn, tmp_path) == [("The best named schedule, and how much faster auto is", "map.png")]
    assert (tmp_path / "map.png").read_bytes().startswith(b"\x89PNG")
    assert schedule_map.findings([]) == schedule_map.draw([], tmp_path) == []
