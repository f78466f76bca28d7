"""The training command: options, the dry run, and short runs through real processes."""

import json
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from support.commands import Cli, Done
from support.inside import (
    GPT,
    LAST_UPDATE,
    GPTConfig,
    RunProgress,
    Summary,
    TrainOptions,
    describe,
    duration,
    headline,
    kept_bytes,
    learning_rate_curve,
    make_optimizer,
    make_pipe,
    make_schedule,
    make_task,
    predict,
    printable,
    read_run,
    resolve,
    run_report,
    stage_input_bytes,
    with_recipe,
)

from stagewright.schedules import build

from .test_run_folder import METRICS

TINY = ("--layers", "2", "--width", "32", "--heads", "2", "--length", "16", "--batch", "8", "--steps", "5")
SOME = replace(METRICS, step=1, tokens_per_s=1234.0, bubble=0.125, simulated_bubble=0.1)


def test_the_learning_rate_goes_up_and_down_and_never_to_zero() -> None:
    rates = [learning_rate_curve(50)(step) for step in range(51)]
    top = rates.index(max(rates))
    assert max(rates) == 1.0
    assert rates[: top + 1] == sorted(rates[: top + 1])
    assert rates[top:] == sorted(rates[top:], reverse=True)
    assert min(rates) > 0


def test_decay_pulls_at_matrices_which_muon_takes() -> None:
    model = GPT(GPTConfig(layers=1, width=16, heads=2, length=8))
    muon, adamw = make_optimizer(lr=0.1)(list(model.named_parameters()))
    matrices, others = adamw.param_groups
    assert (muon, {p.ndim for p in matrices["params"]}, {p.ndim for p in others["params"]}) == (None, {2}, {1})
    assert others["weight_decay"] == 0.0
    assert len(matrices["params"]) + len(others["params"]) == len(list(model.parameters()))
    # Steps of both are as long: 0.2 of the rate for a matrix of any shape.
    muon, adamw = make_optimizer("muon", lr=0.01)(list(model.named_parameters()))
    inner = {id(p) for group in muon.param_groups for p in group["params"]}
    names = [name for name, p in model.named_parameters() if id(p) in inner]
    assert names == [f"blocks.0.{name}.weight" for name in ("attention.qkv", "attention.out", "up", "down")]
    held = [p for group in adamw.param_groups for p in group["params"]]
    assert len(held) + len(names) == len(list(model.parameters()))
    before = {name: parameter.clone() for name, parameter in model.named_parameters()}
    for parameter in model.parameters():
        parameter.grad = torch.randn_like(parameter)
    for group in muon.param_groups:
        group["weight_decay"] = 0.0
    muon.step()
    for name in names:
        step = (model.get_parameter(name).detach() - before[name]).square().mean().sqrt()
        assert step.item() == pytest.approx(0.2 * 0.01, rel=0.2)  # Newton-Schulz is rough on purpose
    assert all(torch.equal(before[name], p) for name, p in model.named_parameters() if name not in names)
    with pytest.raises(ValueError, match="optimizer 'lion': expected adamw, nadam or muon"):
        make_optimizer("lion", lr=0.1)


