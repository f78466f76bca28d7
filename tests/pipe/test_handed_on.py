"""Units of an nn.Sequential, and of stages=, that hand tensors to each other past their arguments stay on one stage."""

import copy
import functools
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from support.alone import Alone, near, train_alone, train_piped
from support.parts import GIVEN, Does, Parts
from support.plain import WIDTH, batch, linear
from support.pool import Pool
from support.records import records
from support.small import sgd
from torch import Tensor, nn

from stagewright.pipe import PipelineModule

OPTIONS: dict[str, Any] = {"schedule": "gpipe", "num_microbatches": 4, "loss_fn": F.mse_loss, "mesh": {"pipe": 2}}


class Puts(Parts, layer=linear, put=GIVEN):
    def forward(self, x: Tensor) -> Tensor:
        y = torch.tanh(self.layer(x))
        self.put(x)
        return y


class Takes(Parts, layer=linear, take=GIVEN):
    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x) * self.take()


class Remembers(Parts, layer=linear):
    def forward(self, x: Tensor) -> Tensor:
        self.last = x
        return torch.tanh(self.layer(x))


def attribute() -> list[nn.Module]:
    first = Remembers()
    return [linear(), first, linear(), Takes(lambda: first.last), linear(), linear()]


def shared_object() -> list[nn.Module]:
    box = SimpleNamespace()
    # What another one left is returned, without an operation on it.
    takes = Does(lambda x: (x, box.value)), Does(lambda pair: pair[0] * pair[1])
    return [linear(), Puts(lambda x: setattr(box, "value", x)), linear(), *takes, linear()]


def shared_tensor() -> list[nn.Module]:
    """One that no forward made, changed in place."""
    table = torch.zeros(1, dtype=torch.float64)
    put = Puts(lambda x: table.copy_(x.detach().mean()))  # type: ignore[arg-type, return-value]
    return [linear(), put, linear(), Takes(table.clone), linear(), linear()]


def held_by_both() -> list[nn.Module]:
    third = Remembers()
    take = Takes(lambda: third.last)
    take.third = third
    return [linear(), nn.Sequential(third, nn.Tanh()), linear(), take, linear(), linear()]


KINDS = [attribute, shared_object, shared_tensor, held_by_both]


def made(make: Callable[[], list[nn.Module]]) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(*make()).double()


def pipelined(make: Callable[[], list[nn.Module]], **options: Any) -> Alone:
    settings = {"schedule": "1f1b", "num_microbatches": 4, "loss_fn": F.mse_loss, "optimizer": sgd, "timeout": 60.0}
    return train_piped(PipelineModule(made(make), **records(**(settings | options))), map(batch, range(2)))


def agree(found: Alone, make: Callable[[], list[nn.Module]]) -> None:
    wanted = train_alone(made(make), map(batch, range(2)), sgd, parts=4)
    near([found.losses, found.state], [wanted.losses, wanted.state], rtol=1e-12, atol=1e-14)


@pytest.mark.thorough(but=["attribute"])
@pytest.mark.parametrize("make", KINDS, ids=lambda make: make.__name__)
def test_even_stages_do_not_part_them_and_a_split_between_them_is_refused(make: Any) -> None:
    agree(pipelined(make, mesh={"pipe": 3}), make)
    message = r"no stage may end between them: '3' takes a tensor .* that '1' passes outside"
    with pytest.raises(ValueError, match=message):
        pipelined(make, mesh={"pipe": 2}, cut=["3"])
    agree(pipelined(make, mesh={"pipe": 2}, cut=["1"], recompute="full"), make)  # a whole stage runs again


ALONE = r"'3' takes a tensor of shape \(2, 6\) that '1' passes outside.*recompute='full'"


