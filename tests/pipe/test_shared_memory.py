"""Memory that is changed in place, shared by two values, or a buffer on two stages: equal to one process on any cut."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from support.cuts import WIDTH, Counting, agree_with_one_process, linear
from support.parts import GIVEN, Parts
from torch import Tensor, nn

from stagewright.pipe import PipelineModule


class Doubling(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x.mul_(2.0)


def chain(*layers: nn.Module, frozen: bool = False) -> nn.Sequential:
    model = nn.Sequential(*layers)
    model[0].requires_grad_(not frozen)
    return model


class Residual(Parts, a=linear, act=lambda: nn.ReLU(inplace=True), b=linear, c=linear):
    """In plain torch the skip reads what ReLU wrote."""

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


@pytest.mark.thorough(but=["relu at the start of a stage-full"])
@pytest.mark.parametrize("recompute", ["none", "full"])
@pytest.mark.parametrize(("make", "point"), IN_PLACE.values(), ids=IN_PLACE.keys())
def test_in_place_changes(make: Callable[[], nn.Module], point: str, recompute: str) -> None:
    """The stage before keeps its output for its backward, recomputation reads the inputs twice, the user keeps x."""
    agree_with_one_process(make, cut=[point], recompute=recompute)


class SeesThroughAView(Parts, a=linear, act=lambda: nn.ReLU(inplace=True), b=linear, c=linear):
    """`v` is a part of the memory that ReLU changes, and is read after that."""

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


@pytest.mark.thorough(but=["ChangedThroughAView"])
@pytest.mark.parametrize("model", [SeesThroughAView, ChangedThroughAView])
def test_no_cut_parts_a_view_from_the_change_that_it_sees(model: type[nn.Module]) -> None:
    message = r"stages 0 and 1 part '(a|__getitem__)' and 'act' at .*: they share memory .* Expected both in one stage"
    with pytest.raises(ValueError, match=message):
        agree_with_one_process(model, cut=["act"])
    agree_with_one_process(model, cut=["b"])
    for ranks in (2, 3):  # left to itself, the partitioner finds other places
        agree_with_one_process(model, ranks=ranks)


class Halves(nn.Module):
    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        y = 2.0 * x
        return y, y[:, :4]


class ChangesOne(Parts, act=GIVEN):
    def forward(self, pair: tuple[Tensor, Tensor]) -> Tensor:
        whole, part = pair
        return self.act(whole) + F.pad(part, (0, WIDTH - 4))


def halved(inplace: bool, *between: nn.Module) -> nn.Sequential:
    return chain(linear(), Halves(), *between, ChangesOne(nn.ReLU(inplace=inplace)), linear())


@pytest.mark.parametrize("between", [[], [nn.Identity()]], ids=["next stage", "the stage after next"])
def test_memory_shared_by_two_inputs_is_not_changed_in_place(between: list[nn.Module]) -> None:
    """Each stage got copies of its own, and only one of them was changed."""
    last = 2 + len(between)
    points = [str(i) for i in range(2, last + 1)]
    message = rf"stage {last - 1} .* input 0 in place, .* memory with its input 1.*Expected"
    with pytest.raises(ValueError, match=message):
        agree_with_one_process(lambda: halved(True, *between), ranks=last, cut=points)
    agree_with_one_process(lambda: halved(True), cut=["3"])
    agree_with_one_process(lambda: halved(False), cut=["2"])


class Added(Parts, a=linear, act=Doubling, b=linear, changes=""):
    """`changes` works on the first input in place, or on the second one, which nothing reads after that."""

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        if self.changes == "between":
            x[:, :1] += 1.0
        if self.changes == "unit":
            self.act(x)
        h = self.a(x) + y
        if self.changes == "last":
            y.add_(1.0)
        return self.b(h) + x


def train_with(model: nn.Module, *batch: Tensor, **options: Any) -> float | None:
    pipe = PipelineModule(model, mesh={"pipe": 2}, loss_fn=F.mse_loss, num_microbatches=2, **options)
    return pipe.forward_backward(*batch, **({} if batch else {"microbatches": [(X, X * 2)] * 2})).loss


X, T = torch.randn(4, 2 * WIDTH, generator=torch.Generator().manual_seed(3)).split(WIDTH, 1)
ALIASED: dict[str, tuple[Callable[[], nn.Module], tuple[Tensor, ...], str]] = {
    "between units": (lambda: Added(changes="between"), (X, X, T), "input 0 and input 1 .* changes input 0"),
    "in a unit": (lambda: Added(changes="unit"), (X, X.view(4, WIDTH), T), "input 0 and input 1 .* changes input 0"),
    "of no use later": (lambda: Added(changes="last"), (X, X, T), "input 0 and input 1 .* changes input 1"),
    "the target": (lambda: Added(changes="between"), (X, T, X), "input 0 and the target .* changes input 0"),
    "a chain": (lambda: chain(Doubling(), linear(), linear()), (X, X), "input 0 and the target .* changes input 0"),
    "passed on": (lambda: chain(nn.Identity(), Doubling(), linear()), (X, X), "the target .* changes input 0"),
    "microbatches": (lambda: chain(Doubling(), linear()), (), "of microbatch 0 and input 0 of microbatch 1 .* 0"),
}


@pytest.mark.thorough(but=["a chain"])
@pytest.mark.parametrize(("make", "batch", "message"), ALIASED.values(), ids=ALIASED.keys())
def test_a_tensor_that_is_passed_twice_is_not_changed_in_place(
    make: Callable[[], nn.Module], batch: tuple[Tensor, ...], message: str
) -> None:
    """A silent fault: each input was a copy, and the change in one was not seen in the other."""
    for options in ({}, {"verify": False}):
        with pytest.raises(ValueError, match=rf"{message} in place.*Expected"):
            train_with(make(), *batch, **options)


@pytest.mark.parametrize(
    ("changes", "batch"), [("", (X, X, X)), ("between", (X, T, T)), ("between", (X, X.clone(), X.clone()))]
)
def test_tensors_that_only_lie_in_one_memory_are_passed(changes: str, batch: tuple[Tensor, ...]) -> None:
    """X and T are columns of one tensor."""
    model = Added(changes=changes)
    loss = train_with(model, *batch)
    assert loss == pytest.approx(F.mse_loss(model(*(x.clone() for x in batch[:2])), batch[2]).item(), rel=1e-5)


class NormTwice(Parts, norm=GIVEN, a=linear, b=linear):
    def forward(self, x: Tensor) -> Tensor:
        return self.norm(self.b(self.a(self.norm(x))))


class Counts(Parts, calls=lambda: torch.zeros(())):
    def forward(self, x: Tensor) -> Tensor:
        self.calls = self.calls + 1
        return x * self.calls


def norm_twice(norm: nn.Module) -> nn.Module:
    return nn.Sequential(norm, linear(), linear(), norm)


@pytest.mark.parametrize(
    ("make", "names"),
    [
        (lambda: NormTwice(nn.BatchNorm1d(WIDTH)), r"'norm\.(running_mean|running_var|num_batches_tracked)'"),
        (lambda: norm_twice(nn.BatchNorm1d(WIDTH)), r"'0\.(running_mean|running_var|num_batches_tracked)'"),
        (lambda: norm_twice(nn.BatchNorm1d(WIDTH, affine=False)), "'0\\.running_mean'"),
        (lambda: norm_twice(Counts()), "'0\\.calls'"),
    ],
    ids=["traced", "chain", "without parameters", "replaced"],
)
def test_a_buffer_that_moves_stands_on_one_stage(make: Callable[[], nn.Module], names: str) -> None:
    """One module on two ranks had two lives: neither saw what the other's microbatches did to its statistics."""
    with pytest.raises(ValueError, match=rf"buffer {names} changes in .* stages 0 and 1: expected"):
        agree_with_one_process(make)


