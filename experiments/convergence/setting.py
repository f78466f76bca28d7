"""A setting of a run: schedule, optimizer, correction, rate. No torch."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields

from ...schedules import Schedule, build

SCHEDULES = ("1f1b", "2bw", "pipedream", "paci")
OPTIMIZERS = ("adamw", "muon")
NONE, FEEDBACK = "none", "error-feedback"
CORRECTIONS = (NONE, FEEDBACK)
FLUSH = "1f1b"  # the reference


@dataclass(frozen=True, slots=True, kw_only=True)
class Setting:
    """A run's setting.

    Arguments:
        schedule: of SCHEDULES; pipedream and paci update behind each batch of `sequences`, as a microbatch of theirs.
        ranks: P.
        optimizer: adamw; muon: Muon for the matrices of the blocks, AdamW for the rest.
        correction, factor: of the delay; lambda of a stage is factor x its delay. Under 1f1b, which has no delay, as if
            it were one: the control.
        rate: peak rate; momentum: of Muon, or AdamW's first one (0: the optimizer's usual).
        ends: AdamW's rate over Muon's.
        warmup: share of the steps in which the rate rises.
        flush_first: so many updates, the first ones, have a flush each (`PipelineModule(flush_first=)`), corrected by
            lambda 1 if the rest is corrected.
        total_updates: of the weights, each after `sequences` of `length` bytes.
        windows: validation sequences behind the last update; a quarter of them every `evaluate_every` updates.

    Raises ValueError for what cannot be meant.
    """

    schedule: str
    ranks: int = 2
    optimizer: str = "adamw"
    correction: str = NONE
    factor: float = 1.0
    rate: float = 2e-3
    momentum: float = 0.0
    ends: float = 1.0
    warmup: float = 0.1
    seed: int = 0
    flush_first: int = 0
    total_updates: int = 500
    sequences: int = 16
    length: int = 64
    layers: int = 4
    width: int = 128
    evaluate_every: int = 50
    windows: int = 512

    def __post_init__(self) -> None:
        for name, known in (("schedule", SCHEDULES), ("optimizer", OPTIMIZERS), ("correction", CORRECTIONS)):
            if getattr(self, name) not in known:
                raise ValueError(f"{name}={getattr(self, name)!r}: expected {', '.join(known)}")
        if self.total_updates % self.updates_a_step or self.evaluate_every % self.updates_a_step:
            raise ValueError(
                f"total_updates={self.total_updates}, evaluate_every={self.evaluate_every}: expected multiples of "
                f"{self.updates_a_step}, the updates of one step under {self.schedule}"
            )
        if not 0 <= self.flush_first <= self.total_updates or self.flush_first % self.updates_a_step:
            raise ValueError(
                f"flush_first={self.flush_first}: expected a multiple of {self.updates_a_step}, the updates of one "
                f"step under {self.schedule}, at most total_updates={self.total_updates}"
            )

    @classmethod
    def of(cls, values: Mapping[str, object]) -> Setting:
        """Setting with these values; ValueError for a key that is none of its."""
        known = [field.name for field in fields(cls)]
        unknown = [key for key in values if key not in known]
        if unknown:
            raise ValueError(f"{unknown[0]}: expected some of {', '.join(known)}")
        return cls(**values)  # type: ignore[arg-type]

    @property
    def updates_a_step(self) -> int:
        """Updates of one `train_step`."""
        return _MICROBATCHES if self.schedule in _EACH_UPDATES else 1

    @property
    def tokens_a_step(self) -> int:
        """Bytes of one `train_step`."""
        return self.updates_a_step * self.sequences * self.length

    def make_schedule(self) -> Schedule:
        """Schedule of one step: an update behind every `sequences` samples."""
        if self.schedule in _EACH_UPDATES:
            options = {"update_every": 1}
            return build(self.schedule, num_ranks=self.ranks, num_microbatches=self.updates_a_step, **options)
        return build(self.schedule, num_ranks=self.ranks, num_microbatches=self.ranks)


_EACH_UPDATES = ("pipedream", "paci")
_MICROBATCHES = 10  # under these: batches of the others
