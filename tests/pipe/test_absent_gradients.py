"""Gradients that do not exist, which a loss ignores, and sparse ones: as in one plain process, float64."""

import copy
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from support import small
from support.alone import near, train_alone, train_piped
from support.inside import profile_model
from support.parts import Backwards, Parts
from support.plain import batch as plain_batch
from support.pool import Pool
from support.records import records
from torch import Tensor, nn
from torch.optim import SGD, Optimizer, SparseAdam

import stagewright
from stagewright.pipe import PipelineModule
from stagewright.schedules import Message, build

WIDTH, MICROBATCHES = 4, 4
Loss = Callable[[Any, Tensor], Tensor]


class Sided(nn.Module):
    """Blocks in a row; `side` makes a second output from the first block's, and `tied` shares the lift's weight."""

    def __init__(self) -> None:
        super().__init__()
        self.lift = nn.Linear(WIDTH, WIDTH)
        self.side = nn.Linear(WIDTH, WIDTH)
        self.blocks = nn.ModuleList([nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh()) for _ in range(3)])
        self.tied = nn.Linear(WIDTH, WIDTH)
        self.tied.weight = self.side.weight

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        h = self.lift(x)
        aside = self.side(h)
        for block in self.blocks:
            h = block(h)
        return h, self.tied(aside).tanh()


def model_of(kind: type[nn.Module] = Sided) -> Any:
    torch.manual_seed(1)
    return kind().double()


def ignoring(output: Any, target: Tensor) -> Tensor:
    return F.mse_loss(output[0], target)


def sometimes(output: Any, target: Tensor) -> Tensor:
    """Microbatches whose first target is positive learn from the second output too."""
    main, aside = output
    loss = F.mse_loss(main, target)
    return loss + F.mse_loss(aside, target) if float(target[0, 0]) > 0 else loss


def batch(*firsts: float) -> tuple[Tensor, Tensor]:
    """Two samples a microbatch; `firsts`: the sign of each microbatch's first target."""
    x, y = plain_batch(5, WIDTH, samples=2 * MICROBATCHES)
    y[::2, 0] = y[::2, 0].abs() * torch.tensor(firsts, dtype=torch.float64)
    return x, y


decaying = partial(SGD, lr=0.05, weight_decay=0.5)


def piped(model: nn.Module, loss_fn: Loss, **options: Any) -> PipelineModule:
    settings = {"example_inputs": batch(1)[:1], "optimizer": decaying, "timeout": 120.0}
    return small.make(model=model, loss_fn=loss_fn, **settings | options)


BATCHES = [batch(-1, -1, -1, -1), batch(-1, 1, -1, -1), batch(-1, -1, -1, -1), batch(1, 1, -1, 1)]
FLUSH = [
    {"schedule": "1f1b"},
    {"schedule": "1f1b", "recompute": "full", "mesh": {"pipe": 3}},
    {"schedule": "interleaved", "num_chunks": 2},
    {"schedule": "gpipe", "mesh": {"pipe": 2, "data": 2}, "num_microbatches": 2},
]


@pytest.mark.thorough(but=["{'schedule': '1f1b'}-sometimes"])
@pytest.mark.parametrize("loss_fn", [ignoring, sometimes])
@pytest.mark.parametrize("options", FLUSH, ids=str)
def test_as_in_one_process(options: dict[str, Any], loss_fn: Loss) -> None:
    """Weight decay moves what has a gradient, zero or not: no parameter may have one that has none alone."""
    wanted = train_alone(model_of(), BATCHES, decaying, loss_fn=loss_fn, parts=MICROBATCHES)
    near(train_piped(piped(model_of(), loss_fn, **options), BATCHES).state, wanted.state)


@pytest.mark.thorough(but=["none"])
@pytest.mark.parametrize("recompute", ["none", "full"])
def test_in_a_stream(recompute: str) -> None:
    """Weights that the loss ignores do not move, and all else moves as in a model without it."""

    class Alone(Sided):
        def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
            h, aside = super().forward(x)
            return h, aside.detach()

    models = [model_of(), model_of(Alone)]
    for model in models:
        train_piped(piped(model, ignoring, schedule="2bw", recompute=recompute), BATCHES)
    before, (one, other) = model_of().state_dict(), [model.state_dict() for model in models]
    for name, value in one.items():
        assert torch.equal(value, other[name]), name
        assert torch.equal(value, before[name]) == name.startswith(("side", "tied")), name


class Stopping(Parts, own=lambda: nn.Linear(WIDTH, WIDTH)):
    def forward(self, x: Tensor) -> Tensor:
        return self.own(Backwards.apply(x, lambda gradient: None))


