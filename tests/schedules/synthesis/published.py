"""Points of tests/data/published_bubbles.csv.

From the zero bubble papers (Qi et al., ICLR 2024, table 5; their curves of bubble over memory, P = 16, M = 48), as
shared/reference/schedules.md lists them, and the same curves of a V for larger models, M = 3P, from the authors'
repository (`mem2bubble.npy`). `memory` counts P whole activations of a rank, two halves of it under "v"; `kept_share`
follows from the models' sizes: 32 h of 34 h + 5 a s bytes. The bubble is 1 - work / span.
"""

from __future__ import annotations

import csv
from pathlib import Path
from typing import Any

from stagewright.schedules import Costs


def published(source: str) -> list[dict[str, str]]:
    """Points of `zb-...`, the table, of `curve ...`, or of `v of ...` ranks."""
    with (Path(__file__).parents[2] / "data" / "published_bubbles.csv").open(newline="") as file:
        return [point for point in csv.DictReader(file) if point["source"].startswith(source)]


def request(point: dict[str, str]) -> dict[str, Any]:
    """What to ask of a search or a bound to get the point."""
    ranks, chunks = int(point["ranks"]), 2 if point["placement"] == "v" else 1
    seconds = {name: float(point[name]) for name in ("forward", "input_grad", "weight_grad", "latency")}
    return {
        "num_ranks": ranks,
        "num_microbatches": int(point["microbatches"]),
        "costs": Costs(**seconds),
        "memory_limit": float(point["memory"]) * ranks * chunks,
        "kept_share": float(point["kept_share"]),
        "placement": point["placement"],
        "objective": "span",
    }
