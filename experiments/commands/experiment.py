"""`stagewright experiment NAME`: scripted experiments, each a package beside this file."""

from __future__ import annotations

import difflib
import importlib
from collections.abc import Sequence

EXPERIMENTS = {
    "convergence": "loss against steps and time: one process, 1f1b, 2bw, pipedream",
}


def run(argv: Sequence[str]) -> int:
    """Run one experiment and return its exit status."""
    listed = "\n".join(f"  {name:<12} {summary}" for name, summary in EXPERIMENTS.items())
    if not argv or argv[0].startswith("-"):
        print(f"usage: stagewright experiment NAME [options]\n\nexperiments:\n{listed}")
        if not argv:
            return 0
        raise SystemExit(0 if argv[0] in ("-h", "--help") else 2)
    if argv[0] not in EXPERIMENTS:
        near = difflib.get_close_matches(argv[0], EXPERIMENTS, n=1, cutoff=0.4)
        hint = f"; did you mean {near[0]}?" if near else ""
        raise ValueError(f"unknown experiment {argv[0]!r}{hint}\nexperiments: {', '.join(EXPERIMENTS)}")
    module = importlib.import_module(f"..{argv[0]}.command", __package__)
    status: int = module.run(argv[1:])
    return status
