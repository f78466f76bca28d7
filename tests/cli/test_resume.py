"""Runs that are killed and go on: the losses are those of a run that nobody killed, to the last bit."""

import json
import random
import re
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, replace
from pathlib import Path

import pytest
import torch
import tyro
from support.commands import Cli, answer, end_forked, run_forked, start_forked
from support.inside import (
    FolderLock,
    Manifest,
    Metrics,
    OwnBatches,
    OwnOptions,
    RunFolder,
    RunLayout,
    TrainOptions,
    lock,
    make_schedule,
    resolve,
    with_recipe,
)

from stagewright.partition import Plan

TINY = ("--layers", "2", "--width", "16", "--heads", "2", "--length", "8", "--batch", "4", "--microbatches", "2")
STEPS = 24
MINE = '''
import os
import time
import torch
from pathlib import Path
from torch import nn
from torch.utils.data import TensorDataset

class Noisy(torch.utils.data.Dataset):
    """Augmented samples: random numbers in the dataset. Where a file says so, no more than so many, or none once
    there is a checkpoint."""
    given, hold = 0, Path("hold").read_text() if Path("hold").exists() else ""
    def __len__(self): return 22
    def __getitem__(self, index):
        time.sleep(0.003)  # so that a run is killed in the middle of something
        Noisy.given += 1
        saved = Path("runs/run/checkpoints/latest")
        while str(Noisy.given) == Noisy.hold or (Noisy.hold == "saved" and saved.exists()):
            time.sleep(1)
        return torch.full((6,), float(index)) / 22 + 0.1 * torch.randn(6), torch.tensor(index % 3)

def model(): return nn.Sequential(nn.Linear(6, 8), nn.Dropout(0.2), nn.Tanh(), nn.Linear(8, 8), nn.Linear(8, 3))
def dataset(): return Noisy()
class Deadly(Noisy):
    """Kills rank 1's process once a start, twice in all, after some samples."""
    left = 30
    def __getitem__(self, index):
        self.left -= 1
        starts = int(os.environ.get("TORCHELASTIC_RESTART_COUNT", "0"))
        if self.left == 0 and os.environ.get("RANK") == "1" and starts < 2:
            os.kill(os.getpid(), 9)
        return super().__getitem__(index)

def deadly(): return Deadly()
def plain(): return nn.Sequential(*[layer for _ in range(3) for layer in (nn.Linear(6, 6), nn.Tanh())], nn.Linear(6, 3))
def several(): return [(torch.full((4, 6), float(i)), torch.randint(3, (4,))) for i in range(5)]
def shuffled(): return torch.utils.data.DataLoader(Noisy(), batch_size=4, shuffle=True, drop_last=True)
def generator():
    while True:
        yield torch.randn(4, 6), torch.randint(3, (4,))
'''


@pytest.fixture(autouse=True)
def in_folder(here: Path) -> None:
    Path("text.txt").write_bytes(b"the quick brown fox jumps over the lazy dog\n" * 100)
    Path("mine.py").write_text(MINE)


def words(name: str, data: str, *others: str) -> list[str]:
    mine = ("--model", "mine.py:model", "--data", f"mine.py:{data}", "--batch", "4", "--microbatches", "2")
    return ["stagewright", "train", *mine, "--steps", str(STEPS), "--lr", "0.01", "--name", name, *others]


def gpt_words(name: str, *others: str) -> list[str]:
    return ["stagewright", "train", *TINY, "--steps", str(STEPS), "--text", "text.txt", "--name", name, *others]


def losses(name: str) -> dict[int, float]:
    """By step; each stands there once, in order."""
    lines = [json.loads(line) for line in (Path("runs") / name / "metrics.jsonl").read_text().splitlines()]
    steps = [line["step"] for line in lines]
    assert steps == sorted(set(steps))
    assert [line["samples"] for line in lines] == [lines[0]["samples"] * (step + 1) for step in steps]
    return {line["step"]: line["loss"] for line in lines}


def whole(command: Sequence[str], *, num_ranks: int = 2) -> str:
    """Run to the end; what rank 0 said."""
    done = run_forked(command, num_ranks=num_ranks)
    assert [one.status for one in done] == [0] * num_ranks, done
    return done[0].stdout


