"""The seconds that a rank's recorder keeps, costs made of several ranks', and seconds of the runtime around them."""

import time
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from support.inside import (
    HostClock,
    RankRecorder,
    Timed,
    TimedAction,
    assemble_timeline,
    clipping,
    costs_from_medians,
    make_optimizers,
    measure_runtime_seconds,
    named,
    render_terminal,
    runtime_seconds,
    trace_file,
)
from support.inside import PipeTrainingTraining as Training
from support.small import sgd
from torch import nn

from stagewright.pipe import PipelineModule
from stagewright.schedules import Action, Collective, Costs, Message, MessageKind, Op, Timeline, build, simulate
from stagewright.viz import Exhibit, MeasuredStep, write_explorer, write_perfetto

ACT = Message(MessageKind.ACT, 0, 1, 0)


def ran(action: str, seconds: float) -> TimedAction:
    return Action.parse(action), seconds


def _step(recorder: RankRecorder, begin: float) -> None:
    """0F0 takes 1, 0F1 begins 0.5 later, of which 0.3 was spent waiting; 0B0 begins 0.25 after that."""
    recorder.begin()
    recorder.action(Action(0, Op.F, 0), begin, begin + 1.0)
    recorder.wait((ACT, ACT._replace(index=1)), begin + 1.1, begin + 1.4)
    recorder.action(Action(2, Op.F, 1), begin + 1.5, begin + 2.5)
    recorder.action(Action(0, Op.B, 0), begin + 2.75, begin + 5.0)


def test_time_between_actions_counts_for_the_one_before_and_waits_do_not() -> None:
    recorder = RankRecorder(HostClock())
    _step(recorder, 0.0)
    _step(recorder, 100.0)  # the time between steps is nobody's
    assert recorder.median_overheads() == pytest.approx({0: 0.2, 2: 0.25})
    assert recorder.medians() == pytest.approx({((0,), Op.F): 1.0, ((2,), Op.F): 1.0, ((0,), Op.B): 2.25})
    recorder.forget()
    assert recorder.median_overheads() == {}
    recorder.action(Action(2, Op.B, 1), 106.0, 107.0)  # behind 0B0, which ended at 105
    assert recorder.median_overheads() == {0: 1.0}


def hand_clock() -> Any:
    clock: Any = HostClock()
    clock.at, clock.stamp = 0.0, lambda: clock.at
    return clock


def _whole_step(recorder: RankRecorder, begin: float, *, norm: float) -> None:
    """1 s in front of 0F0, and a wait; 2 s between the sum and 0U0, waits and the norm apart; 0.5 s behind it."""
    clock: Any = recorder.clock
    clock.at = begin
    recorder.enter()
    recorder.begin()
    recorder.wait((ACT,), begin + 0.5, begin + 10.5)
    recorder.action(Action(0, Op.F, 0), begin + 11.0, begin + 12.0)
    recorder.action(Action(0, Op.B, 0), begin + 12.0, begin + 14.0)
    recorder.collective(Collective((0,), Op.REDUCE_GRAD, 0), begin + 14.0, begin + 17.0)
    recorder.wait((ACT,), begin + 17.0, begin + 18.0)
    if norm:
        recorder.norm(begin + 19.0, begin + 19.0 + norm)
    recorder.action(Action(0, Op.U, 0), begin + 20.0 + norm, begin + 21.0 + norm)
    clock.at = begin + 21.5 + norm
    recorder.leave()


@pytest.mark.parametrize("norm", [0.0, 4.0])
def test_what_is_around_a_step_is_found_without_waits_sums_and_norms(norm: float) -> None:
    recorder = RankRecorder(hand_clock())
    assert recorder.median_around() is None
    _whole_step(recorder, 0.0, norm=norm)
    assert recorder.median_around() == pytest.approx((1.0, 2.0, 0.5))
    assert recorder.snapshot()().step == (0.0, 21.5 + norm)
    _whole_step(recorder, 100.0, norm=norm)  # the 78 s between two steps are nobody's
    assert recorder.median_around() == pytest.approx((1.0, 2.0, 0.5))
    recorder.begin(counts=False)
    assert recorder.snapshot()().step is None
    recorder.leave()
    assert recorder.median_around() == pytest.approx((1.0, 2.0, 0.5))
    recorder.forget()
    assert recorder.median_around() is None


