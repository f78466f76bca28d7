"""Parameters and buffers that have no values yet: they answer what needs none, and refuse the rest."""

from __future__ import annotations

import threading
from typing import Any, NoReturn

import torch
from torch import nn

from ..model.source_line import line_now
from .recipes import Window, give_value, plainly, value_of

_WITHOUT_VALUES = {
    "device", "is_meta", "is_cpu", "is_cuda", "is_sparse", "is_quantized", "is_nested", "shape", "dtype", "layout",
    "ndim", "itemsize", "nbytes", "grad", "requires_grad", "grad_fn", "is_leaf", "retains_grad", "_backward_hooks",
    "_post_accumulate_grad_hooks", "_version", "size", "stride", "numel", "dim", "nelement", "element_size",
    "storage_offset", "untyped_storage", "is_contiguous", "is_floating_point", "is_complex", "is_signed",
    "is_inference", "requires_grad_", "register_hook", "register_post_accumulate_grad_hook", "get_device",
    "__hash__", "__len__", "__repr__",
}  # fmt: skip
_CONVERTING = ("to", "half", "float", "double", "bfloat16", "cuda", "cpu")
recording: dict[int, bool] = {}  # threads, and whether they draw


class DeferredBuffer(torch.Tensor):
    """A buffer of a model that was built within `sw.deferred()`."""

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func.__self__.__name__ if func.__name__ in ("__get__", "__set__") else func.__name__
        with torch._C.DisableTorchFunctionSubclass():
            if name not in _WITHOUT_VALUES and not is_recording():
                refuse(next(x for x in (*args, *(kwargs or {}).values()) if isinstance(x, DeferredBuffer)), name)
            found = func(*args, **(kwargs or {}))
        if name in _CONVERTING and type(found) is torch.Tensor and value_of(found) is not None:
            found.__class__ = DeferredBuffer
        return found

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        if id(self) not in memo:
            value = value_of(self)
            with plainly():
                storage = torch.empty(
                    self.untyped_storage().nbytes(), dtype=torch.uint8, device="meta"
                ).untyped_storage()
                made = Window.of(self).within(storage)
                if isinstance(self, DeferredParameter):
                    made = DeferredParameter(made, self.requires_grad)
                else:
                    made.__class__ = type(self)
            made.__dict__.update(self.__dict__)
            if value is not None:
                give_value(made, value)
            memo[id(self)] = made
        return memo[id(self)]

    def __reduce_ex__(self, protocol: object) -> NoReturn:
        refuse(self, "pickling")


class DeferredParameter(DeferredBuffer, nn.Parameter):
    """A parameter of one."""


def is_recording() -> bool:
    return threading.get_ident() in recording


def refuse(tensor: torch.Tensor, what: str) -> NoReturn:
    with torch._C.DisableTorchFunction():
        name = tensor.__dict__.get("known_as", f"a tensor of shape {tuple(tensor.shape)}")
    raise ValueError(
        f"{what}(...) of {name}{line_now()}, which was built within stagewright.deferred() and has no values yet. "
        f"Expected PipelineModule(model, ...), which fills each process's own stages (weights= with files); or, before "
        f"that, within stagewright.deferred() what changes the model: its initialisation, a conversion such as "
        f"model.bfloat16()"
    )
