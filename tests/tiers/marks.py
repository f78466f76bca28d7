"""Writes `@pytest.mark.thorough` above the tests that `make test` leaves out, and takes it from those that it runs."""

import ast
from collections import defaultdict
from collections.abc import Collection
from pathlib import Path

MARK = "@pytest.mark.thorough"


def write(root: Path, *, cases: Collection[str], chosen: Collection[str]) -> list[Path]:
    """The marks for a choice among the measured `cases` (node ids); returns the files that changed.

    A test that was not measured, since it was skipped or is a nightly one, keeps the mark it has.
    """
    tests: dict[str, dict[str, dict[str, bool]]] = defaultdict(
        lambda: defaultdict(dict)
    )  # file, function, case: chosen
    for name in cases:
        test, _, case = name.partition("[")
        file, _, function = test.partition("::")
        tests[file][function][case.removesuffix("]")] = name in chosen
    return [root / file for file, functions in tests.items() if _write_file(root / file, functions)]


def runs(node: ast.FunctionDef, case: str) -> bool:
    """Whether `make test` runs a case of a test; of no case (""), whether it runs any."""
    for decorator in node.decorator_list:
        if ast.unparse(decorator) == MARK[1:]:
            return False
        if isinstance(decorator, ast.Call) and ast.unparse(decorator.func) == MARK[1:]:
            return not case or case in ast.literal_eval(decorator.keywords[0].value)
    return True


def _write_file(path: Path, functions: dict[str, dict[str, bool]]) -> bool:
    text = path.read_text(encoding="utf-8")
    lines = text.splitlines()
    nodes = [node for node in ast.parse(text).body if isinstance(node, ast.FunctionDef) and node.name in functions]
    for node in reversed(nodes):
        if all(runs(node, case) == chosen for case, chosen in functions[node.name].items()):
            continue
        for decorator in reversed(node.decorator_list):
            if ast.unparse(decorator).startswith(MARK[1:]):
                del lines[decorator.lineno - 1 : decorator.end_lineno]
        cases = functions[node.name]
        if not all(cases.values()):
            first = min([node.lineno, *(decorator.lineno for decorator in node.decorator_list)])
            but = [case for case, is_chosen in cases.items() if is_chosen]
            lines.insert(first - 1, MARK + (f"(but={but!r})" if but else ""))
    if any(MARK in line for line in lines) and "import pytest" not in lines:
        lines.insert(ast.parse(text).body[0].end_lineno or 1, "import pytest")  # behind the docstring
    written = "\n".join(lines) + "\n"
    if written != text:
        path.write_text(written, encoding="utf-8")
    return written != text
