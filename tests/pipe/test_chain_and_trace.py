"""Odd models, cut at odd places: outputs of any form, values that fork, constants, memory that is changed in place.

Each runs on as many stages as it can be cut into and must equal itself on one process, gradients included.
"""

from __future__ import annotations

from collections import namedtuple
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from stagewright.partition.graph.forms import Arguments
from stagewright.partition.graph.trace import TracedUnits
from stagewright.pipe import PipelineModule

WIDTH = 8
X = torch.randn(8, WIDTH, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
Y = torch.randn(8, WIDTH, dtype=torch.float64, generator=torch.Generator().manual_seed(1))

Pair = namedtuple("Pair", "y note")


def linear() -> nn.Linear:
    return nn.Linear(WIDTH, WIDTH)


class Layers(nn.Module):
    """Linear layers a, b, c, d for the models here to wire."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.c, self.d = linear(), linear(), linear(), linear()


def output_of(value: Any) -> Tensor:
    """The one tensor of a model's output that the loss compares with the target."""
    if isinstance(value, dict):
        return value["y"] + value["aux"][0].mean() + value["early"][0]
    return value[0] if isinstance(value, tuple) else value


def loss_of(output: Any, target: Tensor) -> Tensor:
    return F.mse_loss(output_of(output), target)


def agree_with_one_process(
    make: Callable[[], nn.Module],
    *,
    ranks: int = 2,
    split_points: Sequence[str] | None = None,
    recompute: str = "none",
    inputs: tuple[Tensor, ...] = (X,),
) -> PipelineModule:
    """Loss, gradients, buffers and evaluation of a model on `ranks` stages are those of its twin on one process."""
    torch.manual_seed(3)
    model = make().double()
    torch.manual_seed(3)
    twin = make().double()
    total = 0.0
    for k in range(4):
        loss = loss_of(twin(*(x.tensor_split(4)[k].clone() for x in inputs)), Y.tensor_split(4)[k]) / 4
        loss.backward()
        total += loss.item()
    given = tuple(x.clone() for x in inputs)
    pipe = PipelineModule(
        model,
        num_microbatches=4,
        mesh={"pipe": ranks},
        loss_fn=loss_of,
        split_points=split_points,
        example_inputs=given,
        recompute=recompute,
    )
    assert pipe.forward_backward(*given, Y).loss == pytest.approx(total, abs=1e-12)
    for (name, parameter), other in zip(model.named_parameters(), twin.parameters(), strict=True):
        assert (parameter.grad is None) == (other.grad is None), name
        if parameter.grad is not None:
            assert torch.allclose(parameter.grad, other.grad, rtol=0, atol=1e-12), name
    for (name, buffer), other in zip(model.named_buffers(), twin.named_buffers(), strict=True):
        assert torch.equal(buffer, other[1]), name
    evaluation = pipe.eval_step(*given, Y)
    _same_outputs(evaluation.output, twin.eval()(*(x.clone() for x in inputs)))
    assert all(torch.equal(mine, x) for mine, x in zip(given, inputs, strict=True)), "the user's batch was changed"
    pipe.close()
    return pipe


def _same_outputs(found: Any, expected: Any) -> None:
    leaves, form = pytree.tree_flatten(found)
    wanted, wanted_form = pytree.tree_flatten(expected)
    assert form == wanted_form
    for one, other in zip(leaves, wanted, strict=True):
        if isinstance(other, Tensor) and other.dim():
            assert torch.allclose(one, other, rtol=0, atol=1e-12)
        elif not isinstance(other, Tensor):
            assert one == other


# --- outputs ---


class InADict(Layers):
    """Nested outputs; some of them are made in the first stage, and one is the input."""

    def forward(self, x: Tensor) -> dict[str, Any]:
        h = self.a(x)
        return {"y": self.d(self.c(self.b(h))), "aux": (h.tanh().mean(-1), x), "early": [h]}


class InATuple(Layers):
    def forward(self, x: Tensor) -> tuple[Tensor, Tensor, None]:
        h = self.b(self.a(x))
        return self.d(self.c(h)), h > 0, None


class WithANote(Layers):
    """A constant that is no tensor."""

    def forward(self, x: Tensor) -> Any:
        return Pair(self.d(self.c(self.b(self.a(x)))), 3)


class WithAScalar(Layers):
    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        h = self.a(x)
        return self.d(self.b(h)), h.mean()


class OtherInEvaluation(Layers):
    """Training returns more than evaluation does."""

    def forward(self, x: Tensor) -> Any:
        h = self.b(self.a(x))
        y = self.d(self.c(h))
        return (y, h, None) if self.training else y


@pytest.mark.parametrize("ranks", [1, 2, 3, 4])
@pytest.mark.parametrize("model", [InADict, InATuple, WithANote, OtherInEvaluation])
def test_outputs_of_any_form(model: type[nn.Module], ranks: int) -> None:
    agree_with_one_process(model, ranks=ranks)


def test_an_output_without_dimensions_comes_by_microbatch() -> None:
    pipe = agree_with_one_process(WithAScalar, ranks=3)
    _, scalars = pipe.eval_step(X, Y).output  # type: ignore[misc]
    assert scalars.shape == (4,)


# --- values on their way ---


class Forked(nn.Module):
    """Both halves of a chunk are used, one of them at the very end."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.c, self.d = nn.Linear(WIDTH, 2 * WIDTH), linear(), linear(), linear()

    def forward(self, x: Tensor) -> Tensor:
        u, v = self.a(x).chunk(2, -1)
        u = self.c(self.b(u) + 1)
        return self.d(u * v)


class Selected(nn.Module):
    """topk gives two values, one of integers."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.c = linear(), nn.Linear(4, WIDTH), linear()

    def forward(self, x: Tensor) -> Tensor:
        values, places = self.a(x).topk(4, -1)
        return self.c(self.b(values) + places.sum(-1, keepdim=True))


class Constants(Layers):
    """A tensor made in forward, one kept as a plain attribute, and buffers, each used in several stages."""

    scale: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.plain = torch.rand(WIDTH, dtype=torch.float64)
        self.register_buffer("scale", torch.rand(WIDTH))
        self.register_buffer("shift", torch.rand(WIDTH), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        made = torch.tensor([1.0, 2.0, 3.0, 4.0, 5.0, 6.0, 7.0, 8.0], dtype=torch.float64)
        h = self.a(x) * made + self.scale
        h = self.b(h) * self.plain + self.shift
        h = self.c(h) + torch.arange(WIDTH)
        return self.d(h * made + self.scale)


class Counting(Layers):
    """A buffer that each forward changes."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("calls", torch.zeros((), dtype=torch.int64))

    def forward(self, x: Tensor) -> Tensor:
        h = self.b(self.a(x))
        if self.training:
            self.calls += 1
        return self.d(self.c(h))


class Sizes(Layers):
    """Numbers derived from the batch's size, in several stages."""

    def forward(self, x: Tensor) -> Tensor:
        n = x.shape[0]
        h = self.a(x).reshape(2 * n, -1)
        h = self.c(self.b(h.reshape(n, -1)))
        return self.d(h.view(-1, n).reshape(n, WIDTH))


class Masked(Layers):
    """A mask of booleans over all stages."""

    def forward(self, x: Tensor) -> Tensor:
        mask = x > 0
        h = self.a(x)
        h = self.c(self.b(torch.where(mask, h, -h)))
        return self.d(h) * mask


@pytest.mark.parametrize("ranks", [2, 3, 4])
@pytest.mark.parametrize("model", [Forked, Constants, Counting, Sizes, Masked])
def test_values_of_any_kind_cross_the_cuts(model: type[nn.Module], ranks: int) -> None:
    agree_with_one_process(model, ranks=ranks)


@pytest.mark.parametrize("point", ["b", "c", "d"])
def test_a_cut_between_a_chunk_and_its_uses(point: str) -> None:
    agree_with_one_process(Forked, split_points=[point])


@pytest.mark.parametrize("recompute", ["none", "full"])
def test_parts_of_a_tuple_that_is_no_tensor(recompute: str) -> None:
    agree_with_one_process(Selected, ranks=3, recompute=recompute)


def test_an_input_that_is_not_used() -> None:
    class Ignores(Layers):
        def forward(self, x: Tensor, unused: Tensor) -> Tensor:
            return self.b(self.a(x))

    agree_with_one_process(Ignores, inputs=(X, Y))


# --- memory that is changed in place ---


class Doubling(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x.mul_(2.0)


def chain(*layers: nn.Module, frozen: bool = False) -> nn.Sequential:
    model = nn.Sequential(*layers)
    model[0].requires_grad_(not frozen)
    return model


class Residual(nn.Module):
    """In plain torch the skip reads what ReLU wrote."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.act, self.b, self.c = linear(), nn.ReLU(inplace=True), linear(), linear()

    def forward(self, x: Tensor) -> Tensor:
        h = self.a(x)
        return self.c(self.b(self.act(h)) + h)


IN_PLACE: dict[str, tuple[Callable[[], nn.Module], str]] = {
    "relu at the start of a stage": (lambda: chain(linear(), nn.ReLU(inplace=True), linear()), "1"),
    "twice at the start of a stage": (lambda: chain(linear(), Doubling(), nn.ReLU(inplace=True), linear()), "1"),
    "behind a frozen stage": (lambda: chain(linear(), Doubling(), linear(), frozen=True), "1"),
    "on the model's input": (lambda: chain(Doubling(), linear(), linear()), "2"),
    "with a skip, traced": (Residual, "act"),
    "behind a skip, traced": (Residual, "b"),
}


@pytest.mark.parametrize("recompute", ["none", "full"])
@pytest.mark.parametrize(("make", "point"), IN_PLACE.values(), ids=IN_PLACE.keys())
def test_in_place_changes(make: Callable[[], nn.Module], point: str, recompute: str) -> None:
    """The stage before keeps its output for its backward, recomputation reads the inputs twice, the user keeps x."""
    agree_with_one_process(make, split_points=[point], recompute=recompute)


class SeesThroughAView(nn.Module):
    """`v` is a part of the memory that ReLU changes, and is read after that."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.act, self.b, self.c = linear(), nn.ReLU(inplace=True), linear(), linear()

    def forward(self, x: Tensor) -> Tensor:
        h = self.a(x)
        v = h[:, :4]
        z = self.b(self.act(h))
        return self.c(z) + F.pad(v, (0, 4))


class ChangedThroughAView(SeesThroughAView):
    """The other way round: ReLU changes `h` through a part of it."""

    def forward(self, x: Tensor) -> Tensor:
        h = self.a(x)
        self.act(h[:, :4])
        return self.c(self.b(h))


@pytest.mark.parametrize("model", [SeesThroughAView, ChangedThroughAView])
def test_no_cut_parts_a_view_from_the_change_that_it_sees(model: type[nn.Module]) -> None:
    message = r"stages 0 and 1 part '(a|__getitem__)' and 'act' at .*: they share memory .* Expected both in one stage"
    with pytest.raises(ValueError, match=message):
        agree_with_one_process(model, split_points=["act"])
    agree_with_one_process(model, split_points=["b"])
    for ranks in (2, 3):  # left to itself, the partitioner finds other places
        agree_with_one_process(model, ranks=ranks)


# --- two values over the same memory, between the stages of a chain ---


class Halves(nn.Module):
    """A tensor and a part of it."""

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        y = 2.0 * x
        return y, y[:, :4]


class ChangesOne(nn.Module):
    """In plain torch the part reads what ReLU wrote."""

    def __init__(self, *, inplace: bool) -> None:
        super().__init__()
        self.act = nn.ReLU(inplace=inplace)

    def forward(self, pair: tuple[Tensor, Tensor]) -> Tensor:
        whole, part = pair
        return self.act(whole) + F.pad(part, (0, WIDTH - 4))


@pytest.mark.parametrize("between", [[], [nn.Identity()]], ids=["next stage", "the stage after next"])
def test_memory_shared_by_two_inputs_is_not_changed_in_place(between: list[nn.Module]) -> None:
    """Each stage got copies of its own, and only one of them was changed."""
    last = 2 + len(between)
    points = [str(i) for i in range(2, last + 1)]
    with pytest.raises(
        ValueError, match=rf"stage {last - 1} .* input 0 in place, .* memory with its input 1.*Expected"
    ):
        agree_with_one_process(
            lambda: chain(linear(), Halves(), *between, ChangesOne(inplace=True), linear()),
            ranks=last,
            split_points=points,
        )
    agree_with_one_process(lambda: chain(linear(), Halves(), ChangesOne(inplace=True), linear()), split_points=["3"])
    agree_with_one_process(lambda: chain(linear(), Halves(), ChangesOne(inplace=False), linear()), split_points=["2"])


# --- one buffer on two stages ---


class NormTwice(nn.Module):
    """A traced model that runs one normalisation at its begin and at its end."""

    def __init__(self, norm: nn.Module) -> None:
        super().__init__()
        self.norm, self.a, self.b = norm, linear(), linear()

    def forward(self, x: Tensor) -> Tensor:
        return self.norm(self.b(self.a(self.norm(x))))


class Counts(nn.Module):
    """A buffer that is replaced by a new tensor."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, x: Tensor) -> Tensor:
        self.calls = self.calls + 1
        return x * self.calls


def norm_twice_in_a_row(norm: nn.Module) -> nn.Module:
    return nn.Sequential(norm, linear(), linear(), norm)


@pytest.mark.parametrize(
    ("make", "names"),
    [
        (lambda: NormTwice(nn.BatchNorm1d(WIDTH)), r"'norm\.(running_mean|running_var|num_batches_tracked)'"),
        (lambda: norm_twice_in_a_row(nn.BatchNorm1d(WIDTH)), r"'0\.(running_mean|running_var|num_batches_tracked)'"),
        (lambda: norm_twice_in_a_row(nn.BatchNorm1d(WIDTH, affine=False)), "'0\\.running_mean'"),
        (lambda: norm_twice_in_a_row(Counts()), "'0\\.calls'"),
    ],
    ids=["traced", "chain", "without parameters", "reassigned"],
)
def test_a_buffer_that_moves_stands_on_one_stage(make: Callable[[], nn.Module], names: str) -> None:
    """One module on two ranks had two lives: neither saw what the other's microbatches did to its statistics."""
    with pytest.raises(ValueError, match=rf"buffer {names} changes in .* stages 0 and 1: expected"):
        agree_with_one_process(make)


class Smoothed(Layers):
    """A buffer is replaced in the first layer; the old value, through a view, is read after that."""

    mean: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("mean", torch.ones(WIDTH))
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, x: Tensor) -> Tensor:
        h = self.a(x)
        if self.training:
            old = self.mean[:4]
            self.mean = 0.5 * self.mean + h.detach().mean(0)
            self.calls += 1
            h = h * F.pad(old, (0, 4)) + self.mean * self.calls
        return self.d(self.c(self.b(h)))


@pytest.mark.parametrize("ranks", [2, 3, 4])
def test_a_new_value_of_a_buffer_is_written_where_it_is_made(ranks: int) -> None:
    """torch.export writes it at the end: the buffer stood on the last stage as well."""
    agree_with_one_process(Smoothed, ranks=ranks)
    units = TracedUnits(Smoothed().double(), Arguments.of((X,)), enter_unit=None)
    first, *others = units.at(["b"]).pieces
    assert {name for name, _ in first.module.named_buffers()} == {"mean", "calls"}
    assert not [name for piece in others for name, _ in piece.module.named_buffers()]


class CountsOn(Layers):
    """A buffer that is changed in place is also a value, which a later layer takes."""

    calls: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, x: Tensor) -> Tensor:
        h = self.a(x)
        if self.training:
            self.calls += 1
        return self.d(self.c(self.b(h)) * self.calls)


class GivesItsBuffer(Counting):
    """The same in a chain."""

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        self.calls += self.training
        return self.a(x), self.calls


class Scales(nn.Module):
    def forward(self, pair: tuple[Tensor, Tensor]) -> Tensor:
        return pair[0] * pair[1]


@pytest.mark.parametrize(
    ("make", "ranks", "point"),
    [(CountsOn, 2, "b"), (CountsOn, 2, "c"), (lambda: chain(GivesItsBuffer(), Scales(), linear()), 2, "1")],
)
def test_a_buffer_on_its_way_is_what_it_was(make: Callable[[], nn.Module], ranks: int, point: str) -> None:
    """The next stage saw what the following microbatches had made of it: the message was the buffer's own memory."""
    agree_with_one_process(make, ranks=ranks, split_points=[point])
    units = TracedUnits(CountsOn().double(), Arguments.of((X,)), enter_unit=None)
    assert [len(list(piece.module.buffers())) for piece in units.at(["b", "c", "d"]).pieces] == [1, 0, 0, 0]


def test_a_buffer_that_stands_still_may_be_on_two_stages() -> None:
    agree_with_one_process(lambda: norm_twice_in_a_row(nn.BatchNorm1d(WIDTH).eval()))
    agree_with_one_process(lambda: norm_twice_in_a_row(nn.BatchNorm1d(WIDTH)), ranks=1)


# --- what may not depend on the batch size ---


class AsManyAsSamples(nn.Module):
    def forward(self, x: Tensor) -> tuple[Tensor, ...]:
        return x.unbind(0)


class Stacks(nn.Module):
    def forward(self, xs: tuple[Tensor, ...]) -> Tensor:
        return torch.stack(xs)


class InPlaceWhenLarge(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x.relu_() if x.shape[0] > 2 else x.relu()


@pytest.mark.parametrize(
    ("middle", "message"),
    [
        (
            [AsManyAsSamples(), Stacks()],
            "AsManyAsSamples at the end of stage 0 .. 1 returns 4 tensors .*, and returned 2",
        ),
        (
            [nn.Identity(), InPlaceWhenLarge()],
            r"stage 1 \(2 .. 3\) changes an input of \(4, 8\) .* in place, and did not",
        ),
    ],
)
def test_what_a_stage_returns_and_changes_may_not_follow_the_batch_size(middle: list[nn.Module], message: str) -> None:
    model = nn.Sequential(linear(), *middle, linear()).double()
    pipe = PipelineModule(
        model,
        num_microbatches=4,
        mesh={"pipe": 2},
        loss_fn=loss_of,
        split_points=["2"],
        example_inputs=(X,),
    )
    pipe.forward_backward(X, Y)
    with pytest.raises(ValueError, match=message):
        pipe.forward_backward(torch.cat([X, X]), torch.cat([Y, Y]))
    pipe.forward_backward(X, Y)


# --- building runs nothing ---


_CALLED_WITH: list[str] = []  # by any Watchful; a list of its own is as it was before the build


class Watchful(nn.Module):
    """Notes what it is called with; its buffer counts."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(WIDTH)
        self.linear = linear()
        self.seen: list[str] = []

    def forward(self, x: Tensor) -> Tensor:
        self.seen.append(type(x).__name__)
        _CALLED_WITH.append(type(x).__name__)
        return self.linear(self.norm(x))


@pytest.mark.parametrize("traced", [False, True])
def test_building_computes_nothing_and_changes_nothing(traced: bool) -> None:
    class Wrapped(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.second = Watchful(), Watchful()

        def forward(self, x: Tensor) -> Tensor:
            return self.second(self.first(x))

    model = Wrapped().double() if traced else nn.Sequential(Watchful(), Watchful()).double()
    model[1].eval() if isinstance(model, nn.Sequential) else model.second.eval()
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    state = torch.get_rng_state()
    flags = [module.training for module in model.modules()]
    _CALLED_WITH.clear()
    PipelineModule(model, mesh={"pipe": 2}, num_microbatches=2, example_inputs=(X,))
    assert all(torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items())
    assert torch.equal(torch.get_rng_state(), state)
    assert [module.training for module in model.modules()] == flags
    assert all(parameter.grad is None for parameter in model.parameters())
    assert not [kind for module in model.modules() if isinstance(module, Watchful) for kind in module.seen]
    assert _CALLED_WITH
    assert "Tensor" not in _CALLED_WITH  # fakes alone


# --- the batch size in Python ---


class DividesByTheBatch(Layers):
    """int() makes the size of the traced batch a constant of the graph."""

    def forward(self, x: Tensor) -> Tensor:
        return self.b(self.a(x)) / int(x.shape[0])


class SmallAndLarge(Layers):
    """Takes another path for large batches; the graph knows the small one's."""

    def forward(self, x: Tensor) -> Tensor:
        return self.b(self.a(x)) if x.shape[0] < 4 else self.b(self.c(x))


@pytest.mark.filterwarnings("ignore::stagewright.partition.graph.model_units.TracedModelWarning")
@pytest.mark.parametrize(
    ("model", "size", "known"),
    [(DividesByTheBatch, 12, "exactly 2"), (DividesByTheBatch, 9, "exactly 2"), (SmallAndLarge, 16, "1 to 3")],
)
def test_a_batch_size_for_which_the_graph_is_wrong_is_refused(model: type[nn.Module], size: int, known: str) -> None:
    """torch.export fixes such sizes without a word; the numbers would be wrong."""
    traced = model().double()
    traced.register_forward_hook(lambda module, given, output: None)  # a graph, where a model has one itself
    pipe = PipelineModule(traced, num_microbatches=4, mesh={"pipe": 2}, loss_fn=loss_of, example_inputs=(X,))
    batch = torch.zeros(size, WIDTH, dtype=torch.float64)
    message = rf"microbatches of \d samples for a model that was traced for {known}: .* Expected batches that"
    for step in (pipe.forward_backward, pipe.eval_step):
        with pytest.raises(ValueError, match=message):
            step(batch, batch)
    pipe.forward_backward(X, Y)


@pytest.mark.parametrize("size", [12, 9, 8])
def test_a_recorded_model_is_recorded_again_for_another_batch_size(size: int) -> None:
    torch.manual_seed(0)
    model = DividesByTheBatch().double()
    pipe = PipelineModule(model, num_microbatches=4, mesh={"pipe": 2}, loss_fn=loss_of, example_inputs=(X,))
    x, y = torch.cat([X, X])[:size], torch.cat([Y, Y])[:size]
    parts = list(zip(x.tensor_split(4), y.tensor_split(4), strict=True))
    with torch.no_grad():
        expected = sum(loss_of(model(a), b).item() * len(a) for a, b in parts) / size
    assert pipe.forward_backward(x, y).loss == pytest.approx(expected, abs=1e-12)


def test_a_batch_size_for_which_other_modules_run_is_refused_by_name() -> None:
    pipe = PipelineModule(
        SmallAndLarge().double(), num_microbatches=4, mesh={"pipe": 2}, loss_fn=loss_of, example_inputs=(X,)
    )
    batch = torch.zeros(16, WIDTH, dtype=torch.float64)
    with pytest.raises(ValueError, match=r"module 'a' runs when the stages were built alone: .* Expected the same"):
        pipe.forward_backward(batch, batch)
    pipe.forward_backward(X, Y)


@pytest.mark.parametrize("model", [DividesByTheBatch, SmallAndLarge])
def test_a_model_is_traced_for_microbatches(model: type[nn.Module]) -> None:
    """It was traced for whole batches once, and divided by their size."""
    torch.manual_seed(0)
    one = model().double()
    pipe = PipelineModule(one, num_microbatches=4, mesh={"pipe": 2}, loss_fn=loss_of, example_inputs=(X,))
    with torch.no_grad():
        expected = sum(loss_of(one(x), y).item() for x, y in zip(X.split(2), Y.split(2), strict=True)) / 4
    assert pipe.forward_backward(X, Y).loss == pytest.approx(expected, abs=1e-12)


class Fork(Layers):
    """The output of the first stage goes to the two others."""

    def forward(self, x: Tensor) -> Tensor:
        h = torch.tanh(self.a(x))
        y = torch.tanh(self.b(h))
        out: Tensor = self.c(y) * h
        return out


def test_gradients_of_a_value_that_several_stages_take_add_up() -> None:
    pipe = agree_with_one_process(Fork, ranks=3, split_points=["b", "c"])
    assert {(edge.src, edge.dst) for edge in pipe.schedule.edges if edge.grad} >= {(0, 1), (0, 2)}