def test_the_recipe_follows_the_schedule() -> None:
    def recipe(**options: object) -> tuple[str | None, str | None]:
        given = TrainOptions(ranks=2, **options)  # type: ignore[arg-type]
        found = with_recipe(given, make_schedule(given))
        return found.optimizer, found.delay_correction

    assert recipe(schedule="1f1b") == ("adamw", "none")
    assert recipe(schedule="2bw") == ("muon", "error-feedback")
    two_bw, pipedream = (TrainOptions(ranks=2, schedule=name) for name in ("2bw", "pipedream"))
    assert with_recipe(two_bw, make_schedule(two_bw)).delay_factor == 2.0
    assert with_recipe(pipedream, make_schedule(pipedream)).delay_factor == 1.0
    assert recipe(schedule="2bw", optimizer="adamw", delay_correction="none") == ("adamw", "none")

    def ends(**options: object) -> tuple[int | None, float | None]:
        given = TrainOptions(ranks=2, steps=50, **options)  # type: ignore[arg-type]
        found = with_recipe(given, make_schedule(given))
        return found.flush_first, found.clip

    assert ends(schedule="1f1b") == (0, 1.0)
    assert ends(schedule="2bw") == ends(schedule="2bw", flush_first=15, clip=1.0) == (15, 1.0)
    assert ends(schedule="paci") == ends(schedule="pipedream") == (15, 0.0)
    assert ends(schedule="2bw", flush_first=0, clip=0.5) == (0, 0.5)
    assert ends(schedule="2bw", model="mine:model", data="mine:data") == (0, 1.0)
    with pytest.raises(ValueError, match="--flush-first 3 under 1f1b, which flushes after every batch"):
        ends(schedule="1f1b", flush_first=3)
    with pytest.raises(ValueError, match="--flush-first -1: expected a number of batches"):
        resolve(TrainOptions(flush_first=-1))
    assert recipe(schedule="2bw", model="mine:model", data="mine:data") == (None, "none")
    with pytest.raises(ValueError, match="--delay-correction error-feedback under 1f1b, where no gradient is late"):
        recipe(schedule="1f1b", delay_correction="error-feedback")
    with pytest.raises(ValueError, match=r"--optimizer lion without --model: expected --model with it, or adamw or"):
        resolve(TrainOptions(optimizer="lion"))
    with pytest.raises(ValueError, match=r"--optimizer muon with --model: leave it away"):
        resolve(TrainOptions(optimizer="muon", model="math:cos", data="math:sin"))
    with pytest.raises(ValueError, match=r"--delay-factor -1.0: expected a number from 0 on"):
        resolve(TrainOptions(delay_factor=-1.0))


@pytest.mark.parametrize("schedule", ["1f1b", "2bw"])
def test_the_pipeline_of_a_run_has_the_recipe(schedule: str) -> None:
    options = TrainOptions(
        layers=1, width=16, heads=2, length=8, batch=2, microbatches=2, ranks=1, schedule=schedule, verify=False
    )
    what = make_schedule(options)
    options = with_recipe(options, what)
    task = make_task(options)
    batches = task.batches()
    first = next(batches)
    with make_pipe(options, what, task, task.make_model(), first) as pipe:
        pipe.train_step(*first.args)
        pipe.flush()
        made = [type(one).__name__ for one in pipe.optimizers]
        kept = [LAST_UPDATE in state for one in pipe.optimizers for state in one.state.values()]
    assert made == (["AdamW"] if schedule == "1f1b" else ["Muon", "AdamW"])
    assert set(kept) == {schedule == "2bw"}


def test_ranks_follow_torchrun_and_must_agree_with_it(monkeypatch: pytest.MonkeyPatch) -> None:
    assert resolve(TrainOptions()).ranks == 2
    monkeypatch.setenv("WORLD_SIZE", "3")
    assert resolve(TrainOptions()).ranks == 3
    with pytest.raises(ValueError, match="--ranks 2 in one of 3 processes"):
        resolve(TrainOptions(ranks=2))


def test_processes_are_ranks_times_members(monkeypatch: pytest.MonkeyPatch) -> None:
    assert resolve(TrainOptions(tensor=2)).num_processes == 4
    with pytest.raises(ValueError, match="--dry-run is one process, and with --tensor 2 a rank has 2"):
        resolve(TrainOptions(tensor=2, dry_run=True))
    with pytest.raises(ValueError, match=r"--tensor-parallel mine: expected auto, or a .json file"):
        resolve(TrainOptions(tensor=2, tensor_parallel="mine"))
    with pytest.raises(ValueError, match=r"--tensor 2 with --plan plan.json: leave it away"):
        resolve(TrainOptions(tensor=2, plan="plan.json"))
    monkeypatch.setenv("WORLD_SIZE", "4")
    assert resolve(TrainOptions(tensor=2)).ranks == 2
    with pytest.raises(ValueError, match=r"--ranks 4 in one of 4 processes .* or start 8 processes"):
        resolve(TrainOptions(tensor=2, ranks=4))
    with pytest.raises(ValueError, match="--tensor 3 in 4 processes"):
        resolve(TrainOptions(tensor=3))
    assert resolve(TrainOptions(context=2, tensor=2)).ranks == 1
    with pytest.raises(ValueError, match="--context 3 in 4 processes"):
        resolve(TrainOptions(context=3))
    with pytest.raises(ValueError, match=r"--context 2 with --plan plan.json: leave it away"):
        resolve(TrainOptions(context=2, plan="plan.json"))


