"""`verify` where the pipeline does not compute what the plain module does: the difference is named with its cause."""

import math
import random
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
from support.failing import refusal
from support.inside import (
    B,
    Constraints,
    F,
    changed_by_rounding,
    differs,
    first_difference,
    graph_of,
    in_order,
    tolerance_of,
)
from support.inside import CompareOutcome as Outcome
from support.parts import GIVEN, Parts
from support.pipeline import assembled
from support.pool import Pool
from support.small import sgd
from support.verified import Net, Reverse, chain
from torch import Tensor, nn
from torch.nn import functional

from stagewright.comm import PipelineError
from stagewright.pipe import PipelineModule, VerificationError


def with_backward_hook() -> Net:
    net = Net()
    own = id(net.odd)  # a copy of the hook would know the copy as `net`
    net.odd.register_full_backward_hook(lambda odd, grad, _: None if id(odd) == own else (3 * grad[0],))
    return net


def with_custom_function() -> Net:
    net = Net()
    own = id(net)
    net.middle = lambda model, x: x if id(model) == own else Reverse.apply(x)  # type: ignore[no-untyped-call]
    return net


def with_reassigned_buffer() -> Net:
    net = Net()
    own = id(net)

    def middle(model: Any, x: Tensor) -> Tensor:
        if id(model) != own:
            model.seen = model.seen + x.detach().mean(0)
        return x

    net.middle = middle
    return net


piped = partial(
    assembled, mesh={"pipe": 2}, num_microbatches=2, loss_fn=functional.mse_loss, optimizer=sgd, verify=True
)


def refused(net: nn.Module, **options: Any) -> str:
    torch.manual_seed(0)
    pipe = piped(net, schedule=options.pop("schedule", "1f1b"), **options)
    x = torch.randn(6, 4, generator=torch.Generator().manual_seed(1))
    pipe.build(x, x)
    before = {name: p.clone() for name, p in pipe.named_parameters()}
    try:
        pipe.train_step(x, x.flip(0))
    except VerificationError as error:
        assert all(torch.equal(p, before[name]) for name, p in pipe.named_parameters())  # nothing was trained
        return str(error)
    except PipelineError as error:
        return str(error)
    return "nothing"


def with_python_random() -> Net:
    random.seed(0)  # two draws that are far enough apart
    net = Net()
    own = id(net)
    net.middle = lambda model, x: x if id(model) == own else x * random.random()
    return net


MEASURED = {"evaluated": False, "scale": 1.0}


