"""Parameters that have no values yet: they answer what needs none, and refuse the rest."""

from __future__ import annotations

from typing import Any, NoReturn

import torch
from torch import nn

from ..model.source_line import line_now
from .recipes import Region, give_value, plainly, value_of

_WITHOUT_VALUES = frozenset(
    [
        "device",
        "is_meta",
        "is_cpu",
        "is_cuda",
        "is_sparse",
        "is_quantized",
        "is_nested",
        "shape",
        "dtype",
        "layout",
        "ndim",
        "itemsize",
        "nbytes",
        "requires_grad",
        "grad",
        "grad_fn",
        "is_leaf",
        "retains_grad",
        "_backward_hooks",
        "_post_accumulate_grad_hooks",
        "_version",
        "size",
        "stride",
        "numel",
        "dim",
        "nelement",
        "element_size",
        "storage_offset",
        "untyped_storage",
        "is_contiguous",
        "is_floating_point",
        "is_complex",
        "is_signed",
        "is_inference",
        "requires_grad_",
        "register_hook",
        "register_post_accumulate_grad_hook",
        "get_device",
        "__hash__",
        "__len__",
        "__repr__",
    ]
)
recording: set[int] = set()  # threads


class DeferredParameter(nn.Parameter):
    """A parameter of a model that was built within `sw.deferred()`."""

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func.__self__.__name__ if func.__name__ in ("__get__", "__set__") else func.__name__
        with torch._C.DisableTorchFunctionSubclass():
            if name not in _WITHOUT_VALUES and not is_recording():
                refuse(next(x for x in (*args, *(kwargs or {}).values()) if isinstance(x, cls)), name)
            return func(*args, **(kwargs or {}))

    def __deepcopy__(self, memo: dict[int, Any]) -> DeferredParameter:
        if id(self) not in memo:
            value = value_of(self)
            with plainly():
                storage = torch.UntypedStorage(self.untyped_storage().nbytes(), device="meta")
                made = DeferredParameter(Region.of(self).within(storage), self.requires_grad)
            if value is not None:
                give_value(made, value)
            memo[id(self)] = made
        found: DeferredParameter = memo[id(self)]
        return found

    def __reduce_ex__(self, protocol: object) -> NoReturn:  # type: ignore[override]
        refuse(self, "pickling")


def is_recording() -> bool:
    import threading

    return threading.get_ident() in recording


def refuse(tensor: torch.Tensor, what: str) -> NoReturn:
    with torch._C.DisableTorchFunction():
        shape = tuple(tensor.shape)
    raise ValueError(
        f"{what} of a parameter of shape {shape}{line_now()}, which was built within stagewright.deferred() and has no "
        f"values yet. Expected PipelineModule(model, ...), which fills each process's own stages, or within "
        f"stagewright.deferred() what changes the model before that: its initialisation, a conversion such as "
        f"model.bfloat16()"
    )