def test_a_schedule_from_a_file_must_fit_the_ranks(tmp_path: Path) -> None:
    path = tmp_path / "mine.csv"
    path.write_text("0F0,0B0\n")
    assert make_schedule(TrainOptions(schedule=str(path), ranks=1)).num_stages == 1
    with pytest.raises(ValueError, match=r"--chunks with .*: the file has it"):
        make_schedule(TrainOptions(schedule=str(path), ranks=1, chunks=2))
    assert make_schedule(TrainOptions(schedule="seq1f1b", ranks=2, slices=3)).num_slices == 3
    with pytest.raises(ValueError, match=r"--ranks 2 but .* has 1: expected --ranks 1"):
        make_schedule(TrainOptions(schedule=str(path), ranks=2))


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("--schedule", "1f2b"), "unknown schedule '1f2b'"),
        (("--text", "nowhere.txt"), "cannot read the text file 'nowhere.txt'"),
        (("--name", "a/b"), "run name 'a/b'"),
        (("--batch", "4"), "--batch 4 for 8 microbatches: one would be empty"),
        (("--width", "10", "--heads", "4"), "expected a width that the heads divide"),
        (("--steps", "0"), "--steps 0: expected at least 1"),
        (("--lr", "0.0"), "--lr 0.0: expected a number above 0"),
    ],
)
def test_mistakes_are_answered_before_any_process_starts(words: tuple[str, ...], message: str, cli: Cli) -> None:
    assert message in cli.refused("train", *words)


def test_a_run_that_exists_is_refused_before_any_process_starts(here: Path, cli: Cli) -> None:
    (here / "runs" / "mine").mkdir(parents=True)
    assert "(--name mine-2), or delete the folder (rm -r runs/mine)" in cli.refused("train --name mine")


def test_activations_are_counted_and_recomputation_keeps_the_stage_inputs_only() -> None:
    options = TrainOptions(layers=2, width=32, heads=2, length=16, batch=3, microbatches=1, ranks=1, schedule="gpipe")
    task = make_task(options)
    one_vector = 3 * 16 * 32 * 4  # bytes of [B, T, D]
    kept = kept_bytes(task.make_model(), next(task.batches()), task)
    # About 16 vectors a block (the inputs of its products and norms), and the logits.
    assert 2 * 10 * one_vector < kept < 2 * 24 * one_vector + 3 * 3 * 16 * 256 * 4
    assert stage_input_bytes(options, build("gpipe", num_ranks=2, num_microbatches=1)) == 2 * one_vector


@pytest.mark.parametrize(("schedule", "stages", "copies"), [("interleaved", 4, 1), ("chimera", 2, 2)])
def test_the_dry_run_adds_up(schedule: str, stages: int, copies: int) -> None:
    sizes = {"layers": 2, "width": 32, "heads": 2, "length": 16, "batch": 8, "microbatches": 4}
    options = resolve(TrainOptions(schedule=schedule, **sizes))  # type: ignore[arg-type]
    task = make_task(options)
    parameters = sum(p.numel() for p in task.make_model().parameters())
    answer = predict(options, make_schedule(options), task)
    assert answer.num_stages == len(answer.stages) == stages
    assert sum(stage.parameters for stage in answer.stages) == answer.parameters == parameters
    assert sum(answer.state_bytes) == copies * 16 * parameters
    assert 0 <= answer.bubble < 1
    assert answer.lower_bound_ratio >= 1


def test_the_dry_run_counts_what_muon_keeps() -> None:
    """One average where AdamW has two; feedback adds the last update, 2bw a version."""
    sizes = {"layers": 2, "width": 32, "heads": 2, "length": 16, "batch": 8, "microbatches": 4}
    options = resolve(TrainOptions(schedule="2bw", optimizer="muon", delay_correction="error-feedback", **sizes))  # type: ignore[arg-type]
    task = make_task(options)
    shapes = dict(task.make_model().named_parameters())
    held = {True: 16 + 4 + 4 - 4, False: 16 + 4 + 4}
    expected = sum(held[name.startswith("blocks.") and p.ndim == 2] * p.numel() for name, p in shapes.items())
    assert sum(predict(options, make_schedule(options), task).state_bytes) == expected


