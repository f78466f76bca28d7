"""Costs of a dead process: seconds until the next step has ended, beside a restart from a checkpoint; and throughput.

python -m stagewright.experiments.works.going_on FOLDER MESH    a rank; it trains, and dies where it is told to
"""

from __future__ import annotations

import os
import signal
import sys
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory

from ...cli.launcher import launch, report_to_launcher
from ...schedules import Costs, build, simulate
from ...schedules.transform import replicate, schedule_without
from ..jobs.case import Case
from ..jobs.figure import Figure, How, repeated

_STEPS, _SAVED, _STRUCK = 12, 4, 8  # of a run; behind how many it saves; in which the last rank dies
_WIDTH, _SAMPLES = 256, 128
_NEXT, _THROUGHPUT = "seconds from a death to the next step's end", "throughput with dead ranks"
_TEMPLATES, _REDUNDANT = "shorter pipelines, as Oobleck's", "redundant forwards, as Bamboo's"
_COSTS = Costs(forward=1.0, backward=2.0)


def simulated(case: Case, repetitions: int) -> Iterator[Figure]:
    """Throughput of a mesh of which ranks are dead, as a share of the whole one's: rerouted, and without each pipeline
    that a dead one was in. They are spread over stages and replicas."""
    del repetitions
    pipe, data, dead = case.count("pipe"), case.count("data"), case.count("dead")
    one = build(case.text("schedule"), num_ranks=pipe, num_microbatches=case.count("rounds") * pipe)
    whole = replicate(one, data)
    gone = [number * pipe // dead * data + number % data for number in range(dead)]
    before, after = (simulate(each, _COSTS).makespan for each in (whole, schedule_without(whole, gone)))
    dropped = (data - len({rank % data for rank in gone})) / data
    found = {"reroute": before / after, "without their pipelines": dropped}
    if one.name == "1f1b":
        hurt = Counter(rank % data for rank in gone)
        lost = [hurt[replica] for replica in range(data)]  # by pipeline, how many of its ranks
        found |= {_TEMPLATES: before / _templates(pipe, lost, one.num_microbatches * data)}
        found |= {_REDUNDANT: before / _redundant(pipe, max(lost), one.num_microbatches)}
    for way, value in found.items():
        how = How.SIMULATED if way in ("reroute", _REDUNDANT) else How.CLOSED_FORM
        yield Figure(case=case.also(way=way), name=_THROUGHPUT, value=value, unit="fraction", how=how)


def _templates(pipe: int, lost: Sequence[int], num_microbatches: int) -> float:
    """Makespan in the manner of Oobleck: what is left of a pipeline goes on as a shorter one, its layers shared out
    anew without a remainder, and takes as many microbatches as let all end together. Moving the layers is free.
    """
    counts = [0] * len(lost)

    def ends(replica: int, more: int) -> float:
        ranks = pipe - lost[replica]
        return (counts[replica] + more + ranks - 1) * 3.0 * pipe / ranks  # of 1F1B, balanced

    for _ in range(num_microbatches):
        counts[min(range(len(lost)), key=lambda replica: ends(replica, 1))] += 1
    return max(ends(replica, 0) for replica in range(len(lost)))


def _redundant(pipe: int, dead: int, num_microbatches: int) -> float:
    """Makespan in the manner of Bamboo: each rank runs the next one's forward beside its own, unhidden, and takes over
    all of it where that one dies: the pipeline goes on with a stage of two. Replicas keep their own microbatches.
    """
    if dead > 1:
        raise ValueError(f"dead={dead} in one pipeline: expected at most 1 a pipeline beside redundant computation")
    stages = [1] * (pipe - 2 * dead)
    stages[len(stages) // 2 : len(stages) // 2] = [2] * dead  # a rank in the middle has two
    costs = Costs(forward=[size + 1.0 for size in stages], backward=[2.0 * size for size in stages])
    return simulate(build("1f1b", num_ranks=len(stages), num_microbatches=num_microbatches), costs).makespan


def measured(case: Case, repetitions: int) -> Iterator[Figure]:
    """Seconds from a kill until all that are left, or all of a new start, have ended the step in which it came."""
    pipe, data = case.count("pipe"), case.count("data")
    found: dict[str, list[float]] = {"reroute": [], "restart": []}
    for _ in range(repetitions):
        for way, seconds in found.items():
            with TemporaryDirectory(prefix="stagewright-") as folder:
                seconds.append(_seconds(Path(folder), way, pipe, data))
    for way, seconds in found.items():
        yield from repeated(seconds, case=case.also(way=way), name=_NEXT, unit="s", how=How.MEASURED)


def findings(figures: Sequence[Figure]) -> list[str]:
    by_way: dict[str, list[float]] = {}
    shares: dict[str, dict[tuple[int, int], float]] = {}  # throughput, by way, ranks and how many of them are dead
    for figure in figures:
        way = figure.case.text("way")
        if figure.name == _NEXT:
            by_way.setdefault(way, []).append(figure.value)
        elif figure.case.text("schedule") == "1f1b":
            shares.setdefault(way, {})[figure.case.count("pipe"), figure.case.count("dead")] = figure.value
    lines = [_ratios(shares["reroute"], shares[way], way) for way in (_TEMPLATES, _REDUNDANT) if way in shares]
    if len(by_way) < 2:
        return lines
    ways = {way: median(seconds) for way, seconds in by_way.items()}
    return [
        *lines,
        f"The next step ends {ways['reroute']:.2f} s behind a death where the others go on, and {ways['restart']:.1f} "
        f"s behind it where all start again from a checkpoint of {_STRUCK - _SAVED} steps before, at once.",
    ]


def _ratios(ours: dict[tuple[int, int], float], theirs: dict[tuple[int, int], float], way: str) -> str:
    ratios = {key: ours[key] / theirs[key] for key in theirs}
    shown = {pipe: [ratio for (its, _), ratio in ratios.items() if its == pipe] for pipe, _ in ratios}
    told = ", ".join(f"{min(each):.2f} to {max(each):.2f} with {pipe} stages" for pipe, each in shown.items())
    return f"Simulated with 1F1B, rerouting has this throughput over {way}: {told}."


def _seconds(folder: Path, way: str, pipe: int, data: int) -> float:
    words = [sys.executable, "-P", "-m", __name__, str(folder), f"{pipe}x{data}", way]
    for _ in range(1 if way == "reroute" else 2):
        ended = launch(words, num_ranks=pipe * data, timeout=300.0)
    if ended.status:
        raise RuntimeError(ended.report)
    died = float((folder / "died").read_text())
    return max(float(path.read_text()) for path in folder.glob("*.ended")) - died


def _train(folder: Path, mesh: str, way: str) -> None:
    import torch
    from torch import nn

    from ...pipe import Mesh, PipelineModule

    pipe, data = map(int, mesh.split("x"))
    rank, died = int(os.environ["RANK"]), folder / "died"
    torch.manual_seed(0)
    layers = [nn.Sequential(nn.Linear(_WIDTH, _WIDTH), nn.Tanh()) for _ in range(2 * pipe)]
    run = PipelineModule(
        nn.Sequential(*layers),
        loss_fn=nn.functional.mse_loss,
        optimizer=torch.optim.Adam,
        mesh=Mesh(pipe=pipe, data=data, on_failure="reroute" if way == "reroute" else "stop"),
        verify=False,
    )
    if way == "restart" and died.exists():
        run.load(folder / "saved")
    samples = _SAMPLES if way == "reroute" else _SAMPLES // data  # of the whole batch, or of a replica's own
    while run.num_steps < _STEPS:
        step = run.num_steps
        if step == _SAVED and way == "restart" and not died.exists():
            run.save(folder / "saved")
        if step == _STRUCK and rank == pipe * data - 1 and not died.exists():
            died.write_text(str(time.time()))
            os.kill(os.getpid(), signal.SIGKILL)
        run.train_step(*torch.randn(2, samples, _WIDTH))
        if step == _STRUCK:
            (folder / f"{rank}.ended").write_text(str(time.time()))
    run.close()


if __name__ == "__main__":
    with report_to_launcher():
        _train(Path(sys.argv[1]), *sys.argv[2:])
