"""Options that a user sets between two calls of a stream count from the same update on every stage."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from support.small import WIDTH, X, Y, stream
from torch import Tensor

from stagewright.pipe import PipelineModule
from stagewright.schedules import build

NUM_BATCHES = 7
Options = dict[str, Any]


def options_of(batch: int) -> Options:
    """Others for each batch, but for two that have the same."""
    return {
        "lr": 0.1 / (1 + batch // 2 * 2),
        "weight_decay": 0.3 if batch % 3 else 0.0,
        "betas": (0.9 - 0.1 * (batch % 4), 0.95),
    }


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


def adamw(parameters: list[torch.nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, lr=1.0)


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

    def decay(optimizer: torch.optim.Optimizer) -> Any:
        return torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)

    pipe = stream()
    schedulers = [decay(optimizer) for optimizer in pipe.optimizers]

    def step(_: PipelineModule, number: int) -> None:
        for scheduler in schedulers if number else ():
            scheduler.step()

    found = state_after(pipe, step)
    expected = state_after(stream(lr_scheduler=decay), nothing)
    assert all(torch.equal(found[key], expected[key]) for key in expected)


def test_a_rate_in_a_tensor_stays_the_users_tensor() -> None:
    def sgd(parameters: list[torch.nn.Parameter]) -> torch.optim.Optimizer:
        return torch.optim.SGD(parameters, lr=0.1)

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
    for key in expected:
        torch.testing.assert_close(found[key], expected[key])


def test_a_rate_set_in_flight_beside_a_schedule_of_rates_is_refused() -> None:
    pipe = stream(lr_scheduler=lambda optimizer: torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5))
    pipe.train_step(X, Y)
    pipe.optimizers[0].param_groups[0]["lr"] = 0.05
    message = "'lr' of an optimizer that has an lr_scheduler= was changed while batches 0 to 0"
    with pytest.raises(ValueError, match=message):
        pipe.train_step(X, Y)
    pipe.flush()
    pipe.train_step(X, Y)
