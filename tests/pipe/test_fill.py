"""Background work in the waits of a step: pieces that fit, once each, in order; and a step that knows nothing of it."""

import os
import random
import time
from collections.abc import Callable, Iterator
from datetime import timedelta
from itertools import count, pairwise
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from support.inside import LocalRank, fills
from support.pool import Pool
from support.small import WIDTH, X, Y, make, stream
from torch import nn

from stagewright.comm import PipelineError, Transport
from stagewright.schedules import Message, MessageKind, build

B3, F1 = Message(MessageKind.GRAD, 1, 0, 3), Message(MessageKind.ACT, 1, 0, 1)


class Late(Transport):
    """A transport whose next message comes at `due`, seen or not."""

    def __init__(self, rank: int, clock: SimpleNamespace) -> None:
        super().__init__(rank)
        self.clock = clock
        self.due, self.late, self.is_seen = 0.0, 0.0, False

    def send(self, message: Message, peer: int, tensors: object, specs: object) -> None:
        raise AssertionError(message)

    def ready(self, message: Message) -> bool:
        return self.clock.at >= self.due

    def is_here(self, message: Message) -> bool:
        return self.is_seen and self.clock.at >= self.due

    def wait(self, message: Message, timeout: float) -> tuple[torch.Tensor, ...]:
        self.late = max(0.0, self.clock.at - self.due)
        self.clock.at = max(self.clock.at, self.due)
        return ()

    def abort(self) -> None:
        return


class Hand:
    """Two ranks of one process whose waits are filled."""

    def __init__(self) -> None:
        self.clock, self.done = SimpleNamespace(at=0.0), list[int]()  # a clock that pieces and waits move
        self.inner = [Late(rank, self.clock) for rank in range(2)]
        nobody: Any = None
        ranks = [LocalRank(worker=nobody, transport=inner, recorder=nobody) for inner in self.inner]
        engine: Any = SimpleNamespace(ranks=ranks)
        options = SimpleNamespace(device=torch.device("cpu"))
        layout = SimpleNamespace(schedule=build("1f1b", num_ranks=2, num_microbatches=4))
        run: Any = SimpleNamespace(root=nn.Linear(1, 1), options=options, layout=layout, inside=None)
        self.fill = fills(run, engine, lambda: self.clock.at)
        self.fill([])
        self.transports = [local.transport for local in engine.ranks]

    def spend(self, seconds: float) -> None:
        self.clock.at += seconds

    def pieces(self, *seconds: float) -> Iterator[Callable[[], object]]:
        for number, each in enumerate(seconds):
            yield lambda number=number, each=each: (self.spend(each), self.done.append(number))  # type: ignore[misc]

    def wait(self, message: Message, gap: float, *, rank: int = 0, is_seen: bool = False) -> float:
        """A rank waits for a message that is there `gap` later; seconds by which pieces were late."""
        inner = self.inner[rank]
        inner.due, inner.is_seen = self.clock.at + gap, is_seen
        self.transports[rank].wait(message, 1.0)
        return inner.late


def test_pieces_run_in_order_as_long_as_the_next_one_fits() -> None:
    """Gaps of 10, of which 9 count; pieces of 2."""
    hand = Hand()
    work = hand.fill(hand.pieces(*[2.0] * 12), seconds=2.0)
    counts = [hand.wait(B3, 10.0) or work.num_done for _ in range(6)]
    assert counts == [0, 0, 4, 8, 12, 12]  # two steps are looked at first
    assert hand.done == list(range(12))
    assert work.is_done


def test_a_place_counts_as_its_shortest_gap_but_one_and_each_rank_and_place_for_itself() -> None:
    hand = Hand()
    work = hand.fill(hand.pieces(*[2.0] * 99), seconds=2.0)
    for gap in (5.0, 10.0, 10.0):
        hand.wait(B3, gap)
        hand.wait(F1, 1.0)
    assert work.num_done == 2  # before the third B3, of which 4.5 count
    hand.wait(B3, 10.0)
    hand.wait(B3, 10.0)
    assert work.num_done == 8  # 4.5 again; then that the rank was late once among four does not count
    hand.wait(B3, 10.0, rank=1)  # of another rank nothing is known
    assert (hand.wait(B3, 10.0), work.num_done) == (0.0, 12)


def test_batches_of_a_stream_have_the_same_places() -> None:
    hand = Hand()
    work = hand.fill(hand.pieces(*[2.0] * 99), seconds=2.0)
    for batch in range(3):
        hand.wait(B3._replace(index=3 + 4 * batch), 10.0)
    assert work.num_done == 4


