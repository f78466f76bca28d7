"""`verify` where one microbatch of many is lost, or counts otherwise: less than tolerances, and than the rounding of
sums in bfloat16. And where correct sums differ by as much, for another order or another rounding."""

import itertools
from collections.abc import Callable, Mapping
from typing import Any

import pytest
import torch
from support.failing import refusal
from support.inside import CompareOutcome as Outcome
from support.inside import one_of_many
from support.pool import Pool
from support.records import records
from support.small import sgd
from torch import Tensor, nn
from torch.nn import functional

from stagewright.pipe import PipelineModule, VerificationError


def piped(net: nn.Module, count: int, **options: Any) -> PipelineModule:
    settings: dict[str, Any] = {"mesh": {"pipe": 2}, "loss_fn": functional.mse_loss, "optimizer": sgd}
    return PipelineModule(net, **records(num_microbatches=count, verify=True, **(settings | options)))


def many(count: int, dtype: torch.dtype, **options: Any) -> tuple[PipelineModule, Tensor, Tensor]:
    """A pipeline whose microbatches have much the same gradients, and a batch."""
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(16, 32), nn.Tanh(), nn.Dropout(0.1), nn.Linear(32, 16), nn.Tanh(), nn.Linear(16, 8))
    x, y = 1 + 0.1 * torch.randn(count, 16), 1 + 0.1 * torch.randn(count, 8)
    if dtype != torch.float16:  # of which there may be no weights
        net, x, y = net.to(dtype), x.to(dtype), y.to(dtype)
    return piped(net, count, precision="fp16" if dtype == torch.float16 else None, **options), x, y


