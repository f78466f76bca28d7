"""Turns of a forward and a backward that run together, without processes."""

from __future__ import annotations

import signal
import threading
import time
from collections.abc import Callable
from contextlib import suppress

import pytest
import torch
from support.inside import Exchanges, Seeder
from torch.overrides import TorchFunctionMode
from torch.utils.flop_counter import FlopCounterMode


class _Wire:
    """Collectives that note their order."""

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


def test_random_numbers_go_on_where_an_action_was_interrupted() -> None:
    def draws(wire: _Wire, *, together: bool) -> dict[str, list[float]]:
        found: dict[str, list[float]] = {"f": [], "b": []}

        def action(name: str, microbatch: int) -> Callable[[], None]:
            def run() -> None:
                wire.seeder.begin(step=0, microbatch=microbatch)
                try:
                    for unit in range(3):
                        wire.seeder.enter(unit)
                        found[name].append(torch.rand(()).item())
                        wire.exchange(name)
                        found[name].append(torch.rand(()).item())
                finally:
                    wire.seeder.end()

            return run

        forward, backward = action("f", 1), action("b", 2)
        if together:
            wire.exchanges.forward(forward, backward)
            wire.exchanges.rest_of_backward()
        else:
            forward()
            backward()
        return found

    before = torch.get_rng_state()
    wire = _Wire()
    with wire.seeder.call():
        assert draws(wire, together=True) == draws(_Wire(), together=False)
    assert torch.equal(torch.get_rng_state(), before)


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
    if at == 2:
        wire.exchanges.forward(wire.steps("f", 2), _failing(wire, "b", at))
    with pytest.raises(ValueError, match="b fails"):
        wire.exchanges.rest_of_backward() if at == 2 else wire.exchanges.forward(
            wire.steps("f", 2), _failing(wire, "b", at)
        )
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
