"""Background work in the waits of a step: pieces that fit, once each, in order; and a step that knows nothing of it."""

from __future__ import annotations

import os
import random
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from datetime import timedelta
from itertools import count, pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from support.inside import Fills
from support.pool import Pool
from support.small import WIDTH, X, Y, layers, make, stream
from torch import nn

import stagewright as sw
from stagewright.comm import PipelineError
from stagewright.schedules import Action, Costs, Op, ScheduleError, attribute_idle, build, check, with_fill

B3, F1 = Action(0, Op.B, 3), Action(0, Op.F, 1)


class Hand:
    """A clock that pieces and waits move."""

    def __init__(self) -> None:
        self.at = 0.0
        self.fills = Fills(lambda: self.at)
        self.done: list[int] = []

    def spend(self, seconds: float) -> None:
        self.at += seconds

    def pieces(self, *seconds: float) -> Iterator[Callable[[], object]]:
        for number, each in enumerate(seconds):
            yield lambda number=number, each=each: (self.spend(each), self.done.append(number))  # type: ignore[misc]

    def wait(self, place: Action | None, gap: float, *, norm: float = 0.0, is_seen: bool = False) -> float:
        """A rank comes to a place whose message is there `gap` later; seconds by which pieces were late."""
        due = self.at + gap
        self.fills.pass_place((0, place), norm, lambda: is_seen and self.at >= due)
        late = max(0.0, self.at - due)
        self.at = max(self.at, due)
        self.fills.met(0)
        return late


def test_pieces_run_in_order_as_long_as_the_next_one_fits() -> None:
    """Gaps of 10, of which 9 count; pieces of 2."""
    hand = Hand()
    work = hand.fills.add(hand.pieces(*[2.0] * 12), name=None, seconds=2.0)
    counts = [hand.wait(B3, 10.0) or work.num_done for _ in range(6)]
    assert counts == [0, 0, 4, 8, 12, 12]  # two steps are looked at first
    assert hand.done == list(range(12))
    assert work.is_done


def test_a_place_counts_as_its_shortest_gap_but_one_and_each_rank_and_place_for_itself() -> None:
    hand = Hand()
    work = hand.fills.add(hand.pieces(*[2.0] * 99), name=None, seconds=2.0)
    for gap in (5.0, 10.0, 10.0):
        hand.wait(B3, gap)
        hand.wait(F1, 1.0)
    assert work.num_done == 2  # in front of the third B3, of which 4.5 count
    hand.wait(B3, 10.0)
    hand.wait(B3, 10.0)
    assert work.num_done == 8  # 4.5 again; then that the rank was late once among four does not count
    hand.fills.pass_place((1, B3), 0.0, lambda: False)  # of another rank nothing is known
    assert (hand.wait(B3, 10.0), work.num_done) == (0.0, 12)


def test_a_place_that_was_filled_for_too_long_is_filled_less() -> None:
    hand = Hand()
    work = hand.fills.add(hand.pieces(*[1.0] * 99), name=None, seconds=1.0)
    for _ in range(3):
        hand.wait(B3, 10.0)
    late = [hand.wait(B3, 4.0) for _ in range(5)]  # the wait is shorter from now on
    assert late == [5.0, 5.0, 0.0, 0.0, 0.0]
    assert work.num_done > 18


def test_where_a_message_is_seen_to_come_one_piece_at_most_is_late() -> None:
    """Gaps are as long as they were in front of the piece; one that is over is not filled."""
    hand = Hand()
    work = hand.fills.add(hand.pieces(*[1.5] * 99), name=None, seconds=1.5)
    for _ in range(3):
        hand.wait(B3, 10.0)
    counts, late = [work.num_done], []
    for gap in (4.0, 0.0, 4.0, 4.0, 10.0):
        late.append(hand.wait(B3, gap, is_seen=True))
        counts.append(work.num_done)
    assert late == [0.5, 0.0, 0.0, 0.0, 0.0]
    assert [more - before for before, more in pairwise(counts)] == [3, 0, 1, 1, 1]  # 3.0 twice, but for the 0.0


def test_pieces_of_unknown_length_are_tried_alone_at_the_longest_place() -> None:
    hand = Hand()
    hand.fills.add(hand.pieces(8.0, *[1.0] * 99), name=None, seconds=None)
    counts = []
    for _ in range(7):
        hand.wait(F1, 5.0)
        hand.wait(B3, 10.0)
        counts.append(len(hand.done))
    assert counts == [0, 0, 1, 2, 3, 12, 25]  # what the first one takes says nothing; the fourth tells, and 8 more fit