def test_an_autograd_function_that_hands_nothing_on() -> None:
    model = nn.Sequential(nn.Linear(WIDTH, WIDTH), Stopping(), nn.Linear(WIDTH, WIDTH)).double()
    before = model[0].weight.detach().clone()
    piped(model, F.mse_loss, cut=["1"]).train_step(*BATCHES[0])
    assert model[0].weight.grad is None
    assert torch.equal(model[0].weight, before)


def test_a_gradient_that_stops_coming_is_refused() -> None:
    """An attribute decides: nothing announced that the gradient might not be there."""

    class Deaf(Parts, own=lambda: nn.Linear(WIDTH, WIDTH), deaf=False):
        def forward(self, x: Tensor) -> Tensor:
            return self.own(torch.zeros_like(x) if self.deaf else x)

    model = nn.Sequential(nn.Linear(WIDTH, WIDTH), Deaf()).double()
    pipe = piped(model, F.mse_loss, cut=["1"])
    pipe.train_step(*BATCHES[0])
    model[1].deaf = True
    with pytest.raises(ValueError, match=r"input 0 of stage 1 \(1\) gets no gradient, and got one when the stages"):
        pipe.train_step(*BATCHES[0])


def test_what_certainly_comes_is_not_announced(monkeypatch: pytest.MonkeyPatch) -> None:
    """A message of a chain is its gradient alone; one whose presence is the loss's decision has flags in front."""
    from stagewright.comm import InProcessTransport

    sent: dict[Message, int] = {}
    send = InProcessTransport.send

    def counted(self: Any, message: Message, peer: int, tensors: Any, specs: Any) -> None:
        sent[message._replace(index=0)] = len(tensors)
        send(self, message, peer, tensors, specs)

    monkeypatch.setattr(InProcessTransport, "send", counted)
    piped(nn.Sequential(*[nn.Linear(WIDTH, WIDTH) for _ in range(4)]).double(), F.mse_loss).train_step(*BATCHES[0])
    assert {(m.kind.value, count) for m, count in sent.items() if m.kind.value == "grad"} == {("grad", 1)}
    sent.clear()
    piped(model_of(), ignoring, mesh={"pipe": 3}, cut=["blocks.1", "tied"]).train_step(*BATCHES[0])
    by_edge = {(m.src, m.dst): count for m, count in sent.items() if m.kind.value == "grad"}
    assert by_edge == {(1, 0): 2, (2, 0): 2, (2, 1): 2}


X = torch.randint(0, 11, (8, 3), generator=torch.Generator().manual_seed(0))
Y = torch.randn(8, 2, generator=torch.Generator().manual_seed(1), dtype=torch.float64)


def make_model() -> nn.Sequential:
    torch.manual_seed(0)
    layers = nn.Embedding(11, 4, sparse=True), nn.Flatten(), nn.Linear(12, 6), nn.Tanh(), nn.Linear(6, 2)
    return nn.Sequential(*layers).double()


@stagewright.named
def optimizers(parameters: list[tuple[str, nn.Parameter]]) -> list[Optimizer | None]:
    sparse, others = ([p for name, p in parameters if (name == "0.weight") is wanted] for wanted in (True, False))
    return [SparseAdam(sparse, lr=0.05) if sparse else None, SGD(others, lr=0.1) if others else None]


def make(schedule: Any = "1f1b", **options: Any) -> PipelineModule:
    settings: dict[str, Any] = {"schedule": schedule, "optimizer": optimizers, "example_inputs": (X,)}
    settings |= {"num_microbatches": 4, "mesh": {"pipe": 2}} if isinstance(schedule, str) else {}
    return PipelineModule(make_model(), **records(loss_fn=nn.functional.mse_loss, **(settings | options)))


def plain(*, delay: int, max_norm: float | None, steps: int = 4) -> dict[str, Tensor]:
    """The weights after some steps of one process; gradients are those at the weights `delay` steps before."""
    model = make_model()
    made = [one for one in optimizers(list(model.named_parameters())) if one is not None]
    versions: list[nn.Sequential] = []
    for t in range(steps):
        versions.append(copy.deepcopy(model).requires_grad_())
        other = versions[max(t - delay, 0)]
        other.zero_grad()
        for x, y in zip(X.chunk(4), Y.chunk(4), strict=True):
            (nn.functional.mse_loss(other(x), y) / 4).backward()  # type: ignore[no-untyped-call]
        gradients = [p.grad for p in other.parameters()]
        assert gradients[0].is_sparse
        norm = torch.stack([g.to_dense().norm() for g in gradients if g is not None]).norm()
        for parameter, gradient in zip(model.parameters(), gradients, strict=True):
            factor = 1.0 if max_norm is None else min(1.0, max_norm / (norm.item() + 1e-6))
            parameter.grad = gradient * factor
        for optimizer in made:
            optimizer.step()
            optimizer.zero_grad()
    return {name: value.detach() for name, value in model.state_dict().items()}


