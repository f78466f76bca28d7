"""Runs that are killed and go on: the losses are those of a run that nobody killed, to the last bit."""

from __future__ import annotations

import json
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
from support.commands import answer, end_forked, start_forked

from stagewright.experiments.cli import main
from stagewright.experiments.own_batches import OwnBatches
from stagewright.experiments.own_options import OwnOptions
from stagewright.experiments.training.options import TrainOptions, resolve
from stagewright.experiments.training.run_folder import Manifest, Metrics, RunFolder
from stagewright.pipe.lock import FolderLock

TINY = ("--layers", "2", "--width", "16", "--heads", "2", "--length", "8", "--batch", "4", "--microbatches", "2")
STEPS = 24
MINE = '''
import torch
from torch import nn
from torch.utils.data import TensorDataset

class Noisy(torch.utils.data.Dataset):
    """Augmented samples: random numbers in the dataset."""
    def __len__(self): return 22
    def __getitem__(self, index):
        return torch.full((6,), float(index)) / 22 + 0.1 * torch.randn(6), torch.tensor(index % 3)

def model(): return nn.Sequential(nn.Linear(6, 8), nn.Dropout(0.2), nn.Tanh(), nn.Linear(8, 8), nn.Linear(8, 3))
def dataset(): return Noisy()
def several(): return [(torch.full((4, 6), float(i)), torch.randint(3, (4,))) for i in range(5)]
def shuffled(): return torch.utils.data.DataLoader(Noisy(), batch_size=4, shuffle=True, drop_last=True)
def generator():
    while True:
        yield torch.randn(4, 6), torch.randint(3, (4,))
'''


@pytest.fixture(autouse=True)
def in_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    Path("text.txt").write_bytes(b"the quick brown fox jumps over the lazy dog\n" * 100)
    Path("mine.py").write_text(MINE)
    return tmp_path


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
    assert [line["samples"] for line in lines] == [4 * (step + 1) for step in steps]
    return {line["step"]: line["loss"] for line in lines}


def whole(command: Sequence[str], *, num_ranks: int = 2) -> None:
    ranks = start_forked(command, num_ranks=num_ranks)
    try:
        done = [answer(rank) for rank in ranks]
    finally:
        end_forked(ranks)
    assert [one.status for one in done] == [0] * num_ranks, done


def killed(command: Sequence[str], *, victim: int, when: Callable[[], bool], num_ranks: int = 2) -> None:
    """Run until `when`, then kill -9 one rank, and the others as an agent does."""
    ranks = start_forked(command, num_ranks=num_ranks)
    try:
        while not when() and ranks[victim].process.is_alive():
            time.sleep(0.001)
        assert ranks[victim].process.is_alive(), answer(ranks[victim])
        ranks[victim].process.kill()
    finally:
        end_forked(ranks)


def logged(name: str, steps: int) -> Callable[[], bool]:
    path = Path("runs") / name / "metrics.jsonl"
    return lambda: path.exists() and path.read_bytes().count(b"\n") >= steps


@pytest.mark.gloo
def test_a_run_that_was_killed_goes_on_to_the_last_bit() -> None:
    """Killed before the first checkpoint, then behind one; then to the end."""
    options = ("--schedule", "interleaved", "--chunks", "2", "--checkpoint-every", "5")
    whole(words("whole", "shuffled", *options))
    killed(words("run", "shuffled", *options, "--resume"), victim=1, when=logged("run", 3))
    killed(words("run", "shuffled", *options, "--resume"), victim=0, when=logged("run", 8))
    whole(words("run", "shuffled", *options, "--resume"))
    _check_equal("run", "whole", resumed=2)


