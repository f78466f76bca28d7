"""Schedules whose batches overlap: versions, staleness, memory and speed, against papers and slow recurrences."""

from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.inside import GroupStep, Sharing, count_in_flight, defer_updates

from stagewright.schedules import Action, Costs, Op, Schedule, ScheduleError, build, check, lower, simulate

from .random_schedules import by_hand, steady
from .test_check import with_program

RANKS = (1, 2, 3, 4, 7)
FB = [(1.0, 2.0), (1.0, 1.0), (3.0, 1.0), (0.25, 0.75)]  # all sums exact


def microbatches_for(P: int) -> list[int]:
    """As few as 2bw allows, and more."""
    return sorted({max(P - 1, 1), P, P + 1, 2 * P, 3 * P + 2})


@pytest.mark.thorough(but=["1"])
@pytest.mark.parametrize("P", RANKS)
def test_versions_staleness_and_activations(P: int) -> None:
    """Weight stashing keeps warm-up + 1 = P - r versions, vertical sync P, 2bw 2; as many updates late."""
    in_flight = tuple(P - rank for rank in range(P))
    for M in microbatches_for(P):
        stashing = check(build("pipedream", num_ranks=P, num_microbatches=M))
        assert stashing.peak_versions == stashing.peak_activations == in_flight
        assert stashing.staleness == tuple(P - 1 - rank for rank in range(P))
        synced = check(build("pipedream", num_ranks=P, num_microbatches=M, vertical_sync=True))
        assert synced.peak_versions == (P,) * P
        assert synced.staleness == (P - 1,) * P
        assert synced.peak_activations == in_flight
        buffered = check(build("2bw", num_ranks=P, num_microbatches=M))
        assert buffered.peak_versions == (2,) * P
        assert buffered.staleness == (1,) * P
        assert buffered.peak_activations == in_flight


@pytest.mark.parametrize("P", [1, 2, 4])
def test_updates_deferred_to_the_last_moment(P: int) -> None:
    """U(t) right before the first forward of batch t + 2: only the deep ranks still run backwards on older weights."""
    M = P + 1
    schedule = defer_updates(build("2bw", num_ranks=P, num_microbatches=M))
    report = check(schedule)
    assert report.peak_versions == tuple(1 if rank == P - 1 else 2 for rank in range(P))
    assert report.staleness == (1,) * P
    for program in schedule.programs:
        for action, behind in pairwise(program):
            if action.op is Op.U and action.index < schedule.num_batches - 2:
                assert behind == Action(action.stage, Op.F, (action.index + 2) * M)
        order = [action for action in program if action.op is not Op.U]
        plain = build("2bw", num_ranks=P, num_microbatches=M).programs[program[0].stage]
        assert order == [action for action in plain if action.op is not Op.U]


@pytest.mark.parametrize("name", ["pipedream", "1f1b"])
def test_only_updates_of_2bw_can_wait(name: str) -> None:
    schedule = build(name, num_ranks=2, num_microbatches=2)
    with pytest.raises(ScheduleError, match=rf"'{name}' follows the rule .*: only the updates of '2bw' can wait"):
        defer_updates(schedule)


