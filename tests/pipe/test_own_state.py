"""State dicts whose hooks rename, fuse and nest, and `get_extra_state`: saved and loaded as in plain PyTorch."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from support.alone import train_alone
from support.parts import Parts
from support.pool import Pool
from support.small import X, Y, make, sgd
from torch import Tensor, nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper

import stagewright
from stagewright import Mesh, PipelineModule


class Counting(nn.Linear):
    """Keeps how often it has run in training."""

    def __init__(self, as_tensor: bool) -> None:
        super().__init__(6, 6)
        self.as_tensor, self.count = as_tensor, 0

    def forward(self, x: Tensor) -> Tensor:
        self.count += self.training and torch.is_grad_enabled()
        return super().forward(x)

    def get_extra_state(self) -> Any:
        return torch.tensor(self.count) if self.as_tensor else {"count": self.count, "of": ("linear", None)}

    def set_extra_state(self, state: Any) -> None:
        self.count = int(state if self.as_tensor else state["count"])


def renames(state: dict[str, Any], prefix: str) -> None:
    state[f"{prefix}w"] = state.pop(f"{prefix}weight")


def named_back(state: dict[str, Any], prefix: str) -> None:
    if f"{prefix}w" in state:
        state[f"{prefix}weight"] = state.pop(f"{prefix}w")


def fuses(state: dict[str, Any], prefix: str) -> None:
    state[f"{prefix}both"] = torch.cat([state.pop(f"{prefix}weight"), state.pop(f"{prefix}bias")[None]])


def parted(state: dict[str, Any], prefix: str) -> None:
    if f"{prefix}both" in state:
        *rows, state[f"{prefix}bias"] = state.pop(f"{prefix}both")
        state[f"{prefix}weight"] = torch.stack(rows)


def nests(state: dict[str, Any], prefix: str) -> None:
    state[f"{prefix}made"] = {"by": "hand", "of": torch.ones(2)}


def dropped(state: dict[str, Any], prefix: str) -> None:
    state.pop(f"{prefix}made", None)


def hooked(save: Callable[..., None], load: Callable[..., None]) -> nn.Module:
    module = nn.Linear(6, 6)
    module._register_state_dict_hook(lambda _, state, prefix, *rest: save(state, prefix))
    module._register_load_state_dict_pre_hook(lambda state, prefix, *rest: load(state, prefix))
    return module


KINDS: dict[str, Callable[[], nn.Module]] = {
    "checkpoint_wrapper": lambda: checkpoint_wrapper(nn.Linear(6, 6)),
    "extra dict": lambda: Counting(as_tensor=False),
    "extra tensor": lambda: Counting(as_tensor=True),
    "renames": lambda: hooked(renames, named_back),
    "fuses": lambda: hooked(fuses, parted),
    "nests": lambda: hooked(nests, dropped),
}


def model_of(kind: str) -> nn.Sequential:
    torch.manual_seed(0)
    kind, _, alone = kind.partition(", ")
    second = nn.Tanh() if alone else KINDS[kind]()
    return nn.Sequential(nn.Linear(6, 6), KINDS[kind](), nn.Tanh(), nn.Linear(6, 6), second, nn.Linear(6, 6))


def trained(kind: str, folder: str) -> dict[str, Any]:
    """The state behind two steps, a checkpoint that goes on under another cut, and a step more."""
    pipe = make(model=model_of(kind), verify=True)
    for _ in range(2):
        pipe.train_step(X, Y)
    pipe.save(folder)
    pipe.load_state_dict(pipe.state_dict())
    other = make(model=model_of(kind), example_inputs=None, cut=["2"])
    other.load(folder)
    other.train_step(X, Y)
    state = other.full_state_dict()
    other.load_state_dict(state)
    assert same(other.full_state_dict(), state)
    return state


def same(one: Any, other: Any) -> bool:
    if isinstance(one, dict) and isinstance(other, dict):
        return one.keys() == other.keys() and all(same(one[key], other[key]) for key in one)
    return torch.allclose(one, other, atol=1e-6) if isinstance(one, Tensor) else bool(one == other)


def plain(kind: str) -> dict[str, Any]:
    return train_alone(model_of(kind), [(X, Y)] * 3, sgd, parts=4).state


@pytest.mark.thorough(but=["fuses", "extra tensor", "nests"])
@pytest.mark.parametrize("kind", KINDS)
def test_all_of_the_models_own_state_travels(kind: str, tmp_path: Path) -> None:
    """It was "not in the state when the stages were built", or an AttributeError."""
    expected = plain(kind)
    assert same(trained(kind, str(tmp_path)), dict(expected))
    model_of(kind).load_state_dict(stagewright.read_checkpoint(tmp_path))
    if kind not in ("fuses", "nests"):  # a file has tensors under the model's own keys
        stagewright.import_checkpoint(dict(expected), tmp_path / "plain")
        pipe = make(model=model_of(kind))
        pipe.load(tmp_path / "plain")
        assert same(pipe.full_state_dict(), dict(expected))


@pytest.mark.thorough
def test_all_of_the_models_own_state_travels_over_processes(gloo: Pool, tmp_path: Path) -> None:
    for kind in ("checkpoint_wrapper", "extra dict", "extra tensor, alone"):
        for state in gloo.run(trained, ranks=2, args=(kind, str(tmp_path / kind))):
            assert same(state, dict(plain(kind)))


def test_a_state_dict_of_another_model_is_refused() -> None:
    pipe = make(model=model_of("renames"))
    with pytest.raises(ValueError, match=r"state dict: Error.* Missing key.s. in state_dict: .1\.weight."):
        pipe.load_state_dict({name: x for name, x in plain("renames").items() if name != "1.w"})


class _Caster(Parts, router=lambda: nn.Linear(4, 4), seen=lambda: torch.zeros(1)):
    """Turns its router into float32, as that of Switch Transformers does, and lets a buffer grow."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.router.to(torch.float32)
        if len(self.seen) == 1:
            self.seen = torch.full((3,), 7.0)
        routed: torch.Tensor = self.router(x.float())
        return x + routed.to(x.dtype)


