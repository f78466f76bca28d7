"""recompute= of single modules: equal to one plain process, each module runs again at most once, memory falls.

float64, and equal to the last bit: a second run adds up in no other order.
"""

import random
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from support import small
from support.alone import near, same_gradients
from support.grids import one_in
from support.inside import TrainingWorker
from support.layers import Block, D, T
from support.parts import Parts
from support.reruns import WORDS, M, X, Y, as_one, equals_one_process, made, pipeline
from support.small import WIDTH, make, sgd
from support.storages import Storages
from torch import Tensor, nn
from torch.utils.checkpoint import CheckpointPolicy

from stagewright.pipe import PipelineModule


class Branch(Parts, linear=lambda: nn.Linear(D, D)):
    """A keyword argument, a list that the callee changes, a dict and a tuple that it returns."""

    def forward(self, x: Tensor, *, scale: Tensor, seen: list[Tensor]) -> dict[str, Any]:
        seen.append(x)
        h = torch.sin(self.linear(x) * scale) * len(seen)
        return {"h": h, "pair": (h.cos(), seen[0])}


class Forked(Parts, branch=Branch):
    def forward(self, x: Tensor) -> Tensor:
        seen = [x]
        one = self.branch(x, scale=x.sigmoid(), seen=seen)
        two = self.branch(one["h"], scale=one["pair"][0], seen=seen)
        assert len(seen) == 3
        return two["h"] + two["pair"][0] * two["pair"][1]


class InPlace(Parts, linear=lambda: nn.Linear(D, D)):
    def forward(self, x: Tensor) -> Tensor:
        x.mul_(2.0).sigmoid_()
        return self.linear(x).mul_(0.5)


class ReadsBehind(Parts, before=lambda: nn.Linear(D, D), inner=InPlace):
    def forward(self, x: Tensor) -> Tensor:
        h = self.before(x)
        return self.inner(h) + h


class Moving(Parts, mean=lambda: torch.zeros(D), count=lambda: torch.zeros(())):
    def forward(self, x: Tensor) -> Tensor:
        if self.training:
            self.mean = 0.9 * self.mean + x.detach().mean((0, 1))
            self.count += 1
        return x + self.mean * self.count


class Tokens(Parts, norm=lambda: nn.BatchNorm1d(T)):
    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(self.norm(x))


def tied() -> nn.Module:
    model = nn.Sequential(nn.Linear(D, D), nn.Tanh(), nn.Linear(D, D), nn.Tanh())
    model[2].weight = model[0].weight
    return model


def frozen() -> nn.Module:
    model = nn.Sequential(Forked(), Forked(), nn.Linear(D, D), Tokens())
    model[0].requires_grad_(False)
    model[2].weight.requires_grad_(False)
    return model


CHAINS: dict[str, Callable[[], Any]] = {
    "arguments of all kinds": lambda: nn.Sequential(Forked(), Forked(), nn.Linear(D, D)),
    "in-place": lambda: nn.Sequential(nn.Linear(D, D), nn.ReLU(inplace=True), ReadsBehind(), InPlace(), InPlace()),
    "buffers": lambda: nn.Sequential(Tokens(), Moving(), nn.Linear(D, D), Tokens(), Moving()),
    "tied": tied,
    "frozen": frozen,
    "stages": lambda: [Forked(), nn.Sequential(ReadsBehind(), Moving())],
}


@pytest.mark.thorough(but=["tied-full"])
@pytest.mark.parametrize(("make", "recompute"), one_in(2, CHAINS, WORDS))
def test_equals_one_process(make: Callable[[], Any], recompute: str) -> None:
    # Each stage adds up its own share of a tied weight.
    equals_one_process(make, recompute, atol=1e-12 if make is tied else 0.0)