@pytest.mark.thorough(but=["2-2"])
@pytest.mark.parametrize("P", [2, 3, 4])
@pytest.mark.parametrize("every", [1, 2, 3, 4, 6, 12])
def test_update_every(P: int, every: int) -> None:
    """With an update each k microbatches rank r keeps at most 1 + ceil((P - 1 - r) / k) versions, as a slow replay."""
    schedule = build("pipedream", num_ranks=P, num_microbatches=12, update_every=every)
    report = check(schedule)
    assert schedule.groups_per_batch == 12 // every
    assert report.peak_versions == tuple(1 + -(-(P - 1 - rank) // every) for rank in range(P))
    for rank, program in enumerate(schedule.programs):
        assert replayed(program, every) == (report.peak_versions[rank], report.staleness[rank])
        updates = [action.index for action in program if action.op is Op.U]
        assert updates == list(range(schedule.total_indices // every))


def replayed(program: Sequence[Action], every: int) -> tuple[int, int]:
    """(versions kept, staleness) of weight stashing, as a rank that keeps copies would count them."""
    newest, most, late = 0, 1, 0
    stash: dict[int, int] = {}
    for _, op, k in program:
        if op is Op.F:
            stash[k] = newest
        elif op is Op.B:
            late = max(late, k // every - stash.pop(k))
        else:
            newest += 1
        most = max(most, newest - min([newest, *stash.values()]) + 1)
    return most, late


def warmups_of(schedule: Schedule) -> list[int]:
    """Forwards before the first backward, less the one that is paired with it."""
    return [[action.op for action in program].index(Op.B) - 1 for program in schedule.programs]


@pytest.mark.thorough
@pytest.mark.parametrize(("F", "B"), FB)
def test_eager_closes_latency_up_to_half_of_the_work(F: float, B: float) -> None:
    """And costs as many more activations; where M leaves it no room it is still the deepest that M allows."""
    latency = (F + B) / 2
    for P in (2, 3, 4, 6):
        schedule = build("2bw", num_ranks=P, num_microbatches=2 * P, warmup="eager")
        timeline = simulate(schedule, Costs(forward=F, backward=B, latency=latency))
        assert timeline.bubble == 0.0
        assert check(schedule).peak_activations == tuple(2 * (P - 1 - rank) + 1 for rank in range(P))
        assert check(schedule).peak_versions == (2,) * P
        assert simulate(schedule, Costs(forward=F, backward=B, latency=1.5 * latency)).bubble > 0.0
        plain = simulate(
            build("2bw", num_ranks=P, num_microbatches=2 * P, num_batches=24),
            Costs(forward=F, backward=B, latency=latency),
        )
        assert plain.batch_seconds == pytest.approx(2 * P * (F + B + 2 * latency * (P - 1) / P))
        assert plain.bubble > 0.25
        for M in range(P - 1, 2 * P):
            tight = build("2bw", num_ranks=P, num_microbatches=M, warmup="eager")
            check(tight)
            assert simulate(tight, Costs(forward=F, backward=B)).bubble == 0.0
            assert warmups_of(tight)[0] == min(2 * (P - 1), M)


@steady
@given(st.integers(1, 5), st.data())
def test_any_warm_up_holds_what_it_says(P: int, data: st.DataObject) -> None:
    M = data.draw(st.integers(1, 6))
    depths = data.draw(st.lists(st.integers(0, M), min_size=P, max_size=P))
    warmups = sorted(depths, reverse=True)
    schedule = build("2bw", num_ranks=P, num_microbatches=M, warmup=warmups)
    report = check(schedule)
    assert report.peak_versions == (2,) * P
    assert report.peak_activations == tuple(depth + 1 for depth in warmups)


@pytest.mark.parametrize(
    ("name", "sizes", "options", "message"),
    [
        ("pipedream", (2, 4), {"update_every": 3}, r"update_every=3 for 4 microbatches: .* divides 4, such as 1 or 4"),
        ("pipedream", (2, 4), {"vertical_sync": "no"}, r"vertical_sync=.no.: expected True or False"),
        ("pipedream", (3, 6), {"update_every": 3, "replicas": (2, 1)}, r"update_every=3 with .*: expected a multiple"),
        ("pipedream", (3, 5), {"replicas": (2, 1)}, r"=5 with replicas=\(2, 1\): expected a multiple of 2"),
        ("pipedream", (3, 4), {"replicas": (2, 2)}, r"replicas=\(2, 2\) on 3 ranks: .* at least 1 .*, 3 in all"),
        ("2bw", (3, 4), {"replicas": (3, 0)}, r"replicas=\(3, 0\) on 3 ranks: expected a count of at least 1"),
        ("2bw", (3, 4), {"replicas": 3}, r"replicas=3: expected one count per stage, such as \(2, 1\)"),
        ("2bw", (4, 1), {"replicas": (3, 1), "warmup": (0, 0)}, "=1 with .*: expected at least 3, one for each replic"),
        ("2bw", (2, 4), {"warmup": "deep"}, "warmup='deep': expected 'plain', 'eager', or one number per stage"),
        ("2bw", (2, 4), {"warmup": (1,)}, r"warmup=\[1\] for 2 stages: expected 2 whole numbers from 0 to .*=4"),
        ("2bw", (2, 4), {"warmup": (0, 1)}, r"warmup=\[0, 1\]: expected no stage deeper than the one before it"),
        ("2bw", (2, 4), {"num_batches": 0}, "num_batches=0: expected a whole number, at least 1"),
    ],
)
def test_options_that_do_not_fit(name: str, sizes: tuple[int, int], options: dict[str, object], message: str) -> None:
    num_ranks, num_microbatches = sizes
    with pytest.raises(ValueError, match=message):
        build(name, num_ranks=num_ranks, num_microbatches=num_microbatches, **options)


@pytest.mark.parametrize(("P", "M"), [(2, 1), (4, 3), (6, 5)])
def test_2bw_needs_as_many_microbatches_as_its_warm_up(P: int, M: int) -> None:
    """With one fewer, batch 2 would begin on rank 0 before the update that makes its version."""
    check(build("2bw", num_ranks=P, num_microbatches=M))
    if M > 1:
        with pytest.raises(
            ValueError, match=f"={M - 1} under 2bw: expected at least {M}, the warm-up .*; give more microb"
        ):
            build("2bw", num_ranks=P, num_microbatches=M - 1)
    deeper = build("pipedream", num_ranks=P + 2, num_microbatches=M, update_every=M, num_batches=5)
    claimed = replace(deeper, name="2bw", update_every=None, weight_rule="2bw")
    with pytest.raises(ScheduleError, match=rf"0F{2 * M} comes after 0 updates of stage 0, .* asks for version 1"):
        check(claimed)


@pytest.mark.thorough(but=["1"])
@pytest.mark.parametrize("P", [1, 2, 3])
def test_each_update_has_its_window(P: int) -> None:
    """U(t) may stand anywhere from behind the last backward of batch t to before the first forward of batch t + 2, as
    long as the update before it is not younger; anywhere else, lost, or twice, it is refused."""
    M = max(P, 2)
    schedule = build("2bw", num_ranks=P, num_microbatches=M, num_batches=4)
    for rank, program in enumerate(schedule.programs):
        for update in (action for action in program if action.op is Op.U):
            t = update.index
            rest = [action for action in program if action != update]
            with pytest.raises(ScheduleError, match=r"missing: |is update \d of the stage"):
                check(with_program(schedule, rank, rest))
            for position in range(len(rest) + 1):
                moved = [*rest[:position], update, *rest[position:]]
                with pytest.raises(ScheduleError, match=r"is update \d of the stage"):
                    check(with_program(schedule, rank, [*moved[: position + 1], update, *moved[position + 1 :]]))
                before, behind = set(moved[:position]), set(moved[position + 1 :])
                has_gradients = Action(rank, Op.B, (t + 1) * M - 1) in before
                in_time = Action(rank, Op.F, (t + 2) * M) not in before
                in_order = Action(rank, Op.U, t + 1) not in before and Action(rank, Op.U, t - 1) not in behind
                if has_gradients and in_time and in_order:
                    report = check(with_program(schedule, rank, moved))
                    assert max(report.peak_versions) <= 2
                    assert report.staleness == (1,) * P
                else:
                    with pytest.raises(ScheduleError):
                        check(with_program(schedule, rank, moved))


@pytest.mark.thorough(but=["1-1"])
@pytest.mark.parametrize("P", [1, 2, 3, 4, 7])
@pytest.mark.parametrize("M", [1, 4, 6])
def test_one_version_and_the_published_bound(P: int, M: int) -> None:
    """Rank r crosses at most ceil((P - 1 - r) / K) updates: 0 or 1 for K >= P - 1. Nothing is stashed."""
    for every in (k for k in range(1, M + 1) if M % k == 0):
        schedule = build("paci", num_ranks=P, num_microbatches=M, update_every=every)
        report = check(schedule)
        assert report.peak_versions == (1,) * P
        assert [rank.versions for rank in count_in_flight(schedule)] == [1] * P
        assert report.drift == report.staleness == tuple(-(-(P - 1 - rank) // every) for rank in range(P))
        assert report.peak_activations == tuple(P - rank for rank in range(P))
        for rank, program in enumerate(schedule.programs):
            assert crossed(program) == report.drift[rank]
        other = build("pipedream", num_ranks=P, num_microbatches=M, update_every=every)
        assert schedule.programs == other.programs  # the same order: the rule alone differs
        assert check(other).drift == (0,) * P


def crossed(program: Sequence[Action]) -> int:
    """The most updates between a forward and its backward, by walking from one to the other."""
    most = 0
    for at, action in enumerate(program):
        if action.op is Op.F:
            behind = program[at : program.index(action._replace(op=Op.B))]
            most = max(most, sum(each.op is Op.U for each in behind))
    return most


def test_replicas_share_the_bound() -> None:
    """Each of two replicas adds half of a group: with two in flight there, one update of K=2 may be between."""
    report = check(build("paci", num_ranks=4, num_microbatches=4, replicas=(2, 1, 1), update_every=2))
    assert (report.drift, report.peak_versions) == ((1, 1, 1, 0), (1, 1, 1, 1))


def one_version(program: str, batches: int = 2, microbatches: int = 2) -> Schedule:
    return by_hand(program, microbatches=microbatches, batches=batches, rule="one-version")


@pytest.mark.parametrize(
    ("program", "drift"),
    [
        ("0F0 0F1 0B0 0B1 0U0 0F2 0F3 0B2 0B3 0U1", 0),
        ("0F0 0B0 0F1 0F2 0B1 0U0 0B2 0F3 0B3 0U1", 1),
        ("0F0 0I0 0F1 0F2 0I1 0W0 0W1 0U0 0I2 0W2 0F3 0I3 0W3 0U1", 1),
        ("0F0 0F1 0I0 0I1 0W0 0W1 0U0 0F2 0I2 0F3 0I3 0W2 0W3 0U1", 0),
    ],
)
def test_drift_by_hand(program: str, drift: int) -> None:
    assert check(one_version(program)).drift == (drift,)


def test_weight_gradients_read_no_weights() -> None:
    """0W1 runs behind 0U0, on what 0I1 has kept."""
    schedule = one_version("0F0 0I0 0W0 0F1 0I1 0U0 0W1 0U1", batches=2, microbatches=1)
    assert check(schedule).drift == (0,)


def test_an_update_put_off_breaks_the_bound() -> None:
    """Two in flight, an update a microbatch: one update between a forward and its backward, never two."""
    good = "0F0 0F1 0B0 0U0 0F2 0B1 0U1 0F3 0B2 0U2 0B3 0U3"
    assert check(one_version(good, batches=4, microbatches=1)).drift == (1,)
    late = "0F0 0F1 0B0 0B1 0F2 0F3 0U0 0U1 0B2 0U2 0B3 0U3"
    with pytest.raises(
        ScheduleError,
        match=r"2 updates are between 0F2 and its backward on rank 0, and the rule 'one-version' allows 1: with 2 "
        r"in flight, an update after each 1 of the others\. Move updates \(U\) of stage 0",
    ):
        check(one_version(late, batches=4, microbatches=1))


def test_parts_of_weights_are_whole_before_a_backward_reads_them() -> None:
    """Replicas that update a part each: in the drain, too, where no forward stands between U and the next backward."""
    schedule = build("paci", num_ranks=4, num_microbatches=4, replicas=(2, 1, 1), update_every=2)
    lowered = lower(schedule, sharing=Sharing(loss=True, sums=((0, 1),), parts=((0, 1),)))
    for program in lowered.programs[:2]:
        pending = 0
        for step in program.steps:
            if isinstance(step, Action) and step.op is Op.U:
                pending += 1
            elif isinstance(step, GroupStep) and step.op is Op.UNSHARD:
                pending -= 1
            elif isinstance(step, Action):
                assert not pending, f"{step} on rank {program.rank} reads weights of which a part is old"
        assert not pending