@pytest.mark.parametrize("seconds", [None, 2.0])
def test_work_that_waits_itself_waits_no_longer_than_its_place(seconds: float | None) -> None:
    """Its message comes 4 behind the rank: one piece of unknown length follows, or two of 2; then it never comes."""
    hand = Hand()
    for _ in range(3):
        hand.wait(B3, 10.0)
    work, comes = hand.fills.add(hand.pieces(*[2.0] * 9), name=None, seconds=seconds), hand.at + 4.0

    def stands() -> bool:
        hand.spend(0.125)
        return hand.at < comes

    work.stands = stands
    assert hand.wait(B3, 10.0) == 0.0
    assert work.num_done == (1 if seconds is None else 2)
    comes = float("inf")
    assert hand.wait(B3, 10.0) == 0.0
    assert work.num_done == (1 if seconds is None else 2)


def test_what_took_too_long_once_is_tried_again() -> None:
    hand = Hand()
    hand.fills.add(hand.pieces(*[30.0] * 4, *[1.0] * 99), name=None)
    for _ in range(900):
        hand.wait(B3, 10.0)
    assert len(hand.done) == 4
    for _ in range(200):
        hand.wait(B3, 10.0)
    assert len(hand.done) == 103


def test_the_end_of_a_batch_is_as_long_as_the_norm_that_follows() -> None:
    hand = Hand()
    work = hand.fills.add(hand.pieces(*[2.0] * 99), name=None, seconds=2.0)
    counts, norm = [], 0.0
    for _ in range(5):
        before = work.num_done
        hand.fills.pass_place((0, None), norm, lambda: False)
        counts.append(work.num_done - before)
        norm = 5.0 - 2.0 * counts[-1]
    assert counts == [0, 0, 2, 2, 2]


@pytest.mark.thorough
def test_nothing_but_the_clock_tells_that_a_run_was_filled() -> None:
    """Losses, weights, gradients and generators; pieces draw, and are all done, once, in order."""

    def run(**options: Any) -> tuple[Any, ...]:
        filled = options.pop("filled")
        torch.manual_seed(0)
        pipe, done, drawn = make(max_grad_norm=1.0, **options), list[int](), []

        def piece(number: int) -> Callable[[], object]:
            return lambda: (done.append(number), drawn.append((torch.rand(1), random.random(), np.random.rand())))

        works = (
            [pipe.fill([piece(n) for n in part], seconds=1e-9) for part in (range(9), range(9, 20))] if filled else []
        )
        losses = [pipe.train_step(X, Y).loss for _ in range(12)]
        num_done = len(done)
        losses.append(pipe.eval_step(X, Y).loss)
        assert len(done) == num_done
        states = torch.get_rng_state(), random.getstate()[1], np.random.get_state()[1].tolist()  # type: ignore[index]
        pipe.forward_backward(X, Y)
        gradients = [p.grad for p in pipe.parameters()]
        weights = pipe.full_state_dict()
        for work in works:
            work.finish()
        pipe.close()
        assert done == (list(range(20)) if filled else [])
        assert not filled or works[1].num_done == 11
        return losses, weights, gradients, states

    random.seed(1), np.random.seed(1)  # type: ignore[func-returns-value]
    plain = run(filled=False)
    random.seed(1), np.random.seed(1)  # type: ignore[func-returns-value]
    for one, other in zip(plain, run(filled=True), strict=True):
        torch.testing.assert_close(one, other, rtol=0, atol=0)


def test_a_stream_is_filled_alike() -> None:
    losses, done = [], list[int]()
    for filled in (False, True):
        pipe = stream()
        if filled:
            pipe.fill((lambda n=n: done.append(n) for n in range(10_000)), seconds=1e-9)  # type: ignore[misc]
        losses.append([pipe.train_step(X, Y).loss for _ in range(8)] + [result.loss for result in pipe.flush()])
    assert losses[0] == losses[1]
    assert done == list(range(len(done))) != []
    with pytest.warns(UserWarning, match=r"drops background work: <FillWork .*genexpr.*: \d+ pieces done, more"):
        pipe.close()


