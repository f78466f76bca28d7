"""Constants fitted to steps that a user measured: which are taken, how far they reach, and that they do no harm."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from random import Random
from statistics import fmean
from typing import NamedTuple

import pytest
from support.inside import MORE, NO_FIT, SCALE, DeviceModel, Scales
from support.inside import fit_calibrate as calibrate
from support.trainings import estimated, published

from stagewright.partition import Cluster

from .test_measured_trainings import OTHER, SYNTHETIC, TYPICAL, measured_on, training

VTRAIN = list(published("vtrain").values())


class Step(NamedTuple):
    """A step of so many seconds of compute and of links, one after the other."""

    compute: float
    links: float
    seconds: float = 1.0


def closed_form(step: Step, scales: Scales) -> float:
    return step.compute / scales.compute + step.links / scales.links


def steps(count: int, true: Scales, noise: Callable[[], float], *, links: float = 1.0) -> list[Step]:
    """Steps with shares of links from none to most, times e^noise; no two are equal."""
    plain = [Step(compute=1.0 + k % 3 + k / 100, links=links * k / 2) for k in range(count)]
    return [each._replace(seconds=closed_form(each, true) * 2.718281828 ** noise()) for each in plain]


def off(rows: Sequence[Step], scales: Scales) -> float:
    return fmean(abs(closed_form(each, scales) / each.seconds - 1) for each in rows)


def test_each_choice_is_taken_where_it_is_the_truth() -> None:
    rng = Random(1)
    noise = lambda: rng.gauss(0, 0.02)  # noqa: E731
    as_it_is = calibrate(closed_form, steps(6, Scales(), noise), Scales())
    assert (as_it_is.choice, as_it_is.constants, as_it_is.fitted) == (NO_FIT, Scales(), {})
    assert as_it_is.before == as_it_is.after
    slower = calibrate(closed_form, steps(6, Scales(compute=0.7), noise, links=0.02), Scales())
    assert slower.choice == SCALE
    assert slower.constants.compute == pytest.approx(0.7, rel=0.03)
    assert slower.constants.links == 1.0
    both = calibrate(closed_form, steps(6, Scales(compute=0.7, links=0.5), noise), Scales())
    assert both.choice == MORE
    assert (both.constants.compute, both.constants.links) == (pytest.approx(0.7, rel=0.05), pytest.approx(0.5, rel=0.1))
    for name, value in (("compute", 0.7), ("links", 0.5)):
        found = both.fitted[name]
        assert found.before == 1.0
        assert found.low < value < found.high
        assert found.low < found.after < found.high


def test_rows_that_contradict_each_other_fit_nothing() -> None:
    """Half of them took 25% longer than predicted, half 20% less: any fit to some of them is worse for the others."""
    signs = iter((1.25, 0.8) * 4)
    rows = [each._replace(seconds=each.seconds * next(signs)) for each in steps(8, Scales(), lambda: 0.0)]
    found = calibrate(closed_form, rows, Scales())
    assert (found.choice, found.constants) == (NO_FIT, Scales())
    assert {*found.left_out} == {NO_FIT, SCALE, MORE}


@pytest.mark.parametrize(
    "rows",
    [
        [Step(1.0, 0.5, 0.4)],
        [Step(1.0, 0.5, 0.4), Step(1.0, 0.5, 0.45)],  # of one plan
        [Step(1.0, 0.5, 0.4), Step(2.0, 0.5, 0.4)],
        [Step(1.0, 0.5, 0.501)],
    ],
)
def test_steps_shorter_than_their_links_alone_are_refused(rows: list[Step]) -> None:
    """Devices came out 990 times as fast, without a word."""
    with pytest.raises(ValueError, match=r"rows\[0\].seconds: 0.\d+: expected more than 0.501 s.* profile --links"):
        calibrate(closed_form, rows, Scales())


def test_steps_that_links_explain_or_that_others_outvote_are_not_refused() -> None:
    noisy = calibrate(closed_form, [Step(0.02, 1.0, 0.99)], Scales())
    assert noisy.constants == Scales()
    outvoted = calibrate(closed_form, [Step(1.0, 0.5, 0.4), Step(2.0, 0.1, 1.05), Step(3.0, 0.1, 1.6)], Scales())
    assert outvoted.choice == NO_FIT


def test_few_rows_fit_the_scale_alone_and_slow_runs_move_little() -> None:
    for number in (1, 2):
        rows = steps(number, Scales(compute=0.5, links=0.5), lambda: 0.0)
        found = calibrate(closed_form, rows, Scales())
        assert found.choice == SCALE
        assert bool(found.left_out) == (number == 2)
        assert {*found.fitted} == {"compute"}
        assert found.after[0] == pytest.approx(rows[0].seconds, rel=1e-2 if number == 1 else 0.5)
    for slower, trusted in ((1.04, 0.0), (1.1, 0.725)):  # of one plan, by hand: 1 - (0.05 / log 1.1)^2
        found = calibrate(closed_form, [Step(1.0, 0.0, slower)] * 2, Scales())
        assert found.constants.compute == pytest.approx(1.1**-trusted, rel=1e-3)
        assert (found.choice, len(found.fitted)) == ((SCALE, 1) if trusted else (NO_FIT, 0))
    with pytest.raises(ValueError, match=r"rows: \[\]: expected at least one measured step"):
        calibrate(closed_form, [], Scales())
    with pytest.raises(ValueError, match=r"rows\[0\].seconds: 0: expected a finite number above 0"):
        calibrate(closed_form, [Step(1.0, 1.0, 0)], Scales())
    # Two of seven took ten times as long: each of the others is predicted by the rest as if they had not.
    rows = steps(7, Scales(compute=0.7), lambda: 0.0, links=0.0)
    for at in (1, 3):
        rows[at] = rows[at]._replace(seconds=10 * rows[at].seconds)
    found = calibrate(closed_form, rows, Scales())
    for at in (0, 2, 4, 5, 6):
        assert found.left_out[SCALE][at] == pytest.approx(rows[at].seconds, rel=0.02)


def test_left_out_rows_are_predicted_by_rows_of_other_plans() -> None:
    """Two rows whose middle is their mean, and one that took twice as long: what the two say of it, by hand."""
    rows = [Step(1.0, 0.0, 2.0), Step(2.0, 0.0, 4.0), Step(4.0, 0.0, 16.0)]
    found = calibrate(closed_form, rows, Scales())
    assert found.left_out[SCALE][2] == pytest.approx(8.0, rel=1e-3)
    assert found.left_out[SCALE][0] == pytest.approx(8**0.5, rel=1e-3)
    assert found.left_out[NO_FIT] == (1.0, 2.0, 4.0)
    # Four runs of one plan: nothing to judge by. With other plans each is left out with its own runs, which would
    # predict it exactly.
    same = [Step(1.0, 0.0, 2.0)] * 4
    assert calibrate(closed_form, same, Scales()).left_out == {}
    assert calibrate(closed_form, [*same, Step(2.0, 0.0, 2.0)], Scales()).choice == NO_FIT
    assert calibrate(closed_form, [*same, Step(2.0, 0.0, 3.9)], Scales()).choice == SCALE
    found = calibrate(closed_form, [*same, Step(2.0, 0.0, 2.0), Step(3.0, 0.0, 3.0)], Scales())
    assert found.choice == NO_FIT
    assert found.left_out[SCALE][:4] == pytest.approx([1.0] * 4, rel=1e-3)


def test_scales_of_a_cluster() -> None:
    """Twice as fast links halve a message's seconds; the file keeps them."""
    cluster = Cluster.parse("2x2:nvlink=4GB/s@2us,net=1GB/s@4us")
    cluster = replace(cluster, node_links=((0, 1, 5e8, 8e-6),))
    found = Scales(compute=0.5, links=2.0).of(cluster)
    assert [(level.bandwidth, level.latency) for level in found.levels] == [(8e9, 1e-6), (2e9, 2e-6)]
    assert found.node_links == ((0, 1, 1e9, 4e-6),)
    assert found.kinds[0].speed == 0.5
    assert Cluster.from_json(found.to_json()) == found
    with pytest.raises(ValueError, match=r"scales: compute: 0: expected a finite number above 0"):
        Scales(compute=0)


