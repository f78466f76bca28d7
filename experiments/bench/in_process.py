"""A step at no compute, in one process: the engine's Python, and autograd beneath it.

A process of its own, with one thread and without torch.distributed.
"""

from __future__ import annotations

import cProfile
import io
import pstats
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median

import torch
import tyro

from ...pipe import PipelineModule
from .models import StagesProblem, drop_gradients, make_problem
from .records import Breakdown, write_records
from .workloads import WORKLOADS, Workload

_STEPS = 20  # of one repetition
_PROFILED_STEPS = 50
_PROFILE_LINES = 30


@dataclass(frozen=True, slots=True, kw_only=True)
class InProcessOptions:
    """Options of the measurement."""

    workloads: tuple[str, ...]
    """Names of workloads with tiny stages."""
    repetitions: int
    """Repetitions of each."""
    out: Path
    """Records go here."""
    profile: bool = False
    """Also run the step under cProfile."""


def main(argv: Sequence[str] | None = None) -> None:
    """Measure and write."""
    options = tyro.cli(InProcessOptions, args=argv)
    torch.set_num_threads(1)
    write_records(
        options.out,
        [
            break_down(WORKLOADS[name], repetitions=options.repetitions, profile=options.profile)
            for name in options.workloads
        ],
    )


def break_down(workload: Workload, *, repetitions: int, profile: bool = False) -> Breakdown:
    """Times of the in-process step and of a bare loop over the same forwards and backwards, in turn."""
    problem = make_problem(workload)
    pipe = PipelineModule(
        stages=make_problem(workload).stages,
        schedule=workload.schedule,
        num_microbatches=workload.num_microbatches,
        num_chunks=workload.num_chunks,
        loss_fn=problem.loss_fn,
        example_inputs=(problem.inputs,),
        mesh={"pipe": workload.num_ranks},
    )

    def pipeline() -> None:
        pipe.forward_backward(problem.inputs, problem.target)
        drop_gradients(pipe.parameters())

    def bare() -> None:
        _bare_step(problem, workload.num_microbatches)

    in_process, autograd = [], []
    for step in (pipeline, bare) * 2:
        step()
    for _ in range(repetitions):
        in_process.append(_seconds(pipeline) / workload.num_microbatches)
        autograd.append(_seconds(bare) / workload.num_microbatches)
    return Breakdown(
        schedule=workload.schedule,
        in_process=in_process,
        autograd=autograd,
        profile=_profile(pipeline) if profile else "",
    )


def _bare_step(problem: StagesProblem, num_microbatches: int) -> None:
    """The least that the stages of a pipeline ask of autograd: each its own leaf, graph and backward."""
    last = len(problem.stages) - 1
    inputs, targets = (
        problem.inputs.tensor_split(num_microbatches),
        problem.target.tensor_split(num_microbatches),
    )
    for x, target in zip(inputs, targets, strict=True):
        leaves, outputs = [], []
        for s, stage in enumerate(problem.stages):
            leaf = x.detach().requires_grad_(s > 0)
            out = stage(leaf) if s < last else problem.loss_fn(stage(leaf), target)
            leaves.append(leaf)
            outputs.append(out)
            x = out
        gradient = torch.full_like(outputs[-1], 1 / num_microbatches)
        for leaf, out in zip(reversed(leaves), reversed(outputs), strict=True):
            torch.autograd.backward((out,), (gradient,))
            if leaf.grad is not None:
                gradient = leaf.grad
    drop_gradients(parameter for stage in problem.stages for parameter in stage.parameters())


def _seconds(step: Callable[[], None]) -> float:
    """The median of some steps."""
    times = []
    for _ in range(_STEPS):
        start = time.perf_counter()
        step()
        times.append(time.perf_counter() - start)
    return median(times)


def _profile(step: Callable[[], None]) -> str:
    profiler = cProfile.Profile()
    profiler.enable()
    for _ in range(_PROFILED_STEPS):
        step()
    profiler.disable()
    stream = io.StringIO()
    pstats.Stats(profiler, stream=stream).strip_dirs().sort_stats("tottime").print_stats(_PROFILE_LINES)
    return stream.getvalue()


if __name__ == "__main__":
    main()