def test_what_begins_sums_is_around_the_step_and_nothing_around_an_action() -> None:
    """Two chunks: gradients of the last one are copied and sent off before the backward of the first."""
    recorder = RankRecorder(hand_clock())
    clock: Any = recorder.clock
    clock.at = 0.0
    recorder.enter()
    recorder.begin()
    recorder.action(Action(0, Op.F, 0), 1.0, 2.0)
    recorder.action(Action(1, Op.F, 0), 2.25, 3.0)
    recorder.action(Action(1, Op.B, 0), 3.25, 5.0)
    recorder.action(Action(0, Op.B, 0), 9.0, 11.0)
    recorder.collective(Collective((1,), Op.REDUCE_GRAD, 0), 5.0, 12.0)
    recorder.collective(Collective((0,), Op.REDUCE_GRAD, 0), 11.0, 15.0)
    recorder.action(Action(0, Op.U, 0), 16.0, 17.0)
    clock.at = 17.5
    recorder.leave()
    assert recorder.median_overheads() == {0: 0.25, 1: 0.25}
    assert recorder.median_around() == (1.0, 1.0 + 4.0, 0.5)
    (only,) = recorder.steps()
    assert [seconds for _, seconds in only] == [1.25, 1.0, 2.0, 2.25, 1.0]


def test_steps_have_each_action_with_what_came_behind_it() -> None:
    recorder = RankRecorder(HostClock())
    _step(recorder, 0.0)
    recorder.action(Action(0, Op.U, 0), 7.0, 7.5)  # behind a wait for the norm, which is no overhead of 0B0
    usual = (0.2 + 0.25) / 2
    expected = [(0, Op.F, 1.2), (2, Op.F, 1.25), (0, Op.B, 2.25 + usual), (0, Op.U, 0.5)]

    def rounded(ran: Sequence[TimedAction]) -> list[tuple[int, Op, float]]:
        return [(action.stage, action.op, round(seconds, 9)) for action, seconds in ran]

    (only,) = recorder.steps()
    assert rounded(only) == expected
    _step(recorder, 100.0)
    first, second = recorder.steps()
    assert rounded(first) == expected
    assert rounded(second) == expected[:3]
    recorder.forget()
    assert recorder.steps() == []
    recorder.action(Action(0, Op.U, 0), 107.0, 107.5)
    assert recorder.steps() == []  # what is left of a step that was forgotten
    for number in range(60):
        _step(recorder, 1000.0 + number)
    assert len(recorder.steps()) == 51  # the newest one runs


def test_a_backward_that_ran_as_one_is_halved_in_steps() -> None:
    recorder = RankRecorder(HostClock())
    recorder.begin()
    recorder.runs_as_one([Action(0, Op.I, 0)])
    recorder.action(Action(0, Op.I, 0), 0.0, 1.0)
    recorder.action(Action(0, Op.W, 0), 1.0, 1.0)
    recorder.action(Action(0, Op.F, 1), 1.5, 2.0)
    assert recorder.steps() == [(ran("0I0", 0.75), ran("0W0", 0.75), ran("0F1", 1.0))]
    assert recorder.median_overheads() == {0: 0.5}


def test_ranks_that_take_turns_have_nothing_between_actions() -> None:
    recorder = RankRecorder(HostClock(), takes_turns=True)
    _step(recorder, 0.0)
    assert recorder.steps() == [(ran("0F0", 1.0), ran("2F1", 1.0), ran("0B0", 2.25))]
    assert recorder.median_overheads() == {}


def test_windows_of_overlapping_batches_have_each_step_once() -> None:
    """Four steps together; the one that runs counts, evaluation begins a window anew, and so does forgetting."""
    recorder = RankRecorder(HostClock(), window=4)

    def run(steps: range) -> list[list[int]]:
        for step in steps:
            recorder.begin()
            recorder.action(Action(0, Op.F, step), 10.0 * step, 10.0 * step + 1)
        return [[span.what.index for span in record.compute] for record in recorder.records()]

    assert run(range(3)) == []
    assert run(range(3, 4)) == [[0, 1, 2, 3]]
    assert run(range(4, 11)) == [[0, 1, 2, 3], [4, 5, 6, 7]]
    recorder.begin(counts=False)
    recorder.action(Action(0, Op.F, 99), 0.0, 100.0)
    assert recorder.medians()[(0,), Op.F] == 1.0
    assert run(range(11, 15)) == [[0, 1, 2, 3], [4, 5, 6, 7], [11, 12, 13, 14]]
    recorder.forget()
    assert run(range(15, 18)) == []
    assert run(range(18, 19)) == [[15, 16, 17, 18]]
    assert len(run(range(19, 219))) == 13  # of 50 steps, and the one that runs
    assert len(recorder.steps()) == 51  # these, and the one that runs


