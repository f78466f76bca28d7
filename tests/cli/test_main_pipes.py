"""`stagewright ... | head`: a reader that has gone is no error."""

from __future__ import annotations

import subprocess
import sys

import pytest


@pytest.mark.thorough
@pytest.mark.parametrize(
    "words", ["--help", "simulate --help", "schedule 1f1b --ranks 32 --microbatches 512", "--version"]
)
def test_a_reader_that_has_gone_is_no_error(words: str) -> None:
    line = f"{sys.executable} -m stagewright {words} | true"
    done = subprocess.run(["bash", "-c", line], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")