def _model() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 4), nn.Tanh(), _Caster(), nn.Linear(4, 4)).double()


def _pipeline(**mesh: Any) -> PipelineModule:
    options: dict[str, Any] = {"num_microbatches": 2, "loss_fn": F.mse_loss, "optimizer": sgd}
    return PipelineModule(_model(), mesh=Mesh(**mesh), **options)


def _batch(replicas: int) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(2, 8, 4, generator=generator, dtype=torch.float64)
    return x[0].repeat(replicas, 1), x[1].repeat(replicas, 1)


def _worst(state: dict[str, Any], plain: dict[str, Any]) -> float:
    assert [(x.dtype, x.shape) for x in state.values()] == [(x.dtype, x.shape) for x in plain.values()]
    return max(float((state[name] - x).abs().max()) for name, x in plain.items())


def _saved(folder: Path, mesh: dict[str, int]) -> list[float]:
    plain = _model()
    F.mse_loss(plain(_batch(1)[0]), _batch(1)[1]).backward()
    torch.optim.SGD(plain.parameters(), lr=0.1).step()
    expected = plain.state_dict()
    with _pipeline(**mesh) as pipe:
        pipe.build(*_batch(1))
        pipe.save(folder / "before")  # who writes what is agreed on here
        pipe.train_step(*_batch(1))
        pipe.save(folder / "after")
        found = [_worst(pipe.full_state_dict(), expected)]
        with pytest.raises(ValueError, match=r"is of another model|float64, and it is in float32"):
            pipe.load(folder / "before")
    with _pipeline(**mesh) as pipe:
        pipe.train_step(*_batch(1))
        pipe.train_step(*_batch(1))
        pipe.load(folder / "after")
        return [*found, _worst(pipe.full_state_dict(), expected)]


@pytest.mark.thorough
@pytest.mark.parametrize("mesh", [{"pipe": 2}, {"pipe": 1, "data": 2}], ids=str)
def test_state_has_the_types_and_shapes_after_the_forward(gloo: Pool, tmp_path: Path, mesh: dict[str, int]) -> None:
    for differences in gloo.run(_saved, ranks=2, args=(tmp_path, mesh)):
        assert max(differences) < 1e-6


def _divided(kind: str) -> None:
    text = r"parameter '2.router.weight' was torch.float64 when the stages were built, .* into torch.float32"
    with pytest.raises(ValueError, match=text), _pipeline(pipe=1, data=2, data_parallel=kind) as pipe:
        pipe.train_step(*_batch(1))


@pytest.mark.thorough
@pytest.mark.parametrize("kind", ["zero1", "fsdp"])
def test_replicas_that_divide_the_weight_name_it(gloo: Pool, kind: str) -> None:
    gloo.run(_divided, ranks=2, args=(kind,))


def _on_one_of_two() -> None:
    model = _model()
    with PipelineModule(model, mesh=Mesh(pipe=1, data=2), num_microbatches=2, loss_fn=F.mse_loss) as pipe:
        pipe.forward_backward(*_batch(1))
        if pipe.replica[0] == 1:
            model[2].double()
        text = r"'2.seen' was float64 .* is float32 .* on process 0 and float64 .* on process 1"
        with pytest.raises(ValueError, match=text):
            pipe.full_state_dict()


@pytest.mark.thorough
def test_processes_that_differ_are_named(gloo: Pool) -> None:
    gloo.run(_on_one_of_two, ranks=2)
