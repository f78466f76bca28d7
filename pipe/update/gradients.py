"""Gradients between the last backward and the update, whoever has them: scaled, flat, their norm, clipped.

Both updates use these: a flush all-reduces flat buckets, a stream sends them as messages.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch

from ...comm import TensorSpec
from ...schedules.messages import BUCKET_BYTES

Grads = Sequence[torch.Tensor | None]  # None: no gradient came


def scale_gradients(gradients: Iterable[torch.Tensor | None], factor: float) -> None:
    """Multiply every gradient by `factor`, in place; nothing at 1."""
    present = [gradient for gradient in gradients if gradient is not None]
    if present and factor != 1.0:
        torch._foreach_mul_(present, factor)


def squared_norm(gradients: Iterable[torch.Tensor | None], *, device: torch.device) -> torch.Tensor:
    """Sum of squares of all gradients, float64 scalar on `device`."""
    total = torch.zeros((), dtype=torch.float64, device=device)
    present = [gradient for gradient in gradients if gradient is not None]
    for norm in torch._foreach_norm(present) if present else ():
        total += norm.to(torch.float64).square()
    return total


def clip_factor(*, norm: float, max_norm: float) -> float:
    """What torch.nn.utils.clip_grad_norm_ multiplies gradients with, given their global norm: NaN for NaN."""
    factor = max_norm / (norm + 1e-6)
    return 1.0 if factor > 1.0 else factor


def clip_gradients(gradients: Iterable[torch.Tensor | None], *, norm: float, max_norm: float) -> None:
    """Scale by the clip factor."""
    scale_gradients(gradients, clip_factor(norm=norm, max_norm=max_norm))


class FlatGradients:
    """How the gradients of some parameters travel to other ranks: a flag for each, and flat buckets.

    A bucket holds gradients of one type, together at most BUCKET_BYTES; a larger one stands alone. A flag is 1, or 0
    where no gradient came: one that no rank has is left None, since optimizers leave such a parameter alone.

    Arguments:
        parameters: in the same order on all ranks.
    """

    def __init__(self, parameters: Sequence[torch.Tensor]) -> None:
        self._parameters = tuple(parameters)
        self.buckets = tuple(_buckets(self._parameters))

    def flags(self, gradients: Grads) -> torch.Tensor:
        """[n] float32: 1 where there is a gradient."""
        device = self._parameters[0].device
        return torch.tensor([float(gradient is not None) for gradient in gradients], device=device)

    def specs(self) -> list[TensorSpec]:
        """Layouts of the tensors of a message."""
        numels = [sum(self._parameters[i].numel() for i in bucket) for bucket in self.buckets]
        types = [self._parameters[bucket[0]].dtype for bucket in self.buckets]
        flat = [TensorSpec((numel,), (1,), dtype, False) for numel, dtype in zip(numels, types, strict=True)]
        return [TensorSpec((len(self._parameters),), (1,), torch.float32, False), *flat]

    def pack(self, gradients: Grads) -> tuple[torch.Tensor, ...]:
        """A message: the flags, then every bucket as a copy, zeros where no gradient came."""
        whole = [
            torch.zeros_like(parameter) if gradient is None else gradient.detach()
            for parameter, gradient in zip(self._parameters, gradients, strict=True)
        ]
        return (self.flags(gradients), *(flatten([whole[i] for i in bucket]) for bucket in self.buckets))

    def unpack(self, message: Sequence[torch.Tensor]) -> list[torch.Tensor | None]:
        """The gradients of a message, views of it."""
        flags, *flats = message
        present = flags.tolist()
        found: list[torch.Tensor | None] = [None] * len(present)
        for bucket, flat in zip(self.buckets, flats, strict=True):
            for i, part in zip(bucket, unflatten(flat, [self._parameters[i] for i in bucket]), strict=True):
                found[i] = part if present[i] else None
        return found


def flatten(tensors: Sequence[torch.Tensor], *, out: torch.Tensor | None = None) -> torch.Tensor:
    """One flat copy of tensors of a type."""
    return torch.cat([tensor.reshape(-1) for tensor in tensors], out=out)


def unflatten(flat: torch.Tensor, like: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """Views of `flat` with the shapes of the tensors that it was made of."""
    parts = torch.split(flat, [tensor.numel() for tensor in like])
    return [part.view(tensor.shape) for part, tensor in zip(parts, like, strict=True)]


def _buckets(parameters: Sequence[torch.Tensor]) -> list[tuple[int, ...]]:
    """Positions by bucket: of each type in order."""
    by_type: dict[torch.dtype, list[int]] = {}
    for position, parameter in enumerate(parameters):
        by_type.setdefault(parameter.dtype, []).append(position)
    found = []
    for positions in by_type.values():
        bucket: list[int] = []
        held = 0
        for position in positions:
            size = parameters[position].numel() * parameters[position].element_size()
            if bucket and held + size > BUCKET_BYTES:
                found.append(tuple(bucket))
                bucket, held = [], 0
            bucket.append(position)
            held += size
        found.append(tuple(bucket))
    return found
