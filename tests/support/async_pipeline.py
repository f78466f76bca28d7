"""An `AsyncCase` on a PipelineModule: in one process, or as one rank of several."""

from typing import Any

import torch
from torch import nn

from .async_reference import AsyncCase, AsyncOutcome, autocast, case_bounds, make_batch, make_model, optimizer_states
from .models import task_of
from .pipeline import assembled, random_state
from .reference import copied, make_scheduler, pipeline_optimizer


def make_pipeline(case: AsyncCase, model: nn.Module, **options: Any) -> Any:
    inputs, _ = make_batch(case, 0, case.sizes[0])
    settings: dict[str, Any] = {
        "schedule": make_schedule(case),
        "loss_fn": task_of(case.task).loss,
        "optimizer": pipeline_optimizer(case.optimizer),
        "lr_scheduler": make_scheduler(case.decay),
        "max_grad_norm": case.max_grad_norm,
        "example_inputs": inputs,
        "mesh": {"pipe": case.num_ranks},
        "recompute": case.recompute,
        "seed": case.seed,
        "flush_first": case.flush_first,
    }
    if case.feedback is not None:
        from stagewright import ErrorFeedback

        settings["correction"] = ErrorFeedback(
            factor=case.feedback, delay=case.feedback_delay, fresh=case.feedback_fresh
        )
    if isinstance(settings["schedule"], str):
        settings["num_microbatches"] = case.num_microbatches
    if isinstance(model, nn.Sequential):
        settings["cut"] = [str(child) for child in case_bounds(case, len(model))]
    return assembled(model, **(settings | options))


def make_schedule(case: AsyncCase) -> Any:
    """The schedule's name where it says all, else what `build` makes."""
    from stagewright.schedules import build

    defaults = {"update_every": 1, "vertical_sync": False, "warmup": "plain", "replicas": None}
    names = {"pipedream": ["update_every", "vertical_sync"], "paci": ["update_every", "replicas"], "1f1b": ["replicas"]}
    options: dict[str, Any] = {name: getattr(case, name) for name in names.get(case.schedule, ["warmup", "replicas"])}
    if case.schedule != "paci" and all(value == defaults[name] for name, value in options.items()):
        return case.schedule
    return build(case.schedule, num_ranks=case.num_ranks, num_microbatches=case.num_microbatches, **options)


def run(case: AsyncCase) -> AsyncOutcome:
    """Trains on all batches of the case; under several processes on every one of them."""
    torch.manual_seed(5)  # the user's random state, which no call may change
    before = random_state()
    outcome = AsyncOutcome()
    with autocast(case):
        _train(case, outcome)
    if random_state() != before:
        outcome.complaints.append("the global random state was touched")
    return outcome


def _train(case: AsyncCase, outcome: AsyncOutcome) -> None:
    # Under autocast the types between stages are known inside of it: the first batch builds the stages.
    pipe = make_pipeline(case, make_model(case), **({"example_inputs": None} if case.autocast else {}))
    for t, size in enumerate(case.sizes):
        inputs, target = make_batch(case, t, size)
        result = pipe.train_step(*inputs, target)
        _note(result, t, outcome)
        if t < case.flush_first and result.loss_step != t:
            outcome.complaints.append(f"call {t}, with a flush: the loss of step {result.loss_step}")
        if t in case.evals:
            inputs, target = make_batch(case, 100 + t, case.sizes[0])
            outcome.evals.append(pipe.eval_step(*inputs, target).loss)
        if t in case.flushes:
            _flush(pipe, t, outcome)
    _flush(pipe, len(case.sizes) - 1, outcome)
    outcome.state = copied(pipe.full_state_dict())
    outcome.optimizer_state = optimizer_states(pipe.named_parameters(), pipe.optimizers)
    if not all(torch.equal(tensor, outcome.state[name]) for name, tensor in pipe.state_dict().items()):
        outcome.complaints.append("state_dict after a flush is not that of the newest weights")
    pipe.close()


def _note(result: Any, t: int, outcome: AsyncOutcome) -> None:
    """A result that came while batch t was the last one."""
    step, loss = result.loss_step, result.loss
    if result.grad_norm is not None:
        outcome.grad_norms.append(result.grad_norm)
    if step is None or loss is None:
        if (step, loss) != (None, None):
            outcome.complaints.append(f"call {t}: {loss=} of {step=}")
        return
    if step > t:
        outcome.complaints.append(f"call {t}: the loss of step {step}")
    if outcome.losses.setdefault(step, loss) != loss:
        outcome.complaints.append(f"step {step}: losses {outcome.losses[step]} and {loss}")


def _flush(pipe: Any, t: int, outcome: AsyncOutcome) -> None:
    """Every batch so far has its loss after a flush, and flush returns those only that were not returned yet."""
    known = set(outcome.losses)
    rest = pipe.flush()
    steps = [result.loss_step for result in rest]
    if steps != [step for step in range(t + 1) if step not in known]:
        outcome.complaints.append(f"flush after batch {t}: losses of steps {steps}, known before: {sorted(known)}")
    for result in rest:
        _note(result, t, outcome)
    if pipe.flush():
        outcome.complaints.append(f"flush after batch {t}: a second one returns something")
