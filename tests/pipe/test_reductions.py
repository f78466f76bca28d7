"""Losses that add up over samples, outputs of a whole batch, and microbatches of unequal length."""

import copy
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from support.alone import near, train_piped
from support.failing import Told, told
from support.parts import GIVEN, Parts
from support.pool import Pool
from support.small import WIDTH, X, Y, layers, make
from support.unequal import BATCHES, WORDS, alone, assert_alone, make_model, make_pipe
from torch import Tensor, nn

from stagewright.schedules import build

X64, Y64 = X.double(), Y.double()
RATE = 1e-3


sgd = partial(torch.optim.SGD, lr=RATE)


def trained(loss_fn: Any, options: dict[str, Any]) -> tuple[float | None, float | None, dict[str, Tensor]]:
    torch.manual_seed(0)
    pipe = make(model=layers().double(), loss_fn=loss_fn, example_inputs=None, optimizer=sgd, **options)
    evaluated = pipe.eval_step(X64[:3], Y64[:3]).loss  # of fewer microbatches
    result = [pipe.train_step(X64, Y64), *pipe.flush()][-1]
    return result.loss, evaluated, pipe.full_state_dict()


def assert_sums(found: tuple[float | None, float | None, dict[str, Tensor]]) -> None:
    torch.manual_seed(0)
    model = layers().double()
    few = F.mse_loss(model(X64[:3]), Y64[:3], reduction="sum")
    loss = F.mse_loss(model(X64), Y64, reduction="sum")
    loss.backward()
    sgd(list(model.parameters())).step()
    assert found[:2] == pytest.approx((loss.item(), few.item()), rel=1e-13)
    near(found[2], model.state_dict(), rtol=1e-12, atol=1e-14)


ONE_UPDATE = build("pipedream", num_ranks=2, num_microbatches=4, update_every=4)
CASES: dict[str, dict[str, Any]] = {
    "gpipe": {"schedule": "gpipe"},
    "1f1b-uneven": {"num_microbatches": 3},
    "interleaved": {"schedule": "interleaved"},
    "zb-h1": {"schedule": "zb-h1"},
    "2bw": {"schedule": "2bw", "max_grad_norm": 1e9},
    "pipedream": {"schedule": ONE_UPDATE, "num_microbatches": None, "mesh": None},
    "replicas": {"mesh": {"pipe": 2, "data": 2}},
    "verified": {"verify": True, "recompute": "full"},
}


@pytest.mark.thorough(but=["gpipe"])
@pytest.mark.parametrize("case", CASES)
def test_a_loss_of_sums_is_the_sum_over_the_batch(case: str) -> None:
    assert_sums(trained(nn.MSELoss(reduction="sum"), CASES[case]))


def test_a_partial_with_sums() -> None:
    assert_sums(trained(partial(partial(F.mse_loss, reduction="mean"), reduction="sum"), {}))
    found = trained(partial(nn.MSELoss(reduction="sum")), {})
    assert_sums(found)


def double() -> nn.Linear:
    return nn.Linear(WIDTH, WIDTH, dtype=torch.float64)


class Similar(Parts, layers=lambda: nn.ModuleList(double() for _ in range(4))):
    """Similarities of all samples, and the loss of a model that returns its own."""

    def forward(self, x: Tensor, labels: Tensor | None = None) -> dict[str, Tensor]:
        h = x
        for layer in self.layers:
            h = torch.tanh(layer(h))
        found = {"hidden": h, "similar": h @ x.T}
        return found if labels is None else found | {"loss": F.cross_entropy(h, labels)}


LABELS = torch.tensor([0, 1, -100, -100, 2, -100, 3, 4])


@pytest.mark.filterwarnings("ignore:output 1 of the model has the batch")
def test_the_loss_of_a_prediction_is_that_of_an_evaluation() -> None:
    pipe = make(model=Similar(), loss_fn="model", loss_weight="labels", example_inputs=None)
    pipe.train_step(X64, labels=LABELS)
    expected = pipe.eval_step(X64, labels=LABELS)
    found = pipe.predict(X64, labels=LABELS)
    assert isinstance(found, dict)
    assert found["loss"].dim() == 0
    assert float(found["loss"]) == pytest.approx(expected.loss, rel=1e-14)
    assert float(found["loss"]) == pytest.approx(float(F.cross_entropy(found["hidden"], LABELS)), rel=1e-13)
    assert "loss" not in pipe.predict(X64)  # type: ignore[operator]


def test_an_output_with_the_batch_on_two_axes_is_told_once() -> None:
    pipe = make(model=Similar(), loss_fn=lambda output, y: F.mse_loss(output["hidden"], y), example_inputs=None)
    with pytest.warns(UserWarning, match="output 1 of the model has the batch on two axes, .* of 2 alone"):
        pipe.train_step(X64, Y64)
    pipe.train_step(X64, Y64)
    with pytest.warns(UserWarning, match="it comes as the list of their blocks. Expected num_microbatches=1"):
        found = pipe.predict(X64)
    assert [each.shape for each in found["similar"]] == [(2, 2)] * 4  # type: ignore[index]
    pipe.predict(X64)
    whole = make(model=Similar(), loss_fn=None, example_inputs=None, num_microbatches=1, optimizer=None)
    assert whole.predict(X64)["similar"].shape == (8, 8)  # type: ignore[index]


