"""Gradients between the last backward and the update: scaled, flattened, their norm, clipped.

Both updates use these: a flush all-reduces flat buckets, a stream sends them as messages.

The loss scale of float16 training follows torch.amp.GradScaler, the same on all ranks:

    backward    the loss of a microbatch is multiplied by the scale
    gradients   are divided by it before they are clipped; if one of any stage, replica or rank is not finite, all skip
                the update: weights, optimizers and schedules do not change
    next scale  as GradScaler's: times backoff_factor where the update was skipped, times growth_factor after
                growth_interval updates in a row that were not
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Sequence
from typing import TypeVar

import torch
from torch import nn
from torch.amp import GradScaler

from ...comm import TensorSpec
from ...comm.buckets import Flat
from ...partition.model.forms import Tensors
from ..batch.batches import NonFiniteLossError

Grads = Sequence[torch.Tensor | None]  # None: there is no gradient
Grad = TypeVar("Grad", torch.Tensor, torch.Tensor | None)
_Scale = tuple[float, int]  # a loss scale, and the number of updates in a row since it last changed


def added(known: torch.Tensor | None, more: Grad) -> Grad:
    if known is None or more is None:
        return more if known is None else known
    return known + more


def scale_gradients(gradients: Iterable[torch.Tensor | None], factor: float) -> None:
    """Multiply every gradient by `factor`, in place; nothing at 1."""
    present = [gradient for gradient in gradients if gradient is not None]
    if present and factor != 1.0:
        torch._foreach_mul_(present, factor)


def norm_part(
    gradients: Iterable[torch.Tensor | None], *, norm_type: float = 2.0, device: torch.device
) -> torch.Tensor:
    """[2] float64 on `device`: the part of these gradients in a norm, and whether one of them is not a number. The
    first is the sum of |x|^p over all elements x, or their maximum where p is infinite: those of several ranks are
    added up, or their maximum is taken (which would lose a NaN, so that it counts as infinite there)."""
    present = [_values(gradient) for gradient in gradients if gradient is not None]
    norms = [norm.to(device, torch.float64) for norm in torch._foreach_norm(present, norm_type)] if present else []
    total = torch.zeros((), dtype=torch.float64, device=device)
    is_nan = torch.zeros((), dtype=torch.bool, device=device)
    for norm in norms:
        if math.isinf(norm_type):
            is_nan = is_nan | norm.isnan()
            total = torch.maximum(total, norm.nan_to_num(nan=math.inf, posinf=math.inf))
        else:
            total += norm.pow(norm_type)
    return torch.stack([total, is_nan.to(torch.float64)])


def norm_of(part: torch.Tensor, *, norm_type: float = 2.0) -> float:
    total, is_nan = part.tolist()
    if math.isinf(norm_type):
        return math.nan if is_nan else float(total)
    return math.sqrt(total) if norm_type == 2.0 else float(total ** (1.0 / norm_type))


def check_norm_type(norm_type: object) -> float:
    """`norm_type` of torch.nn.utils.clip_grad_norm_ as a number; ValueError for anything but p > 0 or "inf"."""
    value = math.inf if norm_type == "inf" else norm_type
    if not isinstance(value, int | float) or isinstance(value, bool) or not value > 0:
        raise ValueError(f"norm_type={norm_type!r}: expected a number above 0 (2.0 by default), or math.inf")
    return float(value)


def refuse_sparse_modules(root: nn.Module, shared: Collection[str]) -> None:
    """ValueError for an embedding with sparse gradients whose weight is one of these, which ranks add up."""
    names = {id(parameter): name for name, parameter in root.named_parameters()}
    for path, module in root.named_modules():
        if not (isinstance(module, nn.Embedding | nn.EmbeddingBag) and module.sparse):
            continue
        if module.weight.requires_grad and names[id(module.weight)] in shared:
            raise ValueError(
                f"module {path!r} has sparse gradients, and ranks that hold copies of its weight (replicas, tied "
                f"weights) would have to add them up: expected {type(module).__name__}(..., sparse=False) with "
                f"an optimizer for dense gradients, or one rank that holds it"
            )


def clip_factor(*, norm: float, max_norm: float) -> float:
    """Factor by which torch.nn.utils.clip_grad_norm_ multiplies gradients of this global norm: NaN for NaN."""
    return min(max_norm / (norm + 1e-6), 1.0)


def clip_gradients(gradients: Iterable[torch.Tensor | None], *, norm: float, max_norm: float) -> None:
    scale_gradients(gradients, clip_factor(norm=norm, max_norm=max_norm))


def flags_of(names: Sequence[str], gradients: Grads, note: Sequence[float], *, device: torch.device) -> torch.Tensor:
    """[n + note] float64: 1 where there is a gradient, else 0, then the note. Raises ValueError for a sparse one. A
    gradient that no rank has stays None, since optimizers skip such a parameter."""
    for name, gradient in zip(names, gradients, strict=True):
        if gradient is not None and gradient.is_sparse:
            raise ValueError(
                f"the gradient of {name!r} is sparse, and ranks that hold copies of it (replicas, tied weights) would "
                f"have to add it up: expected a dense one, as of F.embedding(..., sparse=False)"
            )
    flags = [float(gradient is not None) for gradient in gradients]
    return torch.tensor([*flags, *note], dtype=torch.float64, device=device)


def pack_gradients(flat: Flat, names: Sequence[str], gradients: Grads, note: Sequence[float]) -> Tensors:
    """A message of n gradients: flags and a note of n + 1 numbers, then every bucket as a copy."""
    pairs = zip(flat.like, gradients, strict=True)
    whole = [torch.zeros_like(like) if gradient is None else gradient.detach() for like, gradient in pairs]
    return (flags_of(names, gradients, note, device=flat.like[0].device), *flat.pack(whole))


def gradient_specs(flat: Flat) -> list[TensorSpec]:
    return [TensorSpec((2 * len(flat.like) + 1,), (1,), torch.float64, False), *flat.specs()]


def unpack_gradients(flat: Flat, message: Tensors) -> tuple[list[torch.Tensor | None], list[float]]:
    numbers: list[float] = message[0].tolist()
    gradients = zip(flat.unpack(message[1:]), numbers, strict=False)
    return [gradient if is_there else None for gradient, is_there in gradients], numbers[len(flat.like) :]


def _values(gradient: torch.Tensor) -> torch.Tensor:
    return gradient.coalesce().values() if gradient.is_sparse else gradient


class LossScale:
    """The loss scale of the present weights. `scaler`: the user's, which has the scale between two steps, and whose
    changes are adopted."""

    def __init__(self, scaler: GradScaler) -> None:
        self._scaler = scaler
        self._scale = self._published = _read(scaler)

    @property
    def value(self) -> float:
        return self._scale[0]

    def update(self, *, overflowed: bool) -> None:
        """Set the scale of the next update, after one that was made, or skipped since gradients overflowed. Raises
        NonFiniteLossError, on every rank alike, where the scale has shrunk to 0."""
        value, good = self._scale
        scale, tracker = torch.tensor(value, dtype=torch.float32), torch.tensor(good, dtype=torch.int32)
        torch._amp_update_scale_(
            scale,
            tracker,
            torch.tensor(float(overflowed), dtype=torch.float32),
            self._scaler.get_growth_factor(),
            self._scaler.get_backoff_factor(),
            self._scaler.get_growth_interval(),
        )
        if overflowed and not scale > 0:
            raise NonFiniteLossError(
                "the loss scale has shrunk to 0, since gradients were infinite or not a number in one batch after the "
                "other: the updates of all of them were skipped. Expected a finite loss and gradients for some scale; "
                "look at the samples, or run a batch in float32"
            )
        self._scale = scale.item(), int(tracker)

    def publish(self) -> None:
        if self._scale != self._published:
            value, good = self._scale
            self._scaler.load_state_dict({**self._scaler.state_dict(), "scale": value, "_growth_tracker": good})
        self._published = _read(self._scaler)

    def changed_outside(self) -> bool:
        return _read(self._scaler) != self._published

    def adopt(self) -> None:
        self._scale = self._published = _read(self._scaler)

    def content(self) -> _Scale:
        return self._scale

    def load(self, content: Sequence[float]) -> None:
        value, good = content
        self._scale = value, int(good)
        self.publish()


def unscale(gradients: Iterable[torch.Tensor | None], scale: float, *, device: torch.device) -> torch.Tensor:
    """Divide gradients by the scale, in place. Returns 1 where one of them is not finite, else 0: float32 scalar."""
    overflowed = torch.zeros((), dtype=torch.float32, device=device)
    inverse = torch.full((), scale, dtype=torch.float32, device=device).double().reciprocal().float()
    by_type: dict[torch.dtype, list[torch.Tensor]] = {}
    for gradient in gradients:
        if gradient is not None:
            values = gradient._values() if gradient.is_sparse else gradient
            by_type.setdefault(values.dtype, []).append(values)
    for group in by_type.values():
        torch._amp_foreach_non_finite_check_and_unscale_(group, overflowed, inverse)
    return overflowed


def _read(scaler: GradScaler) -> _Scale:
    state = scaler.state_dict()
    scale = torch.tensor(float(state["scale"]), dtype=torch.float32)  # as it is used, with any default type
    return scale.item(), int(state["_growth_tracker"])
