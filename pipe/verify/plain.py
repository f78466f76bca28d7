"""A batch through the plain module: microbatch by microbatch in one process, with the pipeline's random numbers."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from typing import Any

import torch
from torch import nn

from ...partition.deferred.filling import put, rnns_of
from ...partition.deferred.recipes import filled
from ...partition.model.copies import Copies
from ...partition.model.forms import Arguments, Form, Tensors
from ...partition.model.modes import no_collection
from ...partition.model.units import Entering
from ...partition.model.untouched import StateSnapshot
from ...partition.profiler.memory import device_memory
from ..context import Run
from ..guards.randomness import MERSENNE_WORDS, Seeder
from ..settings.arguments import FIRST
from ..settings.given import Given
from ..settings.model_loss import LossValue
from ..settings.precision import Autocast
from ..stage.loss import with_loss
from ..stage.own_state import tensors_of
from ..telling import tell
from ..update.gradients import added
from .compare import Outcome, graph_of, precision_of, rounded

_TABLES = ("_parameters", "_buffers", "_modules")
_TOO_LARGE = (
    "verify: no copy of the model fits, as it and its gradients take more than an eighth of the memory. In the first "
    "batch each unit is compared with a copy of it instead, one at a time; verify=True makes the copy"
)


class NotVerifiableError(ValueError):
    """Raised if the plain model cannot be run besides the pipeline, or cannot be compared with it."""


class PlainModule:
    """A copy of the user's model, and of a loss that is a module, that is not cut; without weights between two runs.

    `root` has the names of both. Raises NotVerifiableError for a model that cannot be copied, or that uses `others`.
    """

    def __init__(self, model: nn.Module, loss_fn: object, *, given: bool, others: Iterable[torch.Tensor] = ()) -> None:
        self._original = with_loss(model, loss_fn)
        roots = [model, *([loss_fn] if isinstance(loss_fn, nn.Module) else [])]
        with no_collection():  # nearly all objects that it makes are kept
            self._make(Copies(*roots, memo={id(x): x for x in others}), model, loss_fn)
        self._given, self._loss_fn = given, loss_fn
        self.losses: dict[int, float] = {}  # means of the last run, by microbatch
        self._divisors: dict[int, float] = {}  # of its gradients, by update group
        self._give_memory()
        self.unload()

    def _make(self, copies: Copies, model: nn.Module, loss_fn: object) -> None:
        try:
            self._model = copies.of(model)
            self.loss_fn = copies.of(loss_fn) if isinstance(loss_fn, nn.Module) else copies.instead(loss_fn)
        except Exception as error:
            raise NotVerifiableError(
                f"verify needs a copy of the model, and copy.deepcopy(model) fails: {error}. Expected a model that can "
                f"be copied, or verify=False"
            ) from error
        self.root = with_loss(self._model, self.loss_fn)
        if (place := copies.shared(self.root, self.loss_fn)) is not None:
            raise NotVerifiableError(
                f"verify needs a copy of the model with nothing of the model in it, and after copy.deepcopy(model) "
                f"{place} of the copy still uses the model's own modules or tensors. Expected a model that is copied "
                f"as a whole, or verify=False"
            )
        for own, parameter in zip(self.root.parameters(), self._original.parameters(), strict=True):
            own.grad = None
            for hook in (parameter._backward_hooks or {}).values():  # deepcopy leaves them behind
                own.register_hook(copies.instead(hook))  # type: ignore[no-untyped-call]

    def load(
        self, weights: Mapping[str, torch.Tensor], device: torch.device, *, rounding: float = 0.0, number: int = 0
    ) -> None:
        """Sets parameters (`rounded`) and persistent buffers, named as in `state_dict()`."""
        for name, tensor in tensors_of(self.root).items():
            value = weights[name].detach().to(device)
            tensor.data = rounded(value, rounding, number) if isinstance(tensor, nn.Parameter) else value
        for buffer in self.root.buffers():
            buffer.data = buffer.data.to(device)

    def follow(self, *, is_divided: bool, is_new: bool = False) -> None:
        """Takes over later changes of the user's modules: flags, and unless `is_divided` attributes and hooks. If the
        copy `is_new`, only what modules that copy themselves left out, as an fx.GraphModule does hooks."""
        pairs = list(zip(self._original.modules(), self.root.modules(), strict=True))
        followed = [pair for pair in pairs if not is_new or _copies_itself(type(pair[0]))]
        if not followed:
            return
        memo: dict[int, Any] = {id(theirs): own for theirs, own in pairs}
        for theirs, own in pairs:
            for table in ("_parameters", "_buffers"):
                memo |= {id(x): vars(own)[table].get(key) for key, x in vars(theirs)[table].items() if x is not None}
        copies = Copies(*([] if is_divided else [self._original]), memo=memo)
        for theirs, own in followed:
            own.training, held = theirs.training, vars(own)
            for key, value in () if is_divided else vars(theirs).items():
                mine = held.get(key)
                is_empty = isinstance(value, dict | set) and type(mine) is type(value) and not (mine or value)
                is_same = mine is value or is_empty
                if not is_same and key not in _TABLES and "state_dict" not in key:
                    with suppress(Exception):  # what cannot be copied stays
                        held[key] = copies.of(value)
        if not is_divided and not isinstance(self._loss_fn, nn.Module):
            with suppress(Exception):
                self.loss_fn = copies.instead(self._loss_fn)  # it may refer to what has been copied again

    def set_buffers(self, values: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """Sets these buffers, also ones that are not persistent; returns copies of all."""
        buffers = dict(self.root.named_buffers())
        for name, value in values.items():
            buffers[name].data = value.to(buffers[name].device, copy=True)
        return {name: buffer.detach().clone() for name, buffer in buffers.items()}

    def unload(self) -> None:
        for tensor in tensors_of(self.root).values():
            tensor.data = tensor.data.new_empty(0)
            tensor.grad = None

    def _give_memory(self) -> None:
        """Gives memory to copies of tensors without; state is loaded before each run, and other buffers stay."""
        rnns, state = rnns_of(self.root), {id(x) for x in tensors_of(self.root).values()}
        places = [[*root.parameters(), *root.buffers()] for root in (self.root, self._original)]
        for own, theirs in zip(*places, strict=True):
            if own.is_meta:
                values = torch.empty(0, dtype=own.dtype) if id(own) in state else next(filled([theirs]))
                put(rnns, own, values)

    def __call__(self, given: Arguments) -> object:
        """The model's output for these arguments, which it may change in place."""
        given = given.map(torch.clone)
        if not self._given:  # a model that is cut; else stages made by hand, each called with the outputs before
            output: object = given.call(self._model)
            return output
        arguments: tuple[Any, ...] = given.call(lambda *args: args)
        for index, stage in enumerate(self._model.children()):
            value = stage(*arguments)
            is_several = index < len(self._model._modules) - 1 and isinstance(value, tuple | list)
            arguments = tuple(value) if is_several else (value,)
        return arguments[0]

    def run(
        self,
        groups: Sequence[Sequence[tuple[int, Given]]],
        loss_of: Callable[[object, object], LossValue],
        seeder: Seeder,
        *,
        entering: Entering,
        step: int,
        loss_scale: float,
        adders: int,
        each: Callable[[Mapping[str, torch.Tensor]], None] | None = None,
    ) -> Outcome:
        """Trains on all microbatches (k, batch), by update group, under the seeds and the loss scale of the pipeline.
        Gradients are added up as by `adders` in turn. `each` gets those of single microbatches instead, as parts of the
        last run's."""
        total = weight = 0.0
        gradients: dict[str, torch.Tensor | None] = dict.fromkeys(name for name, _ in self.root.named_parameters())
        kept = [(parameter, parameter.grad) for parameter in self._original.parameters()]
        for parameter, _ in kept:
            parameter.grad = None
        roots = self.root, self._original  # a loss may compute with the user's own parameters
        for number, group in enumerate(groups):
            samples = sum(microbatch.num_samples for _, microbatch in group)
            counts, sums = 0.0, dict[str, torch.Tensor]()
            for adder in range(adders):
                for k, microbatch in [one for one in group if one[0] % adders == adder]:
                    seeder.begin(step=step, microbatch=k)
                    try:
                        with torch.enable_grad():
                            with entering(self._model, seeder.enter):
                                output = self(microbatch.arguments)
                            seeder.enter_loss()
                            loss, count = loss_of(output, microbatch.target)
                            items = microbatch.num_samples if count is None else float(count)
                            scaled = loss * ((items if count is None else 1.0) / samples)
                            if scaled.requires_grad:
                                with Autocast.now(seeder.device.type).off():
                                    torch.autograd.backward(scaled * loss_scale)
                    finally:
                        seeder.end()
                    self.losses[k] = float(loss.detach()) / float(count or 1.0)
                    total += float(loss.detach()) * (items if count is None else 1.0)
                    counts += items
                    if each is not None:
                        each(_taken({}, roots, self._divisors[number] * loss_scale))
                _taken(sums, roots, loss_scale)
            divisor = self._divisors[number] = 1.0 if count is None else counts / samples
            weight += counts
            for name in [*sums]:
                gradients[name] = added(gradients[name], sums.pop(name) / divisor)
        for parameter, gradient in kept:
            parameter.grad = gradient
        buffers = dict(self.root.named_buffers())
        return Outcome(loss=total / weight, gradients=gradients, buffers=buffers, outputs=None)

    def evaluate(
        self, microbatches: Sequence[tuple[int, Given]], seeder: Seeder, *, entering: Entering, step: int
    ) -> list[tuple[torch.Tensor, ...]]:
        """Outputs in evaluation mode, by flat output and microbatch. Modules are left in that mode, and as runs leave
        them."""
        columns: list[Tensors] = []
        with torch.no_grad():
            self.root.eval()
            for k, microbatch in microbatches:
                seeder.begin(step=step, microbatch=k)
                try:
                    with entering(self._model, seeder.enter):
                        _, flat = Form.of_output(self(microbatch.arguments))
                finally:
                    seeder.end()
                columns.append(flat)
        return list(zip(*columns, strict=True))


