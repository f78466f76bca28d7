"""The experiment `sums`: seconds of sums beside what the measured links let expect of them."""

from __future__ import annotations

from typing import Any

import pytest
from support.inside import Case, How, sums
from support.inside import JobsFigureFigure as Figure
from support.pool import Pool


def figures_of_sums() -> list[Figure]:
    return list(sums.measured(Case.of({"ranks": 2}), 2))


@pytest.mark.thorough
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


def test_findings_name_the_farthest_case() -> None:
    def ratio(num_bytes: int, value: float) -> Figure:
        case = Case.of({"bytes": num_bytes, "sums": 1})
        return Figure(case=case, name="sum, predicted / found", value=value, unit="ratio", how=How.EMULATED)

    few = [ratio(1, 1.02), ratio(1, 1.04), ratio(1, 0.5), ratio(2, 0.8), ratio(3, 1.1)]
    (said,) = sums.findings(few)
    assert said.startswith("Predicted sums are 10% off in the median of 3 cases, -20% at worst (")
    assert "bytes=2" in said
    assert sums.findings([]) == []
