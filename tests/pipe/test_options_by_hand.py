"""Options that a user sets between two calls of a stream count from the same update on every stage."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from support.pool import Pool
from support.small import WIDTH, X, Y, make, sgd, stream
from torch import Tensor

from stagewright.pipe import PipelineModule
from stagewright.schedules import build

NUM_BATCHES = 7
Options = dict[str, Any]


def options_of(batch: int) -> Options:
    """Others for each batch, but for two that have the same."""
    betas = (0.9 - 0.1 * (batch % 4), 0.95)
    return {"lr": 0.1 / (1 + batch // 2 * 2), "weight_decay": 0.3 if batch % 3 else 0.0, "betas": betas}


class Setter:
    """A schedule that sets the options behind each update: of it the numbers are known to be exact."""

    def __init__(self, optimizer: torch.optim.Optimizer, per_batch: int) -> None:
        self.optimizer, self.per_batch, self.updates = optimizer, per_batch, 0
        self.set()

    def set(self) -> None:
        for group in self.optimizer.param_groups:
            group.update(options_of(self.updates // self.per_batch))

    def step(self) -> None:
        self.updates += 1
        self.set()


adamw = partial(torch.optim.AdamW, lr=1.0)


def batch(number: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(number)
    return torch.randn(8, WIDTH, generator=generator), torch.randn(8, WIDTH, generator=generator)


def state_after(pipe: PipelineModule, between: Callable[[PipelineModule, int], object]) -> dict[str, Tensor]:
    for number in range(NUM_BATCHES):
        between(pipe, number)
        pipe.train_step(*batch(number))
        if number == 3:
            pipe.flush()
    return pipe.full_state_dict()


def set_by_hand(pipe: PipelineModule, number: int) -> None:
    for optimizer in pipe.optimizers:
        for group in optimizer.param_groups:
            group.update(options_of(number))
            assert group["lr"] == options_of(number)["lr"]


def nothing(pipe: PipelineModule, number: int) -> None:
    return


SCHEDULES: dict[str, tuple[Options, int]] = {
    "1f1b": ({"schedule": "1f1b"}, 1),
    "2bw": ({"schedule": "2bw"}, 1),
    "2bw-flush-first": ({"schedule": "2bw", "flush_first": 2}, 1),
    "2bw-clipped": ({"schedule": "2bw", "max_grad_norm": 0.1}, 1),
    "pipedream": ({"schedule": build("pipedream", num_ranks=2, num_microbatches=4, update_every=2)}, 2),
    "paci": ({"schedule": "paci"}, 1),
}


def both(name: str) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    options, per_batch = SCHEDULES[name]
    scheduled = stream(**options, optimizer=adamw, lr_scheduler=lambda optimizer: Setter(optimizer, per_batch))
    by_hand = stream(**options, optimizer=adamw)
    return state_after(by_hand, set_by_hand), state_after(scheduled, nothing)


@pytest.mark.thorough(but=["1f1b"])
@pytest.mark.parametrize("name", SCHEDULES)
def test_options_set_by_hand_count_from_the_batch_they_are_set_in_front_of(name: str) -> None:
    found, expected = both(name)
    assert all(torch.equal(found[key], expected[key]) for key in expected)


@pytest.mark.filterwarnings("ignore:Detected call of .lr_scheduler.step")  # the first stage has not updated yet
def test_a_schedule_that_the_user_steps_himself_reads_what_it_has_set() -> None:
    """ExponentialLR makes each rate of the one that it finds in the optimizer."""

    decay = partial(torch.optim.lr_scheduler.ExponentialLR, gamma=0.5)
    pipe = stream()
    schedulers = [decay(optimizer) for optimizer in pipe.optimizers]

    def step(_: PipelineModule, number: int) -> None:
        for scheduler in schedulers if number else ():
            scheduler.step()

    found = state_after(pipe, step)
    expected = state_after(stream(lr_scheduler=decay), nothing)
    assert all(torch.equal(found[key], expected[key]) for key in expected)


def test_a_rate_in_a_tensor_stays_the_users_tensor() -> None:
    def fill(pipe: PipelineModule, number: int) -> None:
        for optimizer in pipe.optimizers:
            optimizer.param_groups[0]["lr"] = 0.1 / (number + 1)

    def fill_tensors(pipe: PipelineModule, number: int) -> None:
        for one in rates:
            one.fill_(0.1 / (number + 1))

    rates: list[Tensor] = []

    def of_tensors(parameters: list[torch.nn.Parameter]) -> torch.optim.Optimizer:
        rates.append(torch.tensor(0.1, dtype=torch.float64))
        return torch.optim.SGD(parameters, lr=rates[-1], foreach=False)

    found, expected = state_after(stream(optimizer=of_tensors), fill_tensors), state_after(stream(optimizer=sgd), fill)
    torch.testing.assert_close(dict(found), dict(expected))


def test_a_rate_set_in_flight_beside_a_schedule_of_rates_is_refused() -> None:
    pipe = stream(lr_scheduler=lambda optimizer: torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5))
    pipe.train_step(X, Y)
    pipe.optimizers[0].param_groups[0]["lr"] = 0.05
    message = "'lr' of an optimizer that has an lr_scheduler= was changed while batches 0 to 0"
    with pytest.raises(ValueError, match=message):
        pipe.train_step(X, Y)
    pipe.flush()
    pipe.train_step(X, Y)


def drawn(p: Tensor, step: int) -> Tensor:
    return torch.randn(p.shape, generator=torch.Generator().manual_seed(step))


ON_ITS_OWN: dict[str, Any] = {
    "steps": lambda own, _: 0.1 / own.calls,
    "steps of the parameter": lambda own, p: 0.1 / own.counted(p),
    "noise of its own": lambda own, p: 0.1 + 0.01 * drawn(p, own.calls),
}
IN_ORDER: dict[str, Any] = {
    "noise": lambda _, p: 0.1 + 0.01 * torch.randn_like(p),
    "noise of numpy": lambda _, p: 0.1 + 0.01 * np.random.default_rng(np.random.randint(99)).random(),
}
AMONG: dict[str, Any] = {
    "the number of parameters": lambda own, _: 0.1 / len(own.param_groups[0]["params"]),
    "its place": lambda own, p: 0.1 * 0.9 ** next(i for i, q in enumerate(own.param_groups[0]["params"]) if q is p),
    "updates of all": lambda own, _: 0.1 / own.counted(own),
    "noise of one generator": lambda own, p: 0.1 + 0.01 * torch.randn(p.shape, generator=own.generator),
}


class Rated(torch.optim.SGD):
    """SGD whose rate is chosen within its step, for one parameter after the other."""

    def __init__(self, parameters: Any, rate: Any) -> None:
        super().__init__(parameters, lr=0.1)
        for group in self.param_groups:
            group["lr"] = None  # as transformers' Adafactor has it
        self.rate, self.calls, self.counts, self.generator = rate, 0, {}, torch.Generator().manual_seed(3)

    def counted(self, key: object) -> int:
        self.counts[id(key)] = self.counts.get(id(key), 0) + 1
        return self.counts[id(key)]

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        self.calls += 1
        for group in self.param_groups:
            for p in group["params"]:
                p.sub_(self.rate(self, p) * p.grad)


def rated(rate: str) -> Any:
    return lambda ps: Rated(ps, {**ON_ITS_OWN, **IN_ORDER, **AMONG}[rate])


def losses(rate: str, **options: Any) -> list[float | None]:
    torch.manual_seed(7)
    np.random.seed(7)
    pipe = make(optimizer=rated(rate), **options)
    return [pipe.train_step(X, Y).loss for _ in range(4)]


@pytest.mark.parametrize("rate", AMONG)
@pytest.mark.parametrize("begin", [make, stream])
def test_updates_by_place_or_number_are_refused(begin: Any, rate: str) -> None:
    """As options by position, but chosen within the step: silent, `verify=True` included."""
    with pytest.raises(ValueError, match=r"Rated updates .* otherwise on its stage .* Expected .*or one stage"):
        begin(optimizer=rated(rate)).train_step(X, Y)


@pytest.mark.parametrize("rate", [*ON_ITS_OWN, *IN_ORDER])
@pytest.mark.parametrize("schedule", ["1f1b", "interleaved"])
def test_updates_of_each_parameter_by_itself_and_noise_in_one_process_are_those_of_one_stage(
    schedule: str, rate: str
) -> None:
    """Ranks stepped one after the other, not stages, so that noise was drawn in another order."""
    assert losses(rate, schedule=schedule) == pytest.approx(losses(rate, mesh={"pipe": 1}), rel=1e-5)


def _over_processes(rate: str) -> tuple[list[float | None], bool]:
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        found = losses(rate)
    return found, any("optimizer Rated draws random numbers in its step" in str(each.message) for each in told)


@pytest.mark.thorough
def test_noise_over_processes_is_told_unless_each_parameter_has_its_own(gloo: Pool) -> None:
    """Each rank drew the same numbers for other parameters, without a word."""
    for rate in IN_ORDER:
        assert any(is_told for _, is_told in gloo.run(_over_processes, ranks=2, args=(rate,)))
    for rate in ON_ITS_OWN:
        for found, is_told in gloo.run(_over_processes, ranks=2, args=(rate,)):
            assert found == pytest.approx(losses(rate, mesh={"pipe": 1}), rel=1e-5)
            assert not is_told