class Measures(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        MEASURED["evaluated"] |= not self.training  # undone before the training, so no cause
        MEASURED["scale"] = float(x.abs().mean())
        return super().forward(x)


class Scales(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) * MEASURED["scale"]


# The last one's second module finds that of a later microbatch, or none over processes.
NAMED: dict[str, tuple[Callable[[], nn.Module], dict[str, Any], str, str]] = {
    "a lost backward hook": (
        with_backward_hook,
        {},
        "verify: the gradient of 'front.bias' (stage 0",
        "Likely cause: module 'odd' has a backward hook",
    ),
    "a lost custom backward": (
        with_custom_function,
        {},
        "the gradient of 'odd.bias'",
        "the model uses the autograd.Function Reverse",
    ),
    "a dropped random number": (with_python_random, {}, "the loss is", "draws from Python's random module"),
    "a number left for another module": (
        lambda: nn.Sequential(Measures(4, 4), nn.Tanh(), Scales(4, 4)),
        {"cut": ["1"], "schedule": "gpipe"},
        "verify: ",
        "Likely cause: the model changes 'scale' of MEASURED",
    ),
}


@pytest.mark.parametrize(("make", "options", "difference", "cause"), NAMED.values(), ids=NAMED)
def test_a_difference_is_named_with_its_cause(
    make: Callable[[], nn.Module], options: dict[str, Any], difference: str, cause: str
) -> None:
    told = refused(make(), **options)
    assert difference in told
    assert cause in told


class Leaves(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        out = super().forward(x)
        if type(out) is Tensor:  # when it runs, not on fake tensors
            self.shared["seen"] = 1 + float(out.detach().abs().mean())
        return out


class Reads(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) * self.shared.get("seen", 1.0)


class Marks(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        out = super().forward(x)
        out.scale = 2.0  # type: ignore[attr-defined]
        return out


class ReadsMark(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) * getattr(x, "scale", 1.0)


class HooksWhatMadeIt(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        if x.grad_fn is not None:
            x.grad_fn.register_prehook(lambda grads: tuple(3 * grad for grad in grads))  # type: ignore[attr-defined]
        return super().forward(x)


class Count(nn.Module):
    def forward(self, x: Tensor) -> int:
        return int((x.detach() > 0.3).sum().item()) + 1


class TimesCount(Parts, front=lambda: nn.Linear(4, 4), count=Count, back=lambda: nn.Linear(4, 4)):
    def forward(self, x: Tensor) -> Tensor:
        number = self.count(x)
        return self.back(torch.tanh(self.front(x))) * number  # type: ignore[no-any-return]


class InOrder(Parts, front=GIVEN, back=GIVEN):
    def forward(self, x: Tensor) -> Tensor:
        return self.back(self.front(x))  # type: ignore[no-any-return]


def unseen(kind: str, *, as_chain: bool) -> nn.Module:
    if kind == "a number of the batch":
        return TimesCount()
    pairs = {
        "an object": (Leaves(4, 4), Reads(4, 4)),
        "an attribute": (Marks(4, 4), ReadsMark(4, 4)),
        "a hook": (nn.Linear(4, 4), HooksWhatMadeIt(4, 4)),
    }
    front, back = pairs[kind]
    front.shared = back.shared = {}  # type: ignore[assignment]
    return nn.Sequential(front, back) if as_chain else InOrder(front, back)


UNSEEN = [(kind, as_chain) for kind in ("an object", "an attribute", "a hook") for as_chain in (True, False)]
UNSEEN.append(("a number of the batch", False))


@pytest.mark.thorough(but=["an attribute-True"])
@pytest.mark.parametrize(("kind", "as_chain"), UNSEEN)
def test_the_default_finds_what_passes_by_other_means_and_without_it_that_trains_in_silence(
    kind: str, as_chain: bool
) -> None:
    """As the page says; where one of these is refused some day, the page has to change."""
    torch.manual_seed(0)
    told = refused(unseen(kind, as_chain=as_chain), verify="first")
    assert "reads what another one left in an object, an attribute of a tensor or a Python number" in told
    assert refused(unseen(kind, as_chain=as_chain), verify=False) == "nothing"


def test_python_random_is_not_blamed_for_seeding_it() -> None:
    """recompute= seeds it for each microbatch; here buffers meet the microbatches in another order."""
    backwards = [in_order(F, key=lambda s, m: (-m, s)), in_order(B, key=lambda s, m: (-m, -s))]
    schedule = Constraints(num_ranks=2, num_microbatches=2, num_chunks=1, placement="cyclic", rules=backwards).solve()
    told = refused(nn.Sequential(nn.BatchNorm1d(4), nn.Linear(4, 4)), schedule=schedule, recompute="full")
    assert "buffer '0.running_mean'" in told
    assert "order of its microbatches" in told
    assert "random module" not in told


class AllReduce(nn.Module):
    """Moves a buffer that no state dict has."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("sum", torch.zeros(4), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        if self.training:
            self.sum.add_(x.detach().mean(0))
        return x + self.sum


def buffers_over_processes() -> tuple[str, str]:
    torch.manual_seed(0)
    x = torch.randn(6, 4, generator=torch.Generator().manual_seed(1))
    with piped(chain(AllReduce())) as pipe:
        for _ in range(3):
            pipe.train_step(x, x)
        pipe.verify(x, x)
        pipe.verify(x, x)
    without_a_copy = refusal(lambda: piped(chain(AllReduce()), verify=False).verify(x, x))
    return refused(with_reassigned_buffer()), without_a_copy


@pytest.mark.thorough
def test_buffers_of_every_process_are_compared(gloo: Pool) -> None:
    for told, without_a_copy in gloo.run(buffers_over_processes, ranks=2):
        assert "after the batch, buffer 'seen'" in told
        assert "Expected PipelineModule(..., verify=True)" in without_a_copy


def test_tolerance_is_that_of_the_shortest_type_computed_in() -> None:
    """Differences of norms that compute in float32, as Gemma's, in a float64 model; autocast."""
    x = torch.randn(4, 4, dtype=torch.float64, requires_grad=True)
    assert tolerance_of(graph_of([x.sin().cos()])) == 1e-9
    assert tolerance_of(graph_of([x.float().sin().double().cos()])) == 1e-3
    with torch.autocast("cpu", torch.bfloat16):
        assert tolerance_of(graph_of([functional.linear(x.float(), x.float()).double()])) == 5e-2
    assert tolerance_of(graph_of([torch.complex(x, x).abs()])) == 1e-9
    other = x * (1 + 1e-7)
    assert differs(x, other, tolerance=1e-3) is None
    assert "differs from the plain module's" in (differs(x, other, tolerance=1e-9) or "")
    one, two = torch.tensor([1.0, torch.inf]), torch.tensor([1.0, 2.0])
    assert differs(one, two, tolerance=1e-6) == "has inf or nan in other places than the plain module's"
    assert differs(one, one, tolerance=1e-6) is None


@pytest.mark.parametrize(
    ("dtype", "rounding", "real"), [(torch.float64, 3e-16, 1e-12), (torch.float32, 3e-8, 1e-5)], ids=str
)
def test_an_output_or_loss_that_is_rounding_alone_is_no_difference(
    dtype: torch.dtype, rounding: float, real: float
) -> None:
    """The mean of a LayerNorm over its features is 0 but for the order of its sum."""

    def told(*, loss: float = 1.0, output: float = 0.0) -> str | None:
        zero = torch.zeros(2, dtype=dtype)
        one = Outcome(loss=loss, gradients={"a": zero + 1}, buffers={}, outputs=[[zero + 1], [zero + output]])
        plain = Outcome(loss=round(loss), gradients={"a": zero + 1}, buffers={}, outputs=[[zero + 1], [-zero - output]])
        return first_difference(plain, one, tolerance=0.0, stage_of={}, suspects={})

    assert told(output=rounding) is None
    assert told(loss=rounding) is None
    assert "output 1 of an evaluation" in (told(output=real) or "")
    assert "the loss is" in (told(loss=1 + 10_000 * real) or "")


class Shifted(nn.Module):
    """Adds a bias, whose gradient counts twice except in copies; the bias is multiplied by `share`."""

    def __init__(self, width: int, share: float, times: float) -> None:
        super().__init__()
        self.bias = nn.Parameter(torch.zeros(width))
        self.home, self.share, self.times = id(self), share, times

    def forward(self, x: Tensor) -> Tensor:
        times = self.times if id(self) == self.home else 1.0
        return x + self.share * (times * self.bias - (times - 1.0) * self.bias.detach())


def told_of_norms(seed: int, dtype: torch.dtype, share: float = 1.0, times: float = 1.0, data: int = 2) -> str:
    """Biases in front of a BatchNorm have a gradient of 0, the last one not."""
    torch.manual_seed(seed)
    blocks = [[nn.Conv2d(width, 8, 3), nn.BatchNorm2d(8), nn.ReLU()] for width in (3, 8, 8)]
    last = nn.Flatten(), nn.Linear(32, 1), Shifted(1, share, times)
    net = nn.Sequential(*blocks[0], *blocks[1], *blocks[2][:2], *last)
    x, y = torch.randn(16, 3, 8, 8), torch.randn(16, 1) + (times != 1.0)
    if dtype != torch.float16:  # of which there may be no weights
        net, x, y = net.to(dtype), x.to(dtype), y.to(dtype)
    pipe = PipelineModule(
        net,
        mesh={"pipe": 2, "data": data},  # replicas sum microbatches in another order
        num_microbatches=4,
        loss_fn=functional.mse_loss,
        precision="fp16" if dtype == torch.float16 else None,
        optimizer=sgd,
        verify=True,
    )
    return refusal(lambda: pipe.train_step(x, y), VerificationError)


@pytest.mark.thorough(but=["torch.float16"])
@pytest.mark.parametrize(
    "dtype",
    [torch.bfloat16, *(pytest.param(each, marks=pytest.mark.thorough) for each in (torch.float16, torch.float32))],
    ids=str,
)
def test_a_gradient_that_is_rounding_alone_is_no_difference(dtype: torch.dtype) -> None:
    """It is 0 but for rounding, which is more than the tolerance of the model's largest gradient."""
    assert {told_of_norms(seed, dtype) for seed in (1, 2, 8)} == {""}


@pytest.mark.thorough(but=["1.0"])
@pytest.mark.parametrize("share", [1.0, 1e-3])
def test_a_gradient_that_counts_twice_is_found_in_a_short_type(share: float) -> None:
    told = {told_of_norms(seed, torch.bfloat16, share, 2.0).partition(" (stage")[0] for seed in range(3)}
    assert told == {"verify: the gradient of '10.bias'"}


def test_runs_that_measure_rounding_leave_the_buffers(monkeypatch: pytest.MonkeyPatch) -> None:
    def noisy(plain: Outcome, piped: Outcome, **options: Any) -> str | None:
        bias = piped.gradients["0.bias"]
        assert bias is not None
        return compared(plain, replace(piped, gradients={**piped.gradients, "0.bias": -bias}), **options)

    compared = first_difference
    monkeypatch.setattr("stagewright.pipe.verify.verification.first_difference", noisy)
    assert told_of_norms(0, torch.bfloat16, data=1) == ""


@pytest.mark.parametrize(
    ("theirs", "ours", "rounding", "is_noise"),
    [(0.02, -0.02, 0.03, True), (0.02, -0.02, 0.01, False), (0.01, 0.04, 0.03, False), (0.2, 0.0, 9.0, False)],
)
def test_rounding_explains_values_that_are_small_on_both_sides(
    theirs: float, ours: float, rounding: float, is_noise: bool
) -> None:
    """In bfloat16 one flipped ReLU may change a gradient as much as it is large: that excuses no larger difference."""
    plain, piped = (
        Outcome(loss=1.0, gradients={"0.bias": small, "1.bias": torch.ones(1)}, buffers={}, outputs=None)
        for small in (torch.tensor([x], dtype=torch.bfloat16) for x in (theirs, ours))
    )
    said = first_difference(
        plain, piped, tolerance=0.0, stage_of={"0.bias": "stage 0"}, suspects={}, rounding=lambda _: rounding
    )
    assert (said is None) == is_noise


@pytest.mark.parametrize(("seconds", "numbers", "share"), [(math.inf, [*range(9)], 15.0), (0.0, [0], 0.0)])
def test_one_sample_alone_says_nothing_and_none_begins_late(seconds: float, numbers: list[int], share: float) -> None:
    """Other ranks wait meanwhile; a route that flips in one sample of eight is no rounding of the others."""
    asked: list[int] = []

    def sample(number: int) -> dict[str, Tensor | None]:
        asked.append(number)
        return {"0.bias": torch.tensor([{0: 0.0, 4: 90.0, 6: 3.0}.get(number, 1.0)])}

    allowed = changed_by_rounding({"0.bias": torch.zeros(1)}, sample, seconds=seconds)
    assert (allowed("0.bias"), asked) == (share, numbers)
