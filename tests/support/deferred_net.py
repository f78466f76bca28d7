"""A model that is built without memory in several ways, and a pipeline over it."""

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import stagewright as sw
from support.inside import recording
from support.pipeline import assembled

WIDTH, VOCABULARY = 16, 24
TOKENS = torch.randint(0, VOCABULARY, (8, 6), generator=torch.Generator().manual_seed(0))
Build = Callable[[], AbstractContextManager[object]]


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.drop = nn.LayerNorm(WIDTH), nn.Dropout(0.1)
        self.up, self.down = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.drop(self.down(torch.relu(self.up(self.norm(x)))))


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, WIDTH)
        self.lstm = nn.LSTM(WIDTH, WIDTH, batch_first=True)
        self.blocks = nn.ModuleList(Block() for _ in range(4))
        self.head = nn.Linear(WIDTH, VOCABULARY, bias=False)
        self.head.weight = self.embed.weight
        self.register_buffer("positions", torch.randn(6, WIDTH).cumsum(0), persistent=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.embed(x) + self.positions
        x = x + self.lstm(x)[0]
        for block in self.blocks:
            x = block(x)
        return self.head(x)


def loss(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    return F.cross_entropy(output.flatten(0, 1), target.flatten())


def sgd(parameters: list[nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, lr=0.01)


@contextmanager
def deferred(**options: Any) -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(recording, "SMALL", 1)
        with sw.deferred(**options):
            yield


BUILDS: dict[str, Build] = {
    "deferred": deferred,
    "files": lambda: deferred(draw=False),
    "meta": lambda: torch.device("meta"),
    "plain": nullcontext,
}


def net(build: str) -> Net:
    """What is computed in the constructor, and so is in no file, is 0 where nothing draws it."""
    with BUILDS[build]():
        model = Net()
    if build != "deferred":
        model.positions = torch.zeros(6, WIDTH)
    return model


make = partial(assembled, mesh={"pipe": 2}, num_microbatches=4, loss_fn=loss, optimizer=sgd)


def trained(build: Build, **options: Any) -> tuple[list[float | None], dict[str, torch.Tensor]]:
    torch.manual_seed(3)
    with build():
        model = Net()
    pipe = make(model, **options)
    losses = [pipe.train_step(TOKENS, TOKENS.flip(0)).loss for _ in range(3)]
    return losses, {name: x.clone() for name, x in pipe.full_state_dict().items()}


def compare(found: Any, expected: Any) -> None:
    assert found[0] == expected[0]
    assert found[1].keys() == expected[1].keys()
    for name, x in expected[1].items():
        assert torch.equal(found[1][name], x), name