def test_what_is_no_work_is_refused_by_name() -> None:
    pipe = make()
    for work, message in (
        (3, r"fill\(3\): expected an iterable of callables"),
        (print, r"fill\(<built-in function print>\): expected \[piece\]"),
        ([print, 3], r"fill\(\[..., 3, ...\]\): expected callables"),
    ):
        with pytest.raises(ValueError, match=message):
            pipe.fill(work)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="seconds=0: expected what a piece takes, above 0"):
        pipe.fill([], seconds=0)
    pipe.close()
    with pytest.raises(PipelineError, match=r"expected fill\(...\) before close\(\)"):
        pipe.fill([])
    with pytest.raises(ValueError, match="fill: the stages are not built yet"):
        make(example_inputs=None).fill([])
    with pytest.raises(ScheduleError, match=r"has background work in it \(0FILL\d+, ...\), and its batches overlap"):
        stream(with_fill(build("2bw", num_ranks=2, num_microbatches=4), Costs()))


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        (lambda pipe: 1 / 0, "ZeroDivisionError: division by zero"),
        (lambda pipe: pipe.train_step(X, Y), "ValueError: a piece of background work calls its pipeline"),
        (lambda pipe: pipe.eval_step(X, Y), "ValueError: a piece of background work calls its pipeline"),
    ],
)
def test_a_piece_that_fails_ends_the_step_by_name(wrong: Callable[[Any], object], message: str) -> None:
    pipe = make()
    work = pipe.fill(iter([lambda: None, lambda: wrong(pipe)]), name="mine", seconds=1e-9)
    with pytest.raises(RuntimeError, match=f"piece 1 of the background work 'mine' failed: {message}"):
        all(pipe.train_step(X, Y) for _ in range(20))
    assert work.is_done
    assert pipe.train_step(X, Y).loss is not None  # as behind any error in a step
    pipe.close()


def test_a_piece_that_changes_a_weight_in_a_step_ends_the_step_by_name() -> None:
    """Behind a step it may."""
    pipe = make()

    def change() -> None:
        with torch.no_grad():
            pipe.parameters()[0].mul_(2.0)

    pipe.fill([change], name="mine").finish()
    pipe.fill(iter([lambda: None, change]), name="mine", seconds=1e-9)
    with pytest.raises(
        ValueError, match="piece 1 of the background work 'mine' changed a weight in the midst of a step"
    ):
        all(pipe.train_step(X, Y) for _ in range(20))
    pipe.close()


def test_an_evaluation_in_the_waits_is_of_what_it_was_given() -> None:
    """Though its batch's memory is filled again; and not of weights that were edited since."""
    pipe = make()
    wanted, x, y = pipe.eval_step(X, Y).loss, X.clone(), Y.clone()
    work = pipe.fill_eval(x, y)
    x.zero_()
    y.zero_()
    pipe.train_step(x, y)
    assert work.result is not None
    assert work.result.loss == wanted
    pipe.fill_eval(x, y)
    with torch.no_grad():
        pipe.parameters()[-1].mul_(2.0)
    with pytest.raises(
        RuntimeError, match="ValueError: a weight was changed behind fill_eval: expected that behind the"
    ):
        pipe.train_step(x, y)
    pipe.close()


def test_what_a_generator_yields_is_looked_at() -> None:
    pipe = make()
    work = pipe.fill(iter([3]), name="mine")  # type: ignore[list-item]
    with pytest.raises(RuntimeError, match="'mine' failed: TypeError: expected a callable without arguments, found 3"):
        work.finish()


def test_a_checkpoint_is_copied_where_the_process_waits(tmp_path: Path) -> None:
    """The state behind its step, from pieces in the next one and the rest in front of its update."""
    pipe = make(model=layers(40), optimizer=torch.optim.Adam)
    with pipe.checkpointer(tmp_path, every=3, copies="waits") as saver:
        for step in range(1, 10):
            pipe.train_step(X, Y)
            saver.step()
            if step in (3, 6):
                wanted = {name: value.clone() for name, value in pipe.state_dict().items()}
                work = pipe._building.built("fills").training.fills.works[-1]
            elif step in (4, 7):
                assert repr(work) == f"<FillWork the checkpoint behind step {step - 1}: {work.num_done} pieces done>"
                saver.wait()
                found = make(model=layers(40), optimizer=torch.optim.Adam)
                found.load(saver.records[-1].path)
                assert all(torch.equal(value, wanted[name]) for name, value in found.state_dict().items())
                if step == 7:
                    assert work.num_done > 0
    assert [record.step for record in saver.records] == [3, 6, 9]
    with pytest.raises(ValueError, match="copies='other': expected one of"):
        pipe.checkpointer(tmp_path, every=1, copies="other")  # type: ignore[arg-type]
    pipe.close()


# --- over processes ---


