"""A batch that wants gradients: what stands in front of the pipeline learns as in one process."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from support.failing import Told, told
from support.pool import Pool
from support.small import WIDTH, make
from torch import Tensor, nn

DOUBLE: dict[str, Any] = {"dtype": torch.float64}


class Skipping(nn.Module):
    """The batch's tensor is taken by the first stage and by the last; a shared one by the middle."""

    def __init__(self, *, frozen: bool = False) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH, **DOUBLE) for _ in range(6))
        if frozen:
            self.requires_grad_(False)

    def forward(self, x: Tensor, prompt: Tensor, *, mask: Tensor | None = None) -> Tensor:
        h = x if mask is None else x * mask
        for i, layer in enumerate(self.layers):
            h = torch.tanh(layer(h)) + (prompt if i == 3 else 0)
        return h + x


class Front(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(WIDTH, WIDTH, **DOUBLE)
        self.prompt = nn.Parameter(torch.ones(WIDTH, **DOUBLE))


def masked(output: Tensor, target: Tensor) -> tuple[Tensor, Tensor]:
    keep = target > 0
    return ((output - target) ** 2 * keep).sum(), keep.sum()


def mean(output: Tensor, target: Tensor) -> Tensor:
    return F.mse_loss(output, target)


def whole(loss: Any, output: Tensor, target: Tensor) -> Tensor:
    value = loss(output, target)
    return value[0] / value[1] if isinstance(value, tuple) else value


def batch(number: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(number)
    return torch.randn(11, WIDTH, generator=generator, **DOUBLE), torch.randn(11, WIDTH, generator=generator, **DOUBLE)


def gradients(module: nn.Module, x: Tensor) -> dict[str, Tensor | None]:
    return {"x": x.grad, **{name: p.grad for name, p in module.named_parameters()}}


def plain(loss: Any, frozen: bool) -> dict[str, Tensor | None]:
    torch.manual_seed(0)
    front, model = Front(), Skipping(frozen=frozen)
    leaf = torch.ones(11, WIDTH, **DOUBLE, requires_grad=True)
    for number in range(2):
        x, y = batch(number)
        whole(loss, model(front.layer(x) * leaf, front.prompt), y).backward()
    return gradients(front, leaf)


def pipelined(options: dict[str, Any], frozen: bool) -> dict[str, Tensor | None]:
    torch.manual_seed(0)
    front, model = Front(), Skipping(frozen=frozen)
    leaf = torch.ones(11, WIDTH, **DOUBLE, requires_grad=True)
    settings = {"optimizer": None, "example_inputs": None, "batch_dims": {"prompt": None}}
    pipe = make(model=model, **settings | options)
    for number in range(2):
        x, y = batch(number)
        pipe.forward_backward(front.layer(x) * leaf, front.prompt, y)
    return gradients(front, leaf)


def same(found: dict[str, Tensor | None], expected: dict[str, Tensor | None]) -> None:
    for name, value in expected.items():
        assert found[name] is not None, name
        torch.testing.assert_close(found[name], value, rtol=1e-12, atol=1e-14)


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
    options = {"loss_fn": mean} | CASES[case]
    same(pipelined(options, frozen), plain(options["loss_fn"], frozen))


@pytest.mark.thorough(but=["False"])
@pytest.mark.parametrize("frozen", [False, True])
def test_over_processes_every_rank_has_them(gloo: Pool, frozen: bool) -> None:
    for found in gloo.run(pipelined, ranks=2, args=({"mesh": None, "loss_fn": mean}, frozen)):
        same(found, plain(mean, frozen))


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


@pytest.mark.thorough
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


def over_data_replicas() -> list[Told]:
    x, y = batch(0)
    model = nn.Sequential(*[nn.Linear(WIDTH, WIDTH, **DOUBLE) for _ in range(4)])
    pipe = make(model=model, mesh={"data": 2}, example_inputs=(x,))
    return [told(lambda: pipe.train_step(x.requires_grad_(), y))]


@pytest.mark.thorough
def test_over_data_replicas_it_is_refused(gloo: Pool) -> None:
    for (found,) in gloo.run(over_data_replicas, ranks=2):
        assert found.kind == "ValueError"
        assert "where data replicas or a tensor group" in found.text
