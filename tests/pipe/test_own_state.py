"""State dicts whose hooks rename, fuse and nest, and `get_extra_state`: saved and loaded as in plain PyTorch."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from support.pool import Pool
from support.small import X, Y, make, sgd
from torch import Tensor, nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper

import stagewright


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
    model = model_of(kind)
    optimizer = sgd(list(model.parameters()))
    for _ in range(3):
        for x, y in zip(X.split(2), Y.split(2), strict=True):
            (F.mse_loss(model(x), y) / 4).backward()
        optimizer.step()
        optimizer.zero_grad()
    return model.state_dict()


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
