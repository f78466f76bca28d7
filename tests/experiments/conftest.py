from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from support.commands import Done, launch_forked
from support.inside import launcher, main


@pytest.fixture
def command(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Callable[..., Done]:
    """`command("train", "--steps", "5")`: the command line in `tmp_path`, with forked ranks."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(launcher, "launch", launch_forked)

    def run(*words: str) -> Done:
        status = main(words)
        captured = capsys.readouterr()
        return Done(status=status, stdout=captured.out, stderr=captured.err)

    return run


@pytest.fixture
def text(tmp_path: Path) -> str:
    path = tmp_path / "text.txt"
    path.write_bytes(b"the quick brown fox jumps over the lazy dog\n" * 200)
    return str(path)
