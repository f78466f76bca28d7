"""The user's callable that makes a stage's optimizers: over parameters, or over named ones; one or several."""

from __future__ import annotations

import inspect
import random
import warnings
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from numbers import Number
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.utils import _pytree as pytree

from ..model.untouched import untouched

NamedParameters = list[tuple[str, nn.Parameter]]  # as model.named_parameters() gives them
HOOKS = ("_backward_hooks", "_post_accumulate_grad_hooks")  # of parameters: some step an optimizer
Made = torch.optim.Optimizer | Sequence[torch.optim.Optimizer | None]
_HOW = {"foreach", "fused", "capturable", "differentiable"}  # an update is computed, not which one
_OPTION_NUMBERS = 1 << 16  # squares and their sums over a thousand ranks are exact in float64


@dataclass(frozen=True, slots=True)
class NamedFactory:
    make: Callable[[NamedParameters], Made]

    def __call__(self, parameters: NamedParameters) -> Made:
        return self.make(parameters)


OptimizerFactory = Callable[[list[nn.Parameter]], Made] | NamedFactory


def named(make: Callable[[NamedParameters], Made]) -> NamedFactory:
    """Mark an `optimizer=` that takes named parameters: a list of (name, parameter), as `model.named_parameters()`.

    Names are those in the user's model, for any cut. It is called for each stage with a parameter to train
    and returns an optimizer, or a list of them; None in the list means one that has nothing to hold there.

        @stagewright.named
        def optimizer(parameters):
            embedding = [p for name, p in parameters if name.startswith("embedding.")]
            others = [p for name, p in parameters if not name.startswith("embedding.")]
            groups = [{"params": embedding, "lr": 1e-4}, {"params": others}]
            return torch.optim.AdamW([group for group in groups if group["params"]], lr=3e-4)

        pipe = stagewright.PipelineModule(model, optimizer=optimizer, ...)

    >>> sgd = named(lambda parameters: torch.optim.SGD(parameters, lr=0.1))
    >>> sgd(list(nn.Linear(2, 1).named_parameters())).param_groups[0]["param_names"]
    ['weight', 'bias']
    """
    if not callable(make):
        raise ValueError(f"named({make!r:.60}): expected a function that takes [(name, parameter), ...]")
    return NamedFactory(make)


def make_optimizers(
    factory: OptimizerFactory, parameters: Sequence[tuple[str, nn.Parameter]], *, where: str
) -> list[torch.optim.Optimizer]:
    """The optimizers of some parameters, of which there must be one at least; `where` they are, for messages.

    Raises ValueError for non-optimizers, and for one that steps with anything but gradients.
    """
    try:
        made = factory(list(parameters)) if isinstance(factory, NamedFactory) else factory([p for _, p in parameters])
    except ValueError as error:
        if "empty parameter list" not in str(error):
            raise
        raise ValueError(
            f"optimizer= made an optimizer of no parameters for {where}: it is called for each stage, and "
            f"{[name for name, _ in parameters][:3]} ... are all that is there. Expected None in its place, as in "
            f"return [Muon(matrices) if matrices else None, AdamW(others) if others else None]"
        ) from error
    given = list(made) if isinstance(made, list | tuple) else [made]
    optimizers: list[torch.optim.Optimizer] = []
    for optimizer in given:
        if optimizer is None and isinstance(made, list | tuple):
            continue
        if not isinstance(optimizer, torch.optim.Optimizer):
            shown = f"a {type(made).__name__} with a " if isinstance(made, list | tuple) else ""
            raise ValueError(
                f"optimizer= returned {shown}{type(optimizer).__name__}: expected a callable that takes a list of "
                f"parameters (with their names: stagewright.named) and returns a torch.optim.Optimizer, or a list of "
                f"them, such as lambda params: torch.optim.AdamW(params)"
            )
        if required_arguments(optimizer):
            raise ValueError(
                f"optimizer {type(optimizer).__name__} evaluates the model again in its step (it needs a closure), and "
                f"each stage steps on its own, after the last backward: expected one that steps from gradients alone, "
                f"such as AdamW"
            )
        optimizers.append(optimizer)
    return optimizers


