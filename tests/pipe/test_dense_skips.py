"""Outputs that several stages take: each tensor crosses each pair of ranks once, and its gradients add up."""

from __future__ import annotations

import copy
import weakref
from collections import Counter
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from support.alone import same_gradients
from support.models import token_loss
from support.parts import Parts
from support.plain import batch as plain_batch
from support.plain import linear
from support.records import records
from support.small import sgd
from torch import Tensor, nn

from stagewright.comm import InProcessTransport
from stagewright.pipe import PipelineModule
from stagewright.schedules import MessageKind

VOCABULARY, WIDTH, BLOCKS, MICROBATCHES = 11, 8, 6, 4


class Block(nn.Module):
    """Reads a learned mean of all outputs so far."""

    def __init__(self, number: int) -> None:
        super().__init__()
        self.weights = nn.Parameter(torch.randn(number))
        self.norm = nn.LayerNorm(WIDTH)
        self.attention = nn.MultiheadAttention(WIDTH, 2, batch_first=True)
        self.mlp = nn.Sequential(nn.Linear(WIDTH, 2 * WIDTH), nn.GELU(), nn.Linear(2 * WIDTH, WIDTH))

    def forward(self, before: list[Tensor]) -> Tensor:
        shares = torch.softmax(self.weights, 0)
        x = self.norm(sum(share * each for share, each in zip(shares, before, strict=True)))
        h, _ = self.attention(x, x, x, need_weights=False)
        return self.mlp(x + h)


class DenseGPT(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, WIDTH)
        self.blocks = nn.ModuleList([Block(i + 1) for i in range(BLOCKS)])
        self.head = nn.Linear(WIDTH, VOCABULARY)

    def forward(self, tokens: Tensor) -> Tensor:
        outputs = [self.embedding(tokens)]
        for block in self.blocks:
            outputs.append(block(outputs))
        return self.head(outputs[-1])


def make_model() -> DenseGPT:
    torch.manual_seed(0)
    return DenseGPT().double()


def batch(step: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(step)
    tokens = torch.randint(VOCABULARY, (2 * MICROBATCHES, 6), generator=generator)
    return tokens[:, :-1], tokens[:, 1:]


def make_pipe(model: nn.Module, **options: Any) -> PipelineModule:
    settings: dict[str, Any] = {"mesh": {"pipe": 2}, "num_microbatches": MICROBATCHES, "timeout": 120.0}
    settings |= {"loss_fn": token_loss, "optimizer": sgd, "example_inputs": batch(0)[:1]}
    return PipelineModule(model, **records(**(settings | options)))


class Counting:
    """Tensors that cross ranks, by (kind, sender, receiver, microbatch), and which microbatches are alive at once."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, transport: type[Any]) -> None:
        self.tensors: Counter[tuple[str, int, int, int]] = Counter()
        self.alive: dict[int, list[weakref.ref[Tensor]]] = {}
        self.most_alive = 0
        send = transport.send

        def counted(mine: Any, message: Any, peer: int, tensors: Any, specs: Any) -> None:
            if message.kind in (MessageKind.ACT, MessageKind.GRAD):
                gone = sum(spec.dtype is torch.uint8 for spec in specs)  # flags
                self.tensors[message.kind.value, mine.rank, peer, message.index] += len(tensors) - gone
            if message.kind is MessageKind.ACT:
                self.alive.setdefault(message.index, []).extend(weakref.ref(x) for x in tensors)
                self.most_alive = max(self.most_alive, self.microbatches_alive())
            send(mine, message, peer, tensors, specs)

        monkeypatch.setattr(transport, "send", counted)

    def microbatches_alive(self) -> int:
        return sum(any(ref() is not None for ref in refs) for refs in self.alive.values())


@pytest.mark.thorough
@pytest.mark.parametrize(("num_ranks", "num_chunks"), [(2, 1), (2, 3), (3, 2)])
def test_each_tensor_crosses_each_pair_of_ranks_once(
    num_ranks: int, num_chunks: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    counting = Counting(monkeypatch, InProcessTransport)
    options = {"schedule": "interleaved", "num_chunks": num_chunks} if num_chunks > 1 else {}
    # Stages begin at blocks 1, 2, ...: the embedding stands beside block 0, the head beside the last one.
    starts = [f"blocks.{i * BLOCKS // (num_ranks * num_chunks)}" for i in range(1, num_ranks * num_chunks)]
    make_pipe(make_model(), mesh={"pipe": num_ranks}, cut=starts, **options).train_step(*batch(0))
    rank_of = {i: (i * num_ranks * num_chunks // BLOCKS) % num_ranks for i in range(BLOCKS)}
    made_on = [0, *(rank_of[i] for i in range(BLOCKS))]  # rank of output j: the embedding's, then the blocks'
    wanted: Counter[tuple[str, int, int]] = Counter()
    for j, rank in enumerate(made_on):
        for other in {rank_of[i] for i in range(j, BLOCKS)} - {rank}:  # block i reads the outputs 0 .. i
            wanted["act", rank, other] += 1
            wanted["grad", other, rank] += 1
    for k in range(MICROBATCHES):
        assert {key[:3]: n for key, n in counting.tensors.items() if key[3] == k} == wanted


@pytest.mark.thorough
def test_freed_behind_the_last_consumer(monkeypatch: pytest.MonkeyPatch) -> None:
    counting = Counting(monkeypatch, InProcessTransport)
    pipe = make_pipe(make_model(), schedule="interleaved", num_chunks=3, num_microbatches=8)
    tokens, targets = (torch.cat([one, one]) for one in batch(0))
    pipe.train_step(tokens, targets)
    assert counting.microbatches_alive() == 0
    assert counting.most_alive <= 4  # of eight


class TakenTwice(Parts, first=linear, second=linear, third=linear, fourth=lambda: nn.Bilinear(6, 6, 6)):
    """What `first` makes goes to `second` and to `fourth`, which are on the other rank under two chunks."""

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.first(x)
        return self.fourth(self.third(self.second(hidden)), hidden)


def test_gradients_of_several_consumers_on_one_rank_add_up() -> None:
    model, (x, target) = TakenTwice().double(), plain_batch(0)
    plain = copy.deepcopy(model)
    F.mse_loss(plain(x), target).backward()
    options: dict[str, Any] = {"schedule": "interleaved", "num_chunks": 2, "num_microbatches": 2, "mesh": {"pipe": 2}}
    options |= {"cut": ["second", "third", "fourth"], "loss_fn": F.mse_loss, "verify": False}
    PipelineModule(model, **options).forward_backward(x, target)
    same_gradients(model, plain)
