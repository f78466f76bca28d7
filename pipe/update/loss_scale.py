"""The loss scale of float16 training: torch.amp.GradScaler's rule, agreed by all ranks.

    backward    the loss of a microbatch is multiplied by the scale
    gradients   are divided by it before they are clipped; is one of any stage, replica or rank not finite, then the
                update is skipped by all: weights, optimizers and schedules stay as they were
    next scale  by the rule of GradScaler: times backoff_factor where the update was skipped, times growth_factor behind
                growth_interval updates in a row that were not

That is what a loop with scale, unscale_, step and update does.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch
from torch.amp import GradScaler

from ..batch.batches import NonFiniteLossError

_Scale = tuple[float, int]  # a loss scale, and how many updates in a row were made since it last changed


class LossScale:
    """The scale that the weights as they are now are trained with. `scaler`: the user's. It has the scale between two
    steps; what is changed in it counts."""

    def __init__(self, scaler: GradScaler) -> None:
        self._scaler = scaler
        self._scale = self._published = _read(scaler)

    @property
    def value(self) -> float:
        return self._scale[0]

    def update(self, *, overflowed: bool) -> None:
        """An update was made, or skipped since gradients overflowed: the scale of the next one.

        Raises NonFiniteLossError, on every rank alike, where the scale has shrunk to 0: no scale helps any more.
        """
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
        """Let the user's scaler have the scale."""
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
    scale = torch.tensor(float(state["scale"]), dtype=torch.float32)  # as it is used, whatever the default type
    return scale.item(), int(state["_growth_tracker"])