@pytest.mark.gloo
def test_a_run_on_two_weight_versions_that_was_killed_goes_on_to_the_last_bit() -> None:
    """2bw: the older weights and the learning rates go along; augmented samples are drawn as they would have been."""
    options = ("--schedule", "2bw", "--checkpoint-every", "5")
    whole(words("whole", "dataset", *options))
    killed(words("run", "dataset", *options, "--resume"), victim=1, when=logged("run", 12))
    whole(words("run", "dataset", *options, "--resume"))
    _check_equal("run", "whole", resumed=1)


def _check_equal(name: str, other: str, *, resumed: int) -> None:
    assert losses(name) == losses(other)
    assert len(losses(name)) == STEPS
    ours, theirs = (json.loads((Path("runs") / each / "summary.json").read_text()) for each in (name, other))
    for key in ("samples", "train_loss", "val_loss", "steps"):
        assert ours[key] == theirs[key], key
    assert len(ours["resumed_at"]) == resumed
    assert ours["resumed_at"][-1] in (5, 10, 15)  # nothing was lost but the steps since the last checkpoint


@pytest.mark.parametrize("data", ["dataset", "generator", "several", "shuffled"])
def test_own_data_goes_on_behind_the_last_batch(data: str) -> None:
    """Whatever else draws random numbers meanwhile, in either process."""
    options = OwnOptions(model="mine.py:model", data=f"mine.py:{data}")

    def make() -> OwnBatches:
        return OwnBatches(options, batch_size=4, seed=3)

    one, state, expected = make(), {}, []
    for number in range(18):
        if number in (0, 7, 12):
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
    with pytest.raises(ValueError, match="gave 5 batches in epoch 2, and the run that goes on stood behind 9"):
        next(several)


@pytest.mark.parametrize(
    ("before", "now", "message"),
    [
        (
            (),
            ("--width", "24"),
            "begun with --width 16, and is to go on with --width 24: .*; type --width 16, or begin",
        ),
        (
            ("--lr", "0.1"),
            (),
            "begun with --lr 0.1, and is to go on with no --lr: expected the same options; type --lr 0.1",
        ),
        ((), ("--lr", "0.1"), "is to go on with --lr 0.1: expected the same options; type the command without --lr"),
        ((), ("--steps", "30"), "begun with --steps 24, and is to go on with --steps 30"),
    ],
)
def test_a_run_goes_on_with_the_options_it_was_begun_with(
    before: tuple[str, ...], now: tuple[str, ...], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """Before any process starts; where and how fast it runs may change."""
    _begun("mine", gpt_words("mine", *before))
    assert main(gpt_words("mine", *now, "--resume")[1:]) == 2
    assert re.search(message, capsys.readouterr().err)


def _begun(name: str, command: Sequence[str]) -> RunFolder:
    options = resolve(tyro.cli(TrainOptions, args=command[2:]))
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


def test_a_resume_needs_a_name_where_the_newest_run_may_be_another(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["train", "--resume"]) == 2
    assert "there is no runs/latest, the newest run: expected --name NAME" in capsys.readouterr().err
    _begun("mine", gpt_words("mine"))
    assert resolve(TrainOptions(resume=True)).name == "mine"
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(ValueError, match="--resume under torchrun: expected --name NAME"):
        resolve(TrainOptions(resume=True))


def test_two_processes_that_write_one_folder_are_told(tmp_path: Path) -> None:
    """While one lives; a kill gives the folder free."""
    program = "import sys, time; from pathlib import Path; from stagewright.pipe.lock import FolderLock; "
    hold = program + "lock = FolderLock(Path('shared')); print('held', flush=True); time.sleep(60)"
    other = subprocess.Popen([sys.executable, "-P", "-c", hold], stdout=subprocess.PIPE, text=True)
    try:
        assert other.stdout is not None
        assert other.stdout.readline() == "held\n"
        with pytest.raises(ValueError, match=rf"shared is being written by another run \(process {other.pid} on "):
            FolderLock(Path("shared"), patience=0.2)
    finally:
        other.kill()
        other.communicate()
    FolderLock(Path("shared"), patience=5.0).release()