def made(*by_rank: dict[Timed, float], replicas: tuple[int, ...]) -> Costs:
    schedule = build("1f1b", num_ranks=sum(replicas), num_microbatches=4, replicas=replicas)
    return costs_from_medians(by_rank, {0: 0.25}, schedule=schedule, latency=0.5, norm=None, around=0.0)


def measured(forward: float, backward: float, *, stage: int = 0, **more: float) -> dict[Timed, float]:
    found = {((stage,), Op.F): forward, ((stage,), Op.B): backward}
    return found | {((stage,), Op(op)): seconds for op, seconds in more.items()}


def test_replicas_keep_what_each_of_them_measured() -> None:
    """Ranks 0 and 1 share stage 0, microbatch by microbatch; the sum takes what it took the last of them to come."""
    one, two = measured(1.0, 2.0, U=1.0, REDUCE_GRAD=9.0), measured(3.0, 5.0, U=2.0, REDUCE_GRAD=4.0)
    costs = made(one, two, measured(7.0, 8.0, stage=1), replicas=(2, 1))
    assert costs.forward == ((1.0, 3.0, 1.0, 3.0), 7.0)
    assert costs.backward == ((2.0, 5.0, 2.0, 5.0), 8.0)
    assert (costs.update, costs.reduce_grad) == ((1.5, 0.0), (4.0, 0.0))
    assert (costs.overhead, costs.latency) == ((0.25, 0.0), 0.5)
    assert made(measured(1.0, 2.0), measured(1.0, 2.0), replicas=(2,)).forward == (1.0,)
    costs = made(measured(1.0, 2.0), {}, measured(2.0, 4.0), replicas=(3,))
    assert costs.forward == ((1.0, 1.5, 2.0, 1.0),)
    # Rank 0 ran I and W apart, rank 1 both as one; stage 1 did not split any.
    apart: dict[Timed, float] = {((0,), Op.F): 1.0, ((0,), Op.I): 2.0, ((0,), Op.W): 3.0}
    costs = made(apart, apart | {((0,), Op.I): 4.0}, measured(1.0, 6.0, stage=1), replicas=(2, 1))
    assert costs.input_grad == ((2.0, 4.0, 2.0, 4.0), 3.0)
    assert costs.weight_grad == (3.0, 3.0)
    assert costs.backward == ((5.0, 7.0, 5.0, 7.0), 6.0)
    costs = made(measured(1.0, 2.0), measured(3.0, 6.0), measured(5.0, 5.0, stage=1), replicas=(2, 1))
    table = costs.table(num_stages=2)
    assert (table.means(Op.F), table.means(Op.B)) == ((2.25, 5.0), (4.25, 5.0))  # each with 0.25 around it


def test_exchanges_are_of_the_action_in_which_they_were() -> None:
    recorder = RankRecorder(HostClock())
    recorder.exchange(-2.0, -1.0)  # while stages were built
    recorder.begin()
    recorder.exchange(0.25, 0.5)
    recorder.exchange(0.5, 0.75)
    recorder.action(Action(0, Op.F, 1), 0.0, 1.0)
    recorder.action(Action(0, Op.F, 2), 1.0, 2.0)
    recorder.exchange(2.5, 3.0)
    recorder.action(Action(0, Op.B, 1), 2.0, 3.0)
    within = Collective((0,), Op.EXCHANGE, 1)
    assert recorder.snapshot()().exchanges == ((within, 0.25, 0.5), (within, 0.5, 0.75), (within, 2.5, 3.0))


def test_rows_of_experts_are_added_up_over_the_layers_of_an_action(tmp_path: Path) -> None:
    """In a file and a timeline, too; none travel from when stages were built, or from another action."""
    recorder = RankRecorder(HostClock())
    recorder.rows([9, 9], 0)
    recorder.begin()
    for by_member in ([4, 0], [1, 3]):
        recorder.rows(by_member, 0)
    recorder.exchange(0.25, 0.5)
    recorder.action(Action(0, Op.F, 0), 0.0, 1.0)
    recorder.action(Action(0, Op.B, 0), 1.0, 3.0)
    record = recorder.snapshot()()
    assert record.rows == ((Action(0, Op.F, 0), (5, 7, 4.0)),)
    line = trace_file.parse_line(trace_file.step_line("run", 1, {0: record}).strip())
    assert trace_file.parse_step(line)[0] == record
    timeline = assemble_timeline(build("1f1b", num_ranks=1, num_microbatches=1), [record])
    assert timeline.busiest_member == 7 / 4
    assert Timeline.from_json(timeline.to_json()) == timeline
    assert simulate(timeline.schedule, Costs(forward=1, backward=2)).busiest_member is None
    exhibit, file = Exhibit(name="run", measured=(MeasuredStep(1, timeline),)), tmp_path / "trace.json"
    assert "busiest member of experts 1.75 x mean" in render_terminal([exhibit], width=90, colour=False)
    write_perfetto(timeline, file)
    write_explorer([exhibit], page := tmp_path / "page.html")
    for text in (file.read_text(), page.read_text()):
        assert text.count('"5 rows, the busiest member 1.75 times the mean"') == 1


