"""The protocol of `cases.py` on a PipelineModule: in one process, or as one rank of several."""

import random
import warnings
from typing import Any

import torch
from torch import Tensor, nn

from support.records import records

from .cases import Case, Layout, Outcome
from .models import TASKS, Chain, make_batch
from .reference import copied, make_scheduler, pipeline_optimizer, reference_model


def make_pipeline(case: Case, layout: Layout, model: nn.Module, **options: Any) -> Any:
    inputs, _ = make_batch(case.task, index=0, size=case.batch_sizes[0])
    settings: dict[str, Any] = {
        "schedule": layout.schedule,
        "num_microbatches": case.num_microbatches,
        "num_chunks": layout.num_chunks,
        "loss_fn": TASKS[case.task].loss,
        "optimizer": pipeline_optimizer(case.optimizer),
        "lr_scheduler": make_scheduler(case.decay),
        "max_grad_norm": case.max_grad_norm,
        "example_inputs": inputs,
        "mesh": {"pipe": layout.num_ranks},
        "recompute": list(layout.recompute) if isinstance(layout.recompute, tuple) else layout.recompute,
        "cut": None if layout.cut is None else list(layout.cut),
        "seed": case.seed,
    }
    return assembled(model, **(settings | options))


def assembled(model: nn.Module, **settings: Any) -> Any:
    """A PipelineModule over a model, or over the stages of a `Chain`."""
    from stagewright.pipe import PipelineModule

    what = {"stages": list(model)} if isinstance(model, Chain) else {"model": model}
    return PipelineModule(**records(**what, **({"timeout": 120.0} | settings)))


def run(case: Case, layout: Layout) -> Outcome:
    # It is about time, and said of stages that split their backward and have little but an LSTM.
    warnings.filterwarnings("ignore", message="the schedule splits the backward of stage")
    torch.manual_seed(5)  # the user's random state, which no call may change
    before = random_state()
    model = reference_model(case)
    pipe = make_pipeline(case, layout, model)
    outcome = Outcome()
    sizes = case.batch_sizes
    names = {name for name, _ in model.named_parameters(remove_duplicate=False)}
    _own_parameters(pipe, model, layout, outcome)

    def batch(call: int) -> tuple[Any, ...]:
        inputs, target = make_batch(case.task, index=call, size=sizes[call])
        return (*inputs, target)

    def forward_backward(call: int) -> dict[str, Tensor]:
        clear(pipe)
        outcome.losses.append(pipe.forward_backward(*batch(call)).loss)
        found = {name: p.grad.clone() for name, p in pipe.named_parameters() if p.grad is not None}
        clear(pipe)
        if not found.keys() <= names:
            outcome.complaints.append(f"unknown parameter names {sorted(found.keys() - names)}")
        return found

    outcome.first_grads = forward_backward(0)
    outcome.first_state = copied(pipe.full_state_dict())
    for call in range(1, len(sizes) - 1):
        result = pipe.train_step(*batch(call))
        outcome.losses.append(result.loss)
        outcome.grad_norms.append(result.grad_norm)
        if result.loss_step != call:
            outcome.complaints.append(f"call {call}: loss_step {result.loss_step}")
    evaluation = pipe.eval_step(*batch(0))
    outcome.eval_loss, outcome.eval_output = evaluation.loss, evaluation.output
    has_last = pipe.num_ranks == 1 or pipe.rank in pipe.schedule.owners[-1] or _in_process(layout)
    if has_last != (evaluation.output is not None):
        outcome.complaints.append(f"output of eval_step: {has_last=}, got {evaluation.output!r}")
    outcome.last_grads = forward_backward(len(sizes) - 1)
    outcome.state = copied(pipe.full_state_dict())
    if random_state() != before:
        outcome.complaints.append("the global random state was touched")
    pipe.close()
    return outcome


def clear(pipe: Any) -> None:
    for parameter in pipe.parameters():
        parameter.grad = None


def _own_parameters(pipe: Any, model: nn.Module, layout: Layout, outcome: Outcome) -> None:
    mine = {id(p) for p in pipe.parameters()}
    users = {id(p) for p in model.parameters()}
    if _in_process(layout) and mine != users:
        outcome.complaints.append("pipe.parameters() are not the user's own Parameter objects")


def _in_process(layout: Layout) -> bool:
    return not (torch.distributed.is_available() and torch.distributed.is_initialized())


def random_state() -> tuple[bytes, Any]:
    return torch.get_rng_state().numpy().tobytes(), random.getstate()
