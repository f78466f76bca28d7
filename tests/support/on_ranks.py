"""Jobs of works on ranks of this machine."""

import json
from pathlib import Path

from support.inside import JobsFigureFigure as Figure
from support.inside import LocalBackend, Nodes, read_figures
from support.inside import RecordsWork as Work


def figures_on_ranks(folder: Path, work: str, *cases: dict[str, object], ranks: int, repetitions: int) -> list[Figure]:
    """What a function of `experiments.works` gives for these cases: the way of a job, torchrun included."""
    job = {"work": f"stagewright.experiments.works.{work}", "repetitions": repetitions, "cases": cases}
    (folder / "job.json").write_text(json.dumps(job))
    program = {"module": "stagewright.experiments.jobs.worker", "arguments": (str(folder), "--ranks")}
    outcome = LocalBackend(say=lambda line: None).run(
        Work(**program, folder=folder, timeout=400),  # type: ignore[arg-type]
        Nodes(ranks_per_node=ranks),
    )
    assert outcome.status == 0, outcome.report
    return read_figures(folder / "figures.jsonl")
