"""The same calls on a PipelineModule: in one process, or as one rank of several."""

import copy
import math
import random
import tempfile
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor, nn

from support.inside import chain
from support.records import records
from support.reference import make_scheduler, pipeline_optimizer
from support.replay_cases import random_order

from . import changes
from .cases import Call, Case, Outcome
from .models import CHAINS, Batch, blocks_of, first_names, make_batch, make_loss, make_model
from .plain import autocast, batches_of, evaluating, flatten, kept_generators

KEPT_BY_NAME = ("recompute", "max_grad_norm", "seed", "flush_first", "data_parallel", "verify")


EDITS: dict[str, Callable[[Any], Any]] = {
    "checkpoint": lambda at: at.checkpoint(),
    "gelu": lambda at: at.keep_less("gelu"),
    "replace": lambda at: at.replace(copy.deepcopy),
    "dtype": lambda at: at.dtype(torch.float64),
    "compile": lambda at: at.compile("eager"),
}


def _built(case: Case) -> nn.Module:
    if not case.is_deferred:
        return make_model(case)
    from support.inside import recording

    with patch.object(recording, "SMALL", 1), recording.deferred():
        return make_model(case)


class AcceptedError(AssertionError):
    """A bad batch was taken."""


def make_schedule(case: Case) -> Any:
    from stagewright.schedules import Op, build

    if case.schedule == "custom":
        draw, S = random.Random(case.seed), case.num_stages
        places = [[s % case.P] for s in range(S)]
        if draw.random() < 0.5:
            draw.shuffle(places)
        gradients = [[draw.choice((Op.B, Op.B, Op.I)) for _ in range(S)]] * case.M
        return random_order(draw, places, chain(S), gradients, num_ranks=case.P)
    if not case.builder:
        return case.schedule
    chunks = {} if case.V is None else {"num_chunks": case.V}
    return build(case.schedule, num_ranks=case.P, num_microbatches=case.M, **chunks, **dict(case.builder))


def make_pipeline(case: Case, model: nn.Module, loss: Any) -> Any:
    from stagewright.pipe import PipelineModule, edit

    schedule = make_schedule(case)
    axes = {"pipe": case.P, "data": case.data, "tensor": case.tensor}
    options: dict[str, Any] = {name: case.option(name) for name in KEPT_BY_NAME if case.option(name) is not None}
    options |= {"schedule": schedule, "mesh": {axis: size for axis, size in axes.items() if size > 1 or axis == "pipe"}}
    if isinstance(schedule, str):
        options |= {"num_microbatches": case.M, "num_chunks": case.V}
    if case.tensor > 1:
        options["tensor_parallel"] = {"blocks.*.up": "column", "blocks.*.down": "row"}
    if case.model.inputs == "positions":
        options["batch_dims"] = {"positions": None}
    if case.model.loss == "model":
        options["loss_weight"] = "samples"
    if (points := case.option("cut")) is not None:
        options["cut"] = list(points)
    if isinstance(options.get("recompute"), tuple):
        options["recompute"] = (
            dict(options["recompute"])
            if case.option("recompute")[0][0] == "memory_budget" or case.option("recompute")[0][0].count(".")
            else list(options["recompute"])
        )
    if not case.is_lazy:
        batch = local(case, make_batch(case, 0, *_first_sizes(case)))
        given = replace(batch, target=None).whole
        options["example_inputs"] = given if isinstance(given, tuple | dict) else (given,)
    what: dict[str, Any] = {"stages": list(model.children())} if case.model.style == "stages" else {"model": model}
    if case.option("edits"):
        what["model"] = edit(model)
        for name, word in case.option("edits"):
            EDITS[word](what["model"][name])
    return PipelineModule(
        **records(
            **what,
            **options,
            loss_fn=loss,
            optimizer=pipeline_optimizer(case.optimizer),
            lr_scheduler=make_scheduler(case.option("lr_scheduler", False)),
            timeout=60.0,
        )
    )


def _first_sizes(case: Case) -> tuple[int, int]:
    for call in case.calls:
        if call[0] == "train":
            return call[1], call[2]
    return case.M * case.data, 3


