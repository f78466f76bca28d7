"""The backward in two halves: I leaves weights alone where it can, and both together are the whole, to the last bit."""

import gc
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from support.inside import Block, GPTConfig, SplitBackward, WeightGradients
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.nn.utils.parametrizations import weight_norm
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.checkpoint import checkpoint


class Branches(nn.Module):
    """Parameters alone on a branch, a parameter used twice, and one that nobody uses."""

    def __init__(self) -> None:
        super().__init__()
        self.places = nn.Parameter(torch.randn(3, 4))
        self.twice = nn.Linear(4, 4)
        self.unused = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.twice(F.gelu(self.twice(x + self.places.exp()[:2])))


class Thrice(nn.Module):
    """One weight in three places: the order in which its parts are added up shows in the last bit."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(self.linear(self.linear(x).tanh()).tanh())


class Reversible(torch.autograd.Function):
    """Keeps its input alone, and asks for its own gradients within its backward."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(x, weight)
        return F.linear(x, weight)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, ...]:
        x, weight = ctx.saved_tensors
        with torch.enable_grad():
            again = x.detach().requires_grad_()
            y = F.linear(again, weight)
        return torch.autograd.grad(y, (again, weight), gradient)


class Apart(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(4))

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        return x * self.weight, self.weight.square()


class Call(nn.Module):
    def __init__(self, call: Callable[..., Tensor], *shapes: tuple[int, ...]) -> None:
        super().__init__()
        self.call = call
        self.weights = nn.ParameterList([nn.Parameter(torch.randn(shape)) for shape in shapes])

    def forward(self, x: Tensor) -> Tensor:
        return self.call(x, *self.weights)


