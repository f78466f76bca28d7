"""In which numbers a run computes: float16 has a loss scale, and needs one; a batch keeps the autocast of its call."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import NamedTuple

import torch
from torch import nn
from torch.amp import GradScaler

DTYPES = {"bf16": torch.bfloat16, "bfloat16": torch.bfloat16, "fp16": torch.float16, "float16": torch.float16}


def read_grad_scaler(option: object) -> GradScaler | None:
    """The option `grad_scaler=`; None for a scaler that is not enabled. ValueError for anything else."""
    if option is None:
        return None
    if not isinstance(option, GradScaler):
        raise ValueError(
            f"grad_scaler={option!r:.60}: expected torch.amp.GradScaler('cpu' or 'cuda'), with init_scale=, "
            f"growth_factor=, backoff_factor= and growth_interval= as in plain PyTorch"
        )
    return option if option.is_enabled() else None


def refuse_float16_parameters(*modules: object) -> None:
    for module in modules:
        for name, parameter in module.named_parameters() if isinstance(module, nn.Module) else ():
            if parameter.dtype is torch.float16:
                raise ValueError(
                    f"parameter {name!r} is torch.float16: expected float32 parameters under "
                    f"torch.autocast(..., torch.float16) with a torch.amp.GradScaler, which divides no "
                    f"float16 gradients, or torch.bfloat16 (predict, without loss_fn=, runs)"
                )


def refuse_float16_autocast(device: torch.device, *, scales_loss: bool) -> None:
    """ValueError for a batch to train on within torch.autocast to float16 without a loss scale."""
    if (
        not scales_loss
        and torch.is_autocast_enabled(device.type)
        and torch.get_autocast_dtype(device.type) is torch.float16
    ):
        raise ValueError(
            f"torch.autocast({device.type!r}, dtype=torch.float16) around training, where small gradients become 0 "
            f"without a loss scale: expected PipelineModule(..., precision='fp16'), "
            f"or torch.bfloat16, which needs none"
        )


_NOTHING: AbstractContextManager[None] = nullcontext()


class Autocast(NamedTuple):
    """Type that a kind of device casts to; None: no autocast."""

    kind: str
    dtype: torch.dtype | None

    @classmethod
    def now(cls, kind: str) -> Autocast:
        return cls(kind, torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else None)

    def off(self) -> AbstractContextManager[None]:
        """Within: none is in force. Backwards run so: operations have the types of the forward's results already, and
        float32 islands in a forward must not be cast behind it."""
        return torch.autocast(self.kind, enabled=False) if torch.is_autocast_enabled(self.kind) else _NOTHING

    def again(self) -> AbstractContextManager[None]:
        if self.dtype is None:
            return self.off()
        if Autocast.now(self.kind) == self:
            return _NOTHING
        return torch.autocast(self.kind, dtype=self.dtype)
