"""A batch that wants gradients: what stands in front of the pipeline learns as in one process."""

from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from support.alone import near
from support.failing import Told, told
from support.parts import Parts
from support.plain import batch as plain_batch
from support.pool import Pool
from support.small import WIDTH, make
from torch import Tensor, nn

DOUBLE: dict[str, Any] = {"dtype": torch.float64}
batch = partial(plain_batch, samples=11)
same = partial(near, rtol=1e-12, atol=1e-14)


class Skipping(Parts, layers=lambda: nn.ModuleList(nn.Linear(WIDTH, WIDTH, **DOUBLE) for _ in range(6))):
    """The batch's tensor is taken by the first stage and by the last; a shared one by the middle."""

    def forward(self, x: Tensor, prompt: Tensor, *, mask: Tensor | None = None) -> Tensor:
        h = x if mask is None else x * mask
        for i, layer in enumerate(self.layers):
            h = torch.tanh(layer(h)) + (prompt if i == 3 else 0)
        return h + x


def masked(output: Tensor, target: Tensor) -> tuple[Tensor, Tensor]:
    keep = target > 0
    return ((output - target) ** 2 * keep).sum(), keep.sum()


def gradients(module: nn.Module, x: Tensor) -> dict[str, Tensor | None]:
    return {"x": x.grad, **{name: p.grad for name, p in module.named_parameters()}}


def front_of(frozen: bool) -> tuple[Any, Any, Tensor]:
    """What is trained before the pipeline, the model, and a leaf of the batch's size."""
    torch.manual_seed(0)
    front: Any = nn.Linear(WIDTH, WIDTH, **DOUBLE)
    front.prompt = nn.Parameter(torch.ones(WIDTH, **DOUBLE))
    return front, Skipping().requires_grad_(not frozen), torch.ones(11, WIDTH, **DOUBLE, requires_grad=True)


def plain(loss_fn: Any, frozen: bool) -> dict[str, Tensor | None]:
    front, model, leaf = front_of(frozen)
    for number in range(2):
        x, y = batch(number)
        loss = loss_fn(model(front(x) * leaf, front.prompt), y)
        (loss[0] / loss[1] if isinstance(loss, tuple) else loss).backward()
    return gradients(front, leaf)


def pipelined(options: dict[str, Any], frozen: bool) -> dict[str, Tensor | None]:
    front, model, leaf = front_of(frozen)
    pipe = make(model=model, **{"optimizer": None, "example_inputs": None, "batch_dims": {"prompt": None}} | options)
    for number in range(2):
        x, y = batch(number)
        pipe.forward_backward(front(x) * leaf, front.prompt, y)
    return gradients(front, leaf)


CASES: dict[str, dict[str, Any]] = {
    "gpipe": {"schedule": "gpipe"},
    "1f1b": {"schedule": "1f1b"},
    "one": {"mesh": {"pipe": 1}},
    "interleaved": {"schedule": "interleaved"},
    "zb-h1": {"schedule": "zb-h1"},
    "zb-v": {"schedule": "zb-v"},
    "dualpipe": {"schedule": "dualpipe", "num_microbatches": 8, "mesh": {"pipe": 2}},
    "full": {"recompute": "full"},
    "layer": {"recompute": "layer"},
    "replicas": {"mesh": {"pipe": 2, "data": 2}, "num_microbatches": 4},
    "counts": {"loss_fn": masked},
    "verified": {"verify": True},
}


@pytest.mark.thorough(but=["one-False", "zb-v-False"])
@pytest.mark.parametrize(
    ("case", "frozen"), [*((case, False) for case in CASES), ("1f1b", True), ("zb-h1", True), ("full", True)]
)
def test_gradients_are_those_of_one_process(case: str, frozen: bool) -> None:
    options = {"loss_fn": F.mse_loss} | CASES[case]
    same(pipelined(options, frozen), plain(options["loss_fn"], frozen))


@pytest.mark.thorough
@pytest.mark.parametrize("frozen", [False, True])
def test_over_processes_every_rank_has_them(gloo: Pool, frozen: bool) -> None:
    for found in gloo.run(pipelined, ranks=2, args=({"mesh": None, "loss_fn": F.mse_loss}, frozen)):
        same(found, plain(F.mse_loss, frozen))


def test_train_step_and_microbatches_of_a_dict() -> None:
    def pipe(**options: Any) -> Any:
        torch.manual_seed(0)
        return make(model=Skipping(), example_inputs=None, batch_dims={"prompt": None}, num_microbatches=2, **options)

    x, y = batch(0)
    prompt = torch.zeros(WIDTH, **DOUBLE)
    halves = [
        {"x": part.clone().requires_grad_(), "prompt": prompt, "mask": torch.ones_like(part), "target": target}
        for part, target in zip(x.split([4, 7]), y.split([4, 7]), strict=True)
    ]
    pipe().train_step(microbatches=halves)
    parts = [given.clone().requires_grad_() for given in (x, torch.ones_like(x))]
    torch.manual_seed(0)
    F.mse_loss(Skipping()(parts[0], prompt, mask=parts[1]), y).backward()
    torch.testing.assert_close(torch.cat([half["x"].grad for half in halves]), parts[0].grad)
    mask = torch.ones_like(x).requires_grad_()
    other = pipe()
    other.train_step(x, prompt, mask=mask, target=y)
    torch.testing.assert_close(mask.grad, parts[1].grad)
    mask.grad = None
    other.eval_step(x, prompt, mask=mask, target=y)
    assert mask.grad is None
    third = pipe(optimizer=None)
    for again in (mask, mask.detach().clone().requires_grad_()):  # of the second batch those of the first are no part
        third.forward_backward(x, prompt, mask=again, target=y)
        torch.testing.assert_close(again.grad, parts[1].grad)