CPU = torch.device("cpu")


def test_what_an_action_and_a_step_take_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each action takes 3 s of the runtime, each step 40 s more, and a microbatch's own compute 2 s here and there."""
    clock = SimpleNamespace(seconds=0.0)
    clock.thread_time = lambda: clock.seconds
    monkeypatch.setattr(runtime_seconds, "time", clock)
    monkeypatch.setattr(runtime_seconds, "_ROUNDS", 2)
    took, batch, step = RankRecorder.action, Training.accumulate, Training.step
    plain = runtime_seconds._plain

    def action(self, what, *about):
        clock.seconds += 0.0 if what.op is Op.U else 3.0 + 0.5
        return took(self, what, *about)

    def accumulate(self, given):
        clock.seconds += 50.0
        return batch(self, given)

    def whole_step(self, given):
        clock.seconds += 40.0
        return step(self, given)

    def loop(modules, num_microbatches):
        clock.seconds += 2.0 * num_microbatches
        plain(modules, num_microbatches)

    monkeypatch.setattr(RankRecorder, "action", action)
    monkeypatch.setattr(Training, "accumulate", accumulate)
    monkeypatch.setattr(Training, "step", whole_step)
    monkeypatch.setattr(runtime_seconds, "_plain", loop)
    assert measure_runtime_seconds(CPU) == (3.0, 40.0)


@pytest.mark.thorough
def test_nothing_is_left_of_it() -> None:
    """Random numbers go on as if it had not been; where another device computes, the host works ahead: none."""
    torch.manual_seed(5)
    expected = torch.rand(3)
    torch.manual_seed(5)
    with torch.no_grad():
        assert min(measure_runtime_seconds(CPU)) > 0
        assert not torch.is_grad_enabled()
    assert torch.equal(torch.rand(3), expected)
    assert measure_runtime_seconds(torch.device("cuda")) == (0.0, 0.0)


@pytest.mark.parametrize("max_grad_norm", [None, 1.0])
def test_a_timeline_has_what_a_step_takes(max_grad_norm: float | None) -> None:
    """From where train_step begins to where its result is made; where gradients alone are made nobody says so."""
    layers = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3))
    pipe = PipelineModule(
        layers,
        schedule="1f1b",
        mesh={"pipe": 2},
        num_microbatches=2,
        loss_fn=F.mse_loss,
        optimizer=sgd,
        max_grad_norm=max_grad_norm,
    )
    x = torch.ones(4, 3)
    longest = 0.0
    for _ in range(3):
        begun = time.perf_counter()
        timeline = pipe.train_step(x, x).timeline()
        assert timeline.makespan < timeline.batch_seconds < time.perf_counter() - begun
        assert timeline.batch_seconds == timeline.makespan + timeline.around
        longest = max(longest, timeline.batch_seconds)
        assert Timeline.from_json(timeline.to_json()) == timeline
    costs = pipe.measured_costs()
    assert 0 < costs.around < longest
    assert simulate(pipe.schedule, costs).around == costs.around
    assert pipe.forward_backward(x, x).timeline().around == 0.0


def test_the_first_step_clips_by_the_norm_of_all_parameters() -> None:
    torch.manual_seed(0)
    plain, clipped = (nn.Linear(3, 2).double() for _ in range(2))
    clipped.load_state_dict(plain.state_dict())

    def make(parameters: list[tuple[str, nn.Parameter]]) -> list[torch.optim.Optimizer]:
        return [torch.optim.SGD([p], lr=0.1) for _, p in parameters]  # a step each for weight and bias

    for model, factory in ((plain, named(make)), (clipped, clipping(named(make), 0.5))):
        model(torch.arange(6.0, dtype=torch.float64).view(2, 3)).square().sum().backward()
        if model is plain:
            assert nn.utils.clip_grad_norm_(model.parameters(), 0.5) > 1
        for optimizer in make_optimizers(factory, list(model.named_parameters()), where="here"):
            optimizer.step()
    for one, other in zip(plain.parameters(), clipped.parameters(), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-5, atol=0)  # the runtime adds 1e-6 to the norm, as torch does
