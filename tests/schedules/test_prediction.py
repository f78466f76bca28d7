"""A prediction held against measured steps: causes that add up, and the one input that was wrong by its name."""

from dataclasses import replace
from statistics import fmean, median
from typing import Any

import pytest
from support.inside import Cause, Input, calibrate, measured_inputs, predicted_inputs, replicate
from support.recorded import recorded
from support.sizes import fitting

from stagewright.schedules import (
    FAMILIES,
    AllReduce,
    Costs,
    Link,
    Links,
    Op,
    PredictionCheck,
    Schedule,
    build,
    check_prediction,
    simulate,
)


def uneven(schedule: Schedule) -> Costs:
    stages = range(schedule.num_stages)
    return Costs(
        forward=[1.0 + s % 3 for s in stages],
        input_grad=[1.5 + s % 2 for s in stages],
        weight_grad=[1.25 + s % 2 for s in stages],
        overhead=0.0625,
        latency=0.125,
        reduce_grad=0.5,
        update=0.5,
        norm=0.25 if schedule.has_epilogue else None,
        around=0.5 if schedule.has_epilogue else 0.0,  # a stream's is in its period
    )


def seconds_of(found: PredictionCheck) -> dict[str, float]:
    return {each.name: each.seconds for each in found.causes if abs(each.seconds) > 1e-12}


def check_adds_up(found: PredictionCheck) -> None:
    """From the predicted step to the measured one without a gap, in total and on each rank."""
    assert found.causes[0].before == found.predicted
    assert [each.after for each in found.causes[:-1]] == [each.before for each in found.causes[1:]]
    assert sum(each.seconds for each in found.causes) == pytest.approx(found.step_seconds - found.predicted, abs=1e-9)
    assert [each.name for each in found.causes] == [each.value for each in Cause][: len(found.causes)]


@pytest.mark.thorough(but=["gpipe", "2bw", "zb-h1"])
@pytest.mark.parametrize("name", FAMILIES)
def test_all_inputs_explain_all(name: str) -> None:
    """Under each family: with every input wrong, those that were measured give the measured step to the last bit."""
    P, M = fitting(name, 3, 6)
    schedule = build(name, num_ranks=P, num_microbatches=M)
    costs = uneven(schedule)
    stages = range(schedule.num_stages)
    true = replace(
        costs,
        forward=[1.25 + s % 3 for s in stages],
        input_grad=[1.5 + s % 3 for s in stages],
        overhead=[0.125 + s % 2 / 8 for s in stages],
        latency=0.25,
        reduce_grad=0.75,
        update=1.0,
        around=1.25 if schedule.has_epilogue else 0.0,
    )
    truth = simulate(schedule, true)
    found = check_prediction(simulate(schedule, costs), [recorded(truth, true.overhead)], costs=costs)
    check_adds_up(found)
    off, spread = (found.cause(each).seconds for each in (Cause.UNEXPLAINED, Cause.SPREAD))
    assert (off, spread) == pytest.approx((0.0, 0.0), abs=1e-9)
    for rank, changes in enumerate(found.ranks if not schedule.is_asynchronous else ()):
        assert sum(change.after for change in changes) == pytest.approx(found.measured), rank
        assert sum(change.before for change in changes) == pytest.approx(found.predicted), rank


def linked(replicas: tuple[int, ...] = (2, 1), num_microbatches: int = 8) -> tuple[Schedule, Costs, Links]:
    """A plan as `simulated` has it: stages on unequal replicas, links with bytes on cards, a sum that occupies them."""
    schedule = build("1f1b", num_ranks=sum(replicas), num_microbatches=num_microbatches, replicas=replicas)
    costs = Costs(forward=[1.0, 1.5], backward=[2.0, 3.0], overhead=0.125, update=0.5, norm=0.25, around=0.5)
    pairs = {(a, b) for a in range(sum(replicas)) for b in range(sum(replicas)) if a != b}
    network = {(a, b): Link(latency=0.25, seconds_per_byte=0.125, sending=a, receiving=b) for a, b in pairs}
    return (
        schedule,
        costs,
        Links(network=network, activation_bytes=2.0, sums=(AllReduce(stage=0, seconds=1.0, ways=((0, 1),)),)),
    )


