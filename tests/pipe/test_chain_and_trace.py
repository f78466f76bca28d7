"""Odd models, cut at odd places: outputs of any form, values that fork, constants, sizes in Python, dense skips."""

import copy
import weakref
from collections import Counter, namedtuple
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from support.alone import same_gradients
from support.cuts import WIDTH, Counting, Layers, X, Y, agree_with_one_process, linear, loss_of
from support.parts import Does, Parts
from support.plain import batch as plain_batch
from support.plain import linear as narrow
from support.small import make
from torch import Tensor, nn

from stagewright.comm import InProcessTransport
from stagewright.pipe import PipelineModule
from stagewright.schedules import MessageKind

Pair = namedtuple("Pair", "y note")


class InADict(Layers):
    """Nested outputs; some of them are made in the first stage, one is the input, and some are no tensors."""

    def forward(self, x: Tensor) -> dict[str, Any]:
        h = self.a(x)
        more = {"aux": (h.tanh().mean(-1), x), "early": [h], "mask": h > 0, "note": Pair(3, None)}
        return {"y": self.d(self.c(self.b(h)))} | more


class OtherInEvaluation(Layers):
    def forward(self, x: Tensor) -> Any:
        h = self.b(self.a(x))
        y = self.d(self.c(h))
        return (y, h, None) if self.training else y


@pytest.mark.thorough(but=["OtherInEvaluation-1"])
@pytest.mark.parametrize("ranks", [1, 2, 3, 4])
@pytest.mark.parametrize("model", [InADict, OtherInEvaluation])
def test_outputs_of_any_form(model: type[nn.Module], ranks: int) -> None:
    agree_with_one_process(model, ranks=ranks)


class Forked(Parts, a=lambda: nn.Linear(WIDTH, 2 * WIDTH), b=lambda: nn.Linear(4, WIDTH), c=linear, d=linear):
    """Both halves of a chunk are used, one of them at the very end. topk gives two values, one of integers; a number
    derived from the batch's size is used in several stages."""

    def forward(self, x: Tensor) -> Tensor:
        n = x.shape[0]
        u, v = self.a(x).reshape(2 * n, -1).reshape(n, -1).chunk(2, -1)
        values, places = u.topk(4, -1)
        u = self.c(self.b(values) + places.sum(-1, keepdim=True))
        return self.d((u * v).view(-1, n).reshape(n, WIDTH))


class Constants(Layers):
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


@pytest.mark.thorough(but=["Counting-4-full"])
@pytest.mark.parametrize("recompute", ["none", "full"])
@pytest.mark.parametrize("ranks", [3, 4])
@pytest.mark.parametrize("model", [Forked, Constants, Counting])
def test_values_of_any_kind_cross_the_cuts(model: type[nn.Module], ranks: int, recompute: str) -> None:
    agree_with_one_process(model, ranks=ranks, recompute=recompute)


def test_an_input_that_is_not_used() -> None:
    class Ignores(Layers):
        def forward(self, x: Tensor, unused: Tensor) -> Tensor:
            return self.b(self.a(x))

    agree_with_one_process(Ignores, inputs=(X, Y))


def of_any_size(*middle: nn.Module) -> PipelineModule:
    model = nn.Sequential(linear(), *middle, linear()).double()
    return PipelineModule(model, num_microbatches=4, mesh={"pipe": 2}, loss_fn=loss_of, cut=["2"], example_inputs=(X,))


def test_what_may_and_may_not_follow_the_batch_size() -> None:
    pipe = of_any_size(Does(Tensor.unbind), Does(torch.stack))
    pipe.forward_backward(X, Y)
    with pytest.raises(ValueError, match=r"stage 0 \(0 .. 1\) takes 1 values and returns 4, and .* returned 2 when"):
        pipe.forward_backward(torch.cat([X, X]), torch.cat([Y, Y]))
    pipe.forward_backward(X, Y)
    in_place = Does(lambda x: x.relu_() if x.shape[0] > 2 else x.relu())
    pipe, plain = of_any_size(nn.Identity(), in_place), of_any_size(nn.Identity(), nn.ReLU())
    plain.load_state_dict(pipe.state_dict())
    for each in (pipe, plain):
        each.forward_backward(X, Y)
        each.forward_backward(torch.cat([X, X]), torch.cat([Y, Y]))
    for one, other in zip(pipe.parameters(), plain.parameters(), strict=True):
        assert torch.equal(one.grad, other.grad)  # type: ignore[arg-type]


