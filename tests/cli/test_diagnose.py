"""`stagewright train --diagnose data`: stalls that are put in are found where they were put."""

import statistics
import sys
import textwrap
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from support.commands import Cli, Done
from support.inside import Measured, diagnosis_text, step_with

STEPS = 4
SLOW = """
    import os
    import tempfile
    import time

    import torch
    from torch import nn
    from torch.utils.data import DataLoader, Dataset, IterableDataset, default_collate

    took = {"fetch": [], "collate": []}  # seconds really slept, of each call in this process

    def nap(what, seconds):
        began = time.perf_counter()
        time.sleep(seconds)
        took[what].append(time.perf_counter() - began)

    class Samples(Dataset):
        def __init__(self, seconds=0.0, path=None):
            self.seconds, self.path = seconds, path

        def __len__(self):
            return 256

        def __getitem__(self, number):
            if self.path is not None:
                began = time.perf_counter()
                with open(self.path, "rb") as file:  # 4 pieces at 100 kB/s
                    while piece := file.read(250):
                        time.sleep(len(piece) / 100e3)
                took["fetch"].append(time.perf_counter() - began)
            elif self.seconds:
                nap("fetch", self.seconds)
            return torch.full((4,), float(number)), number % 3

    def collate(samples):
        nap("collate", 0.05)
        return default_collate(samples)

    def model():
        return nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 3))

    def slow_fetch():
        return Samples(0.01)

    def slow_collate():
        return DataLoader(Samples(0.01), batch_size=4, shuffle=True, collate_fn=collate)

    def slow_file():
        path = os.path.join(tempfile.mkdtemp(dir="."), "samples")
        with open(path, "wb") as file:
            file.write(bytes(1000))
        return DataLoader(Samples(path=path), batch_size=4)

    def stream():
        yield torch.zeros(4, 4), torch.zeros(4, dtype=torch.int64)

    class Endless(IterableDataset):
        def __iter__(self):
            yield from stream()

    def endless():
        return DataLoader(Endless(), batch_size=None)
"""
WORDS = ("train", "--model", "slow_data:model", "--microbatches", "2", "--diagnose", "data")


