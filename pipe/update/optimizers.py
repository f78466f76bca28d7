"""Optimizers: one or several per stage, over that stage's parameters, each with its learning-rate schedule; and their
options (rates, betas, decay), copied, compared, and changed by a user while batches run.

In a stream the update of batch t runs in call t on the last stages, and in call t + 1 on the first. A user's change
before call t applies from the update of batch t on, on every stage, as in one process:

    call t      the changes are read, and wait
    update b    those of calls up to b are applied; after it, the user sees the waiting ones again
"""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from typing import Any
from unittest.mock import patch

import torch
from torch import nn
from torch.optim.lr_scheduler import LRScheduler

from ...partition.profiler.optimizers import (
    NamedParameters,
    OptimizerFactory,
    make_optimizers,
    option_number,
    required_arguments,
)
from ..guards.separable import known_to_separate, refuse_shared_statistic, separable
from ..settings.arguments import SchedulerFactory
from ..settings.delay_correction import Feedback
from ..shards.shard import Shard, ShardedParameter
from ..stage.weights import WeightVersions


class StageOptimizers:
    """The optimizers of one stage and their learning-rate schedules; none where the stage has no parameter to train.

    Raises ValueError for a wrong type of optimizer or scheduler, for a parameter that was not given, or is held twice.
    """

    def __init__(
        self,
        stage: int,
        parameters: Sequence[tuple[str, nn.Parameter]],
        factory: OptimizerFactory,
        lr_scheduler: SchedulerFactory | None,  # called once for each optimizer
        *,
        where: str,
        model: Collection[int],  # ids of all of the model's parameters
        # Of the stage's weights, under an asynchronous schedule: then optimizers may hold only the model's tensors.
        versions: WeightVersions | None = None,
        feedback: Feedback | None = None,  # corrects late gradients
    ) -> None:
        self.stage = stage
        self.versions = versions
        # By id of a parameter, and of a part in its place.
        self.names = {id(parameter): name for name, parameter in parameters}
        self.named, self._parameters = [*parameters], [parameter for _, parameter in parameters]
        self._feedback = feedback
        self._take: Callable[[str, torch.Tensor | None], None] | None = None  # instead of a step
        self.is_tried = False  # for a statistic over several stages
        self.parts: Mapping[str, ShardedParameter] = {}
        self._away: list[tuple[torch.optim.Optimizer, dict[str, Any], nn.Parameter]] = []  # wholes replaced by parts
        # In the order in which they were returned. They are made with whole parameters, whose groups may depend on
        # shapes and names, and hold parts of them after `divide`.
        self.optimizers = tuple(make_optimizers(factory, parameters, where=where)) if parameters else ()
        self._refuse_others(where, model)
        self._refuse_twice(where)
        # Of each optimizer; empty without `lr_scheduler`.
        self.schedulers = tuple(_scheduler(lr_scheduler, one) for one in self.optimizers if lr_scheduler is not None)
        self.options = BatchOptions(self.optimizers)

    def refuse_to_divide(self, names: Collection[str]) -> None:
        """ValueError for an optimizer that needs one of these parameters whole, of which each process has a part."""
        for optimizer in self.optimizers:
            held = [self.names.get(id(parameter)) for parameter in parameters_of(optimizer)]
            name = next((each for each in held if each in names), None)
            if name is None:
                continue
            kind = known_to_separate(optimizer)
            if kind != "elements":
                reason = "" if kind is None else ": it needs whole parameters"
                raise ValueError(
                    f"optimizer {type(optimizer).__name__} holds {name!r}, which a group divides, and "
                    f"is not known to update each element independently, as each process must with its part of the "
                    f"weight{reason}. Expected one such as AdamW for it, an attribute separable = 'elements' of its "
                    f"class where it does, or a module that is not divided"
                )

    def whole_names(self) -> set[str]:
        """Names of the parameters that may not be cut, since their optimizer needs each whole. Raises ValueError for an
        optimizer that needs all of its parameters together."""
        wholes = [one for one in self.optimizers if separable(one) == "parameters"]
        return {self.names[id(p)] for one in wholes for p in parameters_of(one) if id(p) in self.names}

    def refuse_shared_statistics(
        self, model: Sequence[tuple[str, nn.Parameter]], asked: Callable[[NamedParameters], dict[int, str | None]]
    ) -> list[str]:
        """Names of the optimizers that are of an unknown kind, or have a hook. ValueError for one that updates this
        stage's parameters otherwise than one over all of the model's parameters would. `model`: (name, parameter) of
        the whole model. `asked`: `options_of` for this optimizer=: named parameters -> options by id of a parameter."""
        kinds = []
        if self.parts or len(self._parameters) < sum(p.requires_grad for _, p in model):
            tried = partial(refuse_shared_statistic, model=[p for _, p in model], own_hook=self._refuse_by_hand)
            kinds = [type(optimizer).__name__ for optimizer in self.optimizers if tried(optimizer)]
            whole = asked([*model]) if (own := asked(self.named)) else {}  # with no copies of replicas
            if other := [self.names[key] for key in own.keys() & whole.keys() if own[key] != whole[key]]:
                raise ValueError(
                    f"optimizer= gives {shown(sorted(other))} other options when called with the parameters of stage "
                    f"{self.stage} than with all of the model's, as in one process: expected options that depend on a "
                    f"parameter's name (stagewright.named) or shape, and not on its position or on how many there are"
                )
        self.is_tried = True
        return kinds

    def divide(self, parts: Mapping[str, ShardedParameter]) -> None:
        """Hold these parts in place of their parameters; none where a part is empty."""
        self.parts = parts
        self.names.update({id(part.parameter): name for name, part in parts.items()})
        for optimizer in self.optimizers:
            optimizer.register_step_pre_hook(self._refuse_by_hand)
            optimizer.zero_grad = partial(self._zero, optimizer, optimizer.zero_grad)  # type: ignore[method-assign]
            for group in optimizer.param_groups:
                kept: list[tuple[int, nn.Parameter]] = []
                for position, parameter in enumerate(group["params"]):
                    part = parts.get(self.names.get(id(parameter), ""))
                    if part is None:
                        kept.append((position, parameter))
                        continue
                    self._away.append((optimizer, group, part.whole))
                    state = optimizer.state.pop(parameter, None)
                    if not part.is_empty:
                        kept.append((position, part.parameter))
                        if state is not None:
                            optimizer.state[part.parameter] = part.state_of(state)
                group["params"] = [parameter for _, parameter in kept]
                if "param_names" in group:
                    group["param_names"] = [group["param_names"][position] for position, _ in kept]

    def _refuse_by_hand(self, optimizer: torch.optim.Optimizer, *_: object) -> None:
        """ValueError for gradients that this step would miss; in `train_step` the parts have them."""
        name = next((self.names[id(p)] for one, _, p in self._away if one is optimizer and p.grad is not None), None)
        if name is not None:
            raise ValueError(
                f"optimizer {type(optimizer).__name__} is stepped by hand, and holds a part of {name!r} without its "
                f"gradient: expected pipe.train_step(...), which adds those there, or data_parallel='replicate'"
            )

    def _zero(self, optimizer: torch.optim.Optimizer, zero: Callable[..., None], *args: Any, **options: Any) -> None:
        zero(*args, **options)
        for one, _, whole in self._away:
            whole.grad = None if one is optimizer else whole.grad

    def names_in(self, optimizer: torch.optim.Optimizer, group: Mapping[str, Any]) -> list[str]:
        """Names of the parameters of a group, those of empty parts too; ValueError for a tensor without a name."""
        away = [whole for _, theirs, whole in self._away if theirs is group]
        for parameter in group["params"]:
            if id(parameter) not in self.names:
                raise ValueError(
                    f"optimizer {type(optimizer).__name__} holds a tensor of shape {tuple(parameter.shape)} that is "
                    f"not the model's, so that a checkpoint has no name for it: expected the module that owns it as "
                    f"loss_fn="
                )
        return list(dict.fromkeys(self.names[id(parameter)] for parameter in [*group["params"], *away]))

    def shard(self, name: str, of: Shard) -> Shard:
        """Shard of a parameter that the optimizer here holds, also of state tensors with the parameter's shape. `of`:
        this rank's shard of the parameter in training."""
        return self.parts[name].shard(of) if name in self.parts else of

    def held_back(self, take: Callable[[str, torch.Tensor | None], None]) -> AbstractContextManager[object]:
        """Context in which `take` gets each parameter's name and gradient (the part's of a divided one) instead of a
        step; weights and rates do not change."""
        return patch.object(self, "_take", take)

    def holds(self, tensor: torch.Tensor) -> bool:
        return any(parameter is tensor for parameter in self._held())

    def unheld(self) -> list[str]:
        held = {self.names.get(id(parameter)) for parameter in self._held()}
        return [name for name in dict.fromkeys(self.names.values()) if name not in held]

    def tensors(self) -> list[torch.Tensor]:
        states = [state for optimizer in self.optimizers for state in optimizer.state.values()]
        return [value for state in states for value in state.values() if isinstance(value, torch.Tensor)]

    def option_numbers(self) -> dict[int, int]:
        """By id of a parameter: a checksum, below 65,536, of its options (rates, betas, ...)."""
        numbers: dict[int, int] = {}
        for optimizer in self.optimizers:
            for group in optimizer.param_groups:
                number = option_number(optimizer, group)
                numbers.update((id(parameter), number) for parameter in group["params"])
        numbers.update((id(whole), option_number(optimizer, group)) for optimizer, group, whole in self._away)
        return numbers

    def corrects(self, name: str) -> bool:
        return self._feedback is not None and self._feedback.factors.get(name, 0.0) > 0

    def step(self, loss: float | None, *, skipped: bool = False, is_fresh: bool = False) -> None:
        """Update, step the learning rates, drop the gradients, also those that no optimizer holds.

        Arguments:
            loss: mean of the batch whose last update this is, for schedules that use it; None for an earlier update.
            skipped: whether gradients are only dropped, since they overflowed.
            is_fresh: whether gradients are not late, though the schedule's are.
        """
        if self._take is not None:
            for parameter in self._parameters:
                name = self.names[id(parameter)]
                own = self.parts[name].parameter if name in self.parts else parameter
                self._take(name, own.grad)
        elif not skipped:
            for optimizer in self.optimizers:
                feedback = self._feedback
                with nullcontext() if feedback is None else feedback.around(optimizer, self.names, is_fresh=is_fresh):
                    optimizer.step()
            for scheduler in self.schedulers:
                if loss is not None or not required_arguments(scheduler):
                    scheduler.step(**dict.fromkeys(required_arguments(scheduler), loss))
            for part in self.parts.values():
                part.settle()
        for optimizer in self.optimizers:
            optimizer.zero_grad(set_to_none=True)
        for parameter in self._parameters:
            parameter.grad = None
        for part in self.parts.values():
            part.parameter.grad = None
        torch.clear_autocast_cache()  # an autocast around the whole loop would reuse casts of the old weights

    def _held(self) -> Iterator[nn.Parameter]:
        for optimizer in self.optimizers:
            yield from parameters_of(optimizer)
        yield from (whole for _, _, whole in self._away)

    def _refuse_others(self, where: str, model: Collection[int]) -> None:
        for parameter in self._held():
            is_models = id(parameter) in model
            if id(parameter) not in self.names and (is_models or self.versions is not None):
                holder = next(one for one in self.optimizers if any(parameter is p for p in parameters_of(one)))
                what = f", one of the model's, but not of {where}" if is_models else ""
                raise ValueError(
                    f"optimizer {type(holder).__name__} holds a parameter of shape {tuple(parameter.shape)} that it "
                    f"was not given{what}: expected the parameters that optimizer= is called with, once per stage; or, "
                    f"for a tensor of the loss, the module that owns it as loss_fn="
                )

    def _refuse_twice(self, where: str) -> None:
        seen: set[int] = set()
        for parameter in self._held():
            if id(parameter) in seen:
                name = self.names.get(id(parameter), f"of shape {tuple(parameter.shape)}")
                raise ValueError(
                    f"parameter {name!r} of {where} is held twice by what optimizer= returned: expected each parameter "
                    f"in one group of one optimizer"
                )
            seen.add(id(parameter))