_CALLED_WITH: Counter[str] = Counter()  # by any Watchful; a list or dict is as it was before the build


class Watchful(Parts, norm=lambda: nn.BatchNorm1d(WIDTH), linear=linear, seen=lambda: []):
    def forward(self, x: Tensor) -> Tensor:
        self.seen.append(type(x).__name__)
        _CALLED_WITH[type(x).__name__] += 1
        return self.linear(self.norm(x))


@pytest.mark.parametrize("traced", [False, True])
def test_building_computes_nothing_and_changes_nothing(traced: bool) -> None:
    class Wrapped(Parts, first=Watchful, second=Watchful):
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


class DividesByTheBatch(Layers):
    """int() makes the size of the recorded batch a constant."""

    def forward(self, x: Tensor) -> Tensor:
        return self.b(self.a(x)) / int(x.shape[0])


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


BLOCKS, MICROBATCHES = 6, 4


class Reads(Parts, layer=linear):
    def forward(self, before: list[Tensor]) -> Tensor:
        return self.layer(torch.stack(before).mean(0))


class Dense(Parts, first=linear, blocks=lambda: nn.ModuleList(Reads() for _ in range(BLOCKS)), head=linear):
    def forward(self, x: Tensor) -> Tensor:
        outputs = [self.first(x)]
        for block in self.blocks:
            outputs.append(block(outputs))
        return self.head(outputs[-1])


def batch(samples: int = 2 * MICROBATCHES) -> tuple[Tensor, Tensor]:
    return plain_batch(0, WIDTH, samples=samples)


def make_pipe(**options: Any) -> PipelineModule:
    return make(model=Dense().double(), **{"num_microbatches": MICROBATCHES, "example_inputs": batch()[:1]} | options)


class CountingTransport:
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


@pytest.mark.thorough(but=["2-3"])
@pytest.mark.parametrize(("num_ranks", "num_chunks"), [(2, 1), (2, 3), (3, 2)])
def test_each_tensor_crosses_each_pair_of_ranks_once(
    num_ranks: int, num_chunks: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    counting = CountingTransport(monkeypatch, InProcessTransport)
    options = {"schedule": "interleaved", "num_chunks": num_chunks} if num_chunks > 1 else {}
    # Stages begin at blocks 1, 2, ...: the first layer stands beside block 0, the head beside the last one.
    starts = [f"blocks.{i * BLOCKS // (num_ranks * num_chunks)}" for i in range(1, num_ranks * num_chunks)]
    make_pipe(mesh={"pipe": num_ranks}, cut=starts, **options).train_step(*batch())
    rank_of = {i: (i * num_ranks * num_chunks // BLOCKS) % num_ranks for i in range(BLOCKS)}
    made_on = [0, *(rank_of[i] for i in range(BLOCKS))]  # rank of output j: the first layer's, then the blocks'
    wanted: Counter[tuple[str, int, int]] = Counter()
    for j, rank in enumerate(made_on):
        for other in {rank_of[i] for i in range(j, BLOCKS)} - {rank}:  # block i reads the outputs 0 .. i
            wanted["act", rank, other] += 1
            wanted["grad", other, rank] += 1
    for k in range(MICROBATCHES):
        assert {key[:3]: n for key, n in counting.tensors.items() if key[3] == k} == wanted


def test_freed_behind_the_last_consumer(monkeypatch: pytest.MonkeyPatch) -> None:
    counting = CountingTransport(monkeypatch, InProcessTransport)
    make_pipe(schedule="interleaved", num_chunks=3, num_microbatches=8).train_step(*batch(16))
    assert counting.microbatches_alive() == 0
    assert counting.most_alive <= 4  # of eight


class TakenTwice(Parts, first=narrow, second=narrow, third=narrow, fourth=lambda: nn.Bilinear(6, 6, 6)):
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
