"""Which module gives other results for the tokens of a part of sequences than it gives for them in the whole."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.modules.module import register_module_forward_hook

from ...partition.model.forms import tensors_in
from ..guards.rounding import SLICED_OUTPUTS, by_type
from ..stage.tokens import Tokens


class _Sums(NamedTuple):
    """Of magnitudes of a tensor: of all, and, by dimension as long as the sequence, [tokens] over the others."""

    shape: torch.Size
    tolerance: float
    whole: Tensor
    by_dim: dict[int, Tensor]

    def differ(self, full: _Sums, span: Tokens) -> bool:
        dims = [d for d, (one, other) in enumerate(zip(self.shape, full.shape, strict=False)) if one != other]
        found, expected = self.whole, full.whole
        if dims:
            if len(dims) > 1 or dims[0] not in self.by_dim.keys() & full.by_dim.keys():
                return False
            found, expected = self.by_dim[dims[0]], span.part(full.by_dim[dims[0]], 0)
        return bool((found - expected).abs().max() > self.tolerance * expected.mean())


class TokenSums:
    """Of what each call of a module of `root` was given and gave in one run over `length` tokens, in the order in which
    calls end."""

    def __init__(self, root: nn.Module, length: int) -> None:
        self._names, self._length = {module: name for name, module in root.named_modules() if name}, length
        self._calls: list[tuple[nn.Module, list[_Sums], list[_Sums]]] = []

    @contextmanager
    def noted(self) -> Iterator[None]:
        with register_module_forward_hook(self._note, with_kwargs=True):
            yield

    def _note(self, module: nn.Module, args: object, kwargs: object, output: object) -> None:
        if module in self._names:
            self._calls.append((module, self._sums(args, kwargs), self._sums(output)))

    def _sums(self, *values: object) -> list[_Sums]:
        found = []
        for x in (x for x in tensors_in(values) if x.is_floating_point() and x.numel()):
            size = x.detach().abs().double()
            dims = [d for d, length in enumerate(x.shape) if length == self._length]
            by_dim = {d: size.movedim(d, 0).reshape(self._length, -1).sum(1) for d in dims}
            found.append(_Sums(x.shape, by_type(SLICED_OUTPUTS, x.dtype), size.sum(), by_dim))
        return found

    def first_unlike(self, whole: TokenSums, span: Tokens) -> str:
        """For people, the module whose results alone differ; empty where none is seen."""

        def differ(found: Sequence[_Sums], expected: Sequence[_Sums]) -> bool:
            return any(one.differ(full, span) for one, full in zip(found, expected, strict=False))

        for (module, given, found), (other, *expected) in zip(self._calls, whole._calls, strict=False):
            if module is not other:
                break
            if differ(found, expected[1]) and not differ(given, expected[0]):
                return f" from {self._names[module]!r} ({type(module).__name__}) on"
        return ""
