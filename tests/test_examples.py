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
from support.commands import Done, run_forked

import stagewright

ROOT = Path(stagewright.__file__).parent
EXAMPLES = sorted((ROOT / "examples").glob("*.py"))
COMMAND = re.compile(r"(?:^#?\s+|`)((?:torchrun|python) [^`\n]*examples/\w+\.py[^`\n]*)", flags=re.M)

TYPED = "torchrun --nproc-per-node 2 examples/train_gpt.py --steps 40"

# What the output ends with, by example; each says itself what it learns.
LEARNT = {
    "train_gpt": r"step 40: loss [0-3]\.\d+\n(?s:.*)def ",
    "get_started": r"step 100: loss 0\.[0-4](?s:.*)(7[5-9]|8\d|9\d)% of 256 new points",
    "gpt2": r"step 30: loss (0|1\.[0-3])(?s:.*)hgfe>",
    "resnet": r"(9\d|100)% of 192 new pictures",
    "large_model": r"losses 0\.\d+, 0\.\d+; \d+ MiB before the model, 1\d\d of weights",
    "notebook": r"(9\d|100)% of the points are told apart",
}


def commands() -> list[tuple[str, str]]:
    return [(file.stem, line) for file in EXAMPLES for line in COMMAND.findall(file.read_text(encoding="utf-8"))]


def test_each_example_says_how_to_run_it() -> None:
    assert {name for name, _ in commands()} == {file.stem for file in EXAMPLES} == set(LEARNT)
    assert TYPED in [line for _, line in commands()]


@pytest.mark.thorough
@pytest.mark.gloo
@pytest.mark.parametrize("name", [file.stem for file in EXAMPLES])
def test_examples(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """All commands of an example one after the other in an empty folder, as a newcomer types them.

    One of them is typed to the letter; the ranks of the others are forked.
    """
    text = (ROOT / "examples" / f"{name}.py").read_text(encoding="utf-8")
    if "from transformers" in text and importlib.util.find_spec("transformers") is None:
        pytest.skip("needs transformers: make extras")
    shutil.copytree(ROOT / "examples", tmp_path / "examples", ignore=shutil.ignore_patterns("__pycache__"))
    monkeypatch.chdir(tmp_path)
    for number, line in enumerate(COMMAND.findall(text)):
        done = typed(line) if line == TYPED else forked(line)
        assert done.status == 0, done.stderr[-3000:]
        assert number or re.search(LEARNT[name], done.stdout), done.stdout[-1000:]  # the second goes on from the first


def typed(line: str) -> Done:
    """A line in a shell of its own, from the interpreter's first import on."""
    environment = os.environ | {"PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"}
    done = subprocess.run(shlex.split(line), env=environment, capture_output=True, text=True, timeout=500, check=False)
    return Done(status=done.returncode, stdout=done.stdout, stderr=done.stderr)


def forked(line: str) -> Done:
    """`python FILE ...` or `torchrun --nproc-per-node N FILE ...`, what each rank says behind the one before it."""
    program, *words = shlex.split(line)
    num_ranks = None
    if program == "torchrun":
        assert words.pop(0) == "--nproc-per-node"
        num_ranks = int(words.pop(0))
    done = run_forked(words, num_ranks=num_ranks)
    return Done(
        status=max(each.status for each in done),
        stdout="".join(each.stdout for each in done),
        stderr="".join(each.stderr for each in done),
    )
