"""The suite: parts of memory against the allocator, its figures as JSON, table and picture, and one real run."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch
from support.commands import Cli
from support.inside import Case, How, auto, bench_command, suite
from support.inside import JobsFigureFigure as Figure
from support.pool import Pool
from torch import nn

import stagewright as sw
from stagewright.schedules import Costs, build, simulate

SAMPLES, M = 32, 4
FLOAT = 4


@pytest.mark.thorough(but=["zb-h1"])
@pytest.mark.parametrize("schedule", ["1f1b", "zb-h1"])
def test_parts_add_up_to_what_the_allocator_saw(schedule: str) -> None:
    """Convolutions take memory within one operation, which no tensor shows."""
    torch.manual_seed(0)
    widths = ((3, 16), (16, 16), (16, 16), (16, 3))
    model = nn.Sequential(*(nn.Sequential(nn.Conv2d(a, b, 3, padding=1), nn.ReLU()) for a, b in widths))
    images, target = torch.randn(2, SAMPLES, 3, 16, 16)
    with sw.PipelineModule(
        model,
        schedule=schedule,
        mesh={"pipe": 2},
        num_microbatches=M,
        loss_fn=nn.functional.mse_loss,
        optimizer=torch.optim.AdamW,
        example_inputs=(images,),
    ) as pipe:
        step = lambda: pipe.train_step(images, target)  # noqa: E731
        step()
        parts, peak = suite.memory(SimpleNamespace(pipe=pipe, step=step))
    weights = FLOAT * sum(parameter.numel() for parameter in model.parameters())
    assert (parts["weights"], parts["gradients"]) == (weights, weights)
    assert parts["optimizer"] == pytest.approx(2 * weights, rel=0.001)  # and the numbers of steps
    assert sum(parts.values()) == pytest.approx(peak, rel=0.05)
    assert min(parts["activations"], parts["workspace"]) > 0.05 * peak


def trained_once() -> list[Figure]:
    case = Case.of({"model": "moe", "microbatches": 2, "samples": 8})
    with mock.patch.multiple(auto, PROFILE_SECONDS=0.05, SEARCH_SECONDS=0.05):
        return list(suite.trained(case, 2))


@pytest.mark.thorough
@pytest.mark.gloo
def test_a_real_run_of_a_stage_a_rank(gloo: Pool, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Experts add up where whole numbers say, by `index_add`: an index was taken for one of the values, and refused."""
    figures, _ = gloo.run(trained_once, ranks=2)
    (model,) = suite.told(figures)
    assert json.loads(json.dumps(model)) == model
    assert (model["model"], model["unit"], len(model["stages"])) == ("moe", "tokens/s", 2)
    assert min(model["throughput"], model["planned throughput"]) > 0
    assert 0 < model["share of activations"] < 1
    for number, stage in enumerate(model["stages"]):
        shares = ("compute", "links", "parts / peak")
        assert set(stage) == {"stage", "peak", "planned peak", *shares, *suite.PARTS}
        assert stage["stage"] == number
        assert 0 < stage["compute"] <= 1
        assert 0 <= stage["links"] <= 1
        assert sum(stage[name] for name in suite.PARTS) == pytest.approx(stage["peak"], rel=0.05)
        assert min(stage[name] for name in ("weights", "activations")) > 0
    assert suite.draw([*figures, *made_up("lstm")], tmp_path)[0][1] == "suite.png"
    assert (tmp_path / "suite.png").stat().st_size > 10_000
    bench_command.show_suite(suite.told([*figures, *made_up("lstm")]), tmp_path / "suite.png")
    lines = capsys.readouterr().out.splitlines()
    assert max(map(len, lines[:-1])) <= 80
    assert [line.split()[:2] for line in lines[1:5]][::2] == [["moe", "0"], ["lstm", "0"]]


def made_up(model: str) -> list[Figure]:
    """Large figures of two stages."""
    case = Case.of({"model": model})
    shares = [("compute", 1.0), ("links", 1.0)]
    sizes = [(name, 123.4e6) for name in (*suite.PARTS, "peak")]
    speeds = [
        Figure(case=case, name="throughput", value=123456.0, unit="tokens/s", how=how)
        for how in (How.MEASURED, How.SIMULATED)
    ]
    share = Figure(case=case, name="share of activations", value=0.5, unit="fraction", how=How.MEASURED)
    stages = [
        Figure(case=case.also(stage=stage), name=name, value=value, unit="", how=How.MEASURED)
        for stage in range(2)
        for name, value in (*shares, *sizes)
    ]
    return [*speeds, share, *stages]


def test_what_a_link_does_counts_for_both_of_its_ends() -> None:
    """P=2, M=2, F=1, B=2, half a second a message: the one waits 2 + 2 times, the steady ones hidden behind it."""
    timeline = simulate(build("gpipe", num_ranks=2, num_microbatches=2), Costs(forward=1.0, backward=2.0, latency=0.5))
    first, last = (suite.on_links(timeline, rank) for rank in range(2))
    assert first == last == pytest.approx(4 * 0.5 / timeline.batch_seconds)


@pytest.mark.thorough(but=["argv1-ranks: 0: expected a whole number of at least 1"])
@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["--models", "gpt,lstn"], "--models: unknown model 'lstn'; did you mean lstm?\nmodels: gpt, lstm, cnn, unet,"),
        (["--ranks", "0"], "ranks: 0: expected a whole number of at least 1"),
    ],
)
def test_a_users_mistake(argv: list[str], message: str, cli: Cli, tmp_path: Path, monkeypatch: Any) -> None:
    monkeypatch.chdir(tmp_path)
    assert message in cli.refused("bench suite", *argv)
    assert not list(tmp_path.iterdir())