def filled_run(filled: bool, marked: bool) -> tuple[Any, ...]:
    """The last rank waits for the first one's forward, which sleeps."""
    torch.manual_seed(0)
    schedule = build("1f1b", num_ranks=2, num_microbatches=4)
    rank, done = int(os.environ["RANK"]), list[int]()
    if marked:  # rank 1 alone has a place, in front of its first forward
        first, last = schedule.programs
        schedule = replace(schedule, programs=(first, (Action(1, Op.FILL, 0), *last)))
        check(schedule)
    pipe = make(mesh=None, num_microbatches=None, schedule=schedule, max_grad_norm=1.0)
    nap = lambda n: lambda: (time.sleep(0.001), done.append(n))  # noqa: E731
    work = pipe.fill(map(nap, range(100_000)), name="naps", seconds=0.001) if filled else None
    losses, spans = [], []
    for _ in range(14):  # in the first ones the other rank may come late
        if rank == 0:
            time.sleep(0.1)  # so rank 1 waits in front of its first forward
        result = pipe.train_step(X, Y)
        losses.append(result.loss)
        timeline = result.timeline()
        spans.append([[str(what) for what, *_ in trace.moves] for trace in timeline.ranks])
        idle = attribute_idle(timeline)
        for trace, own in zip(timeline.ranks, idle, strict=True):
            assert own.seconds == pytest.approx(timeline.makespan - trace.busy, abs=1e-9)
            assert all(timeline.start <= start <= end for _, start, end in trace.moves)
            assert min(own) > -1e-9
    weights = {name: value.tolist() for name, value in pipe.full_state_dict().items()}
    if work is not None:
        assert done == list(range(len(done)))
        assert len(done) == work.num_done
        with pytest.warns(UserWarning, match=f"<FillWork naps: {len(done)} pieces done, more to do>"):
            pipe.close()
    else:
        pipe.close()
    return losses, weights, len(done), spans


def test_processes_fill_where_they_wait_and_where_their_schedule_says(gloo: Pool) -> None:
    plain, filled, marked = (gloo.run(filled_run, ranks=2, args=each) for each in ((0, 0), (1, 0), (1, 1)))
    for runs in (filled, marked):
        assert [run[:2] for run in runs] == [run[:2] for run in plain]
        assert runs[1][2] > 0
    assert marked[0][2] == 0
    for *_, spans in marked:
        assert {what for step in spans for own in step for what in own} <= {"1FILL0"}


class Slow(nn.Module):
    """A layer that takes its time in training, and draws, and has statistics that move."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.norm, self.dropout = nn.Linear(WIDTH, WIDTH), nn.BatchNorm1d(WIDTH), nn.Dropout(0.3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.training:
            time.sleep(0.01)
        return self.dropout(self.norm(self.layer(x)))  # type: ignore[no-any-return]


def evaluated_run(in_waits: bool, steps: int, mesh: dict[str, int]) -> tuple[Any, ...]:
    """Evaluations in front of steps, or in the waits of these: of one microbatch, of fewer than M, of M."""
    torch.manual_seed(0)
    pipe = make(mesh=mesh, model=nn.Sequential(*[Slow() for _ in range(4)]), max_grad_norm=1.0)
    evaluated, losses, filled = [], [], 0
    for step in range(steps):
        x, y = X[: (1, 3, 8)[step % 3] * mesh.get("data", 1)] + step, Y[: (1, 3, 8)[step % 3] * mesh.get("data", 1)]
        if in_waits:
            work = pipe.fill_eval(x, y)
        else:
            found = pipe.eval_step(x, y)
        result = pipe.train_step(X, Y)
        if in_waits:
            assert work.is_done
            assert work.result is not None
            found = work.result
        evaluated.append((found.loss, None if found.output is None else found.output.tolist()))  # type: ignore[attr-defined]
        losses.append((result.loss, result.grad_norm))
        filled += any(what.op is Op.FILL for trace in result.timeline().ranks for what, *_ in trace.moves)
    if in_waits:
        first, second = pipe.fill_eval(X, Y), pipe.fill_eval(X[:2], Y[:2])  # the one before is finished first
        assert first.is_done
        assert not second.is_done
    weights = {name: value.tolist() for name, value in pipe.full_state_dict().items()}
    pipe.close()
    return evaluated, losses, weights, torch.get_rng_state().tolist(), filled


@pytest.mark.thorough(but=["mesh0"])
@pytest.mark.parametrize("mesh", [{"pipe": 2}, {"pipe": 2, "data": 2}])
def test_evaluations_in_the_waits_are_those_in_front_of_the_step(gloo: Pool, mesh: dict[str, int]) -> None:
    """Losses, outputs, weights, running statistics and generators, to the last bit; and waits had pieces in them."""
    ranks = mesh["pipe"] * mesh.get("data", 1)
    plain, filled = (gloo.run(evaluated_run, ranks=ranks, args=(in_waits, 9, mesh)) for in_waits in (False, True))
    assert [run[:4] for run in filled] == [run[:4] for run in plain]
    assert [run[4] for run in plain] == [0] * ranks
    assert max(run[4] for run in filled) > 3


@pytest.mark.thorough
def test_in_one_process_and_what_evaluates_no_batch_in_waits() -> None:
    torch.manual_seed(0)
    pipe = make(model=nn.Sequential(*[Slow() for _ in range(2)]))
    for batch in (X, X[:3]):
        wanted, work = pipe.eval_step(batch, Y[: len(batch)]), pipe.fill_eval(batch, Y[: len(batch)])
        assert work.result is None
        pipe.train_step(X, Y)
        assert work.result is not None
        assert work.result.loss == wanted.loss
        torch.testing.assert_close(work.result.output, wanted.output, rtol=0, atol=0)
    pipe.close()
    for other, message in (
        (stream(), "where updates do not stand behind a flush"),
        (make(optimizer=None), "without optimizer="),
    ):
        with pytest.raises(ValueError, match=rf"fill_eval\(...\) {message}.*: expected eval_step"):
            other.fill_eval(X, Y)


class Drawing(Slow):
    """One that draws in evaluations, too."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x) + 0.1 * torch.rand_like(x)


