"""A case in one plain process: the whole model, a microbatch after the other, under the weights that the rule names."""

import copy
import random
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from ..async_reference import AsyncCase, Use, uses
from ..reference import make_optimizers, make_scheduler, mix
from . import changes
from .cases import Call, Case, Outcome
from .models import Batch, first_names, make_batch, make_loss, make_model, units


def flatten(name: str, value: Any) -> Iterator[tuple[str, Tensor]]:
    if isinstance(value, Tensor):
        yield name, value.detach().clone()
    elif isinstance(value, dict):
        for key, one in value.items():
            yield from flatten(f"{name}.{key}", one)
    elif isinstance(value, tuple | list):
        for i, one in enumerate(value):
            yield from flatten(f"{name}.{i}", one)


def joined(name: str, outputs: list[Any]) -> dict[str, Tensor]:
    """Tensors of the outputs of microbatches, as those of the batch."""
    found: dict[str, list[Tensor]] = {}
    for output in outputs:
        for key, tensor in flatten(name, output):
            if tensor.ndim:
                found.setdefault(key, []).append(tensor)
    return {key: torch.cat(tensors) for key, tensors in found.items()}


def batches_of(case: Case, at: int, call: Call) -> list[Batch]:
    """The batch of a call at this place, or the microbatches that it is given as."""
    kind, *sizes = call
    if kind == "train-unequal":
        return [make_batch(case, 100 * at + k, size, length) for k, (size, length) in enumerate(sizes[0])]
    return [make_batch(case, 100 * at, sizes[0], sizes[1])]


