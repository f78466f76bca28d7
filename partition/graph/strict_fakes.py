"""Fake tensors that take no mixed types where real ones take none: torch's own multiply float64 by a float32 weight."""

from __future__ import annotations

from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensorMode

_aten = torch.ops.aten
_PRODUCTS = {_aten.linear, _aten.mm, _aten.addmm, _aten.bmm, _aten.baddbmm, _aten.mv, _aten.addmv, _aten.dot}
_PRODUCTS |= {_aten.convolution, _aten._cdist_forward, _aten.index_add}
_NORMS = {_aten.native_layer_norm, _aten.native_group_norm, _aten.native_batch_norm, _aten._native_batch_norm_legit}
_NORMS |= {_aten._native_batch_norm_legit_functional, _aten.cudnn_batch_norm}
_REDUCED = {torch.float16, torch.bfloat16}  # that norms take beside weights in float32


def strict_fake_mode() -> FakeTensorMode:
    """A FakeTensorMode, in which products and norms of tensors of several types are a RuntimeError, as on real ones."""
    mode = FakeTensorMode(allow_non_fake_inputs=True)
    carry_out = mode.dispatch

    def dispatch(func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        operation = getattr(func, "overloadpacket", None)
        if operation in _PRODUCTS or operation in _NORMS:
            kinds = dict.fromkeys(x.dtype for x in args if isinstance(x, torch.Tensor))
            if len(kinds) > 1 and (operation in _PRODUCTS or kinds.keys().isdisjoint(_REDUCED)):
                raise RuntimeError(f"{operation.__name__} of {' and '.join(map(str, kinds))}, which takes one type")
        return carry_out(func, types, args, kwargs)

    mode.dispatch = dispatch  # type: ignore[method-assign]  # operators of a higher order know no class but its own
    return mode
