"""Which module gives other results for the tokens of a part of sequences than it gives for them in the whole."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch._C._functorch import is_functorch_wrapped_tensor
from torch.nn.modules.module import _global_forward_hooks_with_kwargs, register_module_forward_hook

from ...partition.model.forms import tensors_in
from ..guards.rounding import SLICED_OUTPUTS, by_type
from ..stage.tokens import Tokens


class _Sums(NamedTuple):
    """Of a tensor, by dimension as long as the sequence, over the others: [2, tokens], of magnitudes, and of every
    second value with its sign; with None for the dimension, [2, 1], over all."""

    shape: torch.Size
    tolerance: float
    by_dim: dict[int | None, Tensor]

    def differ(self, full: _Sums, span: Tokens) -> bool | None:
        """None: they cannot be compared, as where tokens and samples share a dimension."""
        dims = [d for d, (one, other) in enumerate(zip(self.shape, full.shape, strict=False)) if one != other]
        dim = dims[0] if dims else None
        if len(dims) > 1 or len(self.shape) != len(full.shape) or dim not in self.by_dim.keys() & full.by_dim.keys():
            return None
        found, expected = self.by_dim[dim], full.by_dim[dim] if dim is None else span.part(full.by_dim[dim], 1)
        return bool((found - expected).abs().max() > self.tolerance * expected[0].mean())


class TokenSums:
    """Of what each call of a module of `root` was given and gave in one run over `length` tokens, in the order in which
    calls end."""

    def __init__(self, root: nn.Module, length: int) -> None:
        self._names, self._length = {module: name for name, module in root.named_modules() if name}, length
        self._calls: list[tuple[nn.Module, list[_Sums], list[_Sums]]] = []

    @contextmanager
    def noted(self) -> Iterator[None]:
        handle = register_module_forward_hook(self._note, with_kwargs=True)
        try:
            yield
        finally:
            handle.remove()
            _global_forward_hooks_with_kwargs.pop(handle.id, None)  # which torch's handle (2.13) leaves there

    def _note(self, module: nn.Module, args: object, kwargs: object, output: object) -> None:
        if module in self._names:
            self._calls.append((module, self._sums(args, kwargs), self._sums(output)))

    def _sums(self, *values: object) -> list[_Sums]:
        found = []
        for x in (x for x in tensors_in(values) if x.is_floating_point()):
            shape, by_dim = torch.Size(), dict[int | None, Tensor]()
            with suppress(RuntimeError):  # of a layout without these sums, such as nested or sparse
                if x.numel() and not is_functorch_wrapped_tensor(x):  # whose values do not leave vmap
                    shape, dims = x.shape, [d for d, length in enumerate(x.shape) if length == self._length]
                    by_dim = {d: _summed(x.detach(), d) for d in (None, *dims)}
            found.append(_Sums(shape, by_type(SLICED_OUTPUTS, x.dtype), by_dim))
        return found

    def first_unlike(self, whole: TokenSums, span: Tokens) -> str:
        """For people, the module whose results alone differ; empty where none is seen."""

        def differ(found: Sequence[_Sums], expected: Sequence[_Sums]) -> set[bool | None]:
            return {one.differ(full, span) for one, full in zip(found, expected, strict=False)}

        for (module, given, found), (other, *expected) in zip(self._calls, whole._calls, strict=False):
            if module is not other:
                break
            if True in differ(found, expected[1]) and differ(given, expected[0]) in ({False}, {False, None}, set()):
                return f" from {self._names[module]!r} ({type(module).__name__}) on"
        return ""


def _summed(x: Tensor, dim: int | None) -> Tensor:
    """Sums in float64, without a copy in it."""
    rows = x[None] if dim is None else x.movedim(dim, 0)
    others, half = tuple(range(1, rows.dim())), rows[..., ::2] if rows.dim() > 1 else rows
    if not others:
        return torch.stack([rows.abs(), rows]).double()
    sizes = torch.linalg.vector_norm(rows, 1, others, dtype=torch.float64)
    return torch.stack([sizes, half.sum(others, dtype=torch.float64)])
