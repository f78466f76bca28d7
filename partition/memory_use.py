"""Memory of a device, by data structure."""

from __future__ import annotations

from dataclasses import astuple, dataclass, fields

from .strict import number


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryUse:
    """Bytes on one device at the peak of the schedule.

    Arguments:
        parameters: all weight versions.
        gradients: one set.
        optimizer: state, such as Adam's two averages.
        buffers: of the model, such as BatchNorm's statistics.
        activations: kept from F to B, of all microbatches in flight.
        workspace: that F or B needs for itself while it runs.
        communication: messages that were received ahead of their use, or are not yet sent.

    Raises ValueError for what is no finite number of at least 0.

    >>> (MemoryUse(parameters=4, gradients=4) + MemoryUse(activations=2)).total
    10.0
    """

    parameters: float = 0.0
    gradients: float = 0.0
    optimizer: float = 0.0
    buffers: float = 0.0
    activations: float = 0.0
    workspace: float = 0.0
    communication: float = 0.0

    def __post_init__(self) -> None:
        for each in fields(self):
            object.__setattr__(self, each.name, number(f"memory: {each.name}", getattr(self, each.name)))

    @property
    def total(self) -> float:
        """All of it [bytes]."""
        return float(sum(astuple(self)))

    def __add__(self, other: MemoryUse) -> MemoryUse:
        """Both on one device; they do not need their workspace at once."""
        added = {each.name: getattr(self, each.name) + getattr(other, each.name) for each in fields(self)}
        return MemoryUse(**{**added, "workspace": max(self.workspace, other.workspace)})
