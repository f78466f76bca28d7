"""The experiment `sums`: seconds of sums beside what the measured links let expect of them."""

from __future__ import annotations

from typing import Any

import pytest
from support.inside import Case, sums
from support.inside import JobsFigureFigure as Figure
from support.pool import Pool


def figures_of_sums() -> list[Figure]:
    return list(sums.measured(Case.of({"ranks": 2}), 2))


@pytest.mark.gloo
def test_each_sum_has_its_prediction(gloo: Pool) -> None:
    one, other = gloo.run(figures_of_sums, ranks=2)
    assert one == other  # the slowest rank's
    seconds: dict[Any, dict[str, list[float]]] = {}
    for figure in one:
        seconds.setdefault(figure.case, {}).setdefault(figure.name, []).append(figure.value)
    assert [(case.count("bytes"), case.count("sums")) for case in seconds] == list(sums.SUMS)
    for found in seconds.values():
        (predicted,) = found["sum, predicted"]
        assert predicted > 0
        assert found["sum, predicted / found"] == [predicted / took for took in found["sum"]]
        assert len(found["sum"]) == 2