def trained_by_microbatch(options: dict[str, Any]) -> tuple[list[float | None], dict[str, Tensor]]:
    with make_pipe(**options) as pipe:
        return [pipe.train_step(microbatches=batch).loss for batch in BATCHES], pipe.full_state_dict()


def test_training_over_processes(gloo: Pool) -> None:
    for found in gloo.run(trained_by_microbatch, ranks=2, args=({},)):
        assert_alone(found)


def test_evaluation_verification_and_a_dict_of_a_loader() -> None:
    pipe = make_pipe(mesh={"pipe": 2}, verify=True)
    batch = BATCHES[0]
    outputs = pipe.eval_step(microbatches=batch).output
    model = make_model()
    for (words, _), output in zip(batch, outputs, strict=True):  # type: ignore[call-overload]
        torch.testing.assert_close(output, model(words), rtol=0, atol=1e-13)
    assert len(pipe.predict(microbatches=[words for words, _ in batch])) == len(batch)  # type: ignore[arg-type]
    loss = pipe.train_step({"microbatches": [list(each) for each in batch]}).loss  # verified
    assert loss == pytest.approx(alone()[0][0], rel=1e-13)
    same = [(x[:, :2], y[:, :2]) for x, y in batch]  # equal lengths are joined, as ever
    assert pipe.eval_step(microbatches=same).output.shape == (6, 2, WORDS)  # type: ignore[attr-defined]
    pipe.train_step(torch.ones(5, 4, dtype=torch.long), torch.ones(5, 4, dtype=torch.long))  # a whole one
    pipe.close()


@pytest.mark.thorough(
    but=[
        "call0-microbatches=\\\\[\\\\]: expected a list of microbatches, each a tuple",
        "call2-a batch of 3 microbatches for a schedule of 4: expected 4 in every batch, or",
        "call3-microbatches= together with target: expected it alone",
        "call4-microbatch 3 is int: expected a tuple of what train_step takes",
    ]
)
@pytest.mark.parametrize(
    ("call", "message"),
    [
        ({"microbatches": []}, r"microbatches=\[\]: expected a list of microbatches, each a tuple"),
        ({"microbatches": torch.ones(2)}, r"expected a list of microbatches"),
        (
            {"microbatches": BATCHES[0][:3]},
            "a batch of 3 microbatches for a schedule of 4: expected 4 in every batch, or",
        ),
        ({"microbatches": BATCHES[0], "target": 1}, "microbatches= together with target: expected it alone"),
        ({"microbatches": [*BATCHES[0][:3], 5]}, "microbatch 3 is int: expected a tuple of what train_step takes"),
        ({"microbatches": [*BATCHES[0][:3], (torch.ones(()),) * 2]}, "microbatch 3: input 0 is a tensor without"),
        (
            {"microbatches": [*BATCHES[0][:3], (torch.ones(2, 2),) * 2]},
            "is torch.float32 and the stages were built for",
        ),
        ({"microbatches": [*BATCHES[0][:3], {"words": 1}]}, "microbatch 3: no target among 'words'"),
    ],
)
def test_what_is_no_batch_of_microbatches(call: dict[str, Any], message: str) -> None:
    pipe = make_pipe(mesh={"pipe": 2})
    pipe.build(microbatches=BATCHES[0])
    with pytest.raises(ValueError, match=message):
        pipe.train_step(**call)
    pipe.close()


SINK: list[Tensor] = []


class Block(Parts, first=double, second=double, keep=GIVEN, table=dict):
    """A block whose auxiliary loss stays somewhere; of two layers, so that a cut into more stages than there are
    blocks records its own code."""

    def forward(self, x: Tensor) -> Tensor:
        h = self.first(x)
        self.keep(self, h.square().mean())
        return self.second(torch.tanh(h))


class Looped(nn.ModuleList):
    def forward(self, x: Tensor) -> Tensor:
        for block in self:
            x = block(x)
        return x


# What keeps it, what reads it, what that is told.
PLACES: dict[str, tuple[Callable[[Any, Tensor], object], Callable[[Any], Any], str]] = {
    "attribute": (
        lambda block, aux: setattr(block, "aux", aux),
        lambda model: sum(block.aux for block in model),
        "reads 'aux' of module '0'",
    ),
    "list": (
        lambda block, aux: setattr(block, "aux", [aux]),
        lambda model: sum(sum(block.aux) for block in model),
        "reads 'aux' of module '0'",
    ),
    "dict": (
        lambda block, aux: block.table.update(v=aux),
        lambda model: sum(block.table["v"] for block in model),
        "reads 'v' of a dict, which an earlier stage sets",
    ),
    "global": (
        lambda block, aux: SINK.append(aux),
        lambda model: sum(SINK),
        "reads a list, which an earlier stage sets",
    ),
}


