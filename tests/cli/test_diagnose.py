"""`stagewright train --diagnose data`: stalls that are put in are found where they were put.

The pace of a machine: its filter against dense algebra, and ranges for steps that follow a pace that is known.
"""

import statistics
import sys
import textwrap
from collections import Counter
from collections.abc import Callable, Iterator
from math import cos, exp, log, pi, sin, sqrt
from pathlib import Path
from random import Random
from statistics import fmean

import numpy as np
import pytest
from support.commands import Cli, Done
from support.inside import Measured, Pace, diagnosis_text, paces_of, shared_ratios, step_with, steps_that_follow
from support.noisy_machine import Machine

from stagewright.schedules import Costs, Op, Spread, build, estimate_spread, simulate_spread

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
def slow(here: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.setattr(sys, "dont_write_bytecode", True)
    (here / "slow_data.py").write_text(textwrap.dedent(SLOW))
    yield here
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


ONE = build("gpipe", num_ranks=1, num_microbatches=1)  # F of 1 s, B of 2 s


def _paced(ratios: list[float]) -> Spread:
    """Steps of ONE whose actions all have the same ratio."""
    return Spread(actions={}, steps=[{op: [[ratio]] for op in (Op.F, Op.B)} for ratio in ratios])


def _range(spread: Spread, following: int, samples: int) -> tuple[float, float]:
    steps = steps_that_follow(spread, ONE, following) if following else spread
    return simulate_spread(ONE, Costs(), steps, samples=samples).range()


def test_a_pace_is_what_dense_algebra_says() -> None:
    """Gaussian processes with a level and a scale that are not known (Rasmussen and Williams, 2.7): the likelihood, the
    mean and the variance of a step that follows, from the whole matrix of covariances."""
    random = np.random.default_rng(1)
    logs = np.cumsum(random.normal(0, 0.05, (9, 3)), axis=0) + random.normal(0, 0.05, (9, 3))
    paces, shares = paces_of(np.exp(logs).tolist())
    ones, offsets = np.ones(9), []
    for pace in paces:
        wanders = pace.drive / (1 - pace.kept**2)
        apart = np.abs(np.subtract.outer(np.arange(9), np.arange(9)))
        inverse = np.linalg.inv(np.eye(9) + wanders * pace.kept**apart)
        told = ones @ inverse @ ones
        level = ones @ inverse @ logs / told
        squares = np.einsum("np,nm,mp->p", logs - level, inverse, logs - level)
        assert (pace.surprises**2).sum(axis=0) == pytest.approx(squares)
        known = 0.5 * np.linalg.slogdet(inverse)[1] - 0.5 * log(told) - 4 * log(squares.mean())
        offsets.append(pace.likelihood - known)
        for ahead in (1, 7):
            between = wanders * pace.kept ** (ahead + np.arange(8, -1, -1))
            assert pace.middle(ahead) == pytest.approx(level + between @ inverse @ (logs - level))
            variance = 1 + wanders - between @ inverse @ between + (1 - ones @ inverse @ between) ** 2 / told
            assert pace.variance(ahead) == pytest.approx(variance)
    assert offsets == pytest.approx([offsets[0]] * len(offsets))  # up to a constant
    assert sum(shares) == pytest.approx(1)


def test_a_pace_is_as_probable_as_the_steps_of_ranks_that_vary_by_themselves_say() -> None:
    """One in three that it does not wander, else any drive and tau, before the steps; three ranks of waves that have
    nothing in common tell thrice as much as one."""
    waves = [[exp(0.1 * wave(k * n * pi / 10)) for wave, k in ((cos, 1), (sin, 1), (cos, 2))] for n in range(20)]
    for rows, times in ((waves, 3), ([[first] * 3 for first, _, _ in waves], 1)):
        paces, shares = paces_of(rows)
        told = [times * (pace.likelihood - paces[0].likelihood) for pace in paces]
        others = len(paces) - 1
        assert others == 8 * 7
        assert [log(share / shares[0]) for share in shares[1:]] == pytest.approx(
            [log(2 / others) + x for x in told[1:]]
        )


def test_draws_are_as_far_apart_as_students_distribution_is() -> None:
    """The mean square of Student's distribution is that of a normal one times (N - 1) / (N - 3); each measured step is
    drawn as often as any other."""
    random = np.random.default_rng(5)
    paces, _ = paces_of([[exp(0.1 * each)] for each in (-1, 2, 0, 1, -2, 1, -1, 0, 1, 7)])
    for pace, ahead in ((paces[0], 0), (paces[30], 4)):
        off = [log(pace.draw(random, ahead)[0]) - pace.middle(ahead)[0] for _ in range(20_000)]
        surprises = pace.surprises[:, 0]
        square = fmean(surprises**2) * 10 / 9 * (9 / 7) * pace.variance(ahead)
        assert fmean(each**2 for each in off) == pytest.approx(square, rel=0.05)
        assert fmean(off) == pytest.approx(fmean(surprises) * sqrt(pace.variance(ahead)), abs=0.05 * sqrt(square))


def test_chance_of_few_actions_is_no_part_of_a_step_but_the_pace_is() -> None:
    """Rows of which three quarters of the variance were chance: drawn together by half, but not their wander."""
    rows = [[exp(0.1 * each)] for each in (-3, -2, -2, -1, 0, 0, 1, 2, 2, 3)]
    whole, half = (found[0] for found, _ in (paces_of(rows), paces_of([[sqrt(each)] for (each,) in rows], chance=0.75)))
    assert half.surprises == pytest.approx(whole.surprises)
    assert (whole.own_variance, half.own_variance) == pytest.approx((1.0, 0.25))
    walks, halves = paces_of(rows)[0][-1], paces_of([[sqrt(each)] for (each,) in rows], chance=0.75)[0][-1]
    assert halves.middle(3) == pytest.approx(walks.middle(3))
    assert halves.variance(3) < walks.variance(3) < halves.variance(3) + 1.0001
    assert halves.own_variance == 0.0  # of little surprise in so even a walk all may be chance


def test_steps_say_how_much_of_their_variance_is_chance() -> None:
    """Nearly all where actions alone vary, little where steps do."""
    schedule = build("1f1b", num_ranks=2, num_microbatches=8)
    for step, low, high in ((0.0, 0.6, 1.0), (0.3, 0.0, 0.1)):
        machine = Machine(schedule, Costs(), 1, step=step, rank=0.0, action=0.2)
        spread = estimate_spread(machine.ranks(100), machine.table)
        assert spread is not None
        _, chance = shared_ratios(spread, schedule)
        assert low <= chance <= high


def test_rows_that_do_not_vary_are_drawn_as_they_are() -> None:
    alike = _paced([0.5] * 12)
    for following in (0, 9):
        assert _range(alike, following, samples=3) == pytest.approx((1.5, 1.5))


@pytest.mark.thorough
def test_steps_that_follow_begin_at_the_pace_of_the_last() -> None:
    """A machine that slowed down to twice its seconds stays there a while, and may be anywhere later."""
    random = Random(3)
    ratios = [(1.0 if n < 25 else 2.0) * exp(random.gauss(0, 0.02)) for n in range(50)]
    spread = _paced(ratios)

    def ends(following: int) -> tuple[float, float]:
        return _range(spread, following, samples=600)

    assert ends(0) == pytest.approx((2.8, 6.4), rel=0.1)
    low, high = ends(1)
    assert 4.0 < low < 5.9
    assert 6.1 < high < 8.0
    widths = [log(high / low) for low, high in map(ends, (1, 10, 50))]
    assert widths == sorted(widths)
    assert widths[-1] > 1.3 * widths[0]
    # the order of steps is what tells that: in another one the same steps are independent
    random.shuffle(ratios)
    low, high = _range(_paced(ratios), 50, samples=600)
    assert (low, high) == pytest.approx(ends(0), rel=0.25)


def test_any_of_the_steps_that_follow_is_meant_under_any_pace(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each as often as another, each pace as often as it is probable; of chance as much is left out as was told."""
    drawn: list[tuple[Pace, int]] = []
    monkeypatch.setattr(Pace, "draw", lambda self, _, ahead: drawn.append((self, ahead)) or np.ones(1))
    random = Random(4)
    spread = _paced([exp(random.gauss(0, 0.1)) for _ in range(12)])
    monkeypatch.setattr("stagewright.cli.pace._MADE", 1000)
    steps_that_follow(spread, ONE, 5)
    times = Counter(ahead for _, ahead in drawn)
    assert sorted(times) == [1, 2, 3, 4, 5]
    assert min(times.values()) > 150
    steady = [pace for pace, _ in drawn if pace.drive == 0]
    _, shares = paces_of(*shared_ratios(spread, ONE))
    assert 0.2 < shares[0] < 0.8
    assert len(steady) == pytest.approx(1000 * shares[0], abs=60)


def test_a_number_of_steps_that_is_none_is_refused() -> None:
    with pytest.raises(ValueError, match=r"following=-1: expected a number of steps, or 0"):
        steps_that_follow(_paced([1.0] * 12), ONE, -1)
