"""A plan with what can be done with it."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from ...schedules.ir import Schedule
from ...schedules.shown import Shown
from ...schedules.wording import count, duration
from ..strict import read_text
from .as_json import from_json, to_json
from .as_text import explain
from .record import PlanRecord
from .shown import exhibit_of_plan
from .to_schedule import schedule_of


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan(Shown, PlanRecord):
    """A `PlanRecord` that can be written, read, explained and carried out."""

    _exhibit = exhibit_of_plan

    def __repr__(self) -> str:
        name = "" if self.schedule is None else f"{self.schedule}, "
        step = self.simulated_step_time
        time = "" if step is None else f", {duration(step)} a batch"
        return f"<Plan {name}{count(len(self.stages), 'stage')} on {count(self.num_devices, 'device')}{time}>"

    def build_schedule(self, *, num_microbatches: int | None = None) -> Schedule:
        """The schedule that carries the plan out, on its ranks; see `to_schedule.schedule_of`."""
        return schedule_of(self, num_microbatches=num_microbatches)

    def explain(self) -> str:
        """A table of the stages, then the runners-up with what each loses, then the notes."""
        return explain(self)

    def to_json(self) -> str:
        """One JSON object with a version; `from_json` reads it."""
        return to_json(self)

    @classmethod
    def from_json(cls, text: str, *, source: str = "plan") -> Plan:
        """Read `to_json`'s form. ValueError names `source`, the field and what was expected."""
        return from_json(cls, text, source=source)

    @classmethod
    def load(cls, path: str | Path) -> Plan:
        """Read a JSON file."""
        return cls.from_json(read_text(path), source=str(path))
