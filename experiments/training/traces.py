"""One step of a run twice, predicted and measured: its file, its picture, its Perfetto trace."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

from ...schedules import Timeline

_TRACE = "timeline.json"


@dataclass(frozen=True, slots=True, kw_only=True)
class Traces:
    """One step of a run (of a stream, a few) twice: as simulated from its measured costs, and as measured."""

    predicted: Timeline
    measured: Timeline

    def write(self, folder: Path) -> None:
        """Write timeline.json."""
        pair = {
            "predicted": json.loads(self.predicted.to_json()),
            "measured": json.loads(self.measured.to_json()),
        }
        (folder / _TRACE).write_text(json.dumps(pair) + "\n")

    @classmethod
    def read(cls, folder: Path) -> Traces:
        """Read timeline.json; ValueError says what is missing."""
        path = folder / _TRACE
        try:
            pair = json.loads(path.read_text())
            predicted, measured = (Timeline.from_json(json.dumps(pair[key])) for key in ("predicted", "measured"))
        except OSError as error:
            raise ValueError(f"{folder} has no readable {_TRACE}: a run writes it when it is done") from error
        except (KeyError, TypeError, ValueError) as error:
            raise ValueError(f"{path} is not a run's timeline: {error}") from error
        return cls(predicted=predicted, measured=measured)

    def draw(self, folder: Path) -> tuple[Path, Path]:
        """Write timeline.png (predicted above measured) and timeline.perfetto.json; returns both paths."""
        from ...viz import render_comparison, write_perfetto  # matplotlib: only where something is drawn

        picture, trace = folder / "timeline.png", folder / "timeline.perfetto.json"
        render_comparison(self.predicted, self.measured, picture)
        write_perfetto([("predicted", self.predicted), ("measured", self.measured)], trace)
        return picture, trace