@pytest.mark.thorough(but=["1f1b-0-0.05"])
@pytest.mark.parametrize("max_norm", [None, 0.05])
@pytest.mark.parametrize(
    ("schedule", "delay"),
    [
        ("1f1b", 0),
        ("interleaved", 0),
        ("2bw", 1),
        pytest.param(build("1f1b", num_ranks=3, num_microbatches=4, replicas=(2, 1)), 0, id="replicas"),
    ],
)
def test_sparse_gradients_and_their_norm(schedule: Any, delay: int, max_norm: float | None) -> None:
    """Plain PyTorch does not clip them at all. Replicas in one process add up by themselves."""
    near(train_piped(make(schedule, max_grad_norm=max_norm), [(X, Y)] * 4).state, plain(delay=delay, max_norm=max_norm))


def test_gradients_of_several_calls_add_up() -> None:
    pipe = make(optimizer=None)
    pipe.forward_backward(X, Y)
    once = [p.grad.to_dense().clone() for p in pipe.parameters() if p.grad is not None]
    pipe.forward_backward(X, Y)
    twice = [p.grad for p in pipe.parameters() if p.grad is not None]
    assert twice[0].is_sparse
    for before, after in zip(once, twice, strict=True):
        assert torch.allclose(after.to_dense(), 2 * before, rtol=0, atol=1e-15)
    assert pipe.clip_grad_norm_(0.1) == pytest.approx(torch.stack([2 * g.norm() for g in once]).norm().item())


@pytest.mark.parametrize("schedule", ["1f1b", "2bw"])
def test_verify(schedule: str) -> None:
    make(schedule, max_grad_norm=0.05).verify(X, Y)


def test_a_checkpoint(tmp_path: Any) -> None:
    pipe = make()
    pipe.train_step(X, Y)
    assert pipe.held_bytes() > 0
    pipe.save(tmp_path)
    loss = pipe.train_step(X, Y).loss
    other = make("gpipe", mesh={"pipe": 3})
    other.load(tmp_path)
    assert other.train_step(X, Y).loss == loss


def test_the_profiler_steps_with_sparse_gradients() -> None:
    """As under schedule="auto"; SparseAdam takes no others."""
    options = {"loss_fn": nn.functional.mse_loss, "optimizer": optimizers, "seconds": 0.1}
    assert profile_model(make_model(), (X,), target=Y, **options).nodes[0].update_seconds > 0


MESSAGE = r"module '0' has sparse gradients, and ranks that hold copies of its weight .* Embedding\(..., sparse=False\)"


def test_replicas_of_a_stream_are_refused() -> None:
    with pytest.raises(ValueError, match=MESSAGE):
        make(build("2bw", num_ranks=3, num_microbatches=4, replicas=(2, 1)))
    make(build("2bw", num_ranks=3, num_microbatches=4, replicas=(1, 2)))


class Tied(Parts, weight=lambda: nn.Parameter(torch.zeros(11, 4))):
    """Its function asks for sparse gradients, which no module says."""

    def forward(self, x: Tensor) -> Tensor:
        return nn.functional.embedding(x, self.weight, sparse=True).flatten(1)


def test_a_sparse_gradient_that_no_module_announces_is_refused_in_a_sum() -> None:
    model = nn.Sequential(Tied(), nn.Linear(12, 6), nn.Tanh(), nn.Linear(6, 2)).double()
    schedule = build("2bw", num_ranks=3, num_microbatches=4, replicas=(2, 1))
    pipe = PipelineModule(model, schedule=schedule, loss_fn=nn.functional.mse_loss, optimizer=lambda p: SGD(p, lr=0.1))
    with pytest.raises(ValueError, match=r"the gradient of '0.weight' is sparse, and ranks that hold copies of it"):
        train_piped(pipe, [(X, Y)] * 3)


def _over_processes(replicas: tuple[int, ...]) -> Any:
    try:
        pipe = make(build("1f1b", num_ranks=sum(replicas), num_microbatches=4, replicas=replicas), max_grad_norm=0.05)
    except ValueError as error:
        return str(error)
    return train_piped(pipe, [(X, Y)] * 4).state


@pytest.mark.thorough
def test_over_processes(gloo: Pool) -> None:
    for state in gloo.run(_over_processes, ranks=3, args=((1, 2),)):
        near(state, plain(delay=0, max_norm=0.05))
    answers = gloo.run(_over_processes, ranks=3, args=((2, 1),))
    assert all("module '0' has sparse gradients" in answer for answer in answers)
