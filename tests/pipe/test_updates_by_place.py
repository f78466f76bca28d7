"""Steps of optimizers that depend on what else they hold: the number of parameters, their order, noise drawn in it."""

from __future__ import annotations

import warnings
from typing import Any

import numpy as np
import pytest
import torch
from support.pool import Pool
from support.small import X, Y, make, stream
from torch import Tensor


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
