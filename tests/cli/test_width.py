"""What commands print for people fits a terminal of 80 columns."""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path

import pytest
from support.inside import COMMANDS, main, wrapped

from stagewright.partition import Cluster, Node, Profile, plan

COLUMNS = 80


def too_long(text: str) -> list[str]:
    return [line for line in text.splitlines() if len(line.rstrip()) > COLUMNS]


@pytest.fixture
def files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", str(COLUMNS))
    figures = {"forward_seconds": 0.0123, "backward_seconds": 0.0345, "update_seconds": 0.00123}
    sizes = {"parameter_bytes": 123456789.0, "stash_bytes": 2e7, "activation_bytes": 1e6, "workspace_bytes": 4e6}
    nodes = [Node(name=f"model.layers.{i}", spread=0.01 + i / 1000, **figures, **sizes) for i in range(12)]
    profile = Profile(nodes=nodes, step_seconds=0.6, step_spread=0.012, action_seconds=5e-5, around_seconds=1e-3)
    Path("profile.json").write_text(profile.to_json())
    cluster = Cluster.parse("2x4:nvlink=300GB/s,net=12GB/s:80GB")
    Path("cluster.json").write_text(cluster.to_json())
    Path("plan.json").write_text(plan(profile, cluster, global_batch=64).to_json())


@pytest.mark.thorough(but=["price --help"])
@pytest.mark.usefixtures("files")
@pytest.mark.parametrize(
    "words",
    [
        "--help",
        *(f"{name} --help" for name in COMMANDS),
        "profile --from-json profile.json",
        "plan --profile profile.json --cluster cluster.json --batch 64",
        "plan --transformer layers=24,hidden=1024,heads=16,vocabulary=50000,length=1024 --ranks 8 --batch 64",
        "simulate zb-h1 --ranks 4 --microbatches 8",
        "simulate 2bw --ranks 4 --microbatches 8",
        "simulate interleaved --ranks 4 --microbatches 8 --spread 0.1",
        "simulate auto --ranks 3 --microbatches 4",
        "compare 1f1b interleaved --ranks 4 --microbatches 8",
        "train --dry-run --ranks 2 --layers 2 --width 32 --heads 2 --length 16",
        "experiment list",
    ],
)
def test_lines_fit(words: str, capsys: pytest.CaptureFixture[str]) -> None:
    with suppress(SystemExit):  # of --help
        main(words.split())
    told = capsys.readouterr()
    assert told.out.strip()
    assert too_long(told.out + told.err) == []


def test_a_word_that_is_longer_stays_whole() -> None:
    path = "/a/" + "long/" * 30
    assert wrapped(f"runs: {path}") == f"runs:\n  {path}"
    assert wrapped("short") == "short"
    assert wrapped("") == ""