def make_optimizers_of_copies(
    factory: OptimizerFactory, parameters: Sequence[tuple[str, nn.Parameter, nn.Parameter]], *, where: str
) -> list[torch.optim.Optimizer]:
    """Optimizers as `make_optimizers` makes them of the user's own parameters, holding copies in the places of these.

    A factory may know its parameters by identity (`{id(p) for p in model.head.parameters()}`), and copies by nothing.
    """
    with _hooks_as_found([own for _, own, _ in parameters]):
        made = make_optimizers(factory, [(name, own) for name, own, _ in parameters], where=where)
    copies: dict[int, torch.Tensor] = {id(own): copy for _, own, copy in parameters}
    for optimizer in made:
        for group in optimizer.param_groups:
            group["params"] = [copies.get(id(parameter), parameter) for parameter in group["params"]]
        for own in [each for each in optimizer.state if id(each) in copies]:  # Adagrad makes its state at once
            optimizer.state[copies[id(own)]] = optimizer.state.pop(own)
    return made


def optimizers_of_copies(
    factory: OptimizerFactory,
    named: Sequence[tuple[str, nn.Parameter]],
    module: nn.Module,
    inputs: Sequence[torch.Tensor],
    *,
    where: str,
) -> list[torch.optim.Optimizer]:
    """Optimizers of copies of a module's parameters, which have gradients to step with."""
    called = [(name, own, nn.Parameter(own.detach().clone())) for name, own in named]
    for _, own, copy in called:
        copy.grad = _gradient(module, inputs, own)
    return make_optimizers_of_copies(factory, called, where=where)


def _gradient(module: nn.Module, inputs: Sequence[torch.Tensor], parameter: torch.Tensor) -> torch.Tensor:
    """A gradient to step with: what backwards have added up, since a step may take twice as long where that is 0 (AdamW
    after a ReLU); of an embedding that makes sparse ones, as many rows as the inputs name at most."""
    embeddings = [m for m in module.modules() if isinstance(m, nn.Embedding | nn.EmbeddingBag) and m.sparse]
    known = parameter.grad
    dense = torch.full_like(parameter, 1e-3) if known is None or known.is_sparse else known.detach().clone()
    if not any(module.weight is parameter for module in embeddings):
        return dense
    named = sum(x.numel() for x in inputs if not x.is_floating_point())
    rows = dense[: max(1, min(len(dense), named))]
    at = torch.arange(len(rows), device=rows.device)[None]
    return torch.sparse_coo_tensor(at, rows, dense.shape, check_invariants=True)


@contextmanager
def _hooks_as_found(parameters: Sequence[nn.Parameter]) -> Iterator[None]:
    """Within, hooks may be registered on these; afterwards they have those that they had."""
    before = [
        (parameter, name, dict(getattr(parameter, name, None) or {})) for parameter in parameters for name in HOOKS
    ]
    try:
        yield
    finally:
        for parameter, name, entries in before:
            if table := getattr(parameter, name, None):  # emptied in place: autograd holds the table itself
                table.clear()
                table.update(entries)


def options_of(
    factory: OptimizerFactory, parameters: Sequence[tuple[str, nn.Parameter]], *, user_code: Sequence[object]
) -> dict[int, str | None]:
    """By id: the options that decide the updates of a parameter if `factory` is called with these, None if no optimizer
    would hold it; nothing if it can't be asked. `user_code`: whose state is restored."""
    trained = [(name, p) for name, p in parameters if p.requires_grad]
    try:
        with (
            _hooks_as_found([p for _, p in trained]),
            untouched(*user_code, device=None, buffers=False),
            warnings.catch_warnings(action="ignore"),
        ):
            made = make_optimizers(factory, trained, where="the model")
    except Exception:  # such as a fused optimizer's, for weights that other processes hold
        return {}
    found: dict[int, str | None] = dict.fromkeys(id(p) for _, p in trained)
    for one in made:
        decide = one.defaults.keys() - _HOW
        for group in one.param_groups:
            shown = f"{type(one).__name__} {_shown({key: group[key] for key in decide if key in group})}"
            found.update((id(p), shown) for p in group["params"])
    return found


