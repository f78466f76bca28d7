"""Problems for the partitioner and the planner, and the runs that carry out their plans. No torch.

planned run  profile and links measured -> plan -> the same ranks run it: predicted against measured
contest      one model under one schedule, cut in three ways in turn
"""

from __future__ import annotations

import random
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path

PIPEDREAM_DATA = Path(__file__).parents[2] / "tests" / "data" / "pipedream"
PUBLISHED = ("alexnet", "gnmt", "resnet18", "resnet50", "squeezenet1_0", "vgg16")

_SEED = 1


def check_pipedream_data() -> None:
    """ValueError unless the published profiles are there; a checkout of the repository has them, a wheel has not."""
    for file in (PIPEDREAM_DATA / "runs.json", *(PIPEDREAM_DATA / f"{model}.txt" for model in PUBLISHED)):
        if not file.exists():
            raise ValueError(
                f"the case partitioner needs PipeDream's published profiles, and {file} is not there: expected a "
                f"checkout of the repository (an installed package does not bring its tests), or name the other cases "
                f"with --only"
            )


class PlannedModel(StrEnum):
    """Model of a planned run."""

    GPT = "gpt"  # traced whole, with AdamW
    SLEEP = "sleep"  # an nn.Sequential of layers that sleep for unequal times


@dataclass(frozen=True, slots=True, kw_only=True)
class PlannedRun:
    """A model that is profiled, planned for and run on the same ranks.

    Arguments:
        num_ranks: P; every rank is a process with one thread.
        num_microbatches: M of the whole batch.
        limit: of the step time's relative error.
        memory_limit: of the relative error of each rank's peak memory; None: it is not looked at.
        data_sizes: replicas that the planner may choose; None: any, unequal ones too.
        num_layers: of the model.
        steps: of one repetition, whose value is their median.
    """

    name: str
    model: PlannedModel
    num_ranks: int
    num_microbatches: int
    limit: float
    memory_limit: float | None = None
    data_sizes: tuple[int, ...] | None = None
    num_layers: int
    steps: int = 1

    @property
    def forward_seconds(self) -> tuple[float, ...]:
        """[num_layers] where layers sleep: 2 to 10 ms, always the same; a backward takes twice as long [s]."""
        draw = random.Random(_SEED)
        return tuple(round(draw.uniform(0.002, 0.010), 5) for _ in range(self.num_layers))

    @property
    def described(self) -> str:
        """For people."""
        model = "GPT" if self.model is PlannedModel.GPT else f"{self.num_layers} layers that sleep"
        replicas = "" if self.data_sizes is not None else ", replicas free"
        return f"{model} P={self.num_ranks} M={self.num_microbatches}{replicas}"


def _gpt(*, name: str, data_sizes: tuple[int, ...] | None) -> PlannedRun:
    return PlannedRun(
        name=f"planned-{name}",
        model=PlannedModel.GPT,
        num_ranks=2,
        num_microbatches=8,
        limit=0.10,
        memory_limit=0.10,
        data_sizes=data_sizes,
        num_layers=8,
        steps=3,
    )


def _sleeping(num_ranks: int, *, name: str, data_sizes: tuple[int, ...] | None) -> PlannedRun:
    return PlannedRun(
        name=f"planned-{name}",
        model=PlannedModel.SLEEP,
        num_ranks=num_ranks,
        num_microbatches=2 * num_ranks,
        limit=0.05,
        data_sizes=data_sizes,
        num_layers=3 * num_ranks,
    )


PLANNED_RUNS: dict[str, PlannedRun] = {
    run.name: run
    for run in (
        _gpt(name="gpt", data_sizes=None),
        _gpt(name="gpt-pipeline", data_sizes=(1,)),
        _sleeping(4, name="sleep-4", data_sizes=(1,)),
        _sleeping(8, name="sleep-8", data_sizes=(1,)),
        _sleeping(4, name="sleep-4-free", data_sizes=None),
    )
}


class MemoryKind(StrEnum):
    """Part of a planned run's peak; each is measured in fresh processes, since a peak sticks."""

    IN_USE = "in use"  # malloc gives back to the system at once what is freed: what the plan speaks of
    RESIDENT = "resident"  # malloc as it is by default, which keeps some of it


def memory_job(run: PlannedRun, kind: MemoryKind) -> str:
    """The job that runs a plan again to look at its memory."""
    return f"{run.name}-{kind.value.replace(' ', '-')}"


MEMORY_JOBS: dict[str, tuple[PlannedRun, MemoryKind]] = {
    memory_job(run, kind): (run, kind)
    for run in PLANNED_RUNS.values()
    if run.memory_limit is not None
    for kind in MemoryKind
}


def plan_file(folder: Path, run: PlannedRun) -> Path:
    """File in which the run leaves its plan for the memory job."""
    return folder / f"{run.name}.plan.json"


class CutBy(StrEnum):
    """Rule that cuts the model of a contest."""

    LAYERS = "equal layers"
    PARAMETERS = "equal parameters"  # PipelineModule's own choice
    PROFILE = "profile"


class ContestModel(StrEnum):
    """A model whose layers differ."""

    CNN = "cnn"  # early layers are slow, late layers hold the parameters
    HEAD = "gpt"  # a GPT with a large vocabulary


@dataclass(frozen=True, slots=True, kw_only=True)
class CutContest:
    """One model under 1F1B, cut in each way.

    Arguments:
        num_ranks, num_microbatches: P and M.
        microbatch_size: samples.
        size: height and width of an image, or length of a sequence.
        layers_cut: the module that begins the second stage where both have equally many layers.
        steps: of one repetition, whose value is their median.
    """

    name: str
    model: ContestModel
    num_ranks: int = 2
    num_microbatches: int = 8
    microbatch_size: int
    size: int
    layers_cut: str
    steps: int = 3

    @property
    def described(self) -> str:
        """For people."""
        model = {ContestModel.CNN: "CNN, wide linear layers behind", ContestModel.HEAD: "GPT, large vocabulary"}
        return f"{model[self.model]} 1f1b P={self.num_ranks} M={self.num_microbatches}"


CONTESTS: dict[str, CutContest] = {
    contest.name: contest
    for contest in (
        CutContest(name="cuts-cnn", model=ContestModel.CNN, microbatch_size=8, size=64, layers_cut="5"),
        CutContest(name="cuts-gpt", model=ContestModel.HEAD, microbatch_size=1, size=128, layers_cut="blocks.3"),
    )
}

SCALE = "planning-scale"
SCALES = (  # cluster, layers, sequences of a batch, seconds of CPU that are asked for
    ("128x8", 96, 1_536, 60.0),
    ("128x8", 200, 1_536, 60.0),
    ("10007x1", 96, 6_000, 60.0),
    ("1249x8", 96, 6_000, 60.0),
    ("1250x8", 96, 6_000, 60.0),
    ("1250x8", 200, 6_000, 60.0),
    ("1280x8", 96, 10_240, 60.0),
    ("12288x8", 96, 12_288, 300.0),
    ("12500x8", 96, 12_000, 300.0),
    ("12500x8", 200, 12_000, 300.0),
)