@pytest.mark.thorough
def test_a_device_that_has_other_constants() -> None:
    """Ten trainings of every kind, of which each is predicted by the nine others."""
    rows = measured_on(OTHER, SYNTHETIC)
    found = calibrate(estimated, rows, TYPICAL)
    assert found.choice == MORE

    def mean(predicted: Sequence[float]) -> float:
        return fmean(abs(each / row.seconds - 1) for each, row in zip(predicted, rows, strict=True))

    print({kind: f"{mean(each):.1%}" for kind, each in found.left_out.items()}, f"{mean(found.after):.1%}")
    assert mean(found.left_out[MORE]) < 0.5 * mean(found.left_out[SCALE]) < mean(found.left_out[NO_FIT])
    assert mean(found.after) < 0.02
    ideal = replace(TYPICAL, kernel_seconds=0.0, hop_seconds=0.0, network_efficiency=1.0, partial_efficiency=1.0)
    begun = calibrate(estimated, rows, ideal)
    assert begun.choice == MORE
    assert mean(begun.after) < 0.8 * mean(begun.before)
    assert begun.constants.kernel_seconds > 0  # one that the rows show
    assert (begun.constants.hop_seconds, begun.constants.network_efficiency) == (0.0, 1.0)


def test_trainings_without_links_say_nothing_of_them() -> None:
    """Nor of the host, in large microbatches: what is ideal stays so."""
    start = replace(TYPICAL, kernel_seconds=0.0, hop_seconds=0.0, network_efficiency=1.0, partial_efficiency=1.0)
    sizes = [(size, hidden) for size in (2, 8) for hidden in (768, 1536, 3072, 6144)]
    rows = [training(1, 1, 1, size, hidden=hidden) for size, hidden in sizes]
    found = calibrate(estimated, measured_on(replace(start, memory_efficiency=0.3), rows), start)
    assert found.choice == MORE
    assert {*found.fitted} <= {"matrix_efficiency", "wave_outputs", "memory_efficiency"}
    changed = {name: getattr(found.constants, name) for name in found.fitted}
    assert found.constants == replace(start, **changed)


