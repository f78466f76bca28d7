"""Batches that come microbatch by microbatch, of unequal length: the numbers of one process that accumulates them."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from support.pool import Pool
from torch import Tensor, nn

from stagewright import PipelineModule

D, WORDS = 8, 11
LENGTHS = (3, 9, 4, 7)


class Block(nn.Module):
    """Attention over the sequence, so that a length is more than so many rows."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv, self.out = nn.Linear(D, 3 * D), nn.Linear(D, D)

    def forward(self, h: Tensor) -> Tensor:
        q, k, v = self.qkv(h).chunk(3, dim=-1)
        out: Tensor = h + self.out(F.scaled_dot_product_attention(q, k, v, is_causal=True))
        return out


def make_model() -> nn.Module:
    torch.manual_seed(3)
    return nn.Sequential(nn.Embedding(WORDS, D), Block(), Block(), Block(), nn.Linear(D, WORDS)).double()


def mean_over_words(output: Tensor, target: Tensor) -> tuple[Tensor, Tensor]:
    return F.cross_entropy(output.flatten(0, 1), target.flatten(), reduction="sum"), torch.tensor(target.numel())


def make_batch(seed: int, lengths: tuple[int, ...] = LENGTHS) -> list[tuple[Tensor, Tensor]]:
    """Microbatches of unequal length, and of one or two samples."""
    generator = torch.Generator().manual_seed(seed)

    def words(k: int, length: int) -> Tensor:
        return torch.randint(WORDS, (1 + k % 2, length), generator=generator)

    return [(words(k, n), words(k, n)) for k, n in enumerate(lengths)]


def make_pipe(**options: Any) -> PipelineModule:
    settings: dict[str, Any] = {
        "loss_fn": mean_over_words,
        "optimizer": lambda parameters: torch.optim.SGD(parameters, lr=0.1),
        "num_microbatches": len(LENGTHS),
        "timeout": 60.0,
    }
    return PipelineModule(make_model(), **(settings | options))


BATCHES = [make_batch(0), make_batch(1, (8, 2, 5, 5)), make_batch(2, (1, 6, 12, 3))]


def alone() -> tuple[list[float], dict[str, Tensor]]:
    """One process, microbatch by microbatch."""
    model = make_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    losses = []
    for batch in BATCHES:
        optimizer.zero_grad()
        total = sum(target.numel() for _, target in batch)
        loss = 0.0
        for words, target in batch:
            own = mean_over_words(model(words), target)[0]
            own.backward()
            loss += own.item()
        for parameter in model.parameters():
            assert parameter.grad is not None
            parameter.grad /= total
        optimizer.step()
        losses.append(loss / total)
    return losses, model.state_dict()


def trained(options: dict[str, Any]) -> tuple[list[float | None], dict[str, Tensor]]:
    pipe = make_pipe(**options)
    losses = [pipe.train_step(microbatches=batch).loss for batch in BATCHES]
    state = pipe.full_state_dict()
    pipe.close()
    return losses, state


def assert_alone(found: tuple[list[float | None], dict[str, Tensor]]) -> None:
    losses, state = alone()
    assert found[0] == pytest.approx(losses, rel=1e-13)
    for name, value in state.items():
        torch.testing.assert_close(found[1][name], value, rtol=0, atol=1e-13)


@pytest.mark.parametrize("schedule", ["1f1b", "interleaved-zb"])
def test_training_is_that_of_one_process(schedule: str) -> None:
    assert_alone(trained({"schedule": schedule, "mesh": {"pipe": 2}}))


@pytest.mark.gloo
def test_training_over_processes(gloo: Pool) -> None:
    for found in gloo.run(trained, ranks=2, args=({},)):
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


@pytest.mark.parametrize(
    ("call", "message"),
    [
        ({"microbatches": []}, r"microbatches=\[\]: expected a list of microbatches, each a tuple"),
        ({"microbatches": torch.ones(2)}, r"expected a list of microbatches"),
        (
            {"microbatches": BATCHES[0][:3]},
            "a batch of 3 microbatches for a schedule of 4: expected 4 in every batch, or",
        ),
        ({"microbatches": BATCHES[0], "target": 1}, "microbatches= beside target: expected it alone"),
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