def killed(
    command: Sequence[str], *, victim: int, when: Callable[[], bool], num_ranks: int = 2, hold: int | str = ""
) -> int:
    """Run until `when`, kill -9 one rank, and the others as an agent does; the step of the last whole checkpoint.

    With `hold` no rank gets beyond that sample, or with "saved" beyond the first checkpoint, however late this process
    looks.
    """
    Path("hold").unlink(missing_ok=True)
    if hold:
        Path("hold").write_text(str(hold))
    ranks = start_forked(command, num_ranks=num_ranks)
    try:
        while not when() and ranks[victim].process.is_alive():
            time.sleep(0.001)
        assert ranks[victim].process.is_alive(), answer(ranks[victim])
        ranks[victim].process.kill()
        time.sleep(0.05)
    finally:
        end_forked(ranks)
        Path("hold").unlink(missing_ok=True)
    return saved(command[command.index("--name") + 1])


def saved(name: str) -> int:
    """Step of the last whole checkpoint; 0 without one."""
    path = Path("runs") / name / "checkpoints" / "latest"
    return int(path.read_text().split("-")[1]) if path.exists() else 0


@pytest.mark.thorough
@pytest.mark.gloo
def test_a_run_that_was_killed_goes_on_to_the_last_bit() -> None:
    """Killed before the first checkpoint, then behind one; then to the end."""
    options = ("--schedule", "interleaved", "--chunks", "2", "--checkpoint-every", "5")
    whole(words("whole", "shuffled", *options))
    at = [
        killed(
            words("run", "shuffled", *options, "--resume"), victim=1, when=lambda: logged_steps("run") >= 3, hold=18
        ),
        killed(words("run", "shuffled", *options, "--resume"), victim=0, when=lambda: saved("run") >= 5, hold=60),
    ]
    assert at[0] == 0
    assert at[1] >= 5
    whole(words("run", "shuffled", *options, "--resume"))
    _check_equal("run", "whole", resumed_at=at)


@pytest.mark.thorough
@pytest.mark.gloo
def test_a_run_on_two_weight_versions_that_was_killed_goes_on_to_the_last_bit() -> None:
    """2bw: the older weights and the learning rates go along; augmented samples are drawn as they would have been.

    Killed while it writes a checkpoint, unless it is done with each before this process looks.
    """
    options = ("--schedule", "2bw", "--checkpoint-every", "5")
    whole(words("whole", "dataset", *options))
    command = words("run", "dataset", *options, "--resume")
    at = killed(command, victim=1, when=lambda: saved("run") >= (5 if writing("run") else 10), hold=80)
    whole(command)
    _check_equal("run", "whole", resumed_at=[at])


@pytest.mark.gloo
@pytest.mark.nightly
def test_twenty_kills_at_random_moments_lose_nothing_but_the_steps_since_the_last_checkpoint() -> None:
    """At the start, between two steps, while a checkpoint is copied or written; then to the end."""
    options = ("--schedule", "interleaved", "--chunks", "2", "--checkpoint-every", "3")
    command = words("run", "dataset", *options, "--resume", "--steps", "600")
    whole(words("whole", "dataset", *options, "--steps", "600"))
    chance, at = random.Random(0), []
    for number in range(20):
        before, until = logged_steps("run"), time.monotonic() + chance.uniform(0.0, 3.0)
        more, pause = chance.randint(1, 25), chance.uniform(0.0, 0.02)

        def when(
            kind: int = number % 3, before: int = before, until: float = until, more: int = more, pause: float = pause
        ) -> bool:
            if kind == 0:  # wherever it is by then
                return time.monotonic() > until
            if kind == 1 and not (logged_steps("run") < before and time.sleep(pause) is None):
                return logged_steps("run") >= before + more
            return kind == 2 and writing("run")

        at.append(killed(command, victim=chance.randrange(2), when=when))
    whole(command)
    assert losses("run") == losses("whole")
    assert len(losses("run")) == 600
    resumed = [json.loads(line)["step"] for line in (Path("runs") / "run" / "resumes.jsonl").read_text().splitlines()]
    assert set(resumed) <= {0, *at}
    assert resumed[-1] == at[-1]


@pytest.mark.gloo
@pytest.mark.nightly
def test_torchruns_agent_starts_a_killed_run_again() -> None:
    """Rank 1 is killed twice; the third start comes to the end."""
    options = ("--checkpoint-every", "4")
    whole(words("whole", "dataset", *options))
    command = words("run", "deadly", *options, "--resume")
    agent = ("torch.distributed.run", "--standalone", "--nproc-per-node", "2", "--max-restarts", "3", "-m")
    done = subprocess.run(
        [sys.executable, "-m", *agent, *command], capture_output=True, text=True, check=False, timeout=300
    )
    assert done.returncode == 0, done.stderr[-3000:]
    assert losses("run") == losses("whole")
    assert len(json.loads((Path("runs") / "run" / "summary.json").read_text())["resumed_at"]) == 2


