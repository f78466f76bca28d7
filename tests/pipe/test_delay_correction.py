"""Error feedback on updates: the rule by itself, and under schedules against one process that applies it.

The replay of support/async_reference.py measures an update as the runtime does, so that even Muon, which rounds to
bfloat16 within, agrees to the last bit. That this is the rule is shown by a second means: an optimizer over weights
that are always zero applies nothing but lr d.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from support.async_pipeline import run
from support.async_reference import UNEVEN, AsyncCase, agree
from support.inside import LAST_UPDATE, Feedback, Sharing, StageOptimizers, make_stream
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


def _held(make: Any, parameters: list[nn.Parameter], feedback: dict[str, float] | None) -> StageOptimizers:
    named = [(str(i), parameter) for i, parameter in enumerate(parameters)]
    return StageOptimizers(
        0,
        named,
        make,
        None,
        where="stage 0",
        model=[id(p) for p in parameters],
        feedback=None if feedback is None else Feedback(feedback),
    )


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


def _averaged(parameters: list[nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=1.0, momentum=0.9, dampening=0.9)


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
        PipelineModule(
            nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 1)),
            schedule=Asynchronous(schedule, correction=option),
            num_microbatches=2,
            loss_fn=nn.functional.mse_loss,
            optimizer=torch.optim.AdamW,
            mesh={"pipe": 2},
            example_inputs=(torch.zeros(2, 2),),
        )
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
    held = _held(_averaged, [weight], {"0": 1.0})
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
