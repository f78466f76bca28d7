"""Forwards and backwards that run together over an expert group: exact, in one order, and exchanges are measured."""

import signal
import threading
import time
import warnings
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from support.alone import train_alone
from support.experts import WIDTH, Listed, Stacked, batch, model
from support.inside import Exchanges, Seeder
from support.parts import GIVEN, Parts
from support.pool import Pool
from torch import nn
from torch.overrides import TorchFunctionMode
from torch.utils.flop_counter import FlopCounterMode

from stagewright import Mesh, PipelineModule
from stagewright.schedules import Collective, Op, build, with_overlap


def _schedule(name: str) -> Any:
    return with_overlap(
        build(name, num_ranks=2, num_microbatches=4, **({"num_chunks": 2} if name == "interleaved" else {}))
    )


class _Dropping(Parts, one=Listed, other=Stacked):
    """Experts between masks: what follows an exchange draws numbers, too."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return F.dropout(self.other(F.dropout(self.one(x), 0.4, self.training)), 0.4, self.training)


class _Fails(torch.autograd.Function):
    calls = 0

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, where: str) -> torch.Tensor:
        ctx.where = where
        _Fails.count(where, "forward fails")
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None]:
        _Fails.count(ctx.where, "backward fails")
        return gradient, None

    @staticmethod
    def count(where: str, what: str) -> None:
        _Fails.calls += where == what
        if where == what and _Fails.calls > 9 and dist.get_rank() == 1:
            raise ValueError(what)


class _Failing(Parts, one=Listed, other=Stacked, where=GIVEN):
    """After some microbatches one process's fails between two exchanges."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.other(_Fails.apply(self.one(x), self.where))  # type: ignore[no-untyped-call]


def _layers(kind: str) -> list[nn.Module]:
    if kind.endswith("fails"):
        return [_Failing(kind) for _ in range(4)]
    if kind == "each":
        return [_Dropping() for _ in range(4)]
    if kind == "drops":
        return [_Dropping(), nn.Linear(WIDTH, WIDTH), _Dropping(), _Dropping()]
    return [Listed(), nn.Linear(WIDTH, WIDTH), Stacked(), Listed()]


def _trained(schedule: Any, kind: str, options: dict[str, Any]) -> tuple[list[float], dict[str, torch.Tensor], Any]:
    warnings.filterwarnings("ignore", message="the schedule splits the backward")  # experts give little to W
    rate = {"plain": 0.05, "drops": 1e-4}.get(kind, 1e-9)  # many layers of experts diverge soon
    with PipelineModule(
        model(*_layers(kind)),
        mesh=Mesh(pipe=2, expert=2),
        schedule=schedule,
        num_microbatches=4,
        loss_fn=F.mse_loss,
        optimizer=lambda parameters: torch.optim.SGD(parameters, lr=rate),
        verify=kind == "plain",
        **options,
    ) as pipe:
        results = [pipe.train_step(*batch(pipe.replica[0], step)) for step in range(3)]
        losses = [result.loss for result in results if result.loss is not None]
        if schedule.overlapped and not options:
            with pytest.raises(ValueError, match=r"watch_memory\(\) of a schedule"), pipe.watch_memory():
                pass
        return losses, pipe.full_state_dict(), results[-1].timeline()


def _plain() -> tuple[list[float], dict[str, torch.Tensor]]:
    batches = (zip(*(batch(replica, step) for replica in range(2)), strict=True) for step in range(3))
    optimizer = partial(torch.optim.SGD, lr=0.05)
    found = train_alone(model(*_layers("plain")), (map(torch.cat, each) for each in batches), optimizer)
    return found.losses, found.state


def _differences(found: Any, expected: Any) -> float:
    losses = [abs(one - other) for one, other in zip(found[0], expected[0], strict=True)]
    return max([*losses, *(float((found[1][name] - x).abs().max()) for name, x in expected[1].items())])


@pytest.mark.thorough
@pytest.mark.filterwarnings("ignore:the schedule splits the backward")  # experts give little to W
@pytest.mark.parametrize("name", ["dualpipe-v", "dualpipe"])
def test_in_one_process_pairs_run_one_after_the_other(name: str) -> None:
    expected, own = _plain(), model(*_layers("plain"))
    with PipelineModule(
        own,
        schedule=_schedule(name),
        num_microbatches=4,
        loss_fn=F.mse_loss,
        optimizer=lambda parameters: torch.optim.SGD(parameters, lr=0.05),
    ) as pipe:
        batches = [[batch(replica, step) for replica in range(2)] for step in range(3)]
        whole = [[torch.cat(both) for both in zip(*each, strict=True)] for each in batches]
        losses = [pipe.train_step(*each).loss for each in whole]
        assert pipe.eval_step(*whole[0]).loss is not None
        with pipe.watch_memory() as watched:  # raises an error where they overlap
            pipe.forward_backward(*whole[0])
        assert watched.peak_bytes > 0
        assert _differences((losses, pipe.full_state_dict()), expected) < 1e-10


