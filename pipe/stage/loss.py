"""A loss with parameters: a module given as `loss_fn` belongs to the last stage; an optimizer must hold its parameters.

The module is a child of the one that the last stage runs, so that its parameters and buffers are that stage's: moved to
the device, trained, clipped, summed over replicas, kept in versions, recomputed and saved as all others are. Their
names begin with `loss_fn.`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, NoReturn

import torch
from torch import nn
from torch.utils import _pytree as pytree

from ...partition.model.source_line import module_at
from ...partition.model.units import StageModule
from ...partition.model.untouched import Places

PREFIX = "loss_fn"
_CHILD = "<loss_fn>"  # no attribute of a stage's module can have this name


class ModelWithLoss(nn.Module):
    """Names of a model and its loss: the model's, and the loss's with the prefix `loss_fn.`. Raises ValueError where
    the model has such a name itself."""

    def __init__(self, model: nn.Module, loss: nn.Module) -> None:
        super().__init__()
        taken = sorted(name for name in model.state_dict(keep_vars=True) if name.startswith(f"{PREFIX}."))
        if taken:
            raise ValueError(
                f"loss_fn= is a separate module and the model has {taken[0]!r}, which would be the loss's name: "
                f"expected another name in the model, or loss_fn=model.{PREFIX}"
            )
        self._modules[""] = model  # an empty name adds nothing to those below it
        self._modules[PREFIX] = loss

    def state_dict(self, **options: Any) -> dict[str, Any]:  # type: ignore[override]  # no destination, no prefix
        model, loss = self.children()
        return {**model.state_dict(**options), **loss.state_dict(prefix=f"{PREFIX}.", **options)}

    def load_state_dict(self, state: Mapping[str, Any], **options: Any) -> None:  # type: ignore[override]
        start = f"{PREFIX}."
        model, loss = self.children()
        model.load_state_dict({name: value for name, value in state.items() if not name.startswith(start)}, **options)
        loss.load_state_dict(
            {name.removeprefix(start): value for name, value in state.items() if name.startswith(start)}, **options
        )


def with_loss(model: nn.Module, loss_fn: object) -> nn.Module:
    """The root of all names: the model, or with a loss that has its own tensors both."""
    if not isinstance(loss_fn, nn.Module) or any(module is loss_fn for module in model.modules()):
        return model
    has_tensors = loss_fn.state_dict(keep_vars=True) or any(True for _ in loss_fn.buffers())
    return ModelWithLoss(model, loss_fn) if has_tensors else model


def give_loss(loss_fn: object, stage: StageModule) -> None:
    if isinstance(loss_fn, nn.Module):
        stage.module._modules[_CHILD] = loss_fn


def untrained() -> ValueError:
    return ValueError(
        "nothing to train: no parameter requires a gradient, or the model's output is made without one (detach(), "
        "torch.no_grad()), and plain PyTorch would raise in loss.backward(). Expected parameters with "
        "requires_grad=True that the loss depends on; or eval_step, predict"
    )


class _Left(torch.Tensor):
    """A substitute for a tensor that another stage has left in an attribute: any use of it is a ValueError."""

    place: str

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> NoReturn:
        place = next(leaf.place for leaf in pytree.tree_leaves((args, kwargs)) if isinstance(leaf, _Left))
        raise ValueError(
            f"loss_fn reads {place}, which an earlier stage sets, or code between modules, which runs once. Expected "
            f"it in the model's output, which is sent: blocks that return (h, aux), a model (h, sum of aux), "
            f"and loss_fn=lambda output, target: loss(output[0], target) + output[1] (docs/guides/models.md)"
        )


class LeftBehind:
    """Raises ValueError for a loss that reads tensors that earlier stages have left in attributes and lists."""

    def __init__(self, places: Places, root: nn.Module) -> None:
        names = {id(vars(module)): name for name, module in root.named_modules()}
        self._entries = [(held, key, _left(held, names.get(id(held)), key)) for held, key in places]

    @contextmanager
    def refused(self) -> Iterator[None]:
        kept = []
        for held, key, left in self._entries:
            if isinstance(held, dict):
                kept.append((held, key, held.get(key, left), left))
                held[key] = left
            else:
                held.append(left)
        try:
            yield
        finally:
            for held, key, value, left in reversed(kept):
                held[key] = value
                if value is left:
                    del held[key]
            for held, _, left in self._entries:
                if isinstance(held, list):
                    held[:] = [each for each in held if each is not left]


def _left(held: object, name: str | None, key: object) -> torch.Tensor:
    left = torch.empty(0).as_subclass(_Left)
    left.place = f"{key!r} of {'a dict' if name is None else module_at(name)}" if isinstance(held, dict) else "a list"
    return left


class UntrainedLeaves:
    """Looks once, at the first loss with a graph, for tensors that require a gradient and that no optimizer holds."""

    def __init__(self, module: nn.Module, is_trained: Callable[[torch.Tensor], bool]) -> None:
        self._module = module
        self._is_trained = is_trained
        self._looked = False

    def before(self, outputs: Sequence[torch.Tensor], inputs: Sequence[torch.Tensor]) -> set[object]:
        """The ends of the loss's own graph, before the loss runs: the stage's outputs, or else its inputs."""
        learning = [x for x in outputs if x.requires_grad and not self._looked]
        if len(learning) > 1 and any(x.requires_grad for x in inputs):
            for x in learning:
                x.register_hook(self._refuse_gradient)  # type: ignore[no-untyped-call]
        return set() if self._looked else {*(x.grad_fn or id(x) for x in outputs), *map(id, inputs)}

    def check(self, loss: torch.Tensor, ends: set[object]) -> None:
        if self._looked or not loss.requires_grad:
            return
        self._looked = True
        own = {id(p) for p in self._module.parameters()}
        for leaf in _leaves(loss, ends):
            if id(leaf) not in own and not self._is_trained(leaf):
                raise ValueError(
                    f"loss_fn computes with a tensor of shape {tuple(leaf.shape)} that requires a gradient, and that "
                    f"no optimizer of the pipeline would update here (under an asynchronous schedule: any but the last "
                    f"stage's own): expected the module that owns it as loss_fn= itself, or as a child of it (an "
                    f"nn.Module, whose parameters the last stage trains, with the stage that has them, too), or "
                    f"requires_grad=False"
                )

    def _refuse_gradient(self, _: torch.Tensor) -> None:
        if not self._looked:  # within the loss
            raise ValueError(
                "loss_fn differentiates by one of several outputs of the model (torch.autograd.grad), and would miss "
                "gradients through earlier stages: expected all of that in one module, or one stage"
            )


def _leaves(loss: torch.Tensor, ends: set[object]) -> Iterator[torch.Tensor]:
    pending, seen = [loss.grad_fn], set(ends)
    while pending:
        node = pending.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        leaf = getattr(node, "variable", None)  # of AccumulateGrad
        if leaf is not None and id(leaf) not in ends:
            yield leaf
        pending += [after for after, _ in node.next_functions]