@pytest.mark.thorough(but=["None"])
@pytest.mark.parametrize("precision", [None, "bf16"])
def test_evaluations_in_the_waits_draw_and_cast_as_those_in_front_of_the_step(precision: str | None) -> None:
    """Weights and running statistics are what both trainings end with, so nothing that was cast is taken for new."""
    found = []
    for in_waits in (False, True):
        torch.manual_seed(0)
        pipe = make(model=nn.Sequential(*[Drawing() for _ in range(2)]), precision=precision)
        results: list[Any] = []
        for x in (X, X[:3], X):
            work = pipe.fill_eval(x, Y[: len(x)]) if in_waits else None
            plain = None if in_waits else pipe.eval_step(x, Y[: len(x)])
            results.append(pipe.train_step(X, Y).loss)
            evaluated: Any = plain if work is None else work.result
            results += [evaluated.loss, evaluated.output.tolist()]
        weights = {name: each.tolist() for name, each in pipe.full_state_dict().items()}
        found.append((results, weights, torch.get_rng_state().tolist()))
        pipe.close()
    assert found[1] == found[0]


def refused_run() -> list[str]:
    told_by = []
    for options in (
        {"mesh": sw.Mesh(pipe=1, tensor=2, tensor_parallel={"0": "column", "1": "row"})},
        {"mesh": {"pipe": 1, "data": 2}, "data_parallel": "fsdp"},
    ):
        pipe = make(model=layers(2), **options)
        with pytest.raises(ValueError, match="expected eval_step") as told:
            pipe.fill_eval(X, Y)
        told_by.append(str(told.value))
        pipe.close()
    return told_by


def test_no_forward_with_collectives_is_in_the_waits(gloo: Pool) -> None:
    for tensor, fsdp in gloo.run(refused_run, ranks=2):
        assert tensor.startswith("fill_eval(...) beside a tensor group")
        assert fsdp.startswith('fill_eval(...) beside data_parallel="fsdp"')


class Telling(torch.optim.SGD):
    """Tells the other process of each of its steps."""

    numbers = count(1)

    def step(self, closure: Any = None) -> Any:
        result = super().step(closure)
        dist.distributed_c10d._get_default_store().set(f"stepped {os.environ['RANK']} {next(Telling.numbers)}", "")
        return result


class Listening(nn.Linear):
    """Waits in the last backward of each step of the first rank for the second one's update."""

    count = 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = super().forward(x)
        if self.training and y.requires_grad:
            y.register_hook(self._wait)
        return y

    def _wait(self, gradient: torch.Tensor) -> None:
        self.count += 1
        if os.environ["RANK"] == "0" and self.count % 4 == 0:
            key = f"stepped 1 {self.count // 4}"
            dist.distributed_c10d._get_default_store().wait([key], timedelta(seconds=60))


def updated_early() -> list[float | None]:
    torch.manual_seed(0)
    Telling.numbers = count(1)
    model = nn.Sequential(Listening(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH))
    pipe = make(mesh={"pipe": 2}, model=model, optimizer=lambda p: Telling(p, lr=0.1))
    losses = [pipe.train_step(X, Y).loss for _ in range(3)]
    pipe.close()
    return losses


@pytest.mark.thorough
def test_a_stage_is_updated_in_its_cooldown_bubble(gloo: Pool) -> None:
    """Its optimizer has stepped when the other's last backward goes on, which waits for that."""
    assert all(losses[-1] < losses[0] for losses in gloo.run(updated_early, ranks=2))
