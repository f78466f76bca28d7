"""Error feedback on updates: the rule by itself, and under schedules against one process that applies it.

The replay of support/async_reference.py measures an update as the runtime does, so that even Muon, which rounds to
bfloat16 within, agrees to the last bit. That this is the rule is shown by a second means: an optimizer over weights
that are always zero applies nothing but lr d.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from support.async_pipeline import run
from support.async_reference import UNEVEN, AsyncCase, agree
from torch import Tensor, nn

from stagewright import ErrorFeedback
from stagewright.pipe.update.delay_correction import LAST_UPDATE
from stagewright.pipe.update.optimizers import StageOptimizers
from stagewright.schedules import build
from stagewright.schedules.lowering.stream import make_stream
from stagewright.schedules.messages import Sharing

RULE = AsyncCase(task="mlp", num_ranks=3, sizes=UNEVEN[:5], feedback=1.0, flushes=(2,), decay=True)


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


@pytest.mark.nightly
@pytest.mark.parametrize("num_ranks", [2, 3, 4])
@pytest.mark.parametrize("optimizer", ["momentum", "adamw", "adamw-foreach", "adamw-fused", "rates-by-name", "muon"])
@pytest.mark.parametrize(
    "rule",
    [{}, {"schedule": "pipedream"}, {"schedule": "pipedream", "update_every": 4, "feedback_delay": 1.0}],
    ids=str,
)
def test_every_optimizer_and_rule(rule: dict[str, Any], optimizer: str, num_ranks: int) -> None:
    case = replace(RULE, task="small-gpt", num_ranks=num_ranks, optimizer=optimizer, sizes=UNEVEN, **rule)
    agree(run(case), case)


def test_lambda_follows_the_delay_of_each_stage() -> None:
    def delays(name: str, **options: Any) -> list[float]:
        stream = make_stream(build(name, num_ranks=4, num_microbatches=4, **options), sharing=Sharing())
        return [stream.delay(stage) for stage in range(stream.schedule.num_stages)]

    assert delays("2bw") == delays("2bw", warmup="eager") == [1, 1, 1, 1]
    assert delays("pipedream") == [3, 2, 1, 0]
    assert delays("pipedream", update_every=2) == [1.5, 1, 0.5, 0]
    assert delays("pipedream", vertical_sync=True) == [3, 3, 3, 3]
    assert ErrorFeedback(factor=2, delay=1.5).factors([3, 2, 1, 0]) == (3, 3, 3, 3)


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
        may_hold_others=False,
        feedback=feedback,
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
