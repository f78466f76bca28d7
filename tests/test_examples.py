"""examples/: every command in their texts runs as it is printed there, and prints what it says."""

from __future__ import annotations

import importlib.util
import os
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

import stagewright

ROOT = Path(stagewright.__file__).parent
EXAMPLES = sorted((ROOT / "examples").glob("*.py"))
COMMAND = re.compile(r"(?:^#?\s+|`)((?:torchrun|python) [^`\n]*examples/\w+\.py[^`\n]*)", flags=re.M)

# What the output ends with, by example; each says itself what it learns.
LEARNT = {
    "train_gpt": r"step 40: loss [0-3]\.\d+\n(?s:.*)def ",
    "gpt2": r"step 30: loss (0|1\.[0-3])(?s:.*)hgfe>",
    "resnet": r"(9\d|100)% of 192 new pictures",
    "notebook": r"(9\d|100)% of the points are told apart",
}


def commands() -> list[tuple[str, str]]:
    return [(file.stem, line) for file in EXAMPLES for line in COMMAND.findall(file.read_text(encoding="utf-8"))]


def test_each_example_says_how_to_run_it() -> None:
    assert {name for name, _ in commands()} == {file.stem for file in EXAMPLES} == set(LEARNT)


@pytest.mark.slow
@pytest.mark.gloo
@pytest.mark.parametrize("name", [file.stem for file in EXAMPLES])
def test_examples(name: str, tmp_path: Path) -> None:
    """All commands of an example one after the other in an empty folder, as a newcomer types them."""
    text = (ROOT / "examples" / f"{name}.py").read_text(encoding="utf-8")
    if "from transformers" in text and importlib.util.find_spec("transformers") is None:
        pytest.skip("needs transformers: make extras")
    shutil.copytree(ROOT / "examples", tmp_path / "examples", ignore=shutil.ignore_patterns("__pycache__"))
    environment = os.environ | {"PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"}
    for number, line in enumerate(COMMAND.findall(text)):
        done = subprocess.run(
            shlex.split(line), cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=250, check=False
        )
        assert done.returncode == 0, done.stderr[-3000:]
        assert number or re.search(LEARNT[name], done.stdout), done.stdout[-1000:]  # the second goes on from the first
