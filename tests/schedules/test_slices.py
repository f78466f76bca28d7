"""Microbatches cut along the sequence: what slices need of each other, who owns them, and how long they are."""

from collections.abc import Iterator
from dataclasses import replace
from random import Random

import pytest
from support.inside import Dependencies, replicate, slice_seconds

from stagewright.schedules import (
    Action,
    CausalSeconds,
    Costs,
    Op,
    Schedule,
    ScheduleError,
    build,
    check,
    check_lowered,
    equal_work_lengths,
    lower,
    lower_bound,
    shortest_lengths,
    simulate,
)


def of_text(*programs: str, num_slices: int, num_microbatches: int = 1) -> Schedule:
    return Schedule(
        name="mine",
        placement=tuple((rank,) for rank in range(len(programs))),
        programs=tuple(tuple(map(Action.parse, program.split())) for program in programs),
        num_microbatches=num_microbatches,
        num_slices=num_slices,
    )


def test_needs_of_slices() -> None:
    """Forwards from the first slice on, backwards from the last: of one microbatch, on the same stage, split or not."""
    schedule = of_text("0F0 0F1 0F2 0F3 0B1 0I0 0W0 0I3 0W3 0B2", num_slices=2, num_microbatches=2)
    needs = {str(action): " ".join(map(str, Dependencies(schedule).of(action))) for action in schedule.programs[0]}
    assert [needs[f"0F{index}"] for index in range(4)] == ["", "0F0", "", "0F2"]
    assert [needs["0B1"], needs["0I0"], needs["0I3"], needs["0B2"]] == ["0F1", "0F0 0B1", "0F3", "0F2 0I3"]
    check(schedule)


@pytest.mark.parametrize("wrong", ["0F1 0F0 0B1 0B0", "0F0 0F1 0B0 0B1", "0F0 0F1 0I0 0I1 0W0 0W1"])
def test_slices_in_a_wrong_order(wrong: str) -> None:
    with pytest.raises(ScheduleError, match="deadlock: a cycle of 1 rank"):
        check(of_text(wrong, num_slices=2))
    check(of_text(wrong, num_slices=1, num_microbatches=2))  # as microbatches they need nothing of each other


def test_slices_stand_on_the_rank_of_their_microbatch_in_json_and_in_no_table() -> None:
    """Keys and values stay there; so no message goes between slices, and replicas take turns by microbatch."""
    schedule = replicate(build("seq1f1b", num_ranks=2, num_microbatches=2, num_slices=3), 2)
    assert [schedule.owner(0, index) for index in range(12)] == [0] * 3 + [1] * 3 + [0] * 3 + [1] * 3
    check(schedule)
    assert check_lowered(lower(schedule)).num_messages == 2 * 12  # an activation and a gradient each
    schedule = build("seq1f1b", num_ranks=2, num_microbatches=2, num_slices=3)
    assert Schedule.from_json(schedule.to_json()) == schedule
    with pytest.raises(ScheduleError, match=r"has replicas, slices, several batches or updates.*use to_json"):
        schedule.to_csv()
    assert repr(schedule) == "<Schedule seq1f1b: 2 ranks, 2 stages, 2 microbatches, 3 slices each>"
    alone = schedule.forward_only()  # microbatches whole
    check(alone)
    assert (alone.num_slices, alone.programs[1]) == (1, (Action(1, Op.F, 0), Action(1, Op.F, 1)))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"num_slices": 0}, "num_slices=0: expected at least 1"),
        ({"num_slices": 2, "num_batches": 2}, "num_slices=2 for 2 batches under the rule 'flush': expected one batch"),
        ({"num_slices": 2, "weight_rule": "2bw"}, "num_slices=2 for 1 batch under the rule '2bw'"),
    ],
)
def test_slices_that_do_not_fit(change: dict[str, object], message: str) -> None:
    schedule = build("gpipe", num_ranks=2, num_microbatches=2)
    with pytest.raises(ScheduleError, match=message):
        replace(schedule, **change)  # type: ignore[arg-type]