_SMALL = 4  # of each dimension of a tensor, in a trial
_STEPS = 3  # what the first has left in the optimizer counts in the second, what that left in the weights in the third


def updates_of(
    factory: OptimizerFactory, stages: Sequence[NamedParameters], *, user_code: Sequence[object], later: bool = False
) -> dict[int, torch.Tensor]:
    """By id: the change of each parameter where the optimizers that `factory` makes for each of `stages` step in turn,
    tried on small tensors in their places; nothing if that fails. Parameters, generators and `user_code` are restored.
    `later`: with other random numbers from the global generators.
    """
    trained = [[(name, p) for name, p in stage if p.requires_grad] for stage in stages]
    held = {id(p): (name, p) for stage in trained for name, p in stage}
    kept = [(p, p.data, p.grad) for _, p in held.values() if not p.is_meta]
    device = kept[0][0].device if kept else torch.device("cpu")

    def drawn(p: torch.Tensor, seed: str) -> torch.Tensor:
        generator = torch.Generator().manual_seed(zlib.crc32(seed.encode()))
        return torch.randn([min(n, _SMALL) for n in p.shape], generator=generator, device="cpu").to(device, p.dtype)

    def cut(state: torch.Tensor) -> torch.Tensor:
        small = state[tuple(slice(_SMALL) for _ in state.shape)]
        return torch.zeros_like(small, device=device) if state.is_meta else small.clone()

    try:
        with (
            _hooks_as_found([p for _, p in held.values()]),
            untouched(*user_code, device=None, buffers=False),
            warnings.catch_warnings(action="ignore"),
            torch.no_grad(),
        ):
            if later:
                torch.rand(1), random.random(), np.random.random()
            made = [one for stage in trained if stage for one in make_optimizers(factory, stage, where="the model")]
            begun = {key: drawn(p, name) for key, (name, p) in held.items()}
            places: dict[int, torch.Tensor] = {
                key: nn.Parameter(begun[key].clone()) if p.is_meta else p for key, (_, p) in held.items()
            }
            for p, _, _ in kept:
                p.data, p.grad = begun[id(p)].clone(), None
            for one in made:
                for group in one.param_groups:
                    group["params"] = [places.get(id(p), p) for p in group["params"]]
                for own in [*one.state]:
                    state = pytree.tree_map_only(torch.Tensor, cut, one.state.pop(own))
                    one.state[places.get(id(own), own)] = state
            for step in range(_STEPS):
                for key, (name, p) in held.items():
                    places[key].grad = drawn(p, f"{name} {step}")
                for one in made:
                    one.step()
            return {key: places[key].data - before for key, before in begun.items()}
    except Exception:  # such as a fused optimizer's
        return {}
    finally:
        for p, data, grad in kept:
            p.data, p.grad = data, grad


def option_number(optimizer: torch.optim.Optimizer, group: Mapping[str, Any]) -> int:
    return zlib.crc32(f"{type(optimizer).__name__} {_shown(group)}".encode()) % _OPTION_NUMBERS


def _shown(group: Mapping[str, Any]) -> list[tuple[str, str]]:
    return sorted((key, shown) for key, value in group.items() if (shown := _shown_option(key, value)))


def _shown_option(key: str, value: object) -> str:
    if isinstance(value, torch.Tensor):
        return repr(value.item()) if value.numel() == 1 else ""
    return repr(value) if key != "params" and isinstance(value, Number | str | tuple | list | None) else ""


def required_arguments(owner: Any) -> list[str]:
    """Names of the arguments that the `step` of an object cannot be called without."""
    one_by_one = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    # Its class's, if it has one: a scheduler puts a function on the optimizer that seems to take `self`, too.
    its_class = getattr(type(owner), "step", None)
    known = list(inspect.signature(its_class or owner.step).parameters.values())[its_class is not None :]
    return [
        each.name
        for each in known
        if each.default is each.empty and each.kind in (*one_by_one, inspect.Parameter.KEYWORD_ONLY)
    ]
