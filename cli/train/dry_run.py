"""`stagewright train --dry-run`: the cut, the grid and the simulated step, without any training.

Costs are proportional to parameters (forward 1 per parameter, backward 2): they show the run's shape, not its seconds.
A real run times its own actions instead.
"""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass

import torch
from torch import Tensor, nn
from torch.optim import Muon

from ...partition.plans.plan import Plan
from ...partition.profiler.optimizers import make_optimizers
from ...schedules import Costs, Schedule, lower_bound, simulate
from ...schedules.wording import count, size, wrapped
from ..own_task import OWN_LOSS, Batch
from .options import TrainOptions
from .pipeline import make_pipe
from .task import Task, make_task

BYTES_A_PARAMETER = 16  # float32 weight, gradient and AdamW's two averages
BYTES_LESS_UNDER_MUON = 4  # it has one average
BYTES_OF_FEEDBACK = 4  # the last update of each parameter
BYTES_A_VERSION = 4  # of a weight for each older version of an asynchronous schedule
GRID_COLUMNS = 80


@dataclass(frozen=True, slots=True, kw_only=True)
class StagePlan:
    stage: int
    ranks: tuple[int, ...]
    name: str
    parameters: int


@dataclass(frozen=True, slots=True, kw_only=True)
class DryRun:
    """Predicted shape of a training run."""

    schedule: str
    num_ranks: int
    num_stages: int
    num_microbatches: int
    parameters: int
    stages: tuple[StagePlan, ...]
    bubble: float  # simulated with costs proportional to parameters
    span_bubble: float
    lower_bound_ratio: float  # makespan / lower bound
    peak_activations: tuple[int, ...]  # per rank, in stage activations
    state_bytes: tuple[int, ...]  # per rank; upper bound of parameters (all versions), gradients and optimizer state
    activation_bytes: tuple[int, ...] | None  # per rank, of the microbatches in flight; None if not counted
    costs: str = "proportional to parameters (forward 1, backward 2); a real run measures its own"