def test_what_cannot_be_handed_back_is_refused() -> None:
    x, y = batch(0)
    x, settings = x.requires_grad_(), {"example_inputs": None, "batch_dims": {"prompt": None}}
    arguments = (x, torch.zeros(WIDTH, **DOUBLE), y)
    for schedule in ("2bw", "pipedream"):
        with pytest.raises(ValueError, match=r"a batch that wants gradients under the async.* Expected x.detach\(\)"):
            make(model=Skipping(), schedule=schedule, **settings).train_step(*arguments)
    scaler = torch.amp.GradScaler("cpu")
    with pytest.raises(ValueError, match="a batch that wants gradients with grad_scaler="):
        make(model=Skipping(), grad_scaler=scaler, **settings).train_step(*arguments)
    model = Skipping()
    model.layers[:3].requires_grad_(False)
    pipe = make(model=model, **settings)
    pipe.train_step(x.detach(), *arguments[1:])
    with pytest.raises(ValueError, match=r"output . of stage 0 .* requires a gradient and did not when"):
        pipe.train_step(*arguments)


def without_parameters_first() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Tanh(), nn.Identity(), nn.Tanh(), *(nn.Linear(WIDTH, WIDTH, **DOUBLE) for _ in range(3)))


def later_pipe(model: nn.Module, **options: Any) -> Any:
    settings = {"optimizer": None, "loss_fn": F.mse_loss, "num_microbatches": 6, "example_inputs": None}
    return make(model=model, **settings | options)


CUTS = {"1f1b": ["2", "4"]}  # else its first stage has weights, and messages carry gradients; the others have V = 2
_LATER_TEXT = r"output 0 of stage 0 .* none is sent back to the batch, which wants one: expected example_inputs= or a f"


@pytest.mark.parametrize("schedule", ["1f1b", "zb-v"])
def test_a_later_batch_that_wants_gradients_first_is_refused_before_anything_runs(schedule: str) -> None:
    """Its gradients have no way back where nothing before them trains; the words were those for a counter."""
    pipe = later_pipe(without_parameters_first(), schedule=schedule, mesh={"pipe": 3}, cut=CUTS.get(schedule))
    x, y = batch(0)
    pipe.forward_backward(x, y)
    with pytest.raises(ValueError, match=_LATER_TEXT):
        pipe.forward_backward(x.clone().requires_grad_(), y)
    pipe.forward_backward(x, y)


@pytest.mark.thorough(but=["1f1b-True"])
@pytest.mark.parametrize("by_example", [True, False])
@pytest.mark.parametrize("schedule", ["1f1b", "zb-v", "interleaved"])
def test_after_one_that_wants_them_others_may_and_may_not(schedule: str, by_example: bool) -> None:
    """What the refusal says to type works: gradients of weights and of the batch are those of one process."""
    x, y = batch(0)
    wanted, model = without_parameters_first(), without_parameters_first()
    example = (x.clone().requires_grad_(),) if by_example else None
    options = {"schedule": schedule, "mesh": {"pipe": 3}, "example_inputs": example, "cut": CUTS.get(schedule)}
    pipe = later_pipe(model, **options)
    for wants in (not by_example, False, True):
        mine, its = (x.clone().requires_grad_(wants) for _ in range(2))
        pipe.forward_backward(mine, y)
        F.mse_loss(wanted(its), y).backward()
        same(gradients(model, mine), {k: v for k, v in gradients(wanted, its).items() if v is not None})
        assert (mine.grad is None) == (its.grad is None)


class Later(Parts, weight=lambda: nn.Parameter(torch.ones(WIDTH, **DOUBLE)), uses=False):
    """Uses its weight once an attribute says so: found by rank 0 alone, in its first backward."""

    def forward(self, x: Tensor) -> Tensor:
        return x * self.weight if self.uses else x * self.weight.detach()


def found_by_one_rank() -> list[Told]:
    x, y = batch(0)
    pipe = later_pipe(without_parameters_first(), mesh=None, cut=["2"])
    pipe.forward_backward(x, y)
    found = [told(lambda: pipe.forward_backward(x.clone().requires_grad_(), y))]
    pipe.forward_backward(x, y)
    model = nn.Sequential(Later(), *without_parameters_first()[3:])
    pipe = later_pipe(model, mesh=None, cut=["1"])
    pipe.forward_backward(x, y)
    model[0].uses = True
    found.append(told(lambda: pipe.forward_backward(x, y)))
    over_data = make(model=nn.Sequential(*without_parameters_first()[2:]), mesh={"data": 2}, example_inputs=(x,))
    return [*found, told(lambda: over_data.train_step(x.clone().requires_grad_(), y))]


@pytest.mark.thorough
def test_a_refusal_that_one_rank_finds_is_a_value_error_on_each(gloo: Pool) -> None:
    told_by = gloo.run(found_by_one_rank, ranks=2)
    for of_batch, alone, over_data in told_by:
        assert of_batch.kind == alone.kind == over_data.kind == "ValueError"
        assert "where data replicas or a tensor group" in over_data.text
        assert "which wants one: expected example_inputs= or a first batch" in of_batch.text
        assert alone.text.startswith("output 0 of stage 0 (0) requires a gradient and did not when the stages w")
    assert "\n(found on rank 0; rank 1: " in told_by[1][1].text
    assert "found on" not in told_by[0][1].text