def warn_of_unheld(stages: Iterable[StageOptimizers]) -> None:
    names = sorted({name for one in stages for name in one.unheld()})
    if names:
        warnings.warn(
            f"no optimizer that optimizer= returned holds {shown(names, 5)}: train_step does not update them and drops "
            f"their gradients, which count in the gradient norm. Expected requires_grad_(False) for parameters that "
            f"are not trained",
            stacklevel=2,
        )


def parameters_of(optimizer: torch.optim.Optimizer) -> Iterator[nn.Parameter]:
    for group in optimizer.param_groups:
        yield from group["params"]


def _scheduler(factory: SchedulerFactory, optimizer: torch.optim.Optimizer) -> LRScheduler:
    made = factory(optimizer)
    if not callable(getattr(made, "step", None)):
        raise ValueError(
            f"lr_scheduler= returned {type(made).__name__}: expected a callable that takes an optimizer "
            f"and returns a scheduler, such as lambda optimizer: StepLR(optimizer, step_size=100)"
        )
    needed = required_arguments(made)
    if len(needed) > 1 or {"epoch", "num_updates", "step", "current_step"}.intersection(needed):
        raise ValueError(
            f"the step of the scheduler {type(made).__name__} needs {', '.join(needed)}: expected one that takes "
            f"nothing, or the loss alone as ReduceLROnPlateau does; one that counts the steps itself may call it"
        )
    return made