@pytest.mark.thorough(but=["<lambda>-{'*.branch': 'full'}"])
@pytest.mark.parametrize(
    ("make", "recompute"),
    [
        (CHAINS["arguments of all kinds"], {"*.branch": "full"}),
        (CHAINS["arguments of all kinds"], {"[01]": "full", "*.branch": "selective"}),
        (CHAINS["in-place"], {"2": "selective", "2.inner": "full", "4": "full"}),
        (CHAINS["in-place"], {"?.inner": "selective"}),
        (CHAINS["buffers"], {"*.norm": "full", "1": "selective"}),
        (CHAINS["stages"], {"0.branch": "selective", "1.*": "full"}),
        (CHAINS["frozen"], ["layer", "selective"]),
    ],
    ids=lambda value: value.__name__ if callable(value) else str(value),
)
def test_single_modules_equal_one_process(make: Callable[[], Any], recompute: Any) -> None:
    equals_one_process(make, recompute)


def with_dropout() -> nn.Module:
    return nn.Sequential(
        nn.Linear(D, D), *[Block() for _ in range(3)], nn.Dropout(0.5), nn.LSTM(D, D, batch_first=True), First()
    )


class First(nn.Module):
    def forward(self, x: tuple[Tensor, ...]) -> Tensor:
        return x[0]


def trained(recompute: Any, *, make: Callable[[], Any] = with_dropout, steps: int = 3, **options: Any) -> list[Tensor]:
    model = made(make)
    state = torch.get_rng_state()
    pipe = pipeline(model, recompute, optimizer=sgd, **options)
    for number in range(steps):
        pipe.train_step(X + number, Y)
    pipe.flush()
    assert torch.equal(torch.get_rng_state(), state), "the user's generator moved"
    pipe.close()
    return [p.detach() for p in as_one(model).parameters()]


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("schedule", "recompute"),
    one_in(
        2,
        ("interleaved", "2bw", "pipedream"),
        [
            "layer",
            "selective",
            {"*": "full", "*.attend": "selective"},
            {"*.attend": "full", "*.project_dropout": "full"},
        ],
    ),
)
def test_random_numbers_and_weight_versions(schedule: str, recompute: Any) -> None:
    """The second run draws what the first one drew, and computes with its version; against plain: the matrices."""
    one, other = (trained(each, schedule=schedule) for each in ("none", recompute))
    assert all(torch.equal(a, b) for a, b in zip(one, other, strict=True))


class Draws(Parts, linear=lambda: nn.Linear(D, D)):
    def forward(self, x: Tensor) -> Tensor:
        return torch.sin(self.linear(x)) * torch.rand(D, dtype=x.dtype) * (random.random() + np.random.rand())


@pytest.mark.thorough(but=["layer"])
@pytest.mark.parametrize("recompute", ["layer", {"*": "selective", "*.1": "full"}, {"*.[12]": "full"}], ids=str)
def test_random_numbers_of_python_and_numpy(recompute: Any) -> None:
    """In the midst of a unit."""
    one, other = (
        trained(each, make=lambda: nn.Sequential(*(nn.Sequential(Draws(), Draws(), Draws()) for _ in range(4))))
        for each in ("none", recompute)
    )
    assert all(torch.equal(a, b) for a, b in zip(one, other, strict=True))


def kept(recompute: Any, monkeypatch: pytest.MonkeyPatch) -> float:
    """Elements per token that three blocks on a stage keep of one microbatch more, and the output that is sent."""
    stages = [nn.Sequential(*[Block() for _ in range(3)]).double(), nn.Linear(D, D).double()]
    pipe = pipeline(stages, recompute, schedule="gpipe")
    pipe.forward_backward(X, Y)  # the first forwards learn
    storages, seen, work = Storages(), [], TrainingWorker.run

    def watched(self: TrainingWorker, action: Any) -> None:
        if action.stage > 0:
            return work(self, action)
        with storages:
            work(self, action)
        seen.append(storages.bytes)
        return None

    with monkeypatch.context() as patch:
        patch.setattr(TrainingWorker, "run", watched)
        pipe.forward_backward(X, Y)
    pipe.close()
    forwards = seen[:M]
    assert forwards[3] - forwards[2] == forwards[2] - forwards[1]
    return (forwards[3] - forwards[2]) / (X.element_size() * X[..., 0].numel() / M)


