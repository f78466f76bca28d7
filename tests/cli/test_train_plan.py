"""`stagewright train --plan`: a plan's file, or measured and planned on the spot."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from support.commands import Cli, Done
from support.inside import sampled

from stagewright.partition import Plan, PlanStage
from stagewright.schedules import Costs

TINY = ("--layers", "2", "--width", "32", "--heads", "2", "--length", "16", "--batch", "8", "--steps", "5")


def nodes_of_the_model() -> tuple[str, ...]:
    import torch
    from support.inside import GPT, Arguments, GPTConfig, model_units

    model = GPT(GPTConfig(layers=2, width=32, heads=2, length=16))
    units = model_units(model, Arguments.of((torch.zeros((2, 16), dtype=torch.int64),)), enter_unit=None)
    return tuple(unit.name for unit in units.units)


def write_plan(folder: Path, nodes: tuple[str, ...], **fields: Any) -> Path:
    def stage(number: int, part: tuple[str, ...]) -> PlanStage:
        return PlanStage(nodes=part, ranks=(number,), step_seconds=0.03)

    half = len(nodes) // 2
    settings: dict[str, Any] = {
        "stages": (stage(0, nodes[:half]), stage(1, nodes[half:])),
        "num_devices": 2,
        "costs": Costs(forward=0.01, backward=0.02),
        "cost_model": "default",
        "schedule": "1f1b",
        "num_microbatches": 4,
        "microbatch_size": 2,
        "bottleneck": 0.03,
        "bound": 0.03,
        "simulated_step_time": 0.15,
        "simulated_bubble": 0.2,
    }
    path = folder / "plan.json"
    path.write_text(Plan(**(settings | fields)).to_json())
    return path


@pytest.mark.thorough
@pytest.mark.gloo
def test_a_plan_from_a_file(command: Callable[..., Done], tmp_path: Path, text: str) -> None:
    path = write_plan(tmp_path, nodes_of_the_model())
    done = command("train", *TINY, "--plan", str(path), "--text", text, "--name", "one", "--json")
    assert done.status == 0, done.stderr
    summary = json.loads(done.stdout)
    assert (summary["schedule"], summary["num_ranks"], summary["planned_step_seconds"]) == ("1f1b", 2, 0.15)
    assert len(summary["peak_tensor_bytes"]) == 2
    assert min(summary["peak_tensor_bytes"]) > 10_000
    assert Plan.load(tmp_path / "runs" / "one" / "plan.json") == Plan.load(path)
    # What it promised beside what came of it: the causes add up to the difference.
    done = command("plan", "--check", "one", "--json")
    assert done.status == 0, done.stderr
    found = json.loads(done.stdout)
    assert (found["simulated"], found["step_seconds"]) == (pytest.approx(0.15), summary["step_seconds"])
    assert sum(each["change"] for each in found["causes"]) == pytest.approx(found["step_seconds"] - found["simulated"])
    assert {(each["kind"], *each["at"]) for each in found["inputs"]} >= {(op, s) for op in "FB" for s in (0, 1)}
    assert all(0 < each["measured"] < found["measured"] for each in found["inputs"] if each["kind"] in "FB")


@pytest.mark.thorough
@pytest.mark.gloo
def test_measured_and_planned_on_the_spot(command: Callable[..., Done], tmp_path: Path, text: str) -> None:
    done = command("train", *TINY, "--plan", "auto", "--trials", "1", "--text", text, "--name", "one")
    assert done.status == 0, done.stderr
    assert "plan         step" in done.stdout
    assert "predicted / measured" in done.stdout
    plan = Plan.load(tmp_path / "runs" / "one" / "plan.json")
    assert plan.num_devices in (1, 2)  # a busy machine's second rank may not be worth it
    assert any(note.startswith(("tried for ", "not tried: ")) for note in plan.notes)
    summary = json.loads((tmp_path / "runs" / "one" / "summary.json").read_text())
    drawn = sampled(plan)
    assert summary["planned_step_seconds"] == drawn.median != plan.simulated_step_time
    # The same plan runs again from its file.
    again = command("train", *TINY, "--plan", "runs/one/plan.json", "--text", text, "--name", "two", "--json")
    assert json.loads(again.stdout)["num_microbatches"] == plan.num_microbatches


@pytest.mark.thorough
def test_a_plan_is_shown_without_training(tmp_path: Path, cli: Cli) -> None:
    path = write_plan(tmp_path, nodes_of_the_model())
    shown = cli.text("train", *TINY, "--plan", str(path), "--dry-run")
    assert "1-1 on 2 devices, microbatches of 2" in shown
    assert "rank 0 | F0 F1" in shown
    assert Plan.from_json(cli.text("train", *TINY, "--plan", str(path), "--dry-run --json")) == Plan.load(path)


@pytest.mark.thorough(but=["options0---plan nowhere.json: no such file: expected one that `stagewright plan --out"])
@pytest.mark.parametrize(
    ("options", "message"),
    [
        (("--plan", "nowhere.json"), "--plan nowhere.json: no such file: expected one that `stagewright plan --out"),
        (("--plan", "auto", "--schedule", "1f1b"), "--schedule 1f1b with --plan auto: leave it away"),
        (("--schedule", "auto"), "--schedule auto: expected --plan auto"),
        (("--plan", "auto", "--dry-run"), "--dry-run measures nothing"),
        (("--plan", "auto", "--trials", "-1"), "--trials -1: expected a number of plans, 0 or more, with --plan aut"),
        (("--trials", "2"), "--trials 2: expected a number of plans, 0 or more, with --plan auto"),
        (("--plan", "PLAN", "--microbatches", "4"), "--microbatches 4 with --plan"),
        (("--plan", "PLAN", "--ranks", "3"), "is for 2 ranks: expected --ranks 2, not 3"),
        (("--plan", "PLAN", "--batch", "12"), "is for 4 microbatches of 2 samples: expected --batch 8, not 12"),
        (("--plan", "PLAN", "--batch", "3"), "--batch 3 for 4 microbatches: one would be empty"),
    ],
)
def test_bad_options(options: tuple[str, ...], message: str, tmp_path: Path, cli: Cli) -> None:
    path = str(write_plan(tmp_path, ("a", "b")))
    words = [path if word == "PLAN" else word for word in options]
    assert message in cli.refused("train", *words)


def test_a_plan_that_lies_on_another_host(cli: Cli, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("platform.node", lambda: "node1")
    for name, value in (("WORLD_SIZE", "2"), ("RANK", "1")):
        monkeypatch.setenv(name, value)
    assert "nowhere.json: no such file on node1, where each host needs a copy: expected" in cli.refused(
        "train --plan nowhere.json"
    )


@pytest.mark.thorough
def test_a_dry_run_refuses_a_plan_for_another_model(tmp_path: Path, cli: Cli) -> None:
    path = write_plan(tmp_path, ("a", "b"))
    nodes = nodes_of_the_model()
    for json_mode in ("", "--json"):
        told = cli.refused("train", *TINY, "--plan", str(path), "--dry-run", json_mode)
        assert "the plan is for another model (2 nodes, the model has" in told
    plan = Plan.load(write_plan(tmp_path, nodes))
    heavy = replace(plan, stages=tuple(replace(stage, parameter_bytes=12.0) for stage in plan.stages))
    path.write_text(heavy.to_json())
    assert "has 12 bytes of parameters in the plan and " in cli.refused(
        "train", *TINY, "--plan", str(path), "--dry-run"
    )


def test_files_that_cannot_be_meant_are_named(tmp_path: Path, cli: Cli) -> None:
    path = write_plan(tmp_path, ("a", "b"), schedule="1f2b")
    assert f"{path}: unknown schedule '1f2b'" in cli.refused("train", *TINY, "--plan", str(path))
    path.write_bytes(b"\xff\xfe")
    assert f"{path}: no UTF-8 text at byte 0" in cli.refused("train", *TINY, "--plan", str(path))
