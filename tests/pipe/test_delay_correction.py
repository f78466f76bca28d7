"""Updates of streams: error feedback, and options that a user sets between two calls.

The replay of support/async_reference.py measures an update as the runtime does, so that even Muon, which rounds to
bfloat16 within, agrees to the last bit. That this is the rule is shown by a second means: an optimizer over weights
that are always zero applies nothing but lr d.
"""

import warnings
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from support.async_pipeline import run
from support.async_reference import UNEVEN, AsyncCase, agree
from support.inside import LAST_UPDATE, Feedback, Sharing, StageOptimizers, make_stream
from support.pool import Pool
from support.small import WIDTH, X, Y, make, sgd, stream
from torch import Tensor, nn

from stagewright import ErrorFeedback
from stagewright.pipe import Asynchronous, PipelineModule
from stagewright.schedules import build

RULE = AsyncCase(task="mlp", num_ranks=3, sizes=UNEVEN[:5], feedback=1.0, flushes=(2,), decay=True)


@pytest.mark.thorough(but=["{'schedule': '1f1b', 'optimizer': 'rates-by-name', 'feedback_delay': 1.0}"])
@pytest.mark.parametrize(
    "change",
    [
        {"optimizer": "muon", "feedback": 2.0},
        {"optimizer": "momentum", "task": "conv-norm", "num_ranks": 4, "replicas": (2, 1, 1), "max_grad_norm": 0.05},
        {"optimizer": "momentum", "task": "small-tied"},
        {"schedule": "pipedream", "optimizer": "muon", "update_every": 2},
        {"schedule": "pipedream", "optimizer": "adamw-fused", "vertical_sync": True, "decay": "plateau"},
        {"schedule": "1f1b", "optimizer": "rates-by-name", "feedback_delay": 1.0},
    ],
    ids=str,
)
def test_schedules_equal_one_process_that_applies_the_rule(change: dict[str, Any]) -> None:
    case = replace(RULE, **change)
    agree(run(case), case)


@pytest.mark.thorough
def test_lambda_follows_the_delay_of_each_stage() -> None:
    def delays(name: str, **options: Any) -> list[float]:
        stream = make_stream(build(name, num_ranks=4, num_microbatches=4, **options), sharing=Sharing())
        return [stream.delay(stage) for stage in range(stream.schedule.num_stages)]

    assert delays("2bw") == delays("2bw", warmup="eager") == [1, 1, 1, 1]
    assert delays("pipedream") == [3, 2, 1, 0]
    assert delays("pipedream", update_every=2) == [1.5, 1, 0.5, 0]
    assert delays("pipedream", vertical_sync=True) == [3, 3, 3, 3]
    assert repr(ErrorFeedback(factor=np.float32(2), delay=np.int64(1))) == repr(ErrorFeedback(factor=2, delay=1.0))
    stages = {"first": [0], "tied": [0, 3], "last": [3]}
    assert ErrorFeedback(factor=2).factors(stages, [3, 2, 1, 0]) == {"first": 6, "tied": 6, "last": 0}
    assert ErrorFeedback(factor=2, delay=1.5).factors(stages, [3, 2, 1, 0]) == {"first": 3, "tied": 3, "last": 3}


def _step(parameters: list[nn.Parameter], optimizers: Any, gradients: list[Tensor | None], rate: float) -> None:
    for parameter, gradient in zip(parameters, gradients, strict=True):
        parameter.grad = None if gradient is None else gradient.clone()
    for optimizer in getattr(optimizers, "optimizers", optimizers):
        for group in optimizer.param_groups:
            if isinstance(group["lr"], Tensor):
                group["lr"].fill_(rate)
            else:
                group["lr"] = rate
    if isinstance(optimizers, StageOptimizers):
        optimizers.step(None)
        return
    for optimizer in optimizers:
        optimizer.step()


