"""Tests of the tests: 160 small mistakes of a programmer, and a test of the first tier that fails with each of them.

    [a-sum-is-taken-twice]                       the mistake, in tests/faults/<room>.toml
    file = "pipe/update/..."
    old = "..."                                  is in the file once
    new = "..."
    caught_by = "tests/pipe/test_...::test_..."
    gloo = true                                  where only several processes show it

A change that moves or renames what `old` quotes, or the test that catches it, takes the record along: the first tier
says which. `make nightly ARGS="-k faults"` tries all of them, each in a copy of the package.
"""

import ast
from pathlib import Path

import pytest
from tiers import budget, marks

from .seeded import LONG, ROOMS, ROOT, Fault, copy, read, run_in, seeded

AT_LEAST, IN_ALL = 15, 160


@pytest.mark.thorough
def test_faults_fit_the_code_and_the_tests() -> None:
    """Otherwise the test of the night would try nothing."""
    rooms = [read(room) for room in ROOMS]
    assert all(len(faults) >= AT_LEAST for faults in rooms)
    faults = [fault for room in rooms for fault in room]
    assert len({(fault.file, fault.old, fault.new) for fault in faults}) == len(faults) >= IN_ALL
    for fault in faults:
        text = (ROOT / fault.file).read_text(encoding="utf-8")
        assert ast.dump(ast.parse(fault.seed(text))) != ast.dump(ast.parse(text)), f"{fault.name} changes no code"
        path, _, test = fault.caught_by.partition("::")
        name, _, case = test.removesuffix("]").partition("[")
        tree = ast.parse((ROOT / path).read_text(encoding="utf-8"))
        tests = {node.name: node for node in tree.body if isinstance(node, ast.FunctionDef)}
        assert name in tests, f"fault {fault.name}: expected a test of {path}, not {name!r}"
        assert marks.runs(tests[name], case), f"fault {fault.name}: {test} is not in the first tier; type make tiers"


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return copy(tmp_path_factory.mktemp("faults"))


@pytest.mark.nightly
@pytest.mark.timeout(LONG + 120)
@pytest.mark.parametrize(
    "fault",
    [
        pytest.param(fault, id=f"{room}-{fault.name}", marks=pytest.mark.gloo if fault.gloo else ())
        for room in ROOMS
        for fault in read(room)
    ],
)
def test_a_fault_is_caught(root: Path, fault: Fault) -> None:
    """By the cases of the first tier."""
    words = f"-q -x -p no:cacheprovider --hypothesis-profile=unshrunk --timeout={LONG} -m"
    options = [*words.split(), budget.MARKS]
    with seeded(root, fault):
        ended = run_in(root, "-m", "pytest", *options, fault.caught_by)
    failed = ended.returncode == pytest.ExitCode.TESTS_FAILED and "\nFAILED " in ended.stdout
    assert failed, f"{fault.caught_by} does not see {fault.new!r} in {fault.file}:\n{ended.stdout}{ended.stderr}"


@pytest.mark.parametrize(("slower", "core_seconds", "holds"), [(1, 590, True), (1, 610, False), (3, 3 * 590, True)])
def test_the_budget_counts_on_the_scale_of_the_work_beside_it(slower: int, core_seconds: float, holds: bool) -> None:
    first_tier = budget.Budget()
    first_tier._workers = [(core_seconds / 3, slower * budget.REFERENCE)] * 3
    assert first_tier.verdict()[1] is holds
