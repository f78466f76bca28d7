"""timeline.json of a run: its simulation and the inputs of that. The trace files next to it have the measurements."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from ..ir import Schedule
from ..timing.costs import Costs
from ..timing.memory import StageBytes
from ..timing.sampling import StepSamples
from ..timing.spread import Spread
from ..timing.timeline import Timeline

NAME = "timeline.json"
_VERSION = 3


@dataclass(frozen=True, slots=True, kw_only=True)
class RunFile:
    """A run, simulated from its own measurements.

    Raises ValueError for costs and bytes of another number of stages.
    """

    schedule: Schedule  # that ran
    simulated: Timeline  # under the measured `costs`
    costs: Costs | None = None
    memory: tuple[StageBytes, ...] = ()  # [S] bytes of each stage; empty if not known
    memory_limit: tuple[float, ...] | None = None  # [P] bytes; None if not known
    predicted_peak: tuple[float, ...] | None = None  # likewise
    spread: Spread | None = None  # of its durations around `costs`; None if too few steps were measured
    sampled: StepSamples | None = None  # steps simulated under both, whose median is predicted; None without a spread

    def __post_init__(self) -> None:
        num_stages = self.schedule.num_stages
        if self.costs is not None:
            self.costs.table_for(self.schedule)
        if len(self.memory) not in (0, num_stages):
            raise ValueError(f"bytes of {len(self.memory)} stages for a schedule of {num_stages}: expected as many")

    def write(self, folder: Path) -> None:
        """Write timeline.json atomically; OSError if that fails."""
        data: dict[str, Any] = {
            "version": _VERSION,
            "schedule": self.schedule.to_data(),
            "simulated": json.loads(self.simulated.to_json()),
            "costs": None if self.costs is None else json.loads(self.costs.to_json()),
            "memory": [asdict(each) for each in self.memory],
            "memory_limit": self.memory_limit,
            "predicted_peak": self.predicted_peak,
            "spread": None if self.spread is None else json.loads(self.spread.to_json()),
            "sampled": None if self.sampled is None else asdict(self.sampled),
        }
        partial = folder / f"{NAME}.partial"
        partial.write_text(json.dumps(data) + "\n", encoding="utf-8")
        partial.replace(folder / NAME)

    @classmethod
    def read(cls, folder: Path) -> RunFile:
        """Read timeline.json; ValueError says what is missing or unreadable."""
        path = folder / NAME
        try:
            return _parse(json.loads(path.read_text(encoding="utf-8")))
        except OSError as error:
            raise ValueError(f"{folder} has no readable {NAME}: a run writes it when it traces a step") from error
        except (KeyError, TypeError, ValueError, AttributeError, RecursionError, OverflowError) as error:
            raise ValueError(f"{path} is not a run's timeline: {error}") from error


def _parse(data: Any) -> RunFile:
    version = data.get("version")
    if version != _VERSION:
        raise ValueError(f"version {version!r}, expected {_VERSION}: written by another stagewright")
    spread = data.get("spread")
    return RunFile(
        schedule=Schedule.from_data(data["schedule"]),
        simulated=Timeline.from_json(json.dumps(data["simulated"])),
        costs=None if data["costs"] is None else Costs.from_json(json.dumps(data["costs"])),
        memory=tuple(StageBytes(**each) for each in data["memory"]),
        memory_limit=_numbers(data["memory_limit"]),
        predicted_peak=_numbers(data["predicted_peak"]),
        spread=None if spread is None else Spread.from_json(json.dumps(spread)),
        sampled=None if data.get("sampled") is None else StepSamples(**data["sampled"]),
    )


def _numbers(values: Any) -> tuple[float, ...] | None:
    return None if values is None else tuple(map(float, values))