@pytest.mark.parametrize(
    ("options", "message"),
    [
        *(({"recompute": how}, ALONE) for how in ("layer", "selective", {"1": "full"})),
        ({"mesh": {"pipe": 5}}, r"expected 1 to 4, since some units stay together: .* passes outside its arguments"),
    ],
    ids=str,
)
def test_units_are_not_parted_by_options(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        pipelined(attribute, **({"mesh": {"pipe": 2}} | options))


class Own(Parts, units=lambda: nn.ModuleList(attribute())):
    """The same units, or others, in a model that is recorded."""

    def forward(self, x: Tensor) -> Tensor:
        for unit in self.units:
            x = unit(x)
        return x


@pytest.mark.parametrize("recompute", ["layer", {"units.3": "full"}], ids=str)
def test_units_of_a_recorded_model(recompute: Any) -> None:
    torch.manual_seed(0)
    model, (x, y) = Own().double(), batch(0)
    expected = F.mse_loss(model(x), y).item()
    with pytest.raises(ValueError, match=r"reads what units\.0 left in an object.*recompute='full' for the stage"):
        PipelineModule(model, recompute=recompute, **OPTIONS).forward_backward(x, y)
    pipe = PipelineModule(model, recompute="full", **OPTIONS)
    assert pipe.forward_backward(x, y).loss == pytest.approx(expected, rel=1e-12)


def test_given_stages() -> None:
    units = list(made(attribute))
    x, y = batch(0)
    expected = F.mse_loss(nn.Sequential(*units)(x), y).item()
    pipe = PipelineModule([nn.Sequential(*units[:4]), nn.Sequential(*units[4:])], **OPTIONS)
    assert pipe.forward_backward(x, y).loss == pytest.approx(expected, rel=1e-12)
    with pytest.raises(ValueError, match=r"'1\.0' takes a tensor of shape \(2, 6\) that '0\.1' passes outside"):
        PipelineModule([nn.Sequential(*units[:3]), nn.Sequential(*units[3:])], **OPTIONS).forward_backward(x, y)


class Counts(Parts, layer=linear, shared=GIVEN):
    """Something shared that is no tensor of a forward."""

    def forward(self, x: Tensor) -> Tensor:
        self.shared["calls"] += 1
        self.shared["total"].add_(1)
        return self.layer(x) * self.shared["scale"] * self.shared["table"]


def test_counters_and_constants_may_be_shared() -> None:
    shared = {"calls": 0, "total": torch.zeros(()), "scale": 0.5, "table": torch.ones(WIDTH, dtype=torch.float64)}
    model = made(lambda: [Counts(shared) for _ in range(4)])
    pipe = PipelineModule(model, mesh={"pipe": 4}, schedule="gpipe", num_microbatches=2)
    assert pipe.predict(batch(0)[0]).shape == (8, WIDTH)
    assert shared["calls"] == shared["total"] == 4 * 2


class CountsOn(Parts, layer=linear, calls=0):
    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        return self.layer(x) * (1 + self.calls % 3)


class RunsAgain(Parts, counts=CountsOn, b=linear, c=linear):
    def forward(self, x: Tensor) -> Tensor:
        return self.c(self.counts(self.b(self.counts(x))))


def chain_that_runs_again() -> nn.Module:
    counts = CountsOn()
    return nn.Sequential(counts, linear(), counts, linear())


@pytest.mark.parametrize("make", [RunsAgain, chain_that_runs_again])
def test_a_module_that_runs_again_counts_as_in_one_process(make: Callable[[], nn.Module]) -> None:
    """On two stages its runs came in another order: losses were off by 0.1."""
    torch.manual_seed(0)
    model = make().double()
    x, y = batch(0)
    expected = sum(F.mse_loss(model(a), b).item() for a, b in zip(x.chunk(4), y.chunk(4), strict=True)) / 4
    torch.manual_seed(0)
    pipe = PipelineModule(make().double(), mesh={"pipe": 2}, num_microbatches=4, loss_fn=F.mse_loss)
    assert pipe.forward_backward(x, y).loss == pytest.approx(expected, rel=1e-12)


class Rotary(nn.Module):
    """Tables that a longer sequence makes anew."""

    def __init__(self, *, counts: bool = False) -> None:
        super().__init__()
        self.register_buffer("table", torch.ones(1, WIDTH), persistent=False)
        self.longest, self.calls, self.counts = 1, 0, counts
        self.scale = torch.ones(WIDTH)

    def forward(self, x: Tensor, *, data: bool = False) -> Tensor:
        length = x.shape[1]
        if self.counts:
            self.calls += 1
        if length > self.longest:
            self.longest = length
            table = torch.outer(torch.arange(length, dtype=x.dtype), 0.5 ** torch.arange(WIDTH, dtype=x.dtype)).cos()
            self.table = table + x.detach().mean() if data else table
        return self.table[:length] + self.calls


class Layer(Parts, layer=linear, rotary=GIVEN, data=False, sets=False):
    def forward(self, x: Tensor) -> Tensor:
        if self.sets:
            self.rotary.scale = torch.arange(WIDTH, dtype=x.dtype)
        x = x * self.rotary.scale
        return x + self.layer(x) * self.rotary(x, data=self.data)


class Rotated(nn.Module):
    def __init__(self, **options: bool) -> None:
        super().__init__()
        rotary = Rotary(counts=options.get("counts", False))
        data, sets = options.get("data", False), options.get("sets", False)
        self.layers = nn.ModuleList(Layer(rotary, data=data, sets=sets and i == 0) for i in range(4))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        return x


def rotated(*, is_given: bool = False, **options: Any) -> list[tuple[float | None, float]]:
    torch.manual_seed(0)
    model: Any = Rotated().double()
    twin = copy.deepcopy(model)
    pipe = PipelineModule([*model.layers] if is_given else model, num_microbatches=2, loss_fn=F.mse_loss, **options)
    losses = []
    for length in (5, 7, 3):
        x = torch.randn(4, length, WIDTH, dtype=torch.float64, generator=torch.Generator().manual_seed(length))
        losses.append((pipe.forward_backward(x, x * 2).loss, F.mse_loss(twin(x), x * 2).item()))
    pipe.close()
    return losses


@pytest.mark.parametrize("options", [{"is_given": True}, {"cut": ["layers.1", "layers.2", "layers.3"]}], ids=str)
def test_a_cache_of_a_module_that_all_layers_share_hands_on_nothing(options: dict[str, Any]) -> None:
    """All layers were one unit."""
    for loss, expected in rotated(mesh={"pipe": 4}, **options):
        assert loss == pytest.approx(expected, rel=1e-12)


@pytest.mark.thorough
def test_a_cache_over_processes(gloo: Pool) -> None:
    """Ranks with layers and ranks without ran other forwards, since the table was there on some."""
    for losses in gloo.run(rotated, ranks=2):
        assert [loss for loss, _ in losses] == pytest.approx([expected for _, expected in losses], rel=1e-12)


class Tabled(nn.Linear):
    """All of its kind share a table, which the first one makes."""

    table: Tensor | None = None

    def forward(self, x: Tensor) -> Tensor:
        if Tabled.table is None or len(Tabled.table) < x.shape[1]:
            Tabled.table = torch.arange(1, 1 + x.shape[1], dtype=x.dtype)[:, None]
        return super().forward(x) * Tabled.table[: x.shape[1]]


def tabled(place: int, runs_before: int | None) -> tuple[list[float | None], list[float]]:
    """Losses of training and evaluation, microbatches of two sizes, and those of one process. Layers `place` and 3
    share a table; process `runs_before` alone calls the model first."""
    torch.manual_seed(0)
    kinds = [Tabled if i in (place, 3) else nn.Linear for i in range(4)]
    model = Own(units=nn.ModuleList(kind(WIDTH, WIDTH, dtype=torch.float64) for kind in kinds))
    twin = copy.deepcopy(model)
    sgd, expected = torch.optim.SGD(twin.parameters(), lr=0.01), []
    batches = [torch.ones(2 + (step > 2), 3 + step % 2, WIDTH, dtype=torch.float64) for step in range(6)]
    for step, x in enumerate(batches):
        loss = F.mse_loss(twin(x), x)
        expected.append(loss.item())
        if step % 2:
            sgd.zero_grad()
            loss.backward()
            sgd.step()
    Tabled.table = None
    options = {"num_microbatches": 2, "optimizer": functools.partial(torch.optim.SGD, lr=0.01)}
    pipe = PipelineModule(model, mesh={"pipe": 2}, loss_fn=F.mse_loss, **options)
    if pipe.rank == runs_before:
        model(batches[0])
    calls = [pipe.train_step if step % 2 else pipe.eval_step for step in range(6)]
    return [call(x, x).loss for call, x in zip(calls, batches, strict=True)], expected


@pytest.mark.thorough
@pytest.mark.parametrize(("place", "runs_before"), [(1, None), (2, None), (2, 0), (2, 1)])
def test_a_table_that_one_process_has_made_is_no_other_forward(gloo: Pool, place: int, runs_before: int | None) -> None:
    """The layers that share it are on one stage; on the other one it was not made: refused as another forward."""
    for losses, expected in gloo.run(tabled, ranks=2, args=(place, runs_before)):
        assert losses == pytest.approx(expected, rel=1e-12)


@pytest.mark.parametrize(
    ("options", "why"),
    [
        ({"data": True}, "reads what layers.0 left"),
        ({"counts": True}, "both count in attribute"),
        ({"sets": True}, "reads what layers.0 left"),
    ],
)
def test_what_others_would_not_make_alike_is_no_cache(options: dict[str, bool], why: str) -> None:
    pipe = PipelineModule(Rotated(**options), mesh={"pipe": 2}, loss_fn=F.mse_loss, cut=["layers.2"])
    with pytest.raises(ValueError, match=why):
        pipe.build(torch.ones(4, 3, WIDTH), torch.ones(4, 3, WIDTH))