def _held(make: Any, parameters: list[nn.Parameter], feedback: dict[str, float]) -> StageOptimizers:
    named, model = [(str(i), p) for i, p in enumerate(parameters)], [id(p) for p in parameters]
    return StageOptimizers(0, named, make, None, where="stage 0", model=model, feedback=Feedback(feedback))


OPTIMIZERS = {
    "nesterov": lambda ps, wd: torch.optim.SGD(ps, lr=1.0, momentum=0.9, nesterov=True),
    "adamw": lambda ps, wd: torch.optim.AdamW(ps, lr=1.0, weight_decay=wd),
    "nadam": lambda ps, wd: torch.optim.NAdam(ps, lr=1.0, weight_decay=wd, decoupled_weight_decay=True),
    "muon": lambda ps, wd: torch.optim.Muon(ps, lr=1.0, weight_decay=wd),
    "tensor-lr": lambda ps, wd: torch.optim.AdamW(ps, lr=torch.tensor(1.0, dtype=torch.float64), weight_decay=wd),
}


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_an_update_is_that_of_weights_which_are_always_zero(name: str) -> None:
    """There nothing decays, and what a step leaves is -lr d: no difference of weights is taken."""
    torch.manual_seed(0)
    decay, strength = (0.0 if name == "nesterov" else 0.1), 1.5
    mine = [nn.Parameter(torch.randn(3, 4, dtype=torch.float64)) for _ in range(2)]
    weights = [p.detach().clone() for p in mine]
    zeros = [nn.Parameter(torch.zeros_like(p)) for p in mine]
    held = _held(lambda ps: OPTIMIZERS[name](ps, decay), mine, {"0": strength, "1": 0.0})
    shadow = [OPTIMIZERS[name](zeros, 0.0)]
    last: list[Tensor | None] = [None, None]
    for t in range(12):
        rate = [0.0, 0.01, 0.02, 0.005][t % 4]  # a warm-up from 0, and again
        gradients = [torch.randn(3, 4, dtype=torch.float64) if (t, i) != (6, 0) else None for i in range(2)]
        _step(mine, held, gradients, rate)
        for zero in zeros:
            zero.data.zero_()
        _step(zeros, shadow, gradients, rate)
        for i, zero in enumerate(zeros):
            if gradients[i] is None or not rate:
                continue
            d = -zero.detach() / rate
            applied = d if last[i] is None or i == 1 else d + strength * (d - last[i])
            weights[i] = (1 - rate * decay) * weights[i] - rate * applied
            last[i] = d
        for own, expected in zip(mine, weights, strict=True):
            torch.testing.assert_close(own.detach(), expected, rtol=0, atol=1e-13)
    (optimizer,) = held.optimizers
    assert LAST_UPDATE in optimizer.state[mine[0]]
    assert LAST_UPDATE not in optimizer.state[mine[1]]


def _last(held: StageOptimizers, parameter: nn.Parameter) -> Tensor:
    return held.optimizers[0].state[parameter][LAST_UPDATE]


@pytest.mark.parametrize(
    ("option", "schedule", "story"),
    [
        ("error-feedback", "1f1b", "flush schedule '1f1b', whose gradients are not late.*ErrorFeedback\\(delay=1\\)"),
        ("error feedback", "2bw", "expected None, 'error-feedback', or stagewright.ErrorFeedback"),
        ("weight-prediction", "2bw", "Expected 'error-feedback'"),
        ("error-feedback", "auto", "'auto', whose gradients are not late"),
    ],
)
def test_what_is_refused(option: str, schedule: str, story: str) -> None:
    with pytest.raises(ValueError, match=story):
        make(schedule=Asynchronous(schedule, correction=option), num_microbatches=2)
    for options in ({"factor": -1.0}, {"delay": float("nan")}, {"factor": None}, {"delay": True}, {"fresh": -1.0}):
        with pytest.raises(ValueError, match=f"ErrorFeedback\\({next(iter(options))}=.*a finite number of at least 0"):
            ErrorFeedback(**options)