WRONG: dict[str, tuple[Cause, dict[str, Any]]] = {
    "forward of stage 1": (Cause.COMPUTE, {"forward": [1.0, 2.0]}),
    "backward of stage 0": (Cause.COMPUTE, {"backward": [2.5, 3.0]}),
    "stage 1 around an action": (Cause.OVERHEAD, {"overhead": [0.125, 0.375]}),
    "messages of link 0-2": (Cause.MESSAGES, {}),
    "all-reduce of stage 0": (Cause.SUMS, {}),
    "update of stage 0": (Cause.UPDATE, {"update": [1.5, 0.5]}),
    "norm of all gradients": (Cause.UPDATE, {"norm": 1.25}),
    "runtime around a step": (Cause.OUTSIDE, {"around": 1.75}),
}


@pytest.mark.parametrize("wrong", WRONG)
def test_the_one_wrong_input_is_named(wrong: str) -> None:
    """Each in turn, on unequal replicas and links that queue: it alone is named, and its cause has all the seconds."""
    (schedule, costs, links), (cause, change) = linked(), WRONG[wrong]
    true, true_links = replace(costs, **change), links
    if cause is Cause.MESSAGES:
        assert isinstance(links.network, dict)
        slow = replace(links.way(0, 2), latency=1.75)
        true_links = replace(links, network=links.network | {(0, 2): slow})
    if cause is Cause.SUMS:
        true_links = replace(links, sums=(replace(links.sums[0], seconds=3.0),))
    truth = simulate(schedule, true, true_links)
    found = check_prediction(
        simulate(schedule, costs, links), [recorded(truth, true.overhead)], costs=costs, links=links
    )
    check_adds_up(found)
    assert {str(each.what).partition(" on rank")[0] for each in found.wrong} == {wrong}
    assert found.wrong[0].what.cause is cause
    assert found.wrong[0].alone is not None
    rest = {key: value for key, value in seconds_of(found).items() if key != cause.value}
    assert sum(map(abs, rest.values())) <= 0.2 * abs(found.cause(cause).seconds)  # queues in front of others move


def test_as_predicted_nothing_is_named() -> None:
    schedule, costs, links = linked((1, 2))
    truth = simulate(schedule, costs, links)
    found = check_prediction(truth, [recorded(truth, 0.125)] * 3, costs=costs, links=links)
    assert found.wrong == ()
    assert found.num_steps == 3
    assert found.predicted == pytest.approx(found.measured)
    known = predicted_inputs(schedule, costs, links)
    for each in found.inputs:
        assert each.measured >= each.predicted - 1e-9 == pytest.approx(known[each.what] - 1e-9), each.what
        assert each.ratio is None or each.what.kind == "message" or each.ratio == pytest.approx(1.0)


def test_what_varies_is_spread_and_no_input() -> None:
    """One action in a hundred takes ten times as long: medians do not know it, and no input is named for it."""
    schedule = build("1f1b", num_ranks=2, num_microbatches=8)
    costs = Costs(forward=1.0, backward=2.0)
    row = [2.0] * 7 + [20.0]
    truth = simulate(schedule, replace(costs, backward=[2.0, row]))
    found = check_prediction(simulate(schedule, costs), [recorded(truth)], costs=costs, step_seconds=60.0)
    check_adds_up(found)
    assert set(seconds_of(found)) == {Cause.SPREAD, Cause.OUTSIDE}
    assert found.step_seconds == 60.0
    assert found.wrong == ()