class Plain:
    """Runs the calls; `outcome.seen` has what came out, by the number of the call."""

    def __init__(self, case: Case, stage_of: dict[str, int]) -> None:
        self.case, self.stage_of = case, stage_of
        self.outcome = Outcome()
        self.model = make_model(case)
        self.loss = make_loss(case)
        names = {id(p): name for name, p in reversed(self.named())}
        self.optimizers = make_optimizers(case.optimizer, [(names[id(p)], p) for p in dict.fromkeys(self.parameters())])
        scheduler = make_scheduler(case.option("lr_scheduler", False))
        self.schedulers = [] if scheduler is None else [scheduler(optimizer) for optimizer in self.optimizers]
        self.step = self.trained = 0  # batches that were seen, and that were trained on
        self.unit, self.microbatch = 0, 0
        for module in dict.fromkeys(units(self.model)):
            module.register_forward_pre_hook(self._seed, prepend=True)
        self.versions = [self.weights()]
        self.table = self._table()
        self.saved: Any = None

    def named(self) -> list[tuple[str, nn.Parameter]]:
        loss = self.loss.named_parameters() if isinstance(self.loss, nn.Module) else []
        return [*self.model.named_parameters(remove_duplicate=False), *((f"loss_fn.{name}", p) for name, p in loss)]

    def parameters(self) -> list[nn.Parameter]:
        return [parameter for _, parameter in self.named()]

    def weights(self) -> dict[str, Tensor]:
        return {name: parameter.detach().clone() for name, parameter in self.named()}

    def run(self) -> Outcome:
        changes.reset()
        with kept_generators():
            for at, call in enumerate(self.case.calls):
                getattr(self, call[0].replace("-", "_"))(at, call)
            self.state(len(self.case.calls), ())
        changes.reset()
        return self.outcome

    # --- what a batch does ---

    def _seed(self, module: nn.Module, args: Any) -> None:
        if self.model.training:
            seed = mix(self.case.option("seed", 0), self.step, self.microbatch, self.unit)
            torch.default_generator.manual_seed(seed)
            random.seed(seed)
            np.random.seed(seed & 0xFFFFFFFF)
            self.unit += 1

    def _table(self) -> list[list[Use]]:
        """[microbatch][stage] versions, of a stream."""
        case = self.case
        if not case.is_async:
            return []
        trained, drained = 0, []
        for call in case.calls:
            if call[0].startswith("train"):
                trained += 1
            elif trained:
                drained.append(trained - 1)
        return uses(
            AsyncCase(
                task="",
                schedule=case.schedule,
                num_ranks=case.P,
                num_microbatches=case.M,
                update_every=case.group_size,
                vertical_sync=case.option("vertical_sync", False),
                replicas=case.option("replicas"),
                sizes=(1,) * trained,
                flush_first=case.option("flush_first", 0),
                flushes=tuple(drained),
            )
        )

    def _put(self, row: Sequence[Use], which: str) -> None:
        """The weights of a microbatch stand in the model."""
        for name, parameter in self.named():
            use = row[self.stage_of.get(name, len(row) - 1)]
            parameter.data.copy_(self.versions[getattr(use, which)][name])

    def _microbatch(self, batch: Batch) -> tuple[Tensor, Tensor | None]:
        out = self.model(*batch.args, **batch.kwargs)
        if self.loss == "model":
            return out["loss"], None
        loss = self.loss(out, batch.target)
        return loss if isinstance(loss, tuple) else (loss, None)

    def accumulate_one(self, whole: list[Batch], update: bool) -> float:
        """Gradients of one batch; with `update` the optimizer steps behind each update group. Returns the loss."""
        case = self.case
        parts = whole if len(whole) > 1 else self._cut(whole[0])
        group = case.group_size * case.data if update else len(parts)
        samples = sum(part.size for part in parts)
        total, counted = 0.0, 0.0
        for first in range(0, len(parts), group):
            members = parts[first : first + group]
            in_group = sum(part.size for part in members)
            count = sum((float(self._count(part)) for part in members), 0.0) if case.model.loss == "sum-count" else 0.0
            if update:
                self._clear()
            for k, part in enumerate(members, first):
                row = self.table[self.trained * case.M + k // case.data] if case.is_async else None
                if row is not None:
                    self._put(row, "right")
                self.microbatch, self.unit = k, 0
                with autocast(case):  # whose casts of weights must not outlive an update
                    loss, own = self._microbatch(part)
                if row is not None and case.schedule == "paci":
                    self._put(row, "newest")
                share = loss / count if own is not None else loss * (part.size / in_group)
                if share.requires_grad:
                    share.backward()
                total += loss.item() if own is not None else loss.item() * (part.size / samples)
                counted += float(own) if own is not None else 0.0
            if update:
                self._update()
        for scheduler in self.schedulers if update else []:
            if isinstance(scheduler, torch.optim.lr_scheduler.ReduceLROnPlateau):
                scheduler.step(total / counted if counted else total)
        self.step += 1
        return total / counted if counted else total

    def _count(self, part: Batch) -> Tensor:
        assert part.target is not None
        return (part.target > -0.5).sum()

    def _update(self) -> None:
        if self.case.is_async:
            for name, parameter in self.named():
                parameter.data.copy_(self.versions[-1][name])
        if (most := self.case.option("max_grad_norm")) is not None:
            norm = nn.utils.clip_grad_norm_(list(dict.fromkeys(self.parameters())), most)
            self.outcome.seen.setdefault("norms", []).append(float(norm))
        for optimizer in self.optimizers:
            optimizer.step()
        for scheduler in self.schedulers:
            if not isinstance(scheduler, torch.optim.lr_scheduler.ReduceLROnPlateau):
                scheduler.step()
        if self.case.is_async:
            self.versions.append(self.weights())

    # --- calls ---

    def train(self, at: int, call: Call) -> None:
        loss = self.accumulate_one(batches_of(self.case, at, call), update=True)
        self.outcome.seen[f"loss of batch {self.trained}"] = loss
        self.trained += 1
        self._clear()

    def _clear(self) -> None:
        for parameter in self.parameters():
            parameter.grad = None

    train_unequal = train

    def accumulate(self, at: int, call: Call) -> None:
        _, times, size, length, then = call
        for i in range(times):
            batch = make_batch(self.case, 100 * at + i, size, length)
            self.outcome.seen[f"{at}: loss {i}"] = self.accumulate_one([batch], update=False)
        if then == "clip-step":
            norm = nn.utils.clip_grad_norm_(list(dict.fromkeys(self.parameters())), 0.05)
            self.outcome.seen[f"{at}: norm"] = float(norm)
        names = first_names(self.model)
        for name, parameter in self.named():
            if parameter.grad is not None:
                self.outcome.seen[f"{at}: gradient of {names.get(name, name)}"] = parameter.grad.clone()
        for optimizer in self.optimizers if then != "zero" else []:
            optimizer.step()
        self._clear()

    def input_grad(self, at: int, call: Call) -> None:
        batch = make_batch(self.case, 100 * at, *call[1:])
        x = batch.args[0].requires_grad_()
        self.accumulate_one([batch], update=False)
        self.outcome.seen[f"{at}: gradient of the input"] = x.grad
        self._clear()

    def eval(self, at: int, call: Call) -> None:
        total, count, outputs = 0.0, 0.0, []
        with evaluating(self.model, self.case):
            for part in self._parts(at, call):
                out = self.model(*part.args, **part.kwargs)
                outputs.append(out)
                loss = out["loss"] if self.loss == "model" else self.loss(out, part.target)
                value, items = loss if isinstance(loss, tuple) else (loss * part.size, part.size)
                total, count = total + float(value), count + float(items)
        self.outcome.seen[f"{at}: loss"] = total / count
        self.outcome.seen |= joined(f"{at}: output", outputs)

    def predict(self, at: int, call: Call) -> None:
        outputs = []
        with evaluating(self.model, self.case):
            for part in self._parts(at, call):
                kwargs = {key: value for key, value in part.kwargs.items() if key != "labels"}
                outputs.append(self.model(*part.args, **kwargs))
        self.outcome.seen |= joined(f"{at}: prediction", outputs)

    def _parts(self, at: int, call: Call) -> list[Batch]:
        """Microbatches: as many as the batch has samples for."""
        return self._cut(make_batch(self.case, 100 * at, *call[1:]))

    def _cut(self, batch: Batch) -> list[Batch]:
        """Microbatches, as many as there are samples for: of the batch, over processes of what each replica passes."""
        M, data = self.case.M, self.case.data
        if not self.case.gloo:
            return batch.cut(min(batch.size, M * data))
        shares = [share.cut(min(share.size, M)) for share in batch.cut(data)]
        return [part for microbatches in zip(*shares, strict=True) for part in microbatches]

    def change(self, at: int, call: Call) -> None:
        before = self.weights()
        changes.change(self.model, *call[1:])
        self._edited(before)

    def _edited(self, before: dict[str, Tensor]) -> None:
        """What is written by hand becomes every version that is kept."""
        for name, parameter in self.named():
            if name in before and not torch.equal(before[name], parameter):
                for version in self.versions:
                    version[name] = parameter.detach().clone()

    def load_state(self, at: int, call: Call) -> None:
        before = self.weights()
        self._write({key: value * 0.9 if value.is_floating_point() else value for key, value in self._state().items()})
        self._edited(before)

    def _write(self, state: dict[str, Tensor]) -> None:
        own = {name: x for name, x in state.items() if not name.startswith("loss_fn.")}
        self.model.load_state_dict(own)
        with torch.no_grad():
            for name, tensor in self.named():
                if name in state.keys() - own.keys():
                    tensor.copy_(state[name])

    def rate(self, at: int, call: Call) -> None:
        for group in (group for optimizer in self.optimizers for group in optimizer.param_groups):
            group["lr"] = call[1]

    def _state(self) -> dict[str, Tensor]:
        loss = self.loss.state_dict() if isinstance(self.loss, nn.Module) else {}
        state = self.model.state_dict() | {f"loss_fn.{name}": tensor for name, tensor in loss.items()}
        return {name: tensor.detach().clone() for name, tensor in state.items()}

    def state(self, at: int, call: Call) -> None:
        self.outcome.seen |= {f"{at}: state {name}": tensor for name, tensor in self._state().items()}

    def save(self, at: int, call: Call) -> None:
        optimizers = [one.state_dict() for one in (*self.optimizers, *self.schedulers)]
        self.saved = copy.deepcopy((self._state(), optimizers, self.step, self.trained, self.versions))

    def load(self, at: int, call: Call) -> None:
        state, optimizers, self.step, self.trained, self.versions = copy.deepcopy(self.saved)
        self._write(state)
        for one, kept in zip((*self.optimizers, *self.schedulers), optimizers, strict=True):
            one.load_state_dict(kept)

    def forward(self, at: int, call: Call) -> None:
        batch = make_batch(self.case, 100 * at, *call[1:])
        with evaluating(self.model, self.case):
            self.outcome.seen |= dict(flatten(f"{at}: output", self.model(*batch.args, **batch.kwargs)))

    def nothing(self, at: int, call: Call) -> None:
        """A call that leaves the numbers alone: flush, verify, another cut, a batch that is refused."""

    flush = move = verify = bad = nan = fail = other = nothing


def autocast(case: Case) -> AbstractContextManager[Any]:
    return torch.autocast("cpu", torch.bfloat16) if case.option("autocast") else nullcontext()


@contextmanager
def kept_generators() -> Iterator[None]:
    """All of them go on afterwards where they stood."""
    kept = random.getstate(), np.random.get_state()
    try:
        with torch.random.fork_rng(devices=[]):
            yield
    finally:
        random.setstate(kept[0])
        np.random.set_state(kept[1])


@contextmanager
def evaluating(model: nn.Module, case: Case) -> Iterator[None]:
    """In evaluation mode, and then as it was."""
    flags = {module: module.training for module in model.modules()}
    model.eval()
    with torch.no_grad(), autocast(case):
        yield
    for module, flag in flags.items():
        module.training = flag
