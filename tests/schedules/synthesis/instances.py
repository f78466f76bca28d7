"""Random small instances of the synthesis problem, with costs that are whole numbers so that solvers agree exactly.

Points of tests/data/published_bubbles.csv: from the zero bubble papers (Qi et al., ICLR 2024, table 5; their curves of
bubble over memory, P = 16, M = 48), as shared/reference/schedules.md lists them, and the same curves of a V for larger
models, M = 3P, from the authors' repository (`mem2bubble.npy`). `memory` counts P whole activations of a rank, two
halves of it under "v"; `kept_share` follows from the models' sizes: 32 h of 34 h + 5 a s bytes. The bubble is
1 - work / span.
"""

import csv
import json
from pathlib import Path
from random import Random
from typing import Any

from support.inside import Objective, Problem, Request

from stagewright.schedules import Costs

COUNT = 300
DATA = Path(__file__).parents[2] / "data"


def pose(**request: Any) -> Problem:
    return Request(**request).problem()


def random_problem(number: int) -> Problem:
    """Instance `number`: P <= 4, M <= 6, any costs, latency and memory, both objectives.

    Six in ten stand one stage a rank, the others V-shaped or cyclic on two or three ranks with fewer microbatches. In a
    third costs differ by stage alone, in a third all stages are alike, and in the others microbatches differ, too.
    """
    random = Random(f"synthesis {number}")
    placement = random.choice(["plain"] * 6 + ["v"] * 2 + ["cyclic"] * 2)
    P = random.randint(2, 4 if placement == "plain" else 3)
    V = 1 if placement == "plain" else 2
    kind = random.choice(["alike", "by stage", "by microbatch"])
    most = 6 if placement == "plain" else {2: 4, 3: 3}[P]
    M = random.randint(1, most if kind != "by microbatch" else min(most, 4))
    S = P * V

    def seconds(least: int, top: int) -> list[float]:
        if kind == "alike":
            return [float(random.randint(least, top))] * S
        return [float(random.randint(least, top)) for _ in range(S)]

    activations, share = 1.0, 1.0
    if random.random() < 0.3:
        activations, share = 4.0, random.choice([0.25, 0.5, 0.75])
    least = V * activations
    limit: float | list[float] | None = activations * random.randint(V, V * (P + 2)) if random.random() < 0.8 else None
    if limit is not None and random.random() < 0.2:
        limit = [max(least, limit + random.choice([-1, 0, 1]) * activations) for _ in range(P)]
    objective: Objective = random.choice(["makespan", "span"])
    return pose(
        num_ranks=P,
        num_microbatches=M,
        costs=Costs(
            forward=seconds(1, 9),
            input_grad=seconds(1, 9),
            weight_grad=seconds(1, 9),
            latency=random.choice([0, 0, 1, 2, 4]),
            update=0 if random.random() < 0.8 else seconds(0, 5),
            index_factors=[random.randint(1, 3) for _ in range(M)] if kind == "by microbatch" else None,
        ),
        memory_limit=limit,
        placement=placement,
        objective=objective,
        activations=activations,
        kept_share=share,
    )


def read_optima() -> list[float]:
    """By number of the instance, its optimum [s]: what `cp_sat.solve` finds and proves within two minutes each."""
    optima: list[float] = json.loads((DATA / "synthesis_optima.json").read_text())
    return optima


def published(source: str) -> list[dict[str, str]]:
    """Points of `zb-...`, the table, of `curve ...`, or of `v of ...` ranks."""
    with (DATA / "published_bubbles.csv").open(newline="") as file:
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