class TiedTokens(nn.Module):
    def __init__(self, **options: Any) -> None:
        super().__init__()
        self.tokens = nn.Embedding(6, 4, **options)

    def forward(self, x: Tensor) -> Tensor:
        indices = (x.detach().abs() * 10).long() % 6
        return F.linear(self.tokens(indices) + x[..., None], self.tokens.weight)


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(4, 2, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        return self.attention(x, x, x, need_weights=False)[0]


class Checkpointed(nn.Module):
    def __init__(self, inner: nn.Module, use_reentrant: bool) -> None:
        super().__init__()
        self.inner, self.use_reentrant, self.calls = inner, use_reentrant, 0

    def forward(self, x: Tensor) -> Tensor:
        def run(x: Tensor) -> Tensor:
            self.calls += 1
            return self.inner(x)

        return checkpoint(run, x, use_reentrant=self.use_reentrant)  # type: ignore[no-any-return]


def mlp(*, inplace: bool = False) -> nn.Sequential:
    return nn.Sequential(nn.Linear(4, 8), nn.ReLU(inplace), nn.Linear(8, 4, bias=False), nn.LayerNorm(4))


def run(model: nn.Module, x: Tensor) -> tuple[list[Tensor], list[Tensor]]:
    value = model(x)
    flat = [leaf for leaf in tree_leaves(value) if leaf.requires_grad]
    return flat, [torch.linspace(-1, 1, y.numel()).to(y.dtype).reshape(y.shape) for y in flat]


def whole(model: nn.Module, x: Tensor) -> list[Tensor | None]:
    torch.autograd.backward(*run(model, x))
    return taken(model, x)


def first_half(model: nn.Module, x: Tensor) -> WeightGradients:
    split, weights = SplitBackward(), WeightGradients()
    with split.forward():
        values = run(model, x)
    with split.backward(weights):
        torch.autograd.backward(*values)
    return weights


def made(model: nn.Module) -> str:
    return " ".join(name for name, parameter in model.named_parameters() if parameter.grad is not None)


def taken(model: nn.Module, x: Tensor) -> list[Tensor | None]:
    found = [tensor.grad for tensor in (x, *model.parameters())]
    for tensor in (x, *model.parameters()):
        tensor.grad = None
    return found


def same(found: Sequence[Tensor | None], expected: Sequence[Tensor | None]) -> None:
    for one, other in zip(found, expected, strict=True):
        assert (one is None) is (other is None)
        if one is not None and other is not None:
            assert one.layout == other.layout
            assert one.dtype == other.dtype
            assert torch.equal(one.to_dense(), other.to_dense())


# Model, shape of the input, names of parameters whose gradients come in I.
MODELS: list[Any] = [
    pytest.param(lambda: nn.Linear(4, 4), (2, 4), "", id="linear"),
    pytest.param(mlp, (3, 2, 4), "3.weight 3.bias", id="mlp"),
    pytest.param(lambda: mlp(inplace=True), (3, 2, 4), "3.weight 3.bias", id="in-place-behind-a-linear"),
    pytest.param(lambda: nn.Linear(4, 3), (2, 3, 5, 4), "", id="four-dimensions"),
    pytest.param(lambda: Block(GPTConfig(width=8, heads=2, length=4)), (2, 4, 8), None, id="gpt-block"),
    pytest.param(Branches, (2, 4), "places", id="branches"),
    pytest.param(Thrice, (5, 8), "", id="thrice"),
    pytest.param(lambda: Call(Reversible.apply, (4, 4)), (2, 4), "weights.0", id="grad-in-backward"),
    pytest.param(Apart, (4,), "weight", id="apart"),
    pytest.param(Attention, (2, 3, 4), "", id="attention"),
    pytest.param(lambda: nn.TransformerEncoderLayer(4, 2, 8, 0.0), (2, 3, 4), None, id="encoder-layer"),
    pytest.param(lambda: nn.LSTM(4, 4), (3, 2, 4), None, id="lstm"),
    pytest.param(lambda: nn.Sequential(nn.Conv1d(4, 4, 3), nn.BatchNorm1d(4)), (2, 4, 8), None, id="conv1d"),
    pytest.param(lambda: nn.Conv2d(4, 6, (3, 2), (2, 1), (1, 0), groups=2), (2, 4, 6, 6), "", id="conv2d"),
    pytest.param(lambda: nn.Conv2d(2, 2, 3, bias=False, dilation=2), (2, 2, 6, 6), "", id="conv-without-bias"),
    pytest.param(lambda: nn.Conv2d(2, 2, 3, padding="same"), (2, 2, 6, 6), "weight bias", id="conv-same"),
    pytest.param(lambda: nn.ConvTranspose2d(4, 2, 3, 2, output_padding=1), (2, 4, 3, 3), "", id="conv-transpose"),
    pytest.param(TiedTokens, (2, 3), "", id="tied"),
    pytest.param(lambda: TiedTokens(padding_idx=-2), (2, 3), "", id="padding"),
    pytest.param(lambda: TiedTokens(scale_grad_by_freq=True), (2, 3), "", id="by-frequency"),
    pytest.param(lambda: TiedTokens(max_norm=0.5), (2, 3), "", id="max-norm"),
    pytest.param(lambda: Call(lambda x, b, w: torch.addmm(b, x, w), (5,), (4, 5)), (3, 4), "", id="addmm"),
    pytest.param(lambda: Call(lambda x, w: x @ w, (4, 5)), (2, 3, 4), "", id="at"),
    pytest.param(lambda: Call(lambda x, w: x @ w.T, (5, 4)), (2, 3, 4), "", id="at-transposed"),
    pytest.param(lambda: Call(lambda x, w: x @ w[:4], (5, 4)), (3, 4), "weights.0", id="a-part-of-a-weight"),
    pytest.param(lambda: Call(lambda x, w: x.t() @ w, (4, 5)), (4, 3), "", id="columns-first"),
    pytest.param(lambda: Call(torch.bmm, (3, 4, 5)), (3, 2, 4), "", id="experts"),
    pytest.param(lambda: Call(lambda x, b, w: b.baddbmm(x, w), (3, 1, 5), (3, 4, 5)), (3, 2, 4), "", id="baddbmm"),
    pytest.param(lambda: Call(lambda x, w: F.linear(x, w) * w.sum(), (4, 4)), (3, 4), "weights.0", id="in-both-ways"),
    pytest.param(lambda: weight_norm(nn.Linear(4, 4)), (3, 4), None, id="parametrized"),
]


@pytest.mark.parametrize(("make", "shape", "in_first_half"), MODELS)
def test_both_halves_are_the_whole(
    make: Callable[[], nn.Module], shape: tuple[int, ...], in_first_half: str | None
) -> None:
    torch.manual_seed(0)
    model = make().double()
    x = torch.randn(shape, dtype=torch.float64, requires_grad=True)
    expected = whole(model, x)
    weights = first_half(model, x)
    assert x.grad is not None or expected[0] is None
    if in_first_half is not None:
        assert made(model) == in_first_half
    weights.add()
    same(taken(model, x), expected)


class Projections(nn.Module):
    """One input, a leaf, for three linears: autocast casts it once."""

    def __init__(self) -> None:
        super().__init__()
        self.parts = nn.ModuleList(nn.Linear(8, 8, bias=False) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        return F.scaled_dot_product_attention(*(part(x) for part in self.parts))


class Penalty(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner, self.outer = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        y = self.inner(x).tanh()
        by_x, by_weight = torch.autograd.grad(y.sum(), (x, self.inner.weight), create_graph=True)
        return self.outer(y + by_x) + by_weight.sum()


class Transformed(nn.Module):
    """Code under torch.func, which takes no autograd function of ours."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.other = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        rows: Tensor = torch.func.vmap(lambda row: self.linear(row[None])[0])(x)
        y, tangent = torch.func.jvp(lambda x: self.linear(x).tanh(), (x,), (torch.ones_like(x),))
        return self.other(rows + y + tangent)


class Work(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.done: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if not (func.is_view or func is torch.ops.aten.detach.default):
            self.done[str(func)] += 1
        return result


def test_the_halves_do_what_the_whole_does_once() -> None:
    """The same operations as often, where a gradient is the first as where it is added; so it is kept, not copied."""
    model = nn.Sequential(Block(GPTConfig(width=32, heads=2, length=8)), nn.Linear(32, 32))
    x, work = torch.randn(2, 8, 32), list[Counter[str]]()
    for halves in (False, True):
        model.zero_grad()
        for _ in range(2):
            leaf, split, weights = x.clone().requires_grad_(), SplitBackward(), WeightGradients()
            with split.forward() if halves else nullcontext():
                y = model(leaf)
            with Work() as counted, split.backward(weights if halves else None):
                torch.autograd.backward([y], [torch.ones_like(y)])
                weights.add()
            work.append(counted.done)
    whole_first, whole_next, first, following = work
    assert (first, following) == (whole_first, whole_next)
    assert whole_first["aten.mm.default"] == 2 * 5


@pytest.mark.thorough(but=["mlp-float32-plain", "penalty-bfloat16-checkpoint"])
@pytest.mark.filterwarnings("ignore:`torch.jit.script` is deprecated")  # torch's own, for jvp
@pytest.mark.parametrize("use_reentrant", [None, False, True], ids=["plain", "checkpoint", "reentrant"])
@pytest.mark.parametrize("autocast", [False, True], ids=["float32", "bfloat16"])
@pytest.mark.parametrize(
    ("make", "shape"),
    [
        pytest.param(mlp, (3, 2, 4), id="mlp"),
        pytest.param(Projections, (2, 4, 8), id="projections"),
        pytest.param(TiedTokens, (2, 3), id="tied"),
        pytest.param(Branches, (2, 4), id="branches"),
        pytest.param(lambda: nn.Sequential(nn.Conv2d(4, 4, 3), nn.ReLU(True)), (2, 4, 6, 6), id="conv"),
        pytest.param(lambda: nn.TransformerEncoderLayer(4, 2, 8, 0.0), (2, 3, 4), id="encoder-layer"),
        pytest.param(Penalty, (3, 4), id="penalty"),
        pytest.param(Transformed, (3, 4), id="transformed"),
    ],
)
def test_under_autocast_and_checkpoints(
    make: Callable[[], nn.Module], shape: tuple[int, ...], autocast: bool, use_reentrant: bool | None
) -> None:
    """To the last bit: types, casts that are shared, and what runs again are as they were."""
    torch.manual_seed(0)
    inner = make()
    if use_reentrant and isinstance(inner, Penalty):
        pytest.skip("use_reentrant=True runs the forward without a graph, which nothing can differentiate")
    model = inner if use_reentrant is None else Checkpointed(inner, use_reentrant)
    x = torch.randn(shape, requires_grad=True)
    with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
        expected = whole(model, x)
        calls = getattr(model, "calls", 0)
        weights = first_half(model, x)
        weights.add()
    found = taken(model, x)
    if isinstance(inner, Penalty):  # a part of a weight's gradient comes in I, which is a sum in another order
        for one, other in zip(found, expected, strict=True):
            torch.testing.assert_close(one, other, **({"rtol": 0.02, "atol": 0.02} if autocast else {}))
    else:
        same(found, expected)
    assert getattr(model, "calls", 0) == 2 * calls


def test_sparse_and_complex_gradients() -> None:
    class Sparse(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.tokens = nn.Embedding(6, 4, sparse=True)

        def forward(self, x: Tensor) -> Tensor:
            indices = (x.detach().abs() * 10).long() % 6
            return self.tokens(indices) + 2 * self.tokens(indices.flip(0)) + x[..., None]

    torch.manual_seed(0)
    for model, x in (
        (Sparse(), torch.randn(2, 3, requires_grad=True)),
        (nn.Linear(4, 3, dtype=torch.complex64), torch.randn(2, 4, dtype=torch.complex64, requires_grad=True)),
    ):
        for _ in range(2):  # the second adds to what is there
            torch.autograd.backward(*run(model, x))
        expected = taken(model, x)
        for _ in range(2):
            first_half(model, x).add()
        same(taken(model, x), expected)


def test_hooks_on_a_weight_see_its_whole_gradient_once() -> None:
    torch.manual_seed(0)
    model = Branches()
    seen: dict[str, list[Tensor]] = {"weight": [], "bias": []}

    def clamped(gradient: Tensor) -> Tensor:
        seen["weight"].append(gradient)
        return gradient.clamp(-0.1, 0.1)

    model.twice.weight.register_hook(clamped)  # type: ignore[no-untyped-call]
    model.twice.bias.register_post_accumulate_grad_hook(lambda bias: seen["bias"].append(bias.grad.clone()))
    x = torch.randn(2, 4, requires_grad=True)
    expected = whole(model, x)
    first_half(model, x).add()
    same(taken(model, x), expected)
    for plain, again in seen.values():
        assert torch.equal(plain, again)


def test_what_only_the_first_half_needs_is_free_behind_it() -> None:
    """Inputs of a block's linears stay, and the gradients of their outputs; what stands between them goes."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 32), nn.GELU(), nn.Linear(32, 8), nn.LayerNorm(8), nn.GELU())
    outputs: list[StorageWeakRef] = []

    def note(_: nn.Module, __: Any, output: Tensor) -> None:
        outputs.append(StorageWeakRef(output.untyped_storage()))

    for part in model:
        part.register_forward_hook(note)
    x = torch.randn(16, 8, requires_grad=True)
    weights = first_half(model, x)
    assert [output.expired() for output in outputs] == [True, False, True, True, True]
    rows, item = 16, 4
    assert weights.num_bytes == rows * item * (8 + 32) + rows * item * (32 + 8)  # (x, gy) of both
    weights.add()
    assert all(output.expired() for output in outputs)
    assert weights.num_bytes == 0


def test_a_custom_function_keeps_nothing_alive_for_the_second_half() -> None:
    """Not even what it keeps as an attribute of its context, which no one frees but with the graph."""

    class Keeps(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor) -> Tensor:
            ctx.kept = x * 2
            kept.append(StorageWeakRef(ctx.kept.untyped_storage()))
            return x * 2

        @staticmethod
        def backward(ctx: Any, gradient: Tensor) -> Tensor:
            return gradient * 2

    kept: list[Any] = []
    model = Call(lambda x, w: Keeps.apply(x) @ w, (4, 4))  # type: ignore[no-untyped-call]
    weights = first_half(model, torch.randn(3, 4, requires_grad=True))
    gc.collect()
    assert kept[0].expired()
    weights.add()


def test_what_is_changed_in_place_is_told() -> None:
    table = torch.randn(3, 4)
    model = Call(lambda x, w: x * (table @ w), (4, 4))
    x = torch.randn(3, 4, requires_grad=True)
    split = SplitBackward()
    with split.forward():
        values = run(model, x)
    table.add_(1.0)  # behind the forward: autograd says so
    with pytest.raises(RuntimeError, match="modified by an inplace operation"), split.backward(WeightGradients()):
        torch.autograd.backward(*values)
    weights = first_half(model, x)
    table.add_(1.0)  # behind I: W does
    with pytest.raises(RuntimeError, match=r"modified by an inplace operation: a tensor of shape \(3, 4\)"):
        weights.add()


def test_frozen_weights_and_inputs() -> None:
    torch.manual_seed(0)
    for frozen, in_first_half in (("0.weight", "0.bias 3.weight 3.bias"), ("0.bias 2.weight", "3.weight 3.bias")):
        for wants_grad in (True, False):
            model = mlp()
            for name in frozen.split():
                model.get_parameter(name).requires_grad_(False)
            x = torch.randn(3, 4, requires_grad=wants_grad)
            expected = whole(model, x)
            weights = first_half(model, x)
            assert made(model) == in_first_half
            weights.add()
            same(taken(model, x), expected)