@pytest.mark.thorough(but=["dualpipe-"])
@pytest.mark.parametrize(
    ("name", "options"),
    [("dualpipe-v", {}), ("dualpipe", {}), ("interleaved", {}), ("dualpipe-v", {"recompute": "full"})],
    ids=lambda value: str(value) if value else "",
)
def test_pairs_train_as_one_process(gloo: Pool, name: str, options: dict[str, Any]) -> None:
    """One after the other where they do not overlap, as with recompute=."""
    expected = _plain()
    for found in gloo.run(_trained, ranks=4, args=(_schedule(name), "plain", options)):
        assert _differences(found, expected) < 1e-10


@pytest.mark.thorough
def test_random_numbers_are_those_of_the_same_order_without_pairs(gloo: Pool) -> None:
    schedule = _schedule("dualpipe-v")
    apart = replace(schedule, overlapped=())
    together, alone = (gloo.run(_trained, ranks=4, args=(each, "drops", {})) for each in (schedule, apart))
    for found, expected in zip(together, alone, strict=True):
        assert _differences(found, expected) == 0.0


@pytest.mark.thorough
def test_one_exchanges_while_the_other_computes_and_the_timeline_shows_it(gloo: Pool) -> None:
    schedule = _schedule("dualpipe-v")
    timelines = [found[2] for found in gloo.run(_trained, ranks=4, args=(schedule, "each", {}))]
    timeline = next(each for each in timelines if each is not None)
    together = timeline.schedule.together  # of both replicas
    for rank, trace in enumerate(timeline.ranks):
        spans = {span.what: span for span in trace.compute}
        exchange = {action: Collective((action.stage,), Op.EXCHANGE, action.index) for action in spans}
        of = {action: [each for each in trace.exchanges if each.what == exchange[action]] for action in spans}
        pairs = [(forward, backward) for forward, backward in together.items() if forward in spans]
        assert pairs, rank
        for forward, backward in pairs:
            within = [each for each in of[backward] if spans[forward].start < each.start < spans[forward].end]
            turns = sorted([*((each.start, "f") for each in of[forward]), *((each.start, "b") for each in within)])
            assert [name for _, name in turns][:4] == ["f", "b", "f", "b"]
            # The backward's first exchange begins before the forward's first one is waited for, and so on.
            assert within[0].start < of[forward][0].end
            assert of[forward][1].start < within[0].end


def _fails(at: str) -> str:
    """What a process says whose experts fail in a pair."""
    try:
        _trained(_schedule("dualpipe-v"), at, {})
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return "nothing"


@pytest.mark.thorough
@pytest.mark.parametrize("at", ["forward fails", "backward fails"])
def test_an_error_in_a_pair_is_raised_everywhere(gloo: Pool, at: str) -> None:
    said = gloo.run(_fails, ranks=4, args=(at,))
    assert all(at in each for each in said), said


class _Wire:
    def __init__(self) -> None:
        self.seeder = Seeder(0, torch.device("cpu"))
        self.exchanges = Exchanges(self.seeder)
        self.seen: list[str] = []

    def exchange(self, name: str) -> None:
        wire = self

        class Work:
            def wait(self) -> None:
                wire.seen.append(f"{name} through")

        def begin() -> Work:
            wire.seen.append(f"{name} begun")
            return Work()

        self.exchanges.through(begin)

    def steps(self, name: str, count: int) -> Callable[[], None]:
        def run() -> None:
            for number in range(count):
                self.seen.append(f"{name}{number}")
                self.exchange(f"{name}{number}")
            self.seen.append(f"{name} ends")

        return run


def test_one_computes_while_the_other_exchanges() -> None:
    wire = _Wire()
    wire.exchanges.forward(wire.steps("f", 2), wire.steps("b", 2))
    wire.seen.append("sends")
    wire.exchanges.rest_of_backward()
    assert wire.seen == [
        *("f0", "f0 begun", "b0", "b0 begun"),
        *("f0 through", "f1", "f1 begun"),
        *("b0 through", "b1", "b1 begun"),
        *("f1 through", "f ends", "sends"),  # what the forward made leaves before the rest
        *("b1 through", "b ends"),
    ]


