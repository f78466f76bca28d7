"""Writes tests/data/synthesis_optima.json: the optimum of each random instance, by CP-SAT; takes minutes.

python -m tests.schedules.synthesis.make_optima
"""

import json
from pathlib import Path

from .cp_sat import solve
from .instances import COUNT, random_problem

PATH = Path(__file__).parents[2] / "data" / "synthesis_optima.json"


def read() -> list[float]:
    """By number of the instance, its optimum [s]."""
    optima: list[float] = json.loads(PATH.read_text())
    return optima


def main() -> None:
    optima = []
    for number in range(COUNT):
        found = solve(random_problem(number), seconds=120)
        if found is None or not found.proven:
            raise RuntimeError(f"instance {number} was not proven in time: draw smaller ones")
        optima.append(found.value)
        print(f"{number}: {found.value:g}", flush=True)
    PATH.write_text(json.dumps(optima) + "\n")


if __name__ == "__main__":
    main()