@pytest.mark.parametrize("known", [None, Costs(), Costs(norm=0.25)])
def test_what_the_loop_adds_and_what_goes_on_before_updates_are_around_the_step(known: Costs | None) -> None:
    """Between the last backward and the updates the runtime has 0.25 s of work: the norm's, where there is one."""
    schedule = build("1f1b", num_ranks=2, num_microbatches=8)
    costs = Costs(forward=1.0, backward=2.0, update=0.5, around=1.0)
    truth = recorded(simulate(schedule, replace(costs, norm=0.25)))
    found = check_prediction(simulate(schedule, costs), [truth], costs=costs, known=known, step_seconds=40.0)
    check_adds_up(found)
    is_norm = known is None or known.norm is not None
    inputs = {each.what.kind: each.measured for each in found.inputs}
    assert inputs["around"] == pytest.approx(1.0 if is_norm else 1.25)
    added = 40.0 - truth.batch_seconds
    expected = {Cause.UPDATE: 0.25, Cause.OUTSIDE: added} if is_norm else {Cause.OUTSIDE: added + 0.25}
    assert seconds_of(found) == pytest.approx(expected)
    assert found.measured == truth.batch_seconds == truth.makespan + 1.0


@pytest.mark.parametrize("num_steps", [1, 2, 5, 6, 9, 20])
def test_steps_in_the_middle_stand_for_all(num_steps: int) -> None:
    """Some of many steps are replayed; each of these took what its own actions say, so nothing is unexplained."""
    schedule = build("1f1b", num_ranks=2, num_microbatches=4)
    costs = Costs(forward=1.0, backward=2.0)
    steps = [
        recorded(simulate(schedule, replace(costs, backward=[2.0, [2.0, 2.0, 2.0, 2.0 + n % 7]])))
        for n in range(num_steps)
    ]
    found = check_prediction(simulate(schedule, costs), steps, costs=costs)
    check_adds_up(found)
    assert found.num_steps == min(num_steps, 15)
    assert found.cause(Cause.UNEXPLAINED).seconds == pytest.approx(0.0, abs=1e-9)
    assert found.measured == median(each.batch_seconds for each in steps[-15:])


def test_costs_that_the_run_measured_know_what_is_around_an_action() -> None:
    schedule = build("1f1b", num_ranks=2, num_microbatches=4)
    costs = Costs()
    truth = simulate(schedule, replace(costs, overhead=0.5))
    known = replace(costs, overhead=0.375)
    found = check_prediction(simulate(schedule, costs), [recorded(truth, 0.5)], costs=costs, known=known)
    around = [each for each in found.inputs if each.what.kind == "overhead"]
    assert [(each.measured, each.ratio) for each in around] == [(0.375, None)] * 2


def test_what_is_a_little_off_is_not_named_and_all_that_is_far_off_is() -> None:
    schedule, costs, links = linked()
    for backward, named in (
        ([2.0, 3.12], []),  # 4%: worth more than 1% of the step, and not off by 5%
        ([2.5, 3.75], ["backward of stage 0", "backward of stage 1"]),
    ):
        truth = simulate(schedule, replace(costs, backward=backward), links)
        found = check_prediction(simulate(schedule, costs, links), [recorded(truth, 0.125)], costs=costs, links=links)
        assert found.cause(Cause.COMPUTE).seconds > 0.01 * found.predicted
        assert sorted({str(each.what).partition(" on rank")[0] for each in found.wrong}) == named


@pytest.mark.parametrize("slow", [0, 1])
def test_one_of_two_replicas_that_is_slow_is_named(slow: int) -> None:
    """A slow machine is no spread: its rank takes longer each time."""
    schedule = build("1f1b", num_ranks=2, num_microbatches=8, replicas=(2,))
    costs = Costs(forward=1.0, backward=2.0, reduce_grad=0.5, update=0.5)
    row = [4.0 if schedule.owner(0, k) == slow else 2.0 for k in range(8)]
    truth = simulate(schedule, replace(costs, backward=[row]))
    found = check_prediction(simulate(schedule, costs), [recorded(truth)], costs=costs)
    check_adds_up(found)
    assert [str(each.what) for each in found.wrong] == [f"backward of stage 0 on rank {slow}"]
    assert found.wrong[0].ratio == pytest.approx(2.0)
    assert seconds_of(found) == pytest.approx({Cause.COMPUTE: 8.0})