@pytest.mark.gloo
@pytest.mark.nightly
def test_fewer_processes_go_on_by_a_plan_for_what_is_left() -> None:
    """From 4 to 2: the same state, a new plan, and what it costs."""
    mine = ("--model", "mine.py:plain", "--data", "mine.py:dataset", "--batch", "8", "--lr", "0.01")
    common = ["stagewright", "train", *mine, "--steps", str(STEPS), "--plan", "auto", "--checkpoint-every", "5"]
    whole([*common, "--name", "whole"], num_ranks=4)
    command = [*common, "--name", "run", "--resume"]
    at = killed(command, victim=3, when=lambda: saved("run") >= 5, num_ranks=4, hold="saved")
    before = Plan.load(Path("runs/run/checkpoints/plan.json"))
    notes = whole(command, num_ranks=2)
    after = Plan.load(Path("runs/run/checkpoints/plan.json"))
    assert (before.num_devices, after.num_devices) == (4, 2)
    (resume,) = [json.loads(line) for line in Path("runs/run/resumes.jsonl").read_text().splitlines()]
    assert (resume["step"], resume["num_ranks"]) == (at, 2)
    assert resume["planned_before"] == before.simulated_step_time
    assert resume["planned_step_seconds"] == after.simulated_step_time
    assert "the same state, and sums in another order from here on" in " ".join(notes.split())
    assert "a step is planned to take " in " ".join(notes.split())
    ours, theirs = losses("run"), losses("whole")
    assert len(ours) == STEPS
    for step in range(STEPS):  # the two plans of 4 need not be the same either
        assert ours[step] == pytest.approx(theirs[step], rel=1e-4), step


def logged_steps(name: str) -> int:
    path = Path("runs") / name / "metrics.jsonl"
    return path.read_bytes().count(b"\n") if path.exists() else 0


def writing(name: str) -> bool:
    return any((Path("runs") / name / "checkpoints").glob("step-*.partial"))


LAYOUT = RunLayout(
    num_ranks=2, schedule="1f1b", num_stages=2, num_microbatches=4, weight_rule="flush", planned_step_seconds=None
)


def test_it_is_told_when_late_gradients_are_treated_otherwise() -> None:
    """A run that was begun with --flush-first 0, and goes on with the default."""
    before = replace(LAYOUT, schedule="2bw", weight_rule="2bw", correction="none")
    now = replace(before, flush_first=150, correction="error-feedback x 2")
    assert before.changes_to(before) == ()
    assert before.changes_to(now) == (
        "the first 150 steps with a flush (--flush-first), before 0",
        "late gradients are corrected by error-feedback x 2 (--delay-correction), before none",
    )
    assert replace(before, weight_rule="flush").changes_to(now) == (
        "weights follow the rule '2bw', before 'flush': the newest were kept",
    )


def test_the_layout_of_another_version_is_read_as_far_as_it_is_known(tmp_path: Path) -> None:
    file = tmp_path / "layout.json"
    file.write_text(json.dumps({**asdict(LAYOUT), "of a later version": 1}))
    assert RunLayout.read(file) == LAYOUT
    for unreadable in ("{", "[]", "null", '{"num_ranks": 2}'):
        file.write_text(unreadable)
        assert RunLayout.read(file) is None
    assert RunLayout.read(tmp_path / "none.json") is None


def _check_equal(name: str, other: str, *, resumed_at: list[int]) -> None:
    """Nothing was lost but the steps since the last whole checkpoint, and what came of the rest is the same."""
    assert losses(name) == losses(other)
    assert len(losses(name)) == STEPS
    ours, theirs = (json.loads((Path("runs") / each / "summary.json").read_text()) for each in (name, other))
    for key in ("samples", "train_loss", "val_loss", "steps"):
        assert ours[key] == theirs[key], key
    assert ours["resumed_at"] == resumed_at


@pytest.mark.parametrize("data", ["dataset", "generator", "several", "shuffled"])
def test_own_data_goes_on_behind_the_last_batch(data: str) -> None:
    """Whatever else draws random numbers meanwhile, in either process."""
    options = OwnOptions(model="mine.py:model", data=f"mine.py:{data}")

    def make() -> OwnBatches:
        return OwnBatches(options, batch_size=4, seed=3)

    one, state, expected = make(), {}, []
    for number in range(18):
        if number in (0, 7, 10, 12):  # 10: between two epochs
            state[number] = one.state_dict()
        expected.append(next(one).args)
        torch.rand(number)
    for number, saved in state.items():
        again = make()
        next(again)  # as the first batch is read to build the stages
        torch.manual_seed(number)
        again.load_state_dict(json.loads(json.dumps(saved)))
        for args in expected[number:]:
            assert all(torch.equal(x, y) for x, y in zip(next(again).args, args, strict=True))
        assert again.state_dict() == one.state_dict()