@pytest.mark.thorough
def test_ranges_hold_what_they_say() -> None:
    """Of 95% ranges, over 60 data sets of eight steps, those that have the truth in them."""
    true, hits, fitted = Scales(compute=0.7, links=0.6), {"compute": 0, "links": 0}, 0
    for seed in range(60):
        rng = Random(seed)
        found = calibrate(closed_form, steps(8, true, lambda: rng.gauss(0, 0.04)), Scales())  # noqa: B023
        if found.choice == MORE:
            fitted += 1
            for name in hits:
                hits[name] += found.fitted[name].low <= getattr(true, name) <= found.fitted[name].high
    print(fitted, hits)
    assert fitted > 50
    assert all(0.88 * fitted <= each <= fitted for each in hits.values())


@pytest.mark.thorough
@pytest.mark.parametrize("number", [3, 10])
def test_steps_that_nobody_has_seen_are_not_predicted_worse(number: int) -> None:
    """Where steps differ by 10% and the constants are true, fits to few of them are rarely taken, and other steps are
    predicted nearly as well as without a fit. One scale that is always fitted costs more."""
    rng, without, with_fit, always = Random(number), 0.0, 0.0, 0.0
    for _ in range(60):
        known, others = (steps(count, Scales(), lambda: rng.gauss(0, 0.1)) for count in (number, 12))
        found = calibrate(closed_form, known, Scales())
        without += off(others, Scales())
        with_fit += off(others, found.constants)
        middle = sorted(closed_form(each, Scales()) / each.seconds for each in known)[number // 2]
        always += off(others, Scales(compute=middle, links=middle))
    print(f"{number} rows: {without / 60:.2%} without, {with_fit / 60:.2%} with, {always / 60:.2%} always")
    assert with_fit <= 1.03 * without
    assert with_fit < always


@pytest.mark.thorough
@pytest.mark.parametrize(("efficiency", "most"), [(0.5, 0.7), (0.664, 1.02)])
def test_published_trainings_are_predicted_by_five_of_them(efficiency: float, most: float) -> None:
    """vTrain's and Megatron-LM's on A100s, ten times five of each, from a device that is a quarter too slow or about
    right: the others are predicted much closer, or as before."""
    start, rng = replace(DeviceModel.preset("A100-80GB"), matrix_efficiency=efficiency), Random(2)
    for rows in (VTRAIN, list(published("megatron").values())):
        errors = [abs(estimated(row, start) / row.seconds - 1) for row in rows]
        without, with_fit = list[float](), list[float]()
        for _ in range(10):
            known = rng.sample(range(len(rows)), 5)
            found = calibrate(estimated, [rows[at] for at in known], start)
            others = [at for at in range(len(rows)) if at not in known]
            without.append(fmean(errors[at] for at in others))
            with_fit.append(fmean(abs(estimated(rows[at], found.constants) / rows[at].seconds - 1) for at in others))
        print(f"{len(rows)} trainings: {fmean(without):.1%} without, {fmean(with_fit):.1%} with")
        assert fmean(with_fit) < most * fmean(without)