def _copies_itself(kind: type) -> bool:
    ways = ("__deepcopy__", "__reduce_ex__", "__reduce__", "__getstate__", "__setstate__")
    return any(getattr(kind, way, None) is not getattr(nn.Module, way, None) for way in ways)


def _taken(sums: dict[str, torch.Tensor], roots: Sequence[nn.Module], divisor: float) -> dict[str, torch.Tensor]:
    for name, parameter in (one for root in roots for one in root.named_parameters()):
        if parameter.grad is not None:
            sums[name] = added(sums.get(name), parameter.grad / divisor)
            parameter.grad = None
    return sums


class Watch:
    """Notes effects of a module, while it runs plainly, that are not in the tensors that flow through it. `kept`: what
    it reaches, as it is now."""

    def __init__(self, model: nn.Module, kept: StateSnapshot) -> None:
        self._model, self.kept = model, kept
        self._buffers = {name: id(buffer) for name, buffer in model.named_buffers()}
        self._state = dict(_python_state(model))
        self._functions: set[str] = set()
        self._python_random = random.getstate()
        self._draws = False
        self.tolerance = self.rounding = 0.0

    def entering(self, entering: Entering) -> Entering:
        """The same, with a check of whether the model drew from Python's generator."""

        @contextmanager
        def watched(model: nn.Module, enter: Callable[[int], None]) -> Iterator[None]:
            with entering(model, enter):
                yield
            self._look_for_draws()

        return watched

    def _look_for_draws(self) -> None:
        """The generator may have been seeded since the last look; a fresh state has used none of its words."""
        state = random.getstate()
        self._draws |= state != self._python_random and state[1][-1] != MERSENNE_WORDS

    def loss_of(self, loss_of: Callable[[object, object], LossValue]) -> Callable[[object, object], LossValue]:
        def watched(output: object, target: object) -> LossValue:
            value = loss_of(output, target)
            self._look_for_draws()
            nodes = graph_of([value[0]])
            tolerance, rounding = precision_of(nodes)
            self.tolerance, self.rounding = max(self.tolerance, tolerance), max(self.rounding, rounding)
            custom = (type(node) for node in nodes if isinstance(node, torch.autograd.function.BackwardCFunction))
            self._functions.update(kind.__name__.removesuffix("Backward") for kind in custom)
            return value

        return watched

    def suspects(self) -> dict[str, str]:
        """By module name ("" for the whole model), what it does."""
        found: dict[str, str] = {}
        for name, module in self._model.named_modules():
            if module._backward_hooks or module._backward_pre_hooks:
                found[name] = "has a backward hook"
            elif hasattr(module, "_orig_mod"):
                found[name] = "is compiled (torch.compile)"
        for name, parameter in self._model.named_parameters():
            if parameter._backward_hooks or getattr(parameter, "_post_accumulate_grad_hooks", None):
                found.setdefault(_module_of(name), f"has a hook on its parameter {name!r}")
        for name, buffer in self._model.named_buffers():
            if self._buffers.get(name) != id(buffer):
                found.setdefault(_module_of(name), f"assigns its buffer {name!r} anew in forward")
        for name, value in _python_state(self._model):
            if name in self._state and self._state[name] != value:
                found.setdefault(_module_of(name), f"changes its attribute {name!r} in forward")
        everywhere = []
        if self._functions:
            everywhere.append(f"uses the autograd.Function {', '.join(sorted(self._functions))}")
        if self._draws:
            everywhere.append("draws from Python's random module")
        changes = self.kept.surroundings.changes()
        changes = [c for c in changes if not any(isinstance(x, torch.Tensor) for x in c.leaves)]
        everywhere += [f"changes {change.name}" for change in changes[:2]]
        if everywhere:
            found[""] = " and ".join(everywhere)
        return found