def test_the_place_in_other_data_is_refused() -> None:
    dataset, several = (
        OwnBatches(OwnOptions(model="mine.py:model", data=f"mine.py:{data}"), batch_size=4, seed=3)
        for data in ("dataset", "several")
    )
    for _ in range(6):
        next(dataset), next(several)
    place = several.state_dict()
    with pytest.raises(ValueError, match=r"mine.py:several is no Dataset, and the place is one in those of a Dataset"):
        several.load_state_dict(dataset.state_dict())
    several.load_state_dict(place | {"passed": 9})
    with pytest.raises(ValueError, match="gave 5 batches in epoch 2, and the resumed run was after 9"):
        next(several)


@pytest.mark.parametrize(
    ("before", "now", "message"),
    [
        ((), ("--width", "24"), "begun with --width 16, and is to go on with --width 24: .*; type --width 16, or begi"),
        (("--lr", "0.1"), (), "begun with --lr 0.1, and is to go on with no --lr: expected the same options; type --l"),
        ((), ("--lr", "0.1"), "is to go on with --lr 0.1: expected the same options; type the command without --lr"),
        ((), ("--steps", "30"), "begun with --steps 24, and is to go on with --steps 30"),
    ],
)
def test_a_run_goes_on_with_the_options_it_was_begun_with(
    before: tuple[str, ...], now: tuple[str, ...], message: str, cli: Cli
) -> None:
    """Before any process starts; where and how fast it runs may change."""
    _begun("mine", gpt_words("mine", *before))
    assert re.search(message, cli.refused(*gpt_words("mine", *now, "--resume")[1:]))


def _begun(name: str, command: Sequence[str]) -> RunFolder:
    options = resolve(tyro.cli(TrainOptions, args=command[2:]))
    options = with_recipe(options, make_schedule(options))
    return RunFolder.create(Manifest.of(name=name, config=asdict(options), corpus_source="", corpus_sha256=None))


def test_what_was_logged_behind_the_checkpoint_goes_and_the_rest_stays(tmp_path: Path) -> None:
    folder = _begun("mine", gpt_words("mine"))
    metrics = Metrics(
        step=0, samples=4, loss=1 / 3, learning_rate=None, grad_norm=None, step_seconds=1, samples_per_s=4
    )
    for step in (0, 1, 2, 2, 3, 4):
        folder.log(replace(metrics, step=step, samples=4 * step + 4, loss=step / 3))
    path = folder.path / "metrics.jsonl"
    path.write_bytes(path.read_bytes()[:-9])  # killed in the middle of a line
    kept, lost = folder.keep_before(3)
    assert ([one.step for one in kept], lost) == ([0, 1, 2], 3)
    assert losses("mine") == {0: 0.0, 1: 1 / 3, 2: 2 / 3}
    assert folder.keep_before(3) == (kept, 0)


def test_a_resume_needs_a_name_where_the_newest_run_may_be_another(monkeypatch: pytest.MonkeyPatch, cli: Cli) -> None:
    assert "there is no runs/latest, the newest run: expected --name NAME" in cli.refused("train --resume")
    _begun("mine", gpt_words("mine"))
    assert resolve(TrainOptions(resume=True)).name == "mine"
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(ValueError, match="--resume under torchrun: expected --name NAME"):
        resolve(TrainOptions(resume=True))


def test_two_processes_that_write_one_folder_are_told(tmp_path: Path) -> None:
    """While one lives; a kill gives the folder free."""
    hold = (  # without torch, which takes seconds to load
        f"import pathlib, runpy, time; lock = runpy.run_path({lock.__file__!r})['FolderLock'](pathlib.Path('shared')); "
        f"print('held', flush=True); time.sleep(60)"
    )
    other = subprocess.Popen([sys.executable, "-P", "-c", hold], stdout=subprocess.PIPE, text=True)
    try:
        assert other.stdout.readline() == "held\n"
        with pytest.raises(ValueError, match=rf"shared is being written by another run \(process {other.pid} on "):
            FolderLock(Path("shared"), patience=0.2)
    finally:
        other.kill()
        other.communicate()
    FolderLock(Path("shared"), patience=60.0).release()