def local(case: Case, batch: Batch) -> Batch:
    """The batch of this process's data replica; in one process the batch is shared out."""
    if not case.gloo or case.data == 1:
        return batch
    return batch.cut(case.data)[torch.distributed.get_rank() // case.tensor % case.data]


class Piped:
    def __init__(self, case: Case, folder: Path) -> None:
        self.case, self.folder = case, folder
        self.outcome = Outcome()
        self.begin(_built(case))
        self.done: list[Call] = []
        self.memory: dict[str, Any] = {}
        self.other_steps = self.other_steps_saved = 0  # forward_backward counts as a step, too

    def begin(self, model: nn.Module) -> None:
        self.model, self.loss = model, make_loss(self.case)
        self.names = first_names(model)
        self.pipe = make_pipeline(self.case, model, self.loss)

    def run(self) -> Outcome:
        changes.reset()
        torch.manual_seed(5)
        random_state = torch.get_rng_state(), random.getstate()
        for at, call in enumerate(self.case.calls):
            self.outcome.at = at
            # With the last update under way, a program flushes before it looks at weights: docs/guides/schedules.md.
            if self.case.is_async and call[0] not in ("train", "train-unequal"):
                self.note(self.pipe.flush())
            with autocast(self.case):
                getattr(self, call[0].replace("-", "_"))(at, call)
            if call[0] in ("change", "rate"):
                self.done.append(call)
        self.outcome.at = len(self.case.calls)
        self.note(self.pipe.flush())
        self.state(len(self.case.calls), ())
        if self.case.schedule in ("pipedream", "paci"):  # whose rule asks for it
            self.outcome.stages = {name: stages[0] for name, stages in self.pipe.stages_of.items()}
        self.pipe.close()
        if not torch.equal(random_state[0], torch.get_rng_state()) or random_state[1] != random.getstate():
            self.outcome.seen["the user's random state was touched"] = 1.0
        changes.reset()
        return self.outcome

    def note(self, results: Any) -> None:
        for result in results:
            if result.grad_norm is not None:
                self.outcome.seen.setdefault("norms", []).append(result.grad_norm)
            if result.loss is not None:
                key = f"loss of batch {result.loss_step - self.other_steps}"
                self.outcome.seen[key] = result.loss

    def filled(self, batch: Batch) -> Batch:
        """With `refill`, in the memory of the batch before of this size."""
        if not self.case.refill:
            return batch

        def put(name: str, tensor: Tensor) -> Tensor:
            key = f"{name} {tuple(tensor.shape)} {tensor.dtype}"
            if key in self.memory:
                return self.memory[key].copy_(tensor)
            self.memory[key] = tensor
            return tensor

        counter = iter(range(100))
        return batch.part(lambda tensor: put(str(next(counter)), tensor))

    def batch(self, at: int, size: int, length: int, number: int = 0) -> Batch:
        return local(self.case, make_batch(self.case, 100 * at + number, size, length))

    def called(self, method: Callable[..., Any], batch: Batch, at: int) -> Any:
        if (self.case.seed + at) % 3 == 0 or self.case.model.style in CHAINS:
            return method(*batch.positional, **batch.kwargs)
        whole = batch.by_name
        return method(**whole) if (self.case.seed + at) % 3 == 1 else method(whole)

    # --- calls ---

    def train(self, at: int, call: Call) -> None:
        batches = batches_of(self.case, at, call)
        if len(batches) > 1:
            result = self.pipe.train_step(microbatches=[batch.whole for batch in batches])
        else:
            result = self.called(self.pipe.train_step, self.filled(local(self.case, batches[0])), at)
        self.note([result])
        if not self.case.is_async and result.loss is None:
            self.outcome.seen[f"{at}: no loss"] = 0.0

    train_unequal = train

    def accumulate(self, at: int, call: Call) -> None:
        _, times, size, length, then = call
        for i in range(times):
            batch = self.filled(self.batch(at, size, length, i))
            result = self.called(self.pipe.forward_backward, batch, at)
            self.outcome.seen[f"{at}: loss {i}"] = result.loss
            self.other_steps += 1
        if then == "clip-step":
            self.outcome.seen[f"{at}: norm"] = self.pipe.clip_grad_norm_(0.05)
        for name, parameter in self.pipe.named_parameters():
            if parameter.grad is not None and self.case.tensor == 1:
                self.outcome.seen[f"{at}: gradient of {self.names.get(name, name)}"] = parameter.grad.clone()
        if then != "zero":
            for optimizer in self.pipe.optimizers:
                optimizer.step()
        for parameter in self.pipe.parameters():
            parameter.grad = None

    def input_grad(self, at: int, call: Call) -> None:
        batch = self.batch(at, *call[1:])
        x = batch.args[0].requires_grad_()
        self.pipe.forward_backward(*batch.positional, **batch.kwargs)
        self.other_steps += 1
        if x.grad is not None or not self.case.gloo:
            self.outcome.seen[f"{at}: gradient of the input"] = x.grad
        for parameter in self.pipe.parameters():
            parameter.grad = None

    def eval(self, at: int, call: Call) -> None:
        batch = self.batch(at, *call[1:])
        result = self.called(self.pipe.eval_step, batch, at)
        self.outcome.seen[f"{at}: loss"] = result.loss
        if not self.case.parts_outputs:
            self.outcome.seen |= {key: value for key, value in flatten(f"{at}: output", result.output) if value.ndim}

    def predict(self, at: int, call: Call) -> None:
        batch = self.batch(at, *call[1:])
        kwargs = {key: value for key, value in batch.kwargs.items() if key != "labels"}
        output = self.pipe.predict(*batch.args, **kwargs)
        if not self.case.parts_outputs:
            self.outcome.seen |= {key: value for key, value in flatten(f"{at}: prediction", output) if value.ndim}

    def verify(self, at: int, call: Call) -> None:
        batch = self.batch(at, *call[1:])
        self.pipe.verify(*batch.positional, **batch.kwargs)

    def nan(self, at: int, call: Call) -> None:
        """A loss that is not finite: no update, and the next call is that step once more."""
        from stagewright.pipe import NonFiniteLossError

        batch = self.batch(at, *call[1:])
        batch = _on_first(_tensor(lambda x: x * math.nan))(batch)
        try:
            result = self.pipe.train_step(*batch.positional, **batch.kwargs)
        except NonFiniteLossError:
            return
        raise AcceptedError(f"a loss that is not finite was taken: {result}")

    def change(self, at: int, call: Call) -> None:
        with kept_generators():  # a module that is added draws its weights
            changes.change(self.model, *call[1:])

    def rate(self, at: int, call: Call) -> None:
        for optimizer in self.pipe.optimizers:
            for group in optimizer.param_groups:
                group["lr"] = call[1]

    def flush(self, at: int, call: Call) -> None:
        self.note(self.pipe.flush())

    def state(self, at: int, call: Call) -> None:
        full = self.pipe.full_state_dict()
        self.outcome.seen |= {f"{at}: state {name}": tensor.clone() for name, tensor in full.items()}

    def load_state(self, at: int, call: Call) -> None:
        state = self.pipe.full_state_dict()
        self.pipe.load_state_dict({k: v * 0.9 if v.is_floating_point() else v for k, v in state.items()})

    def save(self, at: int, call: Call) -> None:
        self.pipe.save(self.folder / "kept")
        self.other_steps_saved = self.other_steps

    def load(self, at: int, call: Call) -> None:
        self.pipe.load(self.folder / "kept")
        self.other_steps = self.other_steps_saved

    def move(self, at: int, call: Call) -> None:
        self.pipe.save(self.folder / f"moved-{at}")
        self.pipe.close()
        options = tuple(pair for pair in self.case.options if pair[0] != "cut")
        self.case = replace(self.case, options=options, **dict(call[1]))
        self.begin(make_model(replace(self.case, seed=self.case.seed + 1)))
        for before in self.done:
            if before[0] == "change" and before[1] not in changes.VALUES:
                changes.change(self.model, *before[1:])
        if self.case.is_lazy:
            batch = local(self.case, make_batch(self.case, 0, *_first_sizes(self.case)))
            self.pipe.build(*batch.positional, **batch.kwargs)
        self.pipe.load(self.folder / f"moved-{at}")

    def fail(self, at: int, call: Call) -> None:
        block = blocks_of(self.model)[-1]
        block.fails = True
        batch = self.batch(at, *call[1:])
        try:
            self.called(self.pipe.train_step, batch, at)
        except ArithmeticError:
            block.fails = False
            return
        raise AcceptedError("what the model raises is lost")

    def other(self, at: int, call: Call) -> None:
        case = replace(self.case, seed=self.case.seed + 1, is_lazy=True)
        pipe = make_pipeline(case, make_model(case), make_loss(case))
        batch = local(case, make_batch(case, 100 * at, *call[1:]))
        pipe.train_step(*batch.positional, **batch.kwargs)
        pipe.close()

    def forward(self, at: int, call: Call) -> None:
        batch = make_batch(self.case, 100 * at, *call[1:])
        with evaluating(self.model, self.case):
            self.outcome.seen |= dict(flatten(f"{at}: output", self.model(*batch.args, **batch.kwargs)))

    def bad(self, at: int, call: Call) -> None:
        """A batch that plain PyTorch refuses: a ValueError, and all goes on."""
        _, kind, size, length = call
        batch = BAD[kind](self.batch(at, size, length))
        try:
            result = self.pipe.train_step(*batch.positional, **batch.kwargs)
        except (ValueError, RuntimeError) as error:
            from .verdict import is_clear

            if kind != "target" and not is_clear(error):  # what the user's loss raises is its own
                raise AcceptedError(f"bad batch {kind}: no clear refusal: {error!r}") from error
            return
        raise AcceptedError(f"a bad batch ({kind}) was taken: {result}")


def _on_first(change: Callable[[Any], Any]) -> Callable[[Batch], Batch]:
    def changed(batch: Batch) -> Batch:
        if batch.args:
            return replace(batch, args=(change(batch.args[0]), *batch.args[1:]))
        return replace(batch, kwargs=batch.kwargs | {"x": change(batch.kwargs["x"])})

    return changed


def _tensor(change: Callable[[Tensor], Any]) -> Callable[[Any], Any]:
    return lambda value: {**value, "first": change(value["first"])} if isinstance(value, dict) else change(value)


BAD: dict[str, Callable[[Batch], Batch]] = {
    "type": _on_first(_tensor(lambda x: x.float())),
    "width": _on_first(_tensor(lambda x: torch.cat([x, x], -1) if x.is_floating_point() else x.double())),
    "text": _on_first(lambda x: "a batch"),
    "none": _on_first(lambda x: None),
    "fewer": _on_first(_tensor(lambda x: x[:-1])),
    "keyword": lambda batch: replace(batch, kwargs=batch.kwargs | {"unknown": torch.ones(batch.size)}),
    "argument": lambda batch: replace(batch, args=(*batch.args, *([torch.ones(batch.size)] * 3))),
    "target": lambda batch: replace(
        batch, target=batch.target[:, :, :-1] if batch.target.ndim == 3 else batch.target[:-1]
    ),  # type: ignore[index,union-attr]
    "empty": lambda batch: batch.part(lambda tensor: tensor[:0]),
}


def run(case: Case, *, folder: str | None = None) -> Outcome:
    with tempfile.TemporaryDirectory() as made, kept_generators():
        piped: Piped | None = None
        try:
            piped = Piped.__new__(Piped)
            Piped.__init__(piped, case, Path(folder or made))
            return piped.run()
        except Exception as error:  # whatever it is, it is the case's outcome
            from .verdict import is_clear, story

            outcome = getattr(piped, "outcome", Outcome())
            outcome.error, outcome.is_clear = story(error), is_clear(error)
            return outcome
        finally:
            changes.reset()
