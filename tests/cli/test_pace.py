"""The pace of a machine: its filter against dense algebra, and ranges for steps that follow a pace that is known."""

from collections import Counter
from math import cos, exp, log, pi, sin, sqrt
from random import Random
from statistics import fmean

import numpy as np
import pytest
from support.inside import Pace, paces_of, shared_ratios, steps_that_follow
from support.noisy_machine import Machine

from stagewright.schedules import Costs, Op, Spread, build, estimate_spread, simulate_spread

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


@pytest.mark.thorough
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


@pytest.mark.thorough
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
