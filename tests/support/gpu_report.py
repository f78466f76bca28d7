"""Figures that tests of a device leave behind: printed, and kept, with its name, where STAGEWRIGHT_REPORT says."""

import json
import os
import platform
from pathlib import Path

import torch


def note(what: str, **figures: float | str | None) -> None:
    """One line of JSON a measurement, added to the report."""
    name = torch.cuda.get_device_name() if torch.cuda.is_available() else f"CPU ({platform.machine()})"
    line = json.dumps({"what": what, "device": name, "torch": torch.__version__, **figures})
    print(line)
    if folder := os.environ.get("STAGEWRIGHT_REPORT"):
        Path(folder).mkdir(parents=True, exist_ok=True)
        with (Path(folder) / "figures.jsonl").open("a", encoding="utf-8") as report:
            report.write(line + "\n")
