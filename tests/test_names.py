"""Files and names that pages and docstrings mention exist."""

from __future__ import annotations

import ast
import importlib
import re
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

import stagewright

ROOT = Path(stagewright.__file__).parent
PACKAGES = ("cli", "comm", "experiments", "integrations", "partition", "pipe", "schedules", "viz")
FOLDERS = (*PACKAGES, "docs", "examples", "tests")
PAGES = sorted([*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md")])
MODULES = sorted([*ROOT.glob("*.py"), *(file for folder in PACKAGES for file in (ROOT / folder).rglob("*.py"))])
OF_READERS = {"FILE.py", "file.py", "mine.py", "my_data.py", "my_models.py", "script.py", "train.py"}  # of their own
PATH = re.compile(rf"(?<![\w./-])(?:{'|'.join(FOLDERS)})/[\w./*-]*[\w*/]")
FILE = re.compile(r"(?<![\w./*])\w+\.py\b(?!\()")
DOTTED = re.compile(r"(?<![\w./-])stagewright(?:\.[A-Za-z]\w*)+")
OF_SCRIPTS = {"stagewright.extend"}  # of the page's JavaScript


def missing_paths(text: str) -> Iterator[str]:
    for path in PATH.findall(text):
        if not any(ROOT.glob(path.rstrip("/."))):
            yield path


def missing_names(text: str) -> Iterator[str]:
    for name in DOTTED.findall(text):
        if name not in OF_SCRIPTS and not is_name(name):
            yield name


def is_name(dotted: str) -> bool:
    """Whether it is a module, or something in one."""
    parts = dotted.split(".")
    for split in range(len(parts), 0, -1):
        try:
            found = importlib.import_module(".".join(parts[:split]))
        except ModuleNotFoundError:
            continue
        for part in parts[split:]:
            if not hasattr(found, part):
                return False
            found = getattr(found, part)
        return True
    return False


@cache
def known_files() -> set[str]:
    return {file.name for folder in FOLDERS for file in (ROOT / folder).rglob("*.py")} | OF_READERS


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.relative_to(ROOT).as_posix())
def test_what_a_page_names_exists(page: Path) -> None:
    text = re.sub(r"^::: .*$", "", page.read_text(encoding="utf-8"), flags=re.M)  # the site's build finds those
    members = {
        "sw": {*dir(stagewright), *stagewright.pipe.__all__},
        "pipe": set(dir(stagewright.PipelineModule)) | {"device", "rank", "schedule", "plan", "optimizers"},
    }
    missing = [
        *missing_paths(text),
        *missing_names(text),
        *(name for name in FILE.findall(text) if name not in known_files()),
    ]
    for prefix, names in members.items():
        missing += [
            f"{prefix}.{name}" for name in re.findall(rf"(?<![\w./]){prefix}\.(\w+)", text) if name not in names
        ]
    assert missing == []


def test_what_docstrings_name_exists() -> None:
    missing = []
    for module in MODULES:
        for node in ast.walk(ast.parse(module.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
                text = ast.get_docstring(node, clean=False) or ""
                place = f"{module.relative_to(ROOT)}:{getattr(node, 'lineno', 1)}"
                missing += [f"{place}: {name}" for name in (*missing_paths(text), *missing_names(text))]
    assert missing == []