def hook(fault: str, count: int) -> Callable[[Tensor], Tensor]:
    factors = {"dropped": {count // 3: 0.0}, "doubled": {count - 1: 2.0}, "scaled": {}}[fault]
    usual, calls = 1 - (fault == "scaled") / count, itertools.count()
    return lambda gradient: gradient * factors.get(next(calls), usual)


@pytest.mark.thorough(but=["dropped-128-dtype1-0.", "scaled-64-dtype0-"])
@pytest.mark.parametrize("stage", ["0.", ""])
@pytest.mark.parametrize(("count", "dtype"), [(64, torch.bfloat16), (128, torch.bfloat16), (256, torch.float16)])
@pytest.mark.parametrize("fault", ["dropped", "doubled", "scaled"])
def test_one_microbatch_of_many_is_found(
    fault: str, count: int, dtype: torch.dtype, stage: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    pipe, x, y = many(count, dtype)
    assert pipe.verify(x, y).num_gradients == 6
    for name, parameter in pipe.named_parameters():
        if name.startswith(stage):
            parameter.register_hook(hook(fault, count))
    monkeypatch.setattr("torch.Tensor.register_hook", lambda self, hook: None)  # the copy's
    with pytest.raises(VerificationError, match=f"by about that of one of {count} microbatches"):
        pipe.verify(x, y)


def sums_apart() -> int:
    pipe, x, y = many(128, torch.bfloat16, mesh={"pipe": 1, "data": 2})
    return pipe.verify(x, y).num_gradients


@pytest.mark.thorough
def test_replicas_add_up_apart(gloo: Pool) -> None:
    """In bfloat16, a sum of 256 gradients and two of 128 differ by more than one of them."""
    assert gloo.run(sums_apart, ranks=2) == [6, 6]


@pytest.mark.parametrize(("last", "total", "told"), [(3, 2, ""), (3.1, 2.03, "microbatch 2 is"), (3, 1.99, "is 1.99")])
def test_losses_of_microbatches_are_compared(last: float, total: float, told: str) -> None:
    plain, piped = (Outcome(loss=loss, gradients={}, buffers={}, outputs=None) for loss in (2.0, total))
    losses = {0: (1.0, 1.0), 1: (2.0, 2.0), 2: (3.0, last)}
    _, found = one_of_many(plain, piped, 5e-2, rounding=float, count=3, losses=losses, sums={}, again=print) or ("", "")
    assert told in found
    assert bool(told) == bool(found)


def told(losses: Mapping[int, tuple[float, float]], *, total: float = 0.0, share: float = 0.0) -> str:
    """`one_of_many` of gradients of which the pipeline's are larger by this share, and its mean loss by `total`."""
    one, count = torch.randn(256, generator=torch.Generator().manual_seed(0)), len(losses)
    plain, piped = (
        Outcome(loss=1.0 + more, gradients={"0.weight": (1 + by) * one}, buffers={}, outputs=None)
        for more, by in ((0.0, 0.0), (total, share))
    )
    options: dict[str, Any] = {"rounding": lambda _: 0.0, "count": count, "sums": {"0.weight": 1}}
    found = one_of_many(
        plain, piped, 5e-2, losses=losses, again=lambda note: note({"0.weight": one / count}), **options
    )
    return found[1] if found else ""


def test_losses_that_round_differently_in_all_microbatches_are_no_fault() -> None:
    """Those of a tensor group in bfloat16 where targets are nearly met: some differ by ten times the median."""
    off = torch.randn(2, 256, generator=torch.Generator().manual_seed(0)).prod(0).abs().tolist()  # error and residual
    usual = {k: (1e-4, 1e-4 + x) for k, x in enumerate(off)}
    assert max(off) > 10 * sorted(off)[128]
    assert told(usual) == ""
    assert "microbatch 3 is" in told(usual | {3: (1e-4, 20 * max(off))})
    unequal = {0: (1.0, 1.09), **dict.fromkeys(range(1, 64), (1.0, 1.01))}  # 0 has nearly all items
    assert told(unequal, total=0.08, share=0.01) == ""
    assert "unlike" in told(unequal, total=0.1)


@pytest.mark.parametrize("off", [0.0, 0.04])
def test_a_gradient_off_by_no_more_than_its_losses_is_rounding(off: float) -> None:
    found = told({k: (1.0, 1.0 + off * (-1) ** k) for k in range(64)}, share=0.03)
    assert ("by about that of one of 64" in found) == (not off)


def test_a_microbatch_without_items_may_have_a_loss() -> None:
    def with_penalty(output: Tensor, target: Tensor) -> tuple[Tensor, Tensor]:
        loss = functional.cross_entropy(output, target, ignore_index=-1, reduction="sum")
        return loss + output.square().sum(), (target >= 0).sum()

    torch.manual_seed(0)
    pipe = piped(nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 4)), 4, loss_fn=with_penalty)
    targets = torch.tensor([-1, -1, 0, 1, 2, 3, -1, 1])
    assert pipe.verify(torch.randn(8, 4), targets).num_gradients == 4


@pytest.mark.parametrize("value", [torch.inf, torch.nan])
def test_a_loss_that_is_not_finite_is_the_scalers_matter(value: float) -> None:
    pipe, x, y = many(4, torch.float16)
    y[2] = value
    assert pipe.verify(x, y).num_gradients == 6


@pytest.mark.parametrize("factor", [1.0, 1.5])
def test_sums_that_cancel_are_off_by_what_their_parts_are(factor: float, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two replicas sum in bfloat16 in another order than the plain module; the residuals' sum is nearly 0."""
    torch.manual_seed(5)
    net = nn.Sequential(nn.Linear(4, 32), nn.Sigmoid(), nn.Linear(32, 1)).bfloat16()
    x, y = torch.ones(60, 4).bfloat16(), torch.randn(60, 1).bfloat16()
    pipe = piped(net, 30, mesh={"pipe": 2, "data": 2})
    pipe.build(x, y)
    if factor != 1.0:
        for parameter in net.parameters():
            parameter.register_hook(lambda gradient: factor * gradient)
        monkeypatch.setattr("torch.Tensor.register_hook", lambda self, hook: None)  # the copy's
    assert ("the gradient of" in refusal(lambda: pipe.verify(x, y), VerificationError)) == (factor != 1.0)