@pytest.mark.parametrize(("forwards", "backwards"), [(0, 0), (0, 3), (3, 0), (1, 4), (4, 1)])
def test_either_may_have_more(forwards: int, backwards: int) -> None:
    wire, number = _Wire(), threading.active_count()
    wire.exchanges.forward(wire.steps("f", forwards), wire.steps("b", backwards))
    assert wire.seen[-1] == "f ends" or forwards > backwards
    wire.exchanges.rest_of_backward()
    for name, count in (("f", forwards), ("b", backwards)):
        each = [word for n in range(count) for word in (f"{name}{n}", f"{name}{n} begun", f"{name}{n} through")]
        assert [word for word in wire.seen if word[0] == name] == [*each, f"{name} ends"]
    assert threading.active_count() == number  # of threads


def _failing(wire: _Wire, name: str, at: int) -> Callable[[], None]:
    def run() -> None:
        for number in range(3):
            if number == at:
                raise ValueError(f"{name} fails")
            wire.exchange(f"{name}{number}")

    return run


@pytest.mark.parametrize("at", [0, 1, 2])
def test_a_forward_that_fails_ends_the_backward(at: int) -> None:
    wire, ended = _Wire(), list[str]()

    def backward() -> None:
        try:
            wire.steps("b", 5)()
        finally:
            ended.append("b")

    with pytest.raises(ValueError, match="f fails"):
        wire.exchanges.forward(_failing(wire, "f", at), backward)
    assert ended == (["b"] if at else [])
    assert "b ends" not in wire.seen
    wire.exchanges.forward(wire.steps("f", 1), wire.steps("b", 1))  # the next pair runs
    wire.exchanges.rest_of_backward()
    assert wire.seen[-1] == "b ends"


@pytest.mark.parametrize("at", [0, 1, 2])
def test_a_backward_that_fails_is_heard_where_it_runs(at: int) -> None:
    wire = _Wire()
    calls = [partial(wire.exchanges.forward, wire.steps("f", 2), _failing(wire, "b", at))]
    calls += [wire.exchanges.rest_of_backward] * (at == 2)
    for call in calls[:-1]:
        call()
    with pytest.raises(ValueError, match="b fails"):
        calls[-1]()
    wire.exchanges.forward(wire.steps("f", 1), wire.steps("b", 1))
    wire.exchanges.rest_of_backward()


def test_a_forward_that_catches_errors_does_not_hide_those_of_a_backward() -> None:
    wire = _Wire()

    def forward() -> None:
        with suppress(ValueError):  # as a model's own code around a layer of experts may
            wire.exchange("f0")
        wire.exchange("f1")

    wire.exchanges.forward(forward, _failing(wire, "b", 0))
    with pytest.raises(ValueError, match="b fails"):
        wire.exchanges.rest_of_backward()


def test_a_forward_that_is_interrupted_in_the_backwards_turn_ends_it_at_its_next_exchange() -> None:
    wire, main = _Wire(), threading.get_ident()

    def backward() -> None:
        signal.pthread_kill(main, signal.SIGINT)
        until = time.monotonic() + 4.0
        while not wire.exchanges._turns._is_abandoned and time.monotonic() < until:
            time.sleep(0.01)
        wire.steps("b", 2)()

    with pytest.raises(KeyboardInterrupt):
        wire.exchanges.forward(wire.steps("f", 2), backward)
    assert wire.seen == ["f0", "f0 begun", "b0", "b0 begun"]


def test_a_run_that_is_dropped_ends_its_backward() -> None:
    wire = _Wire()
    wire.exchanges.forward(wire.steps("f", 1), wire.steps("b", 3))
    wire.exchanges.drop()
    assert "b ends" not in wire.seen
    wire.exchanges.drop()


def test_modes_of_the_user_around_a_step_see_the_backward() -> None:
    class Calls(TorchFunctionMode):
        count = 0

        def __torch_function__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
            self.count += 1
            return func(*args, **(kwargs or {}))

    wire, x = _Wire(), torch.ones(4, 4)

    def product() -> None:
        wire.exchange("x")
        x.matmul(x)

    with Calls() as calls, FlopCounterMode(display=False) as counted:
        wire.exchanges.forward(product, product)
        wire.exchanges.rest_of_backward()
        x.matmul(x)
    assert counted.get_total_flops() == 3 * 2 * 4**3
    assert calls.count == 3