Group = dict[str, Any]

_KEPT = 16  # updates: more than ranks can be apart


def options_of(optimizers: Iterable[torch.optim.Optimizer]) -> list[Group]:
    groups = [group for optimizer in optimizers for group in optimizer.param_groups]
    return [{k: copied_option(v) for k, v in options_of_group(group).items()} for group in groups]


def options_of_group(group: Mapping[str, Any]) -> Group:
    return {key: value for key, value in group.items() if key not in ("params", "param_names")}


def differences(before: Sequence[Group], now: Sequence[Group]) -> list[Group]:
    pairs = zip(before, now, strict=False)
    return [{k: v for k, v in new.items() if k not in old or not _is_same(old[k], v)} for old, new in pairs]


def set_options(optimizers: Iterable[torch.optim.Optimizer], options: Sequence[Group]) -> None:
    """Set options by group; tensors are changed in place, since the user may hold them."""
    groups = [group for optimizer in optimizers for group in optimizer.param_groups]
    for group, given in zip(groups, options, strict=False):
        for key, value in given.items():
            if isinstance(value, torch.Tensor) and isinstance(group.get(key), torch.Tensor):
                group[key].copy_(value)
            else:
                group[key] = copied_option(value)


class BatchOptions:
    def __init__(self, optimizers: Sequence[torch.optim.Optimizer]) -> None:
        self._optimizers = optimizers
        self.forget()

    def forget(self) -> None:
        self._waiting: list[tuple[int, list[Group]]] = []  # changes, and the batch that they begin with
        self._shown = self._used = options_of(self._optimizers)

    def read(self, batch: int) -> set[str]:
        """Read the user's changes since the last call, which apply from this batch on; returns the options' names."""
        now = options_of(self._optimizers)
        changes = differences(self._shown, now)
        if any(changes):
            self._waiting.append((batch, changes))
            self._shown = now
        return {name for group in changes for name in group}

    @contextmanager
    def of(self, batch: int) -> Iterator[None]:
        """Context with the options of an update of this batch; changes by a step or a schedule stay."""
        if self._waiting:
            set_options(self._optimizers, self._used)
            while self._waiting and self._waiting[0][0] <= batch:
                set_options(self._optimizers, self._waiting.pop(0)[1])
        try:
            yield
        finally:
            self._shown = self._used = options_of(self._optimizers)
            for _, changes in self._waiting:
                set_options(self._optimizers, changes)
                self._shown = options_of(self._optimizers)