@pytest.fixture
def slow(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.setattr(sys, "dont_write_bytecode", True)
    (tmp_path / "slow_data.py").write_text(textwrap.dedent(SLOW))
    yield tmp_path
    sys.modules.pop("slow_data", None)


@pytest.mark.nightly  # it measures
@pytest.mark.usefixtures("slow")
@pytest.mark.parametrize("data", ["slow_fetch", "slow_collate", "slow_file"])
def test_injected_stalls_are_found_where_they_were_put(data: str, cli: Cli) -> None:
    words = ("--data", f"slow_data:{data}", "--ranks", "1", "--diagnose-steps", str(STEPS), "--json")
    found = cli.json(*WORDS, *words, *(("--batch", "4") if data == "slow_fetch" else ()))
    causes, took = found["causes_seconds"], sys.modules["slow_data"].took
    # 4 batches from memory were read before, and the first one of the loader's own is not waited for.
    fetched = sum(took["fetch"][4 * 5 : 4 * (5 + STEPS)]) / STEPS
    collated = sum(took["collate"][5 : 5 + STEPS]) / STEPS
    within = 0.05 * (fetched + collated)
    assert causes["fetch"] == pytest.approx(fetched, abs=within)
    assert causes["preparation"] == pytest.approx(collated, abs=within)
    assert causes["transfer"] < within
    assert found["stall_seconds"] == pytest.approx(sum(causes.values()))
    answers = {each["change"]: each for each in found["answers"]}
    tried = [each for each in answers.values() if each["measured"] is not None]
    assert len(tried) == 2  # workers, and the cache, which held all that is fetched
    assert len(took["fetch"]) == 4 * (5 + STEPS + STEPS + 1)
    cached = next(each["measured"] for name, each in answers.items() if "cache" in name)
    assert cached < found["steps_seconds"]["real"] - 0.5 * fetched
    # More workers, and a faster disk, as if nothing else were slow.
    step = found["steps_seconds"]["synthetic"]
    slower = answers["fetching 2 times faster"]["predicted"]
    assert slower == pytest.approx(step + causes["transfer"] + causes["fetch"] / 2 + causes["preparation"])


@pytest.mark.thorough
@pytest.mark.gloo
@pytest.mark.usefixtures("slow")
def test_two_ranks_find_the_same(command: Callable[..., Done]) -> None:
    done = command(*WORDS, "--data", "slow_data:slow_collate", "--diagnose-steps", "2")
    assert done.status == 0, done.stderr
    lines = done.stdout.splitlines()
    assert lines[0] == "2 steps of 4 samples with each input; 2 ranks, 0 workers in each"
    assert max(map(len, lines)) <= 80
    assert not Path("runs").exists()


def test_predictions_follow_from_what_was_measured() -> None:
    synthetic, real = Measured(0.030), Measured(0.110, fetching=0.040, made=0.070, transfer=0.010, cpu=0.050)
    steps = [step_with(synthetic, real, workers=n, cores=2) for n in (0, 1, 2, 4)]
    assert steps == pytest.approx([0.110, 0.070, 0.040, 0.040])
    assert step_with(synthetic, real, workers=4, cores=1) == pytest.approx(0.050)  # no core is free
    assert step_with(synthetic, real, workers=0, cores=2, fetched=0.25) == pytest.approx(0.080)
    assert step_with(synthetic, real, workers=1, cores=2, fetched=0.0) == pytest.approx(0.040)


def test_the_table_is_80_columns_wide() -> None:
    answer = {"change": "a cache of 1.23 GB a rank (45% of samples)", "predicted": 0.0123, "measured": 0.0124}
    found = {
        "steps": 20,
        "samples": 16,
        "ranks": 2,
        "workers": 0,
        "steps_seconds": {"synthetic": 0.01, "cached": 0.01, "real": 0.04},
        "stall_seconds": 0.03,
        "causes_seconds": {"fetch": 0.02, "preparation": 0.011, "transfer": 0.0, "other": -0.001},
        "answers": [answer, {**answer, "measured": None}],
    }
    lines = diagnosis_text(found).splitlines()
    assert max(map(len, lines)) <= 80
    assert statistics.mode(len(line) for line in lines if line) >= 68
    assert lines[8].split() == ["fetch", "(Dataset.__getitem__)", "20.0", "ms", "66.7%"]
    assert lines[11].split()[-3:] == ["-1.00", "ms", "-3.3%"]


@pytest.mark.thorough(but=["words2-num_workers=2 for a DataLoader of your own"])
@pytest.mark.usefixtures("slow")
@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("--data", "slow_data:stream"), "returned generator, which has no samples to be counted and fetched by numbe"),
        (("--data", "slow_data:endless"), "returned a DataLoader of Endless, which has no samples to be counted"),
        (("--data", "slow_data:slow_collate", "--workers", "2"), "num_workers=2 for a DataLoader of your own"),
        (("--data", "slow_data:slow_fetch", "--workers", "-1"), "--workers -1: expected a number from 0 on"),
        (("--data", "slow_data:slow_fetch", "--diagnose-steps", "0"), "--diagnose-steps 0: expected at least 1"),
        (("--data", "slow_data:slow_fetch", "--diagnose-cache", "-1"), "--diagnose-cache -1: expected at least 1"),
        (("--data", "slow_data:slow_fetch", "--resume"), "--diagnose data with --resume: leave one away"),
    ],
)
def test_what_cannot_be_diagnosed_is_refused_before_the_first_step(words: tuple[str, ...], said: str, cli: Cli) -> None:
    assert said in " ".join(cli.refused(*WORDS, *words, "--ranks 1").split())