def cuts(total: int, num_slices: int | None = None) -> Iterator[tuple[int, ...]]:
    if total == 0:
        if not num_slices:
            yield ()
        return
    for first in range(1, total + 1):
        for rest in cuts(total - first, None if num_slices is None else num_slices - 1):
            yield (first, *rest)


def random_table(random: Random) -> dict[tuple[int, int], float]:
    """Seconds that follow no formula; eighths, so that sums are exact."""
    return {(length, offset): random.randint(1, 40) / 8 for length in range(1, 9) for offset in range(9)}


@pytest.mark.parametrize("seed", range(20))
def test_no_cut_is_better(seed: int) -> None:
    random = Random(seed)
    table = random_table(random)
    P, M, T = random.randint(1, 6), random.randint(1, 4), random.randint(3, 8)

    def seconds(length: int, offset: int) -> float:
        return table[length, offset]

    def makespan(lengths: tuple[int, ...]) -> float:
        each = slice_seconds(lengths, seconds)
        return M * sum(each) + (P - 1) * max(each)

    for n in (None, 1, 2, 3):
        found = shortest_lengths(T, seconds, num_ranks=P, num_microbatches=M, num_slices=n)
        assert sum(found) == T
        assert n in (None, len(found))
        assert makespan(found) == min(map(makespan, cuts(T, n)))
    for n in (1, 2, 3):
        found = equal_work_lengths(T, n, seconds)
        assert (sum(found), len(found)) == (T, n)
        keys = [(max(each), sum(each)) for each in (slice_seconds(cut, seconds) for cut in cuts(T, n))]
        own = slice_seconds(found, seconds)
        assert (max(own), sum(own)) == min(keys)


@pytest.mark.parametrize("P", [1, 2, 4])
@pytest.mark.parametrize("M", [1, 3])
def test_terapipe_takes_what_its_programme_says(P: int, M: int) -> None:
    """M (t1 + ... + tn) + (P - 1) max t, of F and B each; no schedule over slices is below the bound."""
    seconds = CausalSeconds(per_token=1.0, per_pair=0.25, fixed=2.0)
    for lengths in ((4, 4, 4), (6, 4, 2), shortest_lengths(12, seconds, num_ranks=P, num_microbatches=M)):
        each = slice_seconds(lengths, seconds)
        costs = Costs(forward=1.0, backward=2.0, index_factors=each * M)
        sizes = {"num_ranks": P, "num_microbatches": M, "num_slices": len(lengths)}
        made = simulate(build("terapipe", **sizes), costs).makespan
        assert made == 3 * (M * sum(each) + (P - 1) * max(each))
        for name in ("terapipe", "seq1f1b", "seq-zb-h1"):
            schedule = build(name, **sizes)
            assert lower_bound(schedule, costs) <= simulate(schedule, costs).makespan


def test_slices_of_equal_work_are_faster_than_equal_ones() -> None:
    seconds = CausalSeconds(per_token=1.0, per_pair=0.05)
    lengths = equal_work_lengths(128, 4, seconds, multiple=8)
    assert lengths == (56, 32, 24, 16)
    schedule = build("seq1f1b", num_ranks=4, num_microbatches=4, num_slices=4)
    found = [
        simulate(schedule, Costs(forward=1.0, backward=2.0, index_factors=slice_seconds(cut, seconds) * 4)).makespan
        for cut in ([32] * 4, lengths)
    ]
    assert found[1] < 0.9 * found[0]


@pytest.mark.parametrize(
    ("total", "n", "multiple", "message"),
    [
        (10, 2, 4, "10 tokens for 2 slices whose lengths are multiples of 4: expected a multiple of 4, of at least 8"),
        (8, 3, 4, "8 tokens for 3 slices .* of at least 12"),
        (8, 0, 1, "num_slices=0: expected a whole number"),
        (8, 2, 0, "multiple=0: expected a whole number"),
    ],
)
def test_sizes_that_make_no_slices(total: int, n: int, multiple: int, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        equal_work_lengths(total, n, CausalSeconds(per_token=1.0), multiple=multiple)


def test_seconds_that_are_none() -> None:
    with pytest.raises(ValueError, match="seconds= returned less than 0, or no number"):
        equal_work_lengths(4, 2, lambda length, offset: length - 3.0)
