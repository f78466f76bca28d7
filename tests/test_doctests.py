"""Runs the examples in the docstrings of the installed package, one test a module that has any."""

import doctest
import importlib
from pathlib import Path

import pytest

import stagewright

ROOT = Path(stagewright.__file__).parent


def modules() -> list[str]:
    """Names of the modules with examples; a `__main__` is a command, not for import."""
    folders = [init.parent for init in ROOT.glob("*/__init__.py")]
    files = [path.relative_to(ROOT) for folder in folders for path in folder.rglob("*.py")]
    files = [path for path in files if ">>>" in (ROOT / path).read_text(encoding="utf-8")]
    names = [".".join(path.with_suffix("").parts).removesuffix(".__init__") for path in files]
    return sorted(f"stagewright.{name}" for name in names if not name.endswith("__main__"))


@pytest.mark.thorough(
    but=["stagewright.experiments.jobs.case", "stagewright.partition.recompute", "stagewright.schedules.search.joint"]
)
@pytest.mark.parametrize("name", modules())
def test_docstring_examples(name):
    module = importlib.import_module(name)
    result = doctest.testmod(module, optionflags=doctest.ELLIPSIS)
    assert result.failed == 0, f"{result.failed} of {result.attempted} examples fail, see the captured output"