def test_a_place_that_was_filled_for_too_long_is_filled_less() -> None:
    hand = Hand()
    work = hand.fill(hand.pieces(*[1.0] * 99), seconds=1.0)
    for _ in range(3):
        hand.wait(B3, 10.0)
    late = [hand.wait(B3, 4.0) for _ in range(5)]  # the wait is shorter from now on
    assert late == [5.0, 5.0, 0.0, 0.0, 0.0]
    assert work.num_done > 18


def test_where_a_message_is_seen_to_come_one_piece_at_most_is_late() -> None:
    """Gaps are as long as they were before the piece; one that is over is not filled."""
    hand = Hand()
    work = hand.fill(hand.pieces(*[1.5] * 99), seconds=1.5)
    for _ in range(3):
        hand.wait(B3, 10.0)
    counts, late = [work.num_done], []
    for gap in (4.0, 0.0, 4.0, 4.0, 10.0):
        late.append(hand.wait(B3, gap, is_seen=True))
        counts.append(work.num_done)
    assert late == [0.5, 0.0, 0.0, 0.0, 0.0]
    assert [more - before for before, more in pairwise(counts)] == [3, 0, 1, 1, 1]  # 3.0 twice, but for the 0.0


def test_pieces_of_unknown_length_or_that_took_too_long_are_tried_again() -> None:
    hand = Hand()
    hand.fill(hand.pieces(8.0, *[1.0] * 99))
    counts = []
    for _ in range(7):
        hand.wait(F1, 5.0)
        hand.wait(B3, 10.0)
        counts.append(len(hand.done))
    assert counts == [0, 0, 1, 2, 3, 12, 25]  # what the first one takes says nothing; the fourth tells, and 8 more fit
    hand = Hand()
    hand.fill(hand.pieces(*[30.0] * 4, *[1.0] * 99))
    for _ in range(900):
        hand.wait(B3, 10.0)
    assert len(hand.done) == 4
    for _ in range(200):
        hand.wait(B3, 10.0)
    assert len(hand.done) == 103


def test_a_rank_that_lets_others_of_its_process_go_on_is_filled_once_a_turn() -> None:
    """Its gap lasts until its turn comes; a step that failed before that leaves none."""
    hand = Hand()
    work = hand.fill(hand.pieces(*[2.0] * 99), seconds=2.0)
    transport, inner, counts = hand.transports[0], hand.inner[0], list[int]()
    for step in range(6):
        transport.post(B3, 1, ())
        inner.due = hand.clock.at + 10.0
        while not transport.ready(B3):
            hand.spend(1.0)
        if step % 2:
            transport.wait(B3, 1.0)
        counts.append(work.num_done)
    assert counts == [0, 0, 0, 0, 4, 8]


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
    with pytest.raises(ValueError, match="piece 1 of the background work 'mine' changed a weight within a step"):
        all(pipe.train_step(X, Y) for _ in range(20))
    pipe.close()


def test_what_a_generator_yields_is_looked_at() -> None:
    pipe = make()
    work = pipe.fill(iter([3]), name="mine")  # type: ignore[list-item]
    with pytest.raises(RuntimeError, match="'mine' failed: TypeError: expected a callable without arguments, found 3"):
        work.finish()


def filled_run(filled: bool) -> tuple[Any, ...]:
    """The last rank waits for the first one's forward, which sleeps."""
    torch.manual_seed(0)
    rank, done = int(os.environ["RANK"]), list[int]()
    pipe = make(mesh=None, max_grad_norm=1.0)
    nap = lambda n: lambda: (time.sleep(0.001), done.append(n))  # noqa: E731
    work = pipe.fill(map(nap, range(100_000)), name="naps", seconds=0.001) if filled else None
    losses = []
    for _ in range(14):  # in the first ones the other rank may come late
        if rank == 0:
            time.sleep(0.1)  # so rank 1 waits before its first forward
        losses.append(pipe.train_step(X, Y).loss)
    weights = {name: value.tolist() for name, value in pipe.full_state_dict().items()}
    if work is not None:
        assert done == list(range(len(done)))
        assert len(done) == work.num_done
        with pytest.warns(UserWarning, match=f"<FillWork naps: {len(done)} pieces done, more to do>"):
            pipe.close()
    else:
        pipe.close()
    return losses, weights, len(done)


@pytest.mark.thorough
def test_processes_fill_where_they_wait(gloo: Pool) -> None:
    plain, filled = (gloo.run(filled_run, ranks=2, args=(filled,)) for filled in (False, True))
    assert [run[:2] for run in filled] == [run[:2] for run in plain]
    assert filled[1][2] > 0


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