@pytest.mark.parametrize("num_microbatches", [1, 4])
def test_what_is_around_an_action_is_no_part_of_a_message_where_nothing_shows_it(num_microbatches: int) -> None:
    """One microbatch: all ranks but the last wait behind each of their actions."""
    schedule = build("1f1b", num_ranks=3, num_microbatches=num_microbatches)
    costs = uneven(schedule)
    truth = simulate(schedule, costs)
    assert seconds_of(check_prediction(truth, [recorded(truth, 0.0625)], costs=costs)) == {}


def test_a_message_counts_until_its_user_begins_and_a_sum_until_the_first_rank_sees_it() -> None:
    """Ranks see late that something is there: the simulator knows no such delay, it is a part of the message."""
    schedule, costs, links = linked()
    truth = recorded(simulate(schedule, costs, links), 0.125)
    ranks = []
    for rank, trace in enumerate(truth.ranks):
        comm = tuple(span._replace(end=max(span.start + 1e-3, span.end - 0.125)) for span in trace.comm)
        late = tuple(span._replace(end=span.end + rank) for span in trace.collectives)
        ranks.append(replace(trace, comm=comm, collectives=late))
    seen = measured_inputs([replace(truth, ranks=tuple(ranks))])
    usual = measured_inputs([truth])
    assert {each.kind for each in usual} >= {"message", "sum"}
    compared = {each for each in usual if each.kind in ("message", "sum")}
    assert {each: seen[each] for each in compared} == pytest.approx({each: usual[each] for each in compared})


def test_what_queued_does_not_queue_again() -> None:
    """A sum stands on the cards of the last gradients: measured, both have their waits in them."""
    schedule, costs, links = linked((1, 2))
    ring = ((1, 2), (2, 1))
    sums = (AllReduce(stage=1, seconds=3.0, ways=ring),)
    links = replace(links, sums=sums)
    predicted = simulate(schedule, costs, links)
    true = replace(links, sums=(replace(sums[0], seconds=6.0),))
    truth = simulate(schedule, costs, true)
    found = check_prediction(predicted, [recorded(truth, 0.125)], costs=costs, links=links)
    check_adds_up(found)
    again = calibrate(schedule, costs, links, {each.what: each.measured for each in found.inputs}, queueing=False)[1]
    assert again.sums[0].ways == ()
    assert abs(found.cause(Cause.UNEXPLAINED).seconds) < 0.05 * found.predicted


@pytest.mark.parametrize("planned", [0.0, 1.0])
def test_sums_of_tied_weights_of_which_a_plan_knows_too_little_or_nothing(planned: float) -> None:
    schedule = build("1f1b", num_ranks=2, num_microbatches=4)
    costs = Costs(update=0.5, tied=[((0, 1), planned)] if planned else ())
    truth = simulate(schedule, replace(costs, tied=[((0, 1), 2.0)]))
    found = check_prediction(simulate(schedule, costs), [recorded(truth)], costs=costs)
    (own,) = [each for each in found.inputs if str(each.what) == "all-reduce of stages 0, 1"]
    assert own.measured == pytest.approx(2.0)
    if planned:
        assert (own.predicted, own.ratio) == (1.0, pytest.approx(2.0))
        assert found.cause(Cause.SUMS).seconds == pytest.approx(1.0)
    assert "all-reduce of stages 0, 1" in map(str, (each.what for each in found.wrong))
    assert found.cause(Cause.UNEXPLAINED).seconds == pytest.approx(0.0)


def test_steps_of_another_schedule_are_refused() -> None:
    costs = Costs()
    predicted = simulate(build("1f1b", num_ranks=2, num_microbatches=4), costs)
    other = simulate(build("1f1b", num_ranks=2, num_microbatches=8), costs)
    with pytest.raises(ValueError, match="expected steps of the schedule that was predicted"):
        check_prediction(predicted, [other], costs=costs)
    halves, quarters = (
        simulate(build("seq1f1b", num_ranks=2, num_microbatches=4, num_slices=n), costs) for n in (2, 4)
    )
    with pytest.raises(ValueError, match="expected steps of the schedule that was predicted"):
        check_prediction(halves, [quarters], costs=costs)
    with pytest.raises(ValueError, match="0 measured steps: expected at least one"):
        check_prediction(predicted, [], costs=costs)


