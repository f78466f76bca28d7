"""Models of other people's packages, unmodified and in their defaults, train as in plain PyTorch."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from support.grids import nightly, one_in
from support.pool import Pool
from support.records import records
from support.small import sgd
from support.zoo import CHECKING, TORCHVISION, TRANSFORMERS, Batch, Case
from torch import nn

from stagewright.pipe import PipelineModule

M = 2


def make_pipe(model: nn.Module, *, ranks: int, **options: Any) -> PipelineModule:
    return PipelineModule(
        model,
        **records(
            **{"schedule": "1f1b", "num_microbatches": M, "loss_fn": "model"} | options,
            mesh={"pipe": ranks},
            optimizer=sgd,
            timeout=120.0,
        ),
    )


def gradients(model: nn.Module) -> dict[str, torch.Tensor | None]:
    return {name: parameter.grad for name, parameter in model.named_parameters()}


def compare(found: Mapping[str, torch.Tensor | None], expected: Mapping[str, torch.Tensor | None]) -> None:
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        other = found[name]
        assert (value is None) == (other is None), name
        if value is not None and other is not None:
            assert (other - value).abs().max() <= 1e-12 * max(1.0, float(value.abs().max())), name


def parts(batch: Batch) -> list[Batch]:
    size = len(next(iter(batch.values()))) // M
    return [{key: value[k * size : (k + 1) * size] for key, value in batch.items()} for k in range(M)]


def plain(case: Case) -> tuple[nn.Module, float]:
    """The model with its gradients, and the loss, by microbatches.

    The packages compute some things in float32 whatever the model is in, and so to other digits in a whole batch.
    """
    model, whole = case.make(), case.batch()
    counts = [int((each["labels"][..., case.unlabelled :] != -100).sum()) for each in parts(whole)]
    total = 0.0
    for each, count in zip(parts(whole), counts, strict=True):
        loss = model(**each).loss.double() * (count / sum(counts))
        loss.backward()
        total += loss.item()
    assert len(set(counts)) > 1 or "pixel_values" in whole  # microbatches weigh differently
    assert total == pytest.approx(case.make()(**whole).loss.item(), rel=1e-6)
    return model, total


@pytest.mark.thorough
@pytest.mark.parametrize("name", TRANSFORMERS)
def test_transformers(name: str) -> None:
    """A batch with padding, whose microbatches have other numbers of labels: the mean over all labels."""
    pytest.importorskip("transformers")
    case = TRANSFORMERS[name]
    expected, loss = plain(case)
    model = case.make()
    pipe = make_pipe(model, ranks=2)
    assert pipe.forward_backward(**case.batch()).loss == pytest.approx(loss, rel=1e-13)
    compare(gradients(model), gradients(expected))

    output = pipe.predict(**case.batch())
    with torch.no_grad():
        whole = expected.eval()(**case.batch())
    assert type(output) is type(whole)
    torch.testing.assert_close(output.logits, whole.logits, rtol=1e-6, atol=1e-6)


def checked(name: str) -> tuple[nn.Module, float]:
    """A model whose code checks values, with its gradients, and the loss, by microbatches."""
    case, weight = CHECKING[name]
    model, total = case.make(), 0.0
    counts = [int((each["labels"][:, case.unlabelled :] != -100).sum()) for each in parts(case.batch())]
    shares = [1 / M] * M if weight == "samples" else [count / sum(counts) for count in counts]
    for each, share in zip(parts(case.batch()), shares, strict=True):
        loss = model(**each).loss.double() * share
        loss.backward()
        total += loss.item()
    return model, total


@pytest.mark.thorough(but=["llava", "wav2vec2"])
@pytest.mark.parametrize("name", CHECKING)
def test_checks_and_collected_values(name: str) -> None:
    pytest.importorskip("transformers")
    case, weight = CHECKING[name]
    (expected, total), model = checked(name), case.make()
    pipe = make_pipe(model, ranks=2, loss_weight=weight)
    assert pipe.forward_backward(**case.batch()).loss == pytest.approx(total, rel=1e-13)
    compare(gradients(model), gradients(expected))


def train(name: str) -> tuple[float, dict[str, torch.Tensor]]:
    case = TRANSFORMERS[name]
    pipe = make_pipe(case.make(), ranks=2)
    loss = pipe.train_step(**case.batch()).loss
    state = pipe.full_state_dict()
    pipe.close()
    assert loss is not None
    return loss, state


@pytest.mark.thorough
@pytest.mark.parametrize("name", [name if name in ("mixtral", "t5") else nightly(name) for name in TRANSFORMERS])
def test_transformers_over_processes(gloo: Pool, name: str) -> None:
    pytest.importorskip("transformers")
    case = TRANSFORMERS[name]
    expected, loss = plain(case)
    torch.optim.SGD([p for p in expected.parameters() if p.grad is not None], lr=0.1).step()
    for found, state in gloo.run(train, ranks=2, args=(name,)):
        assert found == pytest.approx(loss, rel=1e-13)
        compare(state, expected.state_dict())


def by_microbatch(model: nn.Module, batch: Batch) -> float:
    """Gradients of a batch whose microbatches are normalised one by one."""
    total = 0.0
    for each in parts(batch):
        target = each.pop("target")
        loss = F.cross_entropy(model(**each), target) / M
        loss.backward()
        total += loss.item()
    return total


@pytest.mark.thorough
@pytest.mark.parametrize(("name", "ranks"), one_in(2, TORCHVISION.keys(), (2, 3)))
def test_images(name: str, ranks: int) -> None:
    case = TORCHVISION[name]
    expected, model = case.make(), case.make()
    loss = by_microbatch(expected, case.batch())
    pipe = make_pipe(model, ranks=ranks, loss_fn=F.cross_entropy)
    assert pipe.forward_backward(**case.batch()).loss == pytest.approx(loss, rel=1e-13)
    compare(gradients(model), gradients(expected))
    compare(dict(model.named_buffers()), dict(expected.named_buffers()))