class Smoothed(Counting):
    """A buffer is replaced in the first layer; the old value, through a view, is read after that."""

    mean: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("mean", torch.ones(WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        h = self.a(x)
        if self.training:
            old = self.mean[:4]
            self.mean = 0.5 * self.mean + h.detach().mean(0)
            self.calls += 1
            h = h * F.pad(old, (0, 4)) + self.mean * self.calls
        return self.d(self.c(self.b(h)))


@pytest.mark.thorough(but=["2"])
@pytest.mark.parametrize("ranks", [2, 3, 4])
def test_a_new_value_of_a_buffer_is_written_where_it_is_made(ranks: int) -> None:
    """The buffer stands there alone."""
    pipe = agree_with_one_process(Smoothed, ranks=ranks)
    assert len(pipe.stages_of["mean"]) == 1
    assert pipe.stages_of["mean"] == pipe.stages_of["calls"]


class CountsOn(Counting):
    """A buffer that is changed in place is also a value, which a later layer takes."""

    def forward(self, x: Tensor) -> Tensor:
        h = self.a(x)
        if self.training:
            self.calls += 1
        return self.d(self.c(self.b(h)) * self.calls)


class GivesItsBuffer(Counting):
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
    agree_with_one_process(make, ranks=ranks, cut=[point])


def test_a_buffer_that_stands_still_may_be_on_two_stages() -> None:
    agree_with_one_process(lambda: norm_twice(nn.BatchNorm1d(WIDTH).eval()))
    agree_with_one_process(lambda: norm_twice(nn.BatchNorm1d(WIDTH)), ranks=1)