def replicas_in_chunks(share: float) -> tuple[Schedule, Costs, Links]:
    """Two replicas with three chunks: sums of the last ones go on beside backwards of the first."""
    schedule = replicate(build("interleaved", num_ranks=1, num_microbatches=4, num_chunks=3), 2)
    costs = Costs(forward=1.0, backward=[2.0, 2.5, 3.0], update=[0.5, 0.25, 0.5], norm=0.25, sum_busy=share)
    sums = tuple(AllReduce(stage=stage, seconds=1.0, ways=((0, 1), (1, 0))) for stage in range(3))
    return schedule, costs, Links(network=Link(latency=0.125), sums=sums)


@pytest.mark.parametrize(("planned", "true"), [(0.0, 0.0), (0.5, 0.5), (0.0, 0.75), (1.0, 0.25)])
def test_what_sums_take_of_the_processor_is_blamed_on_sums(planned: float, true: float) -> None:
    """Backwards beside them take longer: that is no compute and no spread."""
    schedule, costs, links = replicas_in_chunks(true)
    truth = simulate(schedule, costs, links)
    costs = replace(costs, sum_busy=planned)
    found = check_prediction(simulate(schedule, costs, links), [recorded(truth)], costs=costs, links=links)
    check_adds_up(found)
    held = {each.what.at: each for each in found.inputs if each.what.kind == "held"}
    assert {at: each.measured for at, each in held.items()} == pytest.approx({(1,): true, (2,): true})
    assert {at: each.predicted for at, each in held.items()} == {(1,): planned, (2,): planned}
    named = {str(each.what) for each in found.wrong}
    assert named == (set() if planned == true else {f"all-reduce of stage {s} on the processor" for s in (1, 2)})
    assert seconds_of(found) == pytest.approx({} if planned == true else {Cause.SUMS: truth.makespan - found.predicted})


def test_a_share_of_the_processor_is_of_what_counts_as_the_sum(monkeypatch: pytest.MonkeyPatch) -> None:
    """The median of the sums of a stream beside their mean: a share of 0.5 came out as 0.21."""
    schedule, sums = replicate(build("2bw", num_ranks=1, num_microbatches=4), 2), AllReduce(stage=0, seconds=1.0)
    steps = simulate(schedule, Costs(forward=1.0, backward=2.0), Links(network=Link(), sums=(sums,)))
    later = [
        tuple(span._replace(end=span.end + n % 3 // 2 * 4.0) for n, span in enumerate(trace.collectives))
        for trace in steps.ranks
    ]
    ranks = tuple(replace(trace, collectives=own) for trace, own in zip(steps.ranks, later, strict=True))
    monkeypatch.setitem(measured_inputs.__globals__, "measured_shares", lambda _: {0: 0.5})
    found = measured_inputs([replace(steps, ranks=ranks)], many=fmean)
    summed, held = (found[Input(Cause.SUMS, kind, (0,))] for kind in ("sum", "held"))
    assert (summed, held) == (pytest.approx(7 / 3), pytest.approx(summed / 2))


def test_updates_beside_gathers_are_not_longer_updates() -> None:
    schedule, costs, links = replicas_in_chunks(0.5)
    links = replace(links, sums=tuple(replace(each, gather=0.75) for each in links.sums))
    truth = simulate(schedule, costs, links)
    assert max(s.end - s.start for s in truth.ranks[0].compute if s.what.op is Op.U) > 0.5
    assert seconds_of(check_prediction(truth, [recorded(truth)], costs=costs, links=links)) == {}


@pytest.mark.parametrize(("name", "options"), [("interleaved", {"num_chunks": 2}), ("seq1f1b", {"num_slices": 2})])
def test_a_link_counts_the_messages_of_all_chunks_and_slices(name: str, options: dict[str, int]) -> None:
    schedule = build(name, num_ranks=4, num_microbatches=8, **options)
    steps = [simulate(schedule, Costs(latency=latency)) for latency in (0.1, 0.2)]
    found = check_prediction(steps[0], steps[1:], costs=Costs(latency=0.1))
    times = {each.what.at: each.times for each in found.inputs if each.what.kind == "message"}
    assert times[0, 1] == 16