def _module_of(name: str) -> str:
    return name.rpartition(".")[0]


def _python_state(model: nn.Module) -> Iterator[tuple[str, object]]:
    for name, module in model.named_modules():
        for key, value in vars(module).items():
            if key != "training" and isinstance(value, bool | int | float | str | None):
                yield (f"{name}.{key}" if name else key), value


def copy_fits(root: nn.Module, device: torch.device) -> bool:
    return 2 * sum(p.numel() * p.element_size() for p in root.parameters()) < device_memory(device) / 8


def copy_to_verify(run: Run) -> PlainModule | None:
    """The plain model, in the process of the last stage; in one process `Verifier` makes it. Collective.

    If it would be too large, the run compares unit by unit; if none can be made, nothing.
    """
    place, plain, why = run.layout.place, None, ""
    if place.process_of(run.layout.schedule.owners[-1][0], tensor=0) == place.world.rank:
        try:
            if run.options.verify == FIRST and not copy_fits(run.root, run.options.device):
                why = _TOO_LARGE
            elif place.world.distributed or run.options.verify != FIRST:  # an error is then told before the first batch
                plain = PlainModule(run.root, run.options.loss_fn, given=run.options.model is None)
        except NotVerifiableError as error:
            if run.options.verify != FIRST:
                raise
            why = f"the first batch is not verified: {error}"
    why = "".join(run.collectives.gather(why, what="asking whether a copy to verify with fits"))
    # A unit on a part is none of the plain model's.
    if max(place.context[1], place.expert[1]) > 1 and why == _TOO_LARGE:
        why = "the first batch is not verified: a copy of the model would take too much memory here"
    run.by_unit = why == _TOO_LARGE
    run.verifies = run.by_unit or not why
    if why:
        tell(why, rank=place.world.rank)
    return plain
