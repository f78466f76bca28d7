"""A report on vTrain's trainings: which rows are predicted badly, and the likely cause of each."""

from __future__ import annotations

from pathlib import Path

import pytest
from support.inside import Case, How, vtrain, vtrain_report
from support.inside import JobsFigureFigure as Figure


def test_the_report_names_rows_and_says_why(tmp_path: Path) -> None:
    """Rows 22 to 29 as a file of a user's own: 25 took 3 s more than its sizes, 26 has none of its sizes beside it."""
    lines = (Path(vtrain.__file__).parent / "data" / "vtrain_a100.csv").read_text(encoding="utf-8").splitlines()
    own = tmp_path / "own.csv"
    own.write_text("\n".join([lines[2], *lines[24:32], lines[34]]), encoding="utf-8")
    cases = [Case.of({"rows": which, "trainings": str(own)}) for which in ("odd", "even")]
    figures = [figure for case in cases for figure in vtrain.rows(case, 1)]
    assert len(figures) == 4 * 9
    assert sorted(figure.case.count("row") for figure in figures)[::4] == list(range(1, 10))
    halves = list(vtrain.half(Case.of({"split": "even, odd", "trainings": str(own)}), 1))
    agree = list(vtrain.agreement(Case.of({"rows": "all", "trainings": str(own)}), 1))
    said = vtrain_report.findings([*figures, *halves, *agree])
    assert said[0].startswith("2 halves, each predicted by a device that the other rows gave: ")
    assert any(" of 9 rows off by more than 10%." in line for line in said)
    far = {line.split(" (")[0]: line for line in said if line.startswith("row ")}
    alone, late = far["row 5"], far["row 4"]
    assert alone.startswith("row 5 (h = 8192, T = 2, 16 replicas, P = 16, microbatches of 3): ")
    assert "1.49 times as long as row 4 (T = 4, P = 8), predicted " in alone
    assert late.startswith("row 4 (h = 8192, T = 4, 16 replicas, P = 8, microbatches of 3): ")
    assert "1.09 times as long as row 9 (microbatches of 6), predicted 0.79; " in late
    assert "Likely: this run (a slow device, a busy network)" in late
    assert "rows of h = 8192 with T = 4 on 512 GPUs contradict each other" in said[-1]
    assert "Where each layout (replicas and P) may have a step, a microbatch and a sequence of its own" in said[-1]
    for work, case, message in (
        (vtrain.rows, {"rows": "all"}, "expected odd or even"),
        (vtrain.half, {"split": "third"}, "expected none, 'even, odd', or the number"),
        (vtrain.agreement, {"rows": "odd"}, "rows: expected all"),
        (vtrain.rows, {"rows": "odd", "trainings": str(tmp_path / "none.csv")}, "none.csv"),
    ):
        with pytest.raises((ValueError, OSError), match=message):
            list(work(Case.of(case), 1))


def reported(
    number: int, layout: tuple[int, int, int], size: int, *, predicted: float, of_all: float = 0.5
) -> list[Figure]:
    """Figures of a row that took 10 s with a batch of 64, (T, replicas, P) and microbatches of `size`."""
    sizes = dict(zip(("tensor", "data", "pipeline"), layout, strict=True))
    model = {"gpus": layout[0] * layout[1] * layout[2], "hidden": 1024, "layers": 24, "batch": 64}
    case = Case.of({"row": number, **model, **sizes, "microbatch": size})
    values = {"predicted / measured": predicted, "fitted to all / measured": of_all}
    simulated_ = [Figure(case=case, name=n, value=v, unit="ratio", how=How.SIMULATED) for n, v in values.items()]
    return [Figure(case=case, name="step", value=10.0, unit="s", how=How.PUBLISHED), *simulated_]


def test_likely_causes_by_what_rows_beside_one_say() -> None:
    """Each row that is off has the cause that the rows beside it leave; row 6 has none, row 10 agrees with row 11."""
    late, other = (2, 4, 4), (4, 2, 4)  # 16 / 8 microbatches in 19 / 11 slots, of 1 and 2
    said = vtrain_report.findings(
        [
            *reported(1, late, 1, predicted=1 - 0.019 * 8),
            *reported(2, late, 2, predicted=1 - 0.011 * 8),
            *reported(3, other, 1, predicted=0.99),
            *reported(4, (8, 1, 4), 1, predicted=0.8),
            *reported(5, other, 4, predicted=0.8),
            *reported(6, (1, 8, 8), 1, predicted=0.8),
            *reported(7, (8, 16, 1), 1, predicted=1.2, of_all=1.2),
            *reported(8, (8, 8, 2), 1, predicted=0.7, of_all=1.01),
            *reported(10, (2, 32, 4), 1, predicted=0.88),
            *reported(11, (2, 32, 4), 2, predicted=0.95),
        ]
    )
    far = {line.split(" (")[0]: line for line in said if line.startswith("row ")}
    assert set(far) == {"row 1", "row 4", "row 5", "row 6", "row 7", "row 8", "row 10"}
    assert "Likely: one cause for all runs of this layout: rows 1 and 2 lack 0.08 and 0.08 s for each" in far["row 1"]
    assert "as long as row 3 (T = 4, 2 replicas), predicted 0.86" in far["row 1"]
    assert "It took 1.00 times as long as row 3 (T = 4, 2 replicas), predicted 0.81" in far["row 4"]
    assert "Likely: this run (a slow device, a busy network), or a cost that only rows like it have." in far["row 4"]
    assert "Likely: this run (a slow device, a busy network): other microbatches in the same layout" in far["row 5"]
    assert "Likely: a cost of these sizes that the model does not have: no row beside" in far["row 6"]
    assert "It took" not in far["row 6"]
    assert "Likely: a cost of these sizes that the model does not have: no row beside" in far["row 10"]
    assert "Likely: a cost that rows like it do not have" in far["row 7"]
    assert "Likely: a constant that it shows and the half does not; fitted to all rows it is 1.0% off." in far["row 8"]