@pytest.mark.thorough
def test_memory_falls(monkeypatch: pytest.MonkeyPatch) -> None:
    """Products of a block: queries, keys and values 3 D, projection D, up 2 D, down D (its output: the next input)."""
    found = {word: kept([word, "none"], monkeypatch) for word in WORDS}
    assert found["full"] == D  # the output, on its way; the input is a slice of the batch
    assert found["layer"] == found["full"] + 2 * D  # inputs of the second and third block
    assert found["selective"] == found["layer"] + 3 * (3 + 1 + 2 + 1) * D
    assert found["none"] > 1.5 * found["selective"]
    assert kept({"0.*": "full", "0.*.up": "selective"}, monkeypatch) == found["layer"] + 3 * 2 * D
    assert kept({"0.*": "selective", "0.*.up": "full"}, monkeypatch) == found["selective"] - 3 * 2 * D
    attention = {"0.*.attend": "full"}  # as Megatron's selective recomputation
    assert found["selective"] < kept(attention, monkeypatch) < found["none"]


def keeps_products(context: Any, operator: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
    is_product = operator is torch.ops.aten.addmm.default
    return CheckpointPolicy.MUST_SAVE if is_product else CheckpointPolicy.PREFER_RECOMPUTE


@pytest.mark.thorough
@pytest.mark.parametrize(("policy", "word"), [(lambda *_, **__: False, "layer"), (keeps_products, "selective")])
def test_a_policy_of_the_users(policy: Any, word: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """For all units of a stage, for modules, and beside words."""
    wanted = kept([word, "none"], monkeypatch)
    assert kept([policy, "none"], monkeypatch) == kept({"0.*": policy}, monkeypatch) == wanted
    one, other = (trained(each, steps=2) for each in ("none", {"*": policy, "*.up": "selective"}))
    assert all(torch.equal(a, b) for a, b in zip(one, other, strict=True))


# --- models that are no chain: the code between their modules is recorded ---


class Cache:
    def __init__(self) -> None:
        self.entries: dict[str, list[Tensor]] = {"seen": []}


class Caching(Parts, linear=lambda: nn.Linear(D, D)):
    def forward(self, x: Tensor, *, cache: Cache) -> Tensor:
        seen = cache.entries["seen"]
        seen.append(torch.sin(self.linear(x)))
        return seen[-1].cos() * torch.stack(seen).sum(0) * len(seen)


class Cached(Parts, first=lambda: nn.Linear(D, D), layers=lambda: nn.ModuleList(Caching() for _ in range(3))):
    def forward(self, x: Tensor) -> Tensor:
        x, cache = self.first(x), Cache()
        for layer in self.layers:
            x = layer(x, cache=cache)
        return x


@pytest.mark.thorough(but=["selective"])
@pytest.mark.parametrize("recompute", ["layer", "selective"])
def test_an_object_that_modules_change(recompute: str) -> None:
    """As the caches of `transformers`, which a second run would fill once more."""
    equals_one_process(lambda: [Cached(), nn.Linear(D, D)], {"0.layers.*": "full"})
    equals_one_process(lambda: [Cached(), nn.Linear(D, D)], {"0.layers.*": "selective"})
    equals_one_process(lambda: [nn.Linear(D, D), Cached()], recompute)


ZEROS_FIRST = torch.cat([torch.zeros(2, WIDTH), small.X[2:]])


class Average(nn.Module):
    """A mean that begins to move with a real forward; `large` makes it a buffer of a megabyte."""

    def __init__(self, *, large: bool = False, begins: int = 3) -> None:
        super().__init__()
        self.begins = begins
        self.register_buffer("mean", torch.zeros(1 << 18 if large else 1))
        self.seen = 0

    def forward(self, x: Tensor) -> Tensor:
        if type(x) is Tensor and torch.is_grad_enabled() is not self.training:  # the first run of each microbatch
            self.seen += 1
        if self.seen >= self.begins:
            self.mean.mul_(0.5).add_(x.detach().mean())
        return x + self.mean[0]


class Reassigned(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("mean", torch.zeros(WIDTH))
        self.twin = nn.Module()
        self.twin.register_buffer("count", torch.zeros(()))
        self.register_buffer("count", self.twin.count)

    def forward(self, x: Tensor) -> Tensor:
        self.mean = 0.9 * self.mean + x.detach().mean(0)
        self.count += 1
        return x + self.mean * self.twin.count


@pytest.mark.thorough(but=["none-batch norm", "full-reassigned", "selective-reassigned"])
@pytest.mark.parametrize("middle", [lambda: nn.BatchNorm1d(WIDTH), Reassigned], ids=["batch norm", "reassigned"])
@pytest.mark.parametrize("recompute", ["none", "full", "layer", "selective"])
def test_buffers_that_a_first_forward_leaves_as_they_are(middle: Callable[[], nn.Module], recompute: str) -> None:
    """Which buffers move was learned from values: zeros leave a running mean at 0, and then it moved twice."""
    torch.manual_seed(0)
    model, twin = (nn.Sequential(middle(), nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)) for _ in range(2))
    twin.load_state_dict(model.state_dict())
    for x, y in zip(ZEROS_FIRST.split(2), small.Y.split(2), strict=True):
        (F.mse_loss(twin(x), y) / 4).backward()
    make(model=model, optimizer=None, recompute=recompute, cut=["2"]).forward_backward(ZEROS_FIRST, small.Y)
    near(model.state_dict(), twin.state_dict(), atol=1e-8, rtol=1e-5)
    same_gradients(model, twin, atol=1e-6, rtol=1e-5)


def averaging(*, recompute: str = "full", **options: Any) -> PipelineModule:
    torch.manual_seed(0)
    model = nn.Sequential(Average(**options), nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH))
    return make(model=model, optimizer=None, recompute=recompute, cut=["2"])


def test_a_buffer_that_begins_to_move_later_is_kept_or_refused_where_it_is_large() -> None:
    pipe = averaging()
    pipe.forward_backward(small.X, small.Y)
    expected = 0.0
    for x in small.X.split(2)[2:]:
        expected = expected / 2 + float(x.mean())
    assert float(pipe.state_dict()["0.mean"]) == pytest.approx(expected)
    # Its value from before the change is not kept: that would be a second copy of every mask.
    with pytest.raises(ValueError, match=r"buffer 'mean' of Average .*Expected .* recompute= that leaves it out"):
        averaging(large=True).forward_backward(small.X, small.Y)


def test_a_large_buffer_that_moves_is_what_it_was_in_the_second_run() -> None:
    pipes = [averaging(large=True, begins=0, recompute=recompute) for recompute in ("none", "full")]
    for pipe in pipes:
        for _ in range(2):
            pipe.forward_backward(small.X, small.Y)
    assert torch.equal(*(pipe.state_dict()["0.mean"] for pipe in pipes))
    for one, other in zip(*(pipe.parameters() for pipe in pipes), strict=True):
        assert torch.equal(one.grad, other.grad)


class Centered(Parts, center=lambda: torch.zeros(WIDTH)):
    """A moving target, as DINO's center."""

    def forward(self, output: Tensor, target: Tensor) -> Tensor:
        self.center.mul_(0.5).add_(output.detach().mean(0))
        return F.mse_loss(output - self.center, target)


@pytest.mark.parametrize(
    "loss",
    [
        lambda: lambda output, target: F.mse_loss(F.dropout(output, 0.5), target),
        lambda: lambda output, target: F.mse_loss(output, target.mul_(2.0)),
        Centered,
    ],
    ids=["random", "changes its target", "with a buffer"],
)
def test_a_loss_is_computed_again_as_it_was(loss: Callable[[], Callable[[Tensor, Tensor], Tensor]]) -> None:
    """It drew other numbers, doubled the target once more and moved its buffers twice: other gradients, no word."""
    gradients, targets, buffers = [], [], []
    for recompute in ("none", "full"):
        torch.manual_seed(0)
        model = nn.Sequential(*[nn.Linear(WIDTH, WIDTH) for _ in range(4)])
        loss_fn, target = loss(), small.Y.clone()
        make(model=model, optimizer=None, recompute=recompute, loss_fn=loss_fn).forward_backward(small.X, target)
        gradients.append([p.grad for p in model.parameters()])
        targets.append(target)
        buffers.append(list(loss_fn.buffers()) if isinstance(loss_fn, nn.Module) else [])
    for one, other in zip(gradients[0] + buffers[0], gradients[1] + buffers[1], strict=True):
        assert torch.equal(one, other)
    assert torch.equal(*targets)