def _is_same(one: object, other: object) -> bool:
    if isinstance(one, torch.Tensor) and isinstance(other, torch.Tensor):
        return torch.equal(one, other)
    return bool(one == other)


def copied_option(value: Any) -> Any:
    return value.detach().clone() if isinstance(value, torch.Tensor) else copy.deepcopy(value)


class SameOptions:
    """Options of one rank's updates of the parameters that it shares, compared with the other ranks' after the update.
    A rate that is changed while batches are in flight is first used in a different update on each rank, so the options
    that an update used are compared. Each rank sends them with the gradients of a later update group, without waiting.
    `num_stages`: of the rank: its updates of a group."""

    def __init__(self, rank: int, *, num_stages: int) -> None:
        self._rank = rank
        self._num_stages = num_stages
        self._newest = -1
        self._used: dict[int, dict[str, int]] = {}  # update group -> parameter -> option number
        self._stages_done: dict[int, int] = {}
        self._received: list[tuple[int, int, dict[str, int]]] = []  # (peer, update group, parameter -> number)

    def used(self, index: int, numbers: Mapping[str, int]) -> None:
        """Note the option numbers that a stage's update used, by parameter. Raises ValueError that names a parameter
        for which another rank has used other options."""
        self._used.setdefault(index, {}).update(numbers)
        self._stages_done[index] = self._stages_done.get(index, 0) + 1
        if self._stages_done[index] < self._num_stages:
            return
        del self._stages_done[index]
        self._newest = index
        for old in [known for known in self._used if known <= index - _KEPT]:
            del self._used[old]
        self._compare()

    def note(self, names: Sequence[str]) -> list[float]:
        """Numbers to send to a rank with which these parameters are shared: [n + 1]."""
        known = self._used.get(self._newest, {})
        return [float(self._newest), *(float(known.get(name, 0)) for name in names)]

    def received(self, peer: int, names: Sequence[str], note: Sequence[float]) -> None:
        index, *numbers = map(int, note)
        if index >= 0:
            self._received.append((peer, index, dict(zip(names, numbers, strict=True))))

    def drop(self) -> None:
        self._newest = -1
        self._used.clear()
        self._stages_done.clear()
        self._received.clear()

    def _compare(self) -> None:
        for peer, index, numbers in self._received:
            own = self._used.get(index, {}) if index <= self._newest else {}
            differing = [name for name, number in numbers.items() if own.get(name, number) != number]
            if differing:
                raise ValueError(differing_options(differing, sorted((self._rank, peer))))
        self._received = [one for one in self._received if one[1] > self._newest]


def shown(names: Sequence[str], most: int = 3) -> str:
    return ", ".join(map(repr, names[:most])) + (f" and {len(names) - most} more" if len(names) > most else "")


def differing_options(names: Sequence[str], ranks: Sequence[int]) -> str:
    return (
        f"the ranks {list(ranks)} hold copies of the same weights, and their optimizers have different options for "
        f"{shown(names)} (a learning rate that was changed on some of them?): the copies would drift apart. Expected "
        f"the same change of pipe.optimizers on every rank, under an asynchronous schedule after flush(), or "
        f"lr_scheduler="
    )
