"""The cross entropy of a head without all logits: numbers of plain PyTorch in float64, and what exists meanwhile."""

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from itertools import product
from threading import Barrier
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from support.inside import SplitBackward, WeightGradients, profile_model
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

import stagewright as sw

TOKENS, WIDTH, WORDS = 10, 8, 600


def given(*, bias: bool = True, dtype: torch.dtype = torch.float64) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
    """Hidden [2, 5, H], weight, targets of which two are ignored, bias."""
    torch.manual_seed(0)
    hidden, weight = (torch.randn(*shape, dtype=dtype) for shape in ((2, TOKENS // 2, WIDTH), (WORDS, WIDTH)))
    target = torch.randint(WORDS, (2, TOKENS // 2))
    target[0, 2] = target[1, 0] = -100
    shift = nn.Parameter(torch.randn(WORDS, dtype=dtype)) if bias else None
    return hidden.requires_grad_(), nn.Parameter(weight), target, shift


def plain(
    hidden: Tensor, weight: Tensor, target: Tensor, bias: Tensor | None, *, z_loss: float = 0.0, **how: Any
) -> Tensor:
    logits = F.linear(hidden, weight, bias).flatten(0, 1)
    wanted = target.flatten()
    losses = F.cross_entropy(logits, wanted, **{**how, "reduction": "none"})
    losses = losses + z_loss * logits.logsumexp(1).square() * (wanted != -100)
    reduction = how.get("reduction", "mean")
    if reduction == "none":
        return losses.view(target.shape)
    return losses.sum() if reduction == "sum" else losses.sum() / (wanted != -100).sum()


def results(loss_of: Callable[..., Tensor], inputs: tuple[Any, ...], **how: Any) -> list[Tensor]:
    """Loss and gradients, each number of the loss weighed differently."""
    loss = loss_of(*inputs, **how)
    leaves = [x for x in inputs if isinstance(x, Tensor) and x.requires_grad]
    weights = torch.arange(1, 1 + loss.numel(), dtype=loss.dtype).view(loss.shape)
    return [loss, *torch.autograd.grad((loss * weights).sum(), leaves)]


@pytest.mark.thorough(but=["sum"])
@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
def test_it_is_cross_entropy_of_the_logits(reduction: str) -> None:
    for bias, label_smoothing, z_loss, chunk in product([False, True], [0.0, 0.1], [0.0, 0.01], [7, None]):
        how: dict[str, Any] = {"reduction": reduction, "label_smoothing": label_smoothing, "z_loss": z_loss}
        ours, plains = (
            results(sw.linear_cross_entropy, given(bias=bias), chunk=chunk, **how),
            results(plain, given(bias=bias), **how),
        )
        for one, other in zip(ours, plains, strict=True):
            assert torch.allclose(one, other, rtol=0, atol=1e-12)


@pytest.mark.parametrize("chunk", [2, 3, 10])
def test_words_that_a_bias_hides_are_not_counted(chunk: int) -> None:
    """As padding of a vocabulary is: logits of -inf, also where all of a chunk are hidden."""
    hidden, weight, _, _ = given(bias=False)
    bias = torch.zeros(10, dtype=torch.float64)
    bias[:6] = -torch.inf
    few, target = nn.Parameter(weight.detach()[:10].clone()), torch.tensor([[6, 7, 8, 9, 6], [-100, 9, 8, 7, 6]])
    ours, plains = (
        results(sw.linear_cross_entropy, (hidden, few, target, bias), chunk=chunk),
        results(plain, (hidden, few, target, bias)),
    )
    for one, other in zip(ours, plains, strict=True):
        assert torch.allclose(one, other, rtol=0, atol=1e-12)


def test_a_pair_is_a_sum_and_its_count() -> None:
    loss, count = sw.linear_cross_entropy(*given(), reduction="pair")
    assert loss.item() == pytest.approx(plain(*given(), reduction="sum").item(), abs=1e-12)
    assert int(count) == TOKENS - 2


class Largest(TorchDispatchMode):
    """The number of elements of the largest tensor that an operation makes, weights' gradients aside."""

    def __init__(self) -> None:
        super().__init__()
        self.most = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        made = func(*args, **(kwargs or {}))
        if isinstance(made, Tensor) and made.shape != (WORDS, WIDTH):
            self.most = max(self.most, made.numel())
        return made


@pytest.mark.parametrize(("loss_of", "most"), [(plain, TOKENS * WORDS), (sw.linear_cross_entropy, TOKENS * 256)])
def test_all_logits_never_exist(loss_of: Callable[..., Tensor], most: int) -> None:
    kept: list[int] = []

    def keep(x: Tensor) -> Tensor:
        kept.append(0 if isinstance(x, nn.Parameter) else x.numel())
        return x

    with Largest() as largest, torch.autograd.graph.saved_tensors_hooks(keep, lambda x: x):
        loss = loss_of(*given())
        loss.backward()
    assert largest.most == most
    assert (sum(kept) < 3 * TOKENS * WIDTH) == (most < TOKENS * WORDS)


@pytest.mark.parametrize("bias", [False, True])
def test_the_two_halves_of_a_backward_are_the_whole(bias: bool) -> None:
    """The weight's gradient comes in W, of what is as large as hidden."""
    inputs = given(bias=bias)
    _, *whole = results(sw.linear_cross_entropy, inputs, label_smoothing=0.1)
    leaves: list[Any] = [x for x in inputs if x is not None and x.requires_grad]
    split, later = SplitBackward(), WeightGradients()
    with split.forward():
        loss = sw.linear_cross_entropy(*inputs, label_smoothing=0.1)
    with split.backward(later):
        loss.backward()
    assert [x.grad is None for x in leaves] == [False] + [True] * (len(leaves) - 1)
    assert later.num_bytes <= 8 * (TOKENS * WIDTH + 3 * TOKENS)
    later.add()
    for x, wanted in zip(leaves, whole, strict=True):
        assert torch.equal(x.grad, wanted)


class Member:
    """One of two threads, each with half of the vocabulary."""

    count = 2

    def __init__(self, index: int, barrier: Barrier, given: dict[int, Tensor]) -> None:
        self.index, self._barrier, self._given = index, barrier, given

    def all(self, x: Tensor, dim: int) -> Tensor:
        self._given[self.index] = x
        self._barrier.wait()
        found = torch.cat([self._given[0], self._given[1]], dim)
        self._barrier.wait()
        return found

    def sum(self, x: Tensor) -> Tensor:
        return self.all(x[None], 0).sum(0)


def test_members_with_half_of_the_rows_have_the_loss_of_all() -> None:
    """Loss on both, the sum of their gradients of hidden, and each one's rows of the others'."""
    how: dict[str, Any] = {"label_smoothing": 0.1, "z_loss": 0.01}
    wanted, both = results(plain, given(), **how), [given(), given()]
    barrier, exchanged = Barrier(2, timeout=30), dict[int, Tensor]()

    def member(index: int) -> list[Tensor]:
        hidden, weight, target, bias = both[index]
        own = (nn.Parameter(x.detach().chunk(2)[index].clone()) for x in (weight, bias))
        inputs = hidden, next(own), target, next(own)
        return results(sw.linear_cross_entropy, inputs, members=Member(index, barrier, exchanged), chunk=70, **how)

    with ThreadPoolExecutor(2) as threads:
        one, other = threads.map(member, range(2))
    for found, whole in zip([one[0], other[0], one[1] + other[1]], [wanted[0], wanted[0], wanted[1]], strict=True):
        assert torch.allclose(found, whole, rtol=0, atol=1e-12)
    for place in (2, 3):
        assert torch.allclose(torch.cat([one[place], other[place]]), wanted[place], rtol=0, atol=1e-12)


def test_under_autocast_products_are_in_16_bits_and_sums_in_32() -> None:
    inputs = given(dtype=torch.float32)
    exact = results(plain, inputs)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        found, usual = (results(loss_of, inputs) for loss_of in (sw.linear_cross_entropy, plain))
    assert found[0].dtype is torch.float32
    for one, other, wanted in zip(found, usual, exact, strict=True):
        assert one.dtype is wanted.dtype
        assert (one - wanted).norm().item() <= 1.2 * (other - wanted).norm().item()


@pytest.mark.parametrize(
    ("change", "match"),
    [
        ({"target": torch.full((2, 5), WORDS)}, f"target {WORDS}: expected 0 to {WORDS - 1}, or -100"),
        ({"target": torch.zeros(2, 4, dtype=torch.long)}, r"target \(2, 4\): expected \[..., H\], \[V, H\] and"),
        ({"target": torch.zeros(2, 5)}, "target of torch.float32: expected whole numbers, torch.int64 or torch.int32"),
        ({"bias": torch.zeros(1)}, r"bias \(1,\): expected \[V\], \(600,\)"),
        ({"label_smoothing": 1.5}, "label_smoothing=1.5: expected 0 to 1"),
        ({"chunk": 0}, "chunk=0: expected a number of rows of the weight, at least 1"),
        ({"reduction": "max"}, "reduction='max': expected one of 'mean', 'sum', 'none', 'pair'"),
    ],
)
def test_mistakes_are_named(change: dict[str, Any], match: str) -> None:
    hidden, weight, target, bias = given()
    inputs: dict[str, Any] = {"hidden": hidden, "weight": weight, "target": target, "bias": bias}
    with pytest.raises(ValueError, match=match):
        sw.linear_cross_entropy(**{**inputs, **change})


class Logits(nn.Linear):
    def forward(self, hidden: Tensor, target: Tensor) -> Tensor:  # type: ignore[override]
        return F.cross_entropy(super().forward(hidden).flatten(0, 1), target.flatten())


class Spoken(nn.Module):
    def __init__(self, head: nn.Module) -> None:
        super().__init__()
        self.embed, self.head = nn.Embedding(9, 64), head

    def forward(self, words: Tensor, labels: Tensor) -> Tensor:
        loss: Tensor = self.head(self.embed(words), labels)
        return loss


@pytest.mark.nightly
def test_what_a_profile_counts_of_a_head_of_128256_words() -> None:
    """The table of docs/guides/models.md."""
    words, found = torch.randint(9, (1, 256)), []
    for head in (Logits(64, 128256, bias=False), sw.LinearCrossEntropy(64, 128256)):
        batch = {"words": words, "labels": words}
        profile = profile_model(Spoken(head), batch, loss_fn="model", repetitions=1, seconds=0.1, split_backward=False)
        found.append((profile.nodes[-1].stash_bytes / 1e6, profile.nodes[-1].workspace_bytes / 1e6))
    assert found == [pytest.approx((131.4, 262.6), rel=0.01), pytest.approx((0.0668, 33.4), rel=0.02)]


@pytest.mark.parametrize("changed", ["weight", "bias"])
def test_a_head_that_changes_before_its_backward_is_refused(changed: str) -> None:
    hidden, weight, target, bias = given()
    loss = sw.linear_cross_entropy(hidden, weight, target, bias=bias)
    with torch.no_grad():
        {"weight": weight, "bias": bias}[changed].mul_(2)  # type: ignore[union-attr]
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()
