"""The loss scale of float16 training: torch.amp.GradScaler's rule, agreed by all ranks, one for each weight version.

    backward    the loss of a microbatch is multiplied by the scale of the weight version that it computes with
    gradients   are divided by it before they are clipped; is one of any stage, replica or rank not finite, then
    update u    is skipped by all: version u + 1 of the weights is version u again, optimizers and schedules stay as
                they were
    scale u + 1 made of scale u by the rule of GradScaler: times backoff_factor where update u was skipped, times
                growth_factor behind growth_interval updates in a row that were not

Under a flush schedule batch t computes with version t, so that this is what a loop with scale, unscale_, step and
update does. Under 2bw batch t computes with version max(t - 1, 0): its gradients are scaled by what the updates up to
t - 2 made of the scale, and an overflow of batch t is felt by the scale of batch t + 2.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

import torch
from torch.amp import GradScaler

from ..batch.batches import NonFiniteLossError


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


class Scale(NamedTuple):
    """A loss scale, and how many updates in a row were made since it last changed."""

    value: float
    good_updates: int


class LossScale:
    """The scales of the weight versions that a rank keeps.

    Arguments:
        scaler: the user's. It has the newest scale between two steps; what is changed in it counts.
        count: versions kept.

    Attributes:
        newest: version of the weights.
    """

    def __init__(self, scaler: GradScaler, *, count: int = 1) -> None:
        self.newest = 0
        self._scaler = scaler
        self._count = count
        self._scales = {0: _read(scaler)}
        self._published = self._scales[0]

    def of(self, version: int) -> float:
        """The factor of losses that are computed with this version of the weights."""
        return self._scales[version].value

    def update(self, *, overflowed: bool) -> None:
        """An update was made, or skipped since gradients overflowed: the scale of the next version.

        Raises NonFiniteLossError, on every rank alike, where the scale has shrunk to 0: no scale helps any more.
        """
        value, good = self._scales[self.newest]
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
        self.newest += 1
        self._scales[self.newest] = Scale(scale.item(), int(tracker))
        self._scales = {version: one for version, one in self._scales.items() if version > self.newest - self._count}

    def publish(self) -> None:
        """Let the user's scaler have the newest scale."""
        newest = self._scales[self.newest]
        if newest != self._published:
            self._scaler.load_state_dict(
                {**self._scaler.state_dict(), "scale": newest.value, "_growth_tracker": newest.good_updates}
            )
        self._published = _read(self._scaler)

    def changed_outside(self) -> bool:
        """Whether somebody changed the scaler since `publish`."""
        return _read(self._scaler) != self._published

    def adopt(self) -> None:
        """Every version has the scaler's scale."""
        self.restore(self.newest, {self.newest: _read(self._scaler)})

    def known(self) -> dict[int, Scale]:
        """Scales by version, for `restore`."""
        return dict(self._scales)

    def content(self) -> dict[int, list[float]]:
        """For a checkpoint: age of a version (0: the newest) -> its scale and good updates."""
        return {self.newest - version: list(scale) for version, scale in self._scales.items()}

    def load(self, newest: int, content: Mapping[int, Sequence[float]]) -> None:
        """Go on from `content`, as version `newest`."""
        self.restore(newest, {newest - age: Scale(value, int(good)) for age, (value, good) in content.items()})

    def restore(self, newest: int, scales: Mapping[int, Scale]) -> None:
        """Go on from version `newest`; older versions whose scale is not given have that of the newest."""
        self.newest = newest
        versions = range(max(0, newest - self._count + 1), newest + 1)
        self._scales = {version: scales.get(version, scales[newest]) for version in versions}
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


def _read(scaler: GradScaler) -> Scale:
    state = scaler.state_dict()
    scale = torch.tensor(float(state["scale"]), dtype=torch.float32)  # as it is used, whatever the default type
    return Scale(scale.item(), int(state["_growth_tracker"]))