def test_progress_is_a_line_now_and_then_and_only_rank_0_talks(capsys: pytest.CaptureFixture[str]) -> None:
    line = "loss 2.000  1,234 tokens/s  bubble 12.5% (simulated 10.0%)"
    assert describe(SOME) == line
    assert describe(replace(SOME, bubble_step=1)) == line  # step 1 is the second one
    assert describe(replace(SOME, step=9, bubble_step=3)) == line.replace("12.5%", "12.5% in step 4")
    for rank in (0, 1):
        with RunProgress(rank=rank, steps=2, json=False) as progress:
            progress.step(SOME)
    assert capsys.readouterr().out == f"step 2/2  0:00  {line}\n"
    with RunProgress(rank=0, steps=2, json=True) as progress:
        progress.note("aside")
    assert capsys.readouterr() == ("", "aside\n")


def test_a_sample_cannot_command_the_terminal() -> None:
    assert (
        printable(b"a\n\tb\x1b[2J\r\xc2\x9b\xff".decode(errors="replace"))
        == "a\n\tb\\x1b[2J\\r\\x9b\N{REPLACEMENT CHARACTER}"
    )


def check_run(folder: Path, *, ranks: int, steps: int = 5) -> dict[str, object]:
    names = {"manifest.json", "metrics.jsonl", "summary.json", "timeline.json", "timeline.png"}
    traces = {f"trace.rank{rank}.jsonl" for rank in range(ranks)}
    assert names | traces | {"timeline.perfetto.json"} <= {path.name for path in folder.iterdir()}
    assert len((folder / "metrics.jsonl").read_text().splitlines()) == steps
    found = json.loads((folder / "summary.json").read_text())
    assert found["tokens"] == steps * 8 * 16
    assert found["num_ranks"] == ranks
    for key in ("tokens_per_s", "step_seconds", "simulated_step_seconds", "val_bits_per_byte"):
        assert found[key] > 0
    for key in ("bubble", "simulated_bubble"):
        assert 0 <= found[key] < 1
    assert (found["predicted_bubble"] is None) == (found["predicted_step_seconds"] is None) == (steps < 10)
    return found


def test_predicted_is_what_is_drawn_from_steps_that_vary_and_else_simulated() -> None:
    """summary.json called predicted what metrics.jsonl calls simulated."""
    sizes = {"schedule": "1f1b", "num_ranks": 2, "num_stages": 2, "num_microbatches": 4, "parameters": 9, "steps": 5}
    speed = {"samples": 40, "tokens": None, "seconds": 1.0, "samples_per_s": 40.0, "tokens_per_s": None}
    loss = {"train_loss": 1.0, "train_bits_per_byte": None, "val_loss": None, "val_bits_per_byte": None}
    step = {"step_seconds": 0.2, "simulated_step_seconds": 0.1, "bubble": 0.5, "simulated_bubble": 0.25}
    few = Summary(**sizes, **speed, **loss, **step, peak_memory_bytes=(1, 2))  # type: ignore[arg-type]
    assert "200 ms measured, 100 ms simulated" in run_report(few)
    assert "50.0% measured, 25.0% simulated" in run_report(few)
    assert "predicted" not in run_report(few)
    many = replace(few, predicted_step_seconds=0.15, predicted_step_range=(0.14, 0.3), predicted_bubble=0.375)
    assert "200 ms measured, 150 ms (90%: 140 ms .. 300 ms) predicted" in run_report(many)
    assert "50.0% measured, 37.5% predicted" in run_report(many)
    assert "simulated" not in run_report(many)


def check_drawn_again(command: Callable[..., Done], folder: Path) -> None:
    """The timeline of a run of two processes; its folder is broken behind that."""
    for name in ("timeline.png", "timeline.perfetto.json"):
        (folder / name).unlink()
    answer = json.loads(command("timeline", str(folder), "--json").stdout)
    picture, trace = map(Path, answer["written"][:2])
    assert picture.read_bytes().startswith(b"\x89PNG")
    assert "traceEvents" in trace.read_text()
    assert {"simulated", "predicted", "measured"} <= answer["exhibits"][0].keys()
    (folder / "timeline.json").write_text('{"measured": 3}')
    done = command("timeline", str(folder))
    assert done.status == 0
    assert "is not a run's timeline" in done.stderr
    for rank in range(2):
        (folder / f"trace.rank{rank}.jsonl").unlink()
    done = command("timeline", str(folder))
    assert done.status == 2
    assert "is not a run's timeline" in done.stderr