def test_decay_that_is_not_decoupled_is_part_of_an_update() -> None:
    weight = nn.Parameter(torch.full((1,), 2.0, dtype=torch.float64))
    held = _held(lambda ps: torch.optim.SGD(ps, lr=1.0, weight_decay=0.5), [weight], {"0": 1.5})
    expected, last = 2.0, None
    for gradient in (1.0, -2.0, 0.25):
        _step([weight], held, [torch.full((1,), gradient, dtype=torch.float64)], 0.1)
        d = gradient + 0.5 * expected
        expected -= 0.1 * (d if last is None else d + 1.5 * (d - last))
        last = d
        assert weight.item() == pytest.approx(expected, abs=1e-14)


def test_a_skipped_step_leaves_weights_and_the_last_update_alone() -> None:
    weight = nn.Parameter(torch.ones(3, dtype=torch.float64))
    held = _held(lambda ps: torch.optim.SGD(ps, lr=1.0, momentum=0.9, dampening=0.9), [weight], {"0": 1.0})
    for gradient in (torch.ones(3), torch.arange(3.0)):
        _step([weight], held, [gradient.double()], 0.1)
    before, last = weight.detach().clone(), _last(held, weight).clone()
    weight.grad = torch.full((3,), float("inf"), dtype=torch.float64)
    held.step(None, skipped=True)
    assert torch.equal(weight, before)
    assert torch.equal(_last(held, weight), last)


def test_a_hook_behind_the_step_has_the_last_word() -> None:
    """Weights that are clamped to a range stay in it, and what the clamp took away is no update."""

    def clamp(optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
        for parameter in optimizer.param_groups[0]["params"]:
            parameter.data.clamp_(-0.1, 0.1)

    weight = nn.Parameter(torch.zeros(3, dtype=torch.float64))
    held = _held(lambda params: torch.optim.SGD(params, lr=1.0), [weight], {"0": 5.0})
    held.optimizers[0].register_step_post_hook(clamp)
    for gradient, expected in ((0.5, -0.1), (-0.5, 0.1), (0.05, -0.1)):
        _step([weight], held, [torch.full((3,), gradient, dtype=torch.float64)], 0.2)
        assert torch.equal(weight, torch.full_like(weight, expected))
        torch.testing.assert_close(_last(held, weight), torch.full_like(weight, gradient), rtol=0, atol=1e-15)


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


@pytest.mark.thorough(but=["1f1b"])
@pytest.mark.parametrize("name", SCHEDULES)
def test_options_set_by_hand_count_from_the_batch_they_are_set_in_front_of(name: str) -> None:
    options, per_batch = SCHEDULES[name]
    scheduled = stream(**options, optimizer=adamw, lr_scheduler=lambda optimizer: Setter(optimizer, per_batch))
    found, expected = state_after(stream(**options, optimizer=adamw), set_by_hand), state_after(scheduled, nothing)
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


@pytest.mark.thorough(but=["make-the number of parameters"])
@pytest.mark.parametrize("rate", AMONG)
@pytest.mark.parametrize("begin", [make, stream])
def test_updates_by_place_or_number_are_refused(begin: Any, rate: str) -> None:
    """As options by position, but chosen within the step: silent, `verify=True` included."""
    with pytest.raises(ValueError, match=r"Rated updates .* otherwise on its stage .* Expected .*or one stage"):
        begin(optimizer=rated(rate)).train_step(X, Y)


@pytest.mark.thorough(but=["1f1b-steps"])
@pytest.mark.parametrize("rate", [*ON_ITS_OWN, *IN_ORDER])
@pytest.mark.parametrize("schedule", ["1f1b", "interleaved"])
def test_updates_of_each_parameter_and_noise_in_one_process_are_those_of_one_stage(schedule: str, rate: str) -> None:
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
