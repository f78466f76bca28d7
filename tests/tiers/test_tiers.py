"""The first tier: how it is chosen, how its marks are written, and when its budget fails a run."""

from __future__ import annotations

from pathlib import Path

import pytest

from tiers import budget, marks
from tiers.choose import Measured, choose

TESTS = """import pytest

@pytest.mark.thorough
def test_dear(): ...

@pytest.mark.thorough(but=["gone"])
@pytest.mark.parametrize("n", [1, 2])
def test_grid(n): ...

def test_new(): ...

def test_not_measured(): ...
"""


def branches(*lines: int) -> set[tuple[str, int, int]]:
    return {("pipe/module.py", line, line + 1) for line in lines}


def test_the_cheapest_cases_that_cover_what_all_do_and_catch_each_fault() -> None:
    cases = {
        "a.py::cheap": Measured(0.01, branches=branches(1)),
        "a.py::dear": Measured(9.0, branches=branches(1, 2, 3)),
        "a.py::good": Measured(1.0, branches=branches(2, 3)),
        "a.py::catches": Measured(2.0, branches=branches(1)),
        "a.py::catches too": Measured(3.0, branches=branches(1)),
        "b.py::only one of its file": Measured(5.0, branches=branches(1)),
    }
    chosen = choose(cases, catching=[["a.py::catches too", "a.py::catches"], ["a.py::cheap"]], num_branches=3)
    assert sorted(chosen) == ["a.py::catches", "a.py::cheap", "a.py::good", "b.py::only one of its file"]


def test_marks_say_what_was_chosen(tmp_path: Path) -> None:
    (tmp_path / "test_it.py").write_text(TESTS)
    cases = ["test_dear", "test_grid[1]", "test_grid[2]", "test_new"]
    chosen = {"test_it.py::test_dear", "test_it.py::test_grid[2]"}
    changed = marks.write(tmp_path, cases=[f"test_it.py::{case}" for case in cases], chosen=chosen)
    assert changed == [tmp_path / "test_it.py"]
    expected = TESTS.replace("@pytest.mark.thorough\n", "").replace("gone", "2").replace('"2"', "'2'")
    assert (tmp_path / "test_it.py").read_text() == expected.replace(
        "def test_new", "@pytest.mark.thorough\ndef test_new"
    )
    assert marks.write(tmp_path, cases=[f"test_it.py::{case}" for case in cases], chosen=chosen) == []


@pytest.mark.parametrize(("slower", "core_seconds", "holds"), [(1, 590, True), (1, 610, False), (3, 3 * 590, True)])
def test_the_budget_counts_on_the_scale_of_the_work_beside_it(slower: int, core_seconds: float, holds: bool) -> None:
    first_tier = budget.Budget()
    first_tier._workers = [(core_seconds / 3, slower * budget.REFERENCE)] * 3
    assert first_tier.verdict()[1] is holds