@pytest.mark.thorough
def test_two_processes_train_and_leave_a_run_folder(command: Callable[..., Done], tmp_path: Path, text: str) -> None:
    """The command from end to end, with its launcher; its timeline is drawn again from what it left."""
    words = (*TINY[:-1], "14", "--microbatches", "4", "--text", text, "--name", "one")
    done = subprocess.run(
        [sys.executable, "-m", "stagewright", "train", *words],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=400,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert "step 14/14" in done.stdout
    assert "sample after 'import '" in done.stdout
    summary = check_run(tmp_path / "runs" / "one", ranks=2, steps=14)
    low, high = summary["predicted_step_range"]  # type: ignore[misc]
    assert low < summary["predicted_step_seconds"] < high  # type: ignore[operator]
    assert f"(90%: {duration(low)} .. {duration(high)}) predicted" in done.stdout
    figure = {each.label: each for each in headline(read_run(tmp_path / "runs" / "one"))}["predicted"]
    assert figure.seconds == summary["predicted_step_seconds"]
    assert figure.how.startswith(f"90%: {duration(low)} .. {duration(high)}; median of 200 steps")
    peaks = summary["peak_memory_bytes"]
    assert len(peaks) == 2
    check_drawn_again(command, tmp_path / "runs" / "one")


@pytest.mark.thorough
def test_one_rank_two_ranks_and_two_members_of_a_tensor_group_train_to_the_same_loss(
    command: Callable[..., Done], tmp_path: Path, text: str
) -> None:
    common = ("train", *TINY, "--microbatches", "4", "--text", text, "--json", "--dropout", "0.1")
    alone = json.loads(command(*common, "--name", "one", "--ranks", "1", "--schedule", "gpipe").stdout)
    pair = json.loads(command(*common, "--name", "two", "--schedule", "1f1b").stdout)
    members = json.loads(command(*common, "--name", "t", "--ranks", "1", "--schedule", "gpipe", "--tensor", "2").stdout)
    check_run(tmp_path / "runs" / "one", ranks=1)
    check_run(tmp_path / "runs" / "two", ranks=2)
    assert (len(alone["peak_memory_bytes"]), len(members["peak_memory_bytes"])) == (1, 2)
    assert members["parameters"] == alone["parameters"]
    for each in (pair, members):
        assert each["val_bits_per_byte"] == pytest.approx(alone["val_bits_per_byte"], rel=1e-4)


@pytest.mark.thorough
def test_a_context_group_trains_to_the_loss_of_one_rank_and_is_resumed_without_it(
    command: Callable[..., Done], tmp_path: Path, text: str
) -> None:
    """Traced steps and validation among them; microbatches of one sample."""
    common = ("train", *TINY, "--microbatches", "8", "--text", text, "--json", "--ranks", "1", "--schedule", "gpipe")
    alone = json.loads(command(*common, "--name", "one", "--trace-every", "2").stdout)
    kept = (*common, "--name", "c", "--trace-every", "2", "--checkpoint-every", "2")
    parts = json.loads(command(*kept, "--context", "2").stdout)
    assert (len(parts["peak_memory_bytes"]), parts["num_microbatches"]) == (2, 8)
    assert "M=8, 2 parts each" in command("timeline", "c", "--terminal").stdout
    checkpoints = tmp_path / "runs" / "c" / "checkpoints"
    (checkpoints / "latest").write_text(next(checkpoints.glob("step-4-*")).name)  # as if it was killed in the last step
    resumed = command(*kept, "--resume")
    assert "random numbers (dropout) are others" not in resumed.stderr
    goes_on = json.loads(resumed.stdout)
    assert (goes_on["num_ranks"], goes_on["resumed_at"]) == (1, [4])
    for each in (parts, goes_on):
        assert each["val_bits_per_byte"] == pytest.approx(alone["val_bits_per_byte"], rel=1e-4)
