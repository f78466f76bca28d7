"""How a model calls its modules: found on fake tensors, for trials of one module alone with arguments like these."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import ExitStack
from typing import Any

import torch
from torch import nn
from torch.utils import _pytree as pytree

from ...partition.model.fakes import on_fakes
from ...partition.model.forms import Arguments, Form
from ...partition.model.made_up import call_for_shapes

Call = tuple[tuple[Any, ...], dict[str, Any]]

_SAMPLES = 2


class ModuleCalls:
    """The arguments of the modules of a model when it is called with some like those of the example.

    Where the model fails on the way, of those that were called until then.
    """

    def __init__(self, model: nn.Module, example: Arguments) -> None:
        few = (
            x if dim is None else x.narrow(dim, 0, min(_SAMPLES, x.shape[dim]))
            for x, dim in zip(example.tensors, example.dims, strict=True)
        )
        self._model, self._example = model, Arguments(example.form, tuple(few), example.dims)
        self._called: dict[nn.Module, tuple[Form, list[tuple[torch.Size, torch.dtype, bool]]]] = {}
        self._value = self._run(dict.fromkeys(model.modules(), self._note), before=True)

    def of(self, module: nn.Module) -> Call | None:
        """Made-up arguments: random numbers, zeros for integers, True for flags, None for objects; None: not called."""
        if module not in self._called:
            return None
        form, specs = self._called[module]
        args, kwargs = form.assemble([_made_up(*spec) for spec in specs])
        return args, kwargs

    def reads(self, unread: Mapping[nn.Module, tuple[int, ...]]) -> bool:
        """Whether the model needs values that modules return at these places."""

        def without(module: nn.Module, args: object, value: tuple[Any, ...]) -> tuple[Any, ...]:
            return tuple(None if at in unread[module] else x for at, x in enumerate(value))

        return self._value is None or self._run(dict.fromkeys(unread, without), before=False) != self._value

    def _run(self, hooks: Mapping[nn.Module, Callable[..., Any]], *, before: bool) -> object:
        """Shapes of all that the model returns; None where it fails."""
        device = next(self._model.parameters()).device
        with ExitStack() as stack:
            for module, hook in hooks.items():
                if before:
                    handle = module.register_forward_pre_hook(hook, with_kwargs=True)
                else:
                    handle = module.register_forward_hook(hook)
                stack.callback(handle.remove)
            given, *_ = stack.enter_context(on_fakes(self._model, self._example, device=device, training=True))
            try:
                args, kwargs = given.form.assemble(given.tensors)
                value = call_for_shapes(self._model, args, kwargs)
            except Exception:  # whatever the user's forward raises for made-up inputs
                return None
            return [x.shape if isinstance(x, torch.Tensor) else type(x) for x in pytree.tree_leaves(value)]

    def _note(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        form, tensors = Form.of_output((args, kwargs))
        self._called[module] = form, [(x.shape, x.dtype, x.requires_grad) for x in tensors]


def _made_up(shape: torch.Size, dtype: torch.dtype, requires_grad: bool) -> torch.Tensor:
    if dtype.is_floating_point:
        return torch.randn(shape, dtype=dtype).requires_grad_(requires_grad)
    return torch.full(shape, dtype is torch.bool, dtype=dtype)
