"""What the plain model of `verify` runs is its own: compiled blocks, closures and losses that know the model."""

from __future__ import annotations

import gc
import logging
import warnings
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from support.inside import plain, verification
from support.pool import Pool
from torch import Tensor, nn

from stagewright.pipe import PipelineModule, VerificationError


class Residual(nn.Module):
    """Blocks in a list, so that the model is recorded."""

    def __init__(self, around: Callable[[Any], Any]) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(
            around(nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Tanh())) for _ in range(3)
        )

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = x + block(x)
        return x


def closure(block: Any) -> Any:
    old = block.forward
    block.forward = lambda x: old(x) * 2
    return block


def twice(graph: Any, example: object) -> Any:
    """A backend whose code computes what the plain one does not, as inductor's draws other numbers."""
    del example
    return lambda *args: [x * 2 for x in graph(*args)]


def compiled(block: nn.Module) -> Any:
    return torch.compile(block, backend=twice)


def called_compiled(block: nn.Module) -> nn.Module:
    outer = closure(block)
    outer.compile(backend="eager")
    return block


def pipe_of(model: nn.Module, loss_fn: Any = F.mse_loss, **options: Any) -> PipelineModule:
    settings: dict[str, Any] = {"mesh": {"pipe": 2}, "num_microbatches": 2, "verify": True, "timeout": 120.0}
    optimizer = lambda parameters: torch.optim.SGD(parameters, lr=0.1)  # noqa: E731
    return PipelineModule(model, loss_fn=loss_fn, optimizer=optimizer, **(settings | options))


def trained(around: Callable[[Any], Any], **options: Any) -> tuple[list[float | None], dict[str, Tensor]]:
    torch.manual_seed(0)
    pipe = pipe_of(Residual(around), **options)
    generator = torch.Generator().manual_seed(1)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "The .grad attribute of a Tensor")  # the compiler looks at it
        losses = [pipe.train_step(*torch.randn(2, 4, 4, generator=generator)).loss for _ in range(2)]
    state = pipe.full_state_dict()
    pipe.close()
    return losses, state


@pytest.mark.parametrize("around", [closure, compiled, called_compiled])
def test_a_correct_run_goes_on_with_the_statistics_that_it_has(around: Callable[[Any], Any]) -> None:
    """The copy ran the user's own blocks: running statistics moved twice, and no run with them passed."""
    (losses, state), (without, expected) = trained(around), trained(around, verify=False)
    assert losses == without
    assert all(torch.equal(x, expected[name]) for name, x in state.items())


@pytest.mark.thorough
def test_over_processes_the_copy_has_all_weights(gloo: Pool) -> None:
    """Its blocks ran those of the user, whose weights other processes hold: tensors on the device meta."""
    for around in (closure, compiled, called_compiled):
        alone = trained(around)[0]
        for losses, _ in gloo.run(trained, ranks=2, args=(around,)):
            assert losses == alone


def test_a_difference_within_a_closure_is_seen() -> None:
    """The check was of the user's blocks with themselves."""
    model = Residual(closure)
    part: Any = model.blocks[1][0]
    own = id(part)
    part.register_forward_hook(lambda module, args, output: output * (1 if id(module) == own else 2))
    with pytest.raises(VerificationError, match="the loss is"):
        pipe_of(model).train_step(torch.randn(4, 4), torch.randn(4, 4))


class Auxiliary(nn.Linear):
    """Leaves a loss of its own in a list, and by itself."""

    def __init__(self, left: list[Tensor]) -> None:
        super().__init__(4, 4)
        self.left = left
        self.last: Tensor | None = None

    def forward(self, x: Tensor) -> Tensor:
        y = super().forward(x)
        self.last = y.square().mean()
        self.left.append(self.last)
        return y


@pytest.mark.parametrize("reads", ["attribute", "list"])
def test_a_loss_that_reads_what_the_last_stage_leaves_reads_that_of_the_copy(reads: str) -> None:
    left: list[Tensor] = []
    model = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), Auxiliary(left))

    def loss_fn(output: Tensor, target: Tensor) -> Tensor:
        extra = left.pop()
        left.clear()
        extra = extra if reads == "list" else model[-1].last
        return F.mse_loss(output, target) + extra / (1 + holder["pipe"].num_steps)

    pipe = pipe_of(model, loss_fn, verify=2)
    holder = {"pipe": pipe}  # which no copy is made of
    for _ in range(3):
        pipe.train_step(torch.randn(4, 4), torch.randn(4, 4))


def held() -> int:
    """Bytes of all tensors there are."""
    gc.collect()
    tensors = [x for x in gc.get_objects() if type(x) in (Tensor, nn.Parameter) and not x.is_meta]
    return sum({x.untyped_storage().data_ptr(): x.untyped_storage().nbytes() for x in tensors}.values())


def test_it_holds_one_copy_of_the_weights_and_gradients_of_both(monkeypatch: pytest.MonkeyPatch) -> None:
    """There were three copies of weights, and three of gradients."""
    found: list[int] = []
    freed: list[str] = []
    run = plain.PlainModule.run

    def counted(self: Any, *given: Any, **options: Any) -> Any:
        outcome = run(self, *given, **options)
        found.append(held())
        return outcome

    monkeypatch.setattr(plain.PlainModule, "run", counted)
    monkeypatch.setattr(verification, "_LARGE", 2**20)  # the model's bytes are just above
    monkeypatch.setattr(verification, "give_back", lambda device: freed.append(device.type))
    model = nn.Sequential(*(nn.Linear(256, 256) for _ in range(4)))
    pipe, before = pipe_of(model), held()
    pipe.train_step(torch.randn(4, 256), torch.randn(4, 256))
    weights = 4 * sum(p.numel() for p in model.parameters())
    assert found[0] - before < 3.2 * weights
    for p in model.parameters():
        p.grad = None
    assert held() - before < 0.1 * weights
    assert freed == ["cpu"]


def test_a_copy_that_uses_the_model_is_no_check(caplog: pytest.LogCaptureFixture) -> None:
    def model() -> nn.Module:
        made: Any = Residual(lambda block: block)
        made.blocks[1].parents = [weakref.ref(made)]
        return made

    batch = torch.randn(4, 4), torch.randn(4, 4)
    told = r"'parents' of module 'blocks.1' of the copy still uses the model's own modules.*or verify=False"
    with pytest.raises(ValueError, match=told):
        pipe_of(model()).train_step(*batch)
    with caplog.at_level(logging.INFO, logger="stagewright"):
        pipe_of(model(), verify="first").train_step(*batch)
    assert "the first batch is not verified: verify needs a copy" in caplog.text