def past_the_output(place: str, options: dict[str, Any]) -> Told:
    keep, read, _ = PLACES[place]
    model: Any = Looped(Block(keep) for _ in range(4))
    loss = lambda output, target: F.mse_loss(output, target) + read(model)  # noqa: E731
    pipe = make(model=model, loss_fn=loss, example_inputs=None, **options)
    return told(lambda: (pipe.forward_backward if "optimizer" in options else pipe.train_step)(X64, Y64))


@pytest.fixture(autouse=True)
def _empty_sink() -> Iterator[None]:
    yield
    SINK.clear()


@pytest.mark.thorough(but=["{'optimizer': None}-attribute"])
@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("options", [{"optimizer": None}, {}, {"schedule": "2bw"}, {"recompute": "full"}], ids=str)
def test_what_an_earlier_stage_leaves_behind_is_refused(place: str, options: dict[str, Any]) -> None:
    found = past_the_output(place, options)
    assert found.kind == "ValueError"
    assert PLACES[place][2] in found.text


def test_a_list_that_a_loss_empties_holds_no_fake_tensors() -> None:
    def loss(output: Tensor, target: Tensor) -> Tensor:
        found = F.mse_loss(output, target) + sum(SINK)
        counts.append(len(SINK))
        SINK.clear()
        return found

    counts: list[int] = []
    model = nn.Sequential(*[Block(PLACES["global"][0]) for _ in range(4)])
    make(model=model, loss_fn=loss, example_inputs=None, mesh={"pipe": 1}).train_step(X64, Y64)
    assert counts == [4] * 4


@pytest.mark.parametrize("options", [{}, {"schedule": "2bw"}, {"mesh": {"pipe": 1}}], ids=str)
def test_what_the_last_stage_leaves_behind_may_be_read(options: dict[str, Any]) -> None:
    """And what a stage leaves behind may stay there."""
    torch.manual_seed(0)
    model = nn.Sequential(*[Block(PLACES["attribute"][0]) for _ in range(4)])
    plain = copy.deepcopy(model)
    loss_fn = lambda output, y: F.mse_loss(output, y) + model[3].aux  # noqa: E731
    found = train_piped(make(model=model, loss_fn=loss_fn, example_inputs=None, **options), [(X64, Y64)])
    parts = zip(X64.split(2), Y64.split(2), strict=True)
    wanted = [F.mse_loss(plain(x), y).item() + plain[3].aux.item() for x, y in parts]
    near(found.losses, [sum(wanted) / 4], atol=1e-14)


@pytest.mark.thorough(but=["global"])
@pytest.mark.filterwarnings("ignore:.*does so once, while the model is recorded")
@pytest.mark.parametrize("place", ["attribute", "dict", "global"])
def test_what_recorded_code_leaves_behind_once_is_refused(place: str) -> None:
    keep, read, _ = PLACES[place]

    def loss(output: Tensor, target: Tensor) -> Tensor:
        return F.mse_loss(output, target) + (read(model) if is_read else 0.0)

    for is_read in (True, False):
        torch.manual_seed(0)
        model: Any = Looped(Block(keep) for _ in range(2))
        pipe = make(model=model, loss_fn=loss, example_inputs=None, mesh={"pipe": 4})
        pipe.build(X64, Y64)
        SINK.clear()  # as a loop does in front of each step
        if is_read:
            with pytest.raises(ValueError, match="or code between modules, which runs once"):
                pipe.train_step(X64, Y64)
            continue
        torch.manual_seed(0)
        plain = Looped(Block(keep) for _ in range(2))
        assert pipe.train_step(X64, Y64).loss == pytest.approx(F.mse_loss(plain(X64), Y64).item(), abs=1e-14)


def test_a_loss_that_differentiates_by_an_output_of_an_earlier_stage_is_refused() -> None:
    """A bug: a gradient penalty lost what goes through the stages before the last one, without a word."""

    class Penalised(nn.Sequential):
        def forward(self, x: Tensor) -> Any:
            x = x.detach().requires_grad_()
            return super().forward(x) + x, x

    def penalty(output: tuple[Tensor, Tensor], y: Tensor) -> Tensor:
        (slope,) = torch.autograd.grad(output[0].sum(), output[1], create_graph=True)
        return F.mse_loss(output[0], y) + slope.square().mean()

    model = Penalised(*(nn.Linear(WIDTH, WIDTH).double() for _ in range(2)))
    pipe = make(model=model, loss_fn=penalty, example_inputs=None, mesh={"pipe": 2})
    with pytest.raises(ValueError, match="loss_fn differentiates by one of several outputs"):
        pipe.train_step(X64, Y64)
    alone = make(model=model, loss_fn=penalty, example_inputs=None, mesh={"pipe": 1}, num_microbatches=1)
    assert alone.forward_backward(X64, Y64).loss == pytest.approx(penalty(model(X64), Y64).item(), rel=1e-13)