def predict(options: TrainOptions, schedule: Schedule, task: Task) -> DryRun:
    """Cut the model as a run would, and simulate one batch."""
    model, batch = task.make_model(), next(task.batches())
    kept = None
    if options.recompute == "none":
        kept = kept_bytes(model, batch.head(-(-batch.num_samples // schedule.num_microbatches)), task)
    elif options.recompute == "full" and options.model is None:
        kept = stage_input_bytes(options, schedule)
    muons = _bytes_under_muon(model, task)
    pipe = make_pipe(options, schedule, task, model, batch)  # all ranks in this process
    stages = tuple(
        StagePlan(stage=number, ranks=schedule.owners[number], name=name, parameters=parameters)
        for number, (name, parameters) in enumerate(zip(pipe.stage_names, pipe.stage_num_parameters, strict=True))
    )
    weights = [float(stage.parameters) for stage in stages]
    costs = Costs(forward=weights, backward=[2 * weight for weight in weights])
    timeline = simulate(schedule, costs)
    peaks = timeline.peak_activations
    kept_a_parameter = BYTES_A_PARAMETER + (BYTES_OF_FEEDBACK if options.delay_correction == "error-feedback" else 0)
    held = [sum(s.parameters for s in stages if rank in s.ranks) for rank in range(schedule.num_ranks)]
    less = [0] * schedule.num_ranks
    for name, less_bytes in muons.items():
        for rank in {rank for stage in pipe.stages_of[name] for rank in schedule.owners[stage]}:
            less[rank] += less_bytes
    return DryRun(
        schedule=schedule.name,
        num_ranks=schedule.num_ranks,
        num_stages=schedule.num_stages,
        num_microbatches=schedule.num_microbatches,
        parameters=sum(stage.parameters for stage in stages),
        stages=stages,
        bubble=timeline.bubble,
        span_bubble=timeline.span_bubble,
        lower_bound_ratio=timeline.makespan / lower_bound(schedule, costs),
        peak_activations=peaks,
        state_bytes=tuple(
            (kept_a_parameter + (versions - 1) * BYTES_A_VERSION) * parameters - not_kept
            for parameters, versions, not_kept in zip(held, timeline.peak_versions, less, strict=True)
        ),
        activation_bytes=None if kept is None else tuple(round(peak * kept / schedule.num_stages) for peak in peaks),
    )


def _bytes_under_muon(model: nn.Module, task: Task) -> dict[str, int]:
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    made = make_optimizers(task.optimizer, list(model.named_parameters()), where="the model")
    muons = [group for optimizer in made if isinstance(optimizer, Muon) for group in optimizer.param_groups]
    return {names[id(p)]: BYTES_LESS_UNDER_MUON * p.numel() for group in muons for p in group["params"]}


def stage_input_bytes(options: TrainOptions, schedule: Schedule) -> int:
    """Bytes that a GPT keeps per microbatch under recompute="full": each stage's input, float32 [B, T, D]."""
    samples = -(-options.batch_size // schedule.num_microbatches)
    return schedule.num_stages * samples * options.length * options.width * torch.float32.itemsize


def kept_bytes(model: nn.Module, batch: Batch, task: Task) -> int:
    """Bytes that autograd keeps per microbatch over all stages, without parameters, counted in one forward."""
    own = {parameter.untyped_storage().data_ptr() for parameter in model.parameters()}
    kept: dict[int, int] = {}

    def note(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in own:
            kept[storage.data_ptr()] = storage.nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(note, lambda tensor: tensor):
        loss_fn = task.loss_for(batch)
        inputs, target = batch.parted(loss_fn)
        result = model(**inputs) if isinstance(inputs, dict) else model(*inputs)
        if loss_fn != OWN_LOSS:
            assert callable(loss_fn)
            result = loss_fn(result, target)
    assert result is not None  # the graph is still there: no storage was freed and counted a second time
    return sum(kept.values())


def show(options: TrainOptions, what: Schedule | Plan | None) -> int:
    """Print the prediction, as text or as one JSON object; a plan has its own. Raises ValueError for a plan of another
    model."""
    assert what is not None
    if isinstance(what, Plan):
        if what.tensor == 1:  # the members of a tensor group would be other processes
            check_plan(options, what)
        print(what.to_json() if options.json else _plan_text(what))
        return 0
    schedule = what
    answer = predict(options, schedule, make_task(options))
    if options.json:
        print(json.dumps(asdict(answer)))
    else:
        print(_text(answer, schedule))
    return 0


def check_plan(options: TrainOptions, plan: Plan) -> None:
    """Cut the model as the run would, in this process. Raises ValueError for a plan of another model."""
    task = make_task(options)
    make_pipe(options, plan, task, task.make_model(), next(task.batches()))


def _plan_text(plan: Plan) -> str:
    grid = plan.build_schedule().grid()
    return "\n".join(
        [plan.explain(), "", *(_shortened(line) for line in grid.splitlines()), "", "(nothing is trained)"]
    )


def _text(answer: DryRun, schedule: Schedule) -> str:
    width = max(len(stage.name) for stage in answer.stages)
    ranks = [", ".join(map(str, stage.ranks)) for stage in answer.stages]
    room = max(map(len, ("rank", *ranks)))
    lines = [
        f"{count(answer.parameters, 'parameter')} in {count(answer.num_stages, 'stage')} on "
        f"{count(answer.num_ranks, 'rank')}, {answer.schedule}, {count(answer.num_microbatches, 'microbatch')} "
        f"(nothing is trained)",
        "",
        f"stage  {'rank':>{room}}  {'holds':<{width}}  parameters",
        *(
            f"{s.stage:>5}  {own:>{room}}  {s.name:<{width}}  {s.parameters:>10,}"
            for s, own in zip(answer.stages, ranks, strict=True)
        ),
        "",
        *(_shortened(line) for line in schedule.grid().splitlines()),
        "",
        f"simulated bubble   {answer.bubble:.1%} of the makespan, {answer.span_bubble:.1%} of the longest "
        f"span; makespan {answer.lower_bound_ratio:.3f} x the lower bound",
        f"                   costs {answer.costs}",
        "predicted memory   rank   weights, state   activations in flight",
    ]
    for rank, (state, peak) in enumerate(zip(answer.state_bytes, answer.peak_activations, strict=True)):
        activations = answer.activation_bytes
        held = "not counted" if activations is None else size(activations[rank])
        lines.append(f"                   {rank:>4}   {size(state):>14}   {held} ({count(peak, 'stage')})")
    return wrapped("\n".join(lines))


def _shortened(line: str) -> str:
    return line if len(line) <= GRID_COLUMNS else line[: GRID_COLUMNS - 4] + " ..."
