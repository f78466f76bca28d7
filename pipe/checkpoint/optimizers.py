"""Optimizers and learning-rate schedules in checkpoints: by parameter name, so that another cut may take them.

    a stage     state: name -> what its optimizer keeps for it
                optimizers: class, groups (names, options), scheduler (class, state), in order

Another cut joins stages and divides them. A group then takes the options of its parameters, and a schedule its
state from an optimizer that held them, figures a group (base_lrs, ...) from the groups in which they stood.
"""

from __future__ import annotations

import copy
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch

from ..update.optimizers import StageOptimizers

# Entries of the state of torch's schedulers with a figure a parameter group.
_BY_GROUP = ("base_lrs", "_last_lr", "lr_lambdas", "min_lrs", "max_lrs", "base_momentums", "max_momentums")


def optimizer_content(stage: StageOptimizers | None) -> dict[str, Any]:
    """Content of a stage's file about them.

    Raises ValueError for a tensor without a name in the model.
    """
    states: dict[str, Any] = {}
    written: list[dict[str, Any]] = []
    for position, optimizer in enumerate(stage.optimizers if stage is not None else ()):
        assert stage is not None
        groups = []
        for group in optimizer.param_groups:
            names = [_name(stage, optimizer, parameter) for parameter in group["params"]]
            for name, parameter in zip(names, group["params"], strict=True):
                states[name] = dict(optimizer.state.get(parameter, {}))
            groups.append({"names": names, "options": _options(group)})
        scheduler = stage.schedulers[position] if stage.schedulers else None
        kept = None if scheduler is None else {"class": type(scheduler).__name__, "state": scheduler.state_dict()}
        written.append({"class": type(optimizer).__name__, "groups": groups, "scheduler": kept})
    return {"state": states, "optimizers": written}


class _Group(NamedTuple):
    """A parameter group of a checkpoint: of which optimizer, and the which of its groups."""

    optimizer: int
    number: int


@dataclass(frozen=True, slots=True, kw_only=True)
class SavedOptimizers:
    """Optimizers of all stages of a checkpoint.

    Arguments:
        where: the checkpoint, for people.
        states: name -> state of its parameter.
        optimizers: of all stages, one after the other.
        groups: name -> where it stood.
    """

    where: str
    states: Mapping[str, Mapping[str, Any]]
    optimizers: Sequence[Mapping[str, Any]]
    groups: Mapping[str, _Group]

    @classmethod
    def of(cls, contents: Iterable[Mapping[str, Any]], *, where: str) -> SavedOptimizers:
        """Those of all stages' files."""
        states: dict[str, Mapping[str, Any]] = {}
        optimizers: list[Mapping[str, Any]] = []
        for content in contents:
            states.update(content["state"])
            optimizers.extend(content["optimizers"])
        groups = {
            name: _Group(number, position)
            for number, optimizer in enumerate(optimizers)
            for position, group in enumerate(optimizer["groups"])
            for name in group["names"]
        }
        return cls(where=where, states=states, optimizers=optimizers, groups=groups)

    def check(self, stage: StageOptimizers) -> None:
        """ValueError for optimizers that cannot go on from these; nothing is changed."""
        needed = [_name(stage, one, p) for one in stage.optimizers for g in one.param_groups for p in g["params"]]
        missing = sorted(set(needed) - self.groups.keys())
        if missing:
            raise ValueError(
                f"checkpoint {self.where} has no optimizer state of {missing[:3]}: expected one saved with an optimizer"
            )
        for position, optimizer in enumerate(stage.optimizers):
            scheduler = type(stage.schedulers[position]).__name__ if stage.schedulers else None
            stood: dict[_Group, dict[str, Any]] = {}  # -> the group in which its parameters stand now
            for group in optimizer.param_groups:
                names = [stage.names[id(p)] for p in group["params"]]
                for name in names:
                    self._check_kinds(name, type(optimizer).__name__, scheduler)
                    self._check_options(name, names[0])
                    other = stood.setdefault(self.groups[name], group)
                    if _options(other) != _options(group):
                        raise ValueError(
                            f"checkpoint {self.where} has {name!r} and {stage.names[id(other['params'][0])]!r} in one "
                            f"parameter group, and they stand in groups with different options now: expected the "
                            f"groups of the run that saved it, or load_state_dict to begin with weights alone"
                        )

    def load_into(self, stage: StageOptimizers, device: torch.device) -> None:
        """Take over state, options and schedules of the parameters of a stage that `check` has passed."""
        for position, optimizer in enumerate(stage.optimizers):
            sources: list[_Group | None] = []  # by group; None: an empty one
            for group in optimizer.param_groups:
                names = [stage.names[id(p)] for p in group["params"]]
                sources.append(self.groups[names[0]] if names else None)
                for name, parameter in zip(names, group["params"], strict=True):
                    state = self.states[name]
                    optimizer.state[parameter] = {key: _like(value, parameter, device) for key, value in state.items()}
                for key, value in self._options_of(names[0]).items() if names else ():
                    _set_option(group, key, value)
            saved = next((self.optimizers[at.optimizer]["scheduler"] for at in sources if at is not None), None)
            if stage.schedulers and saved is not None:
                scheduler = stage.schedulers[position]
                own = scheduler.state_dict()
                by_group = [
                    None if at is None else (self.optimizers[at.optimizer]["scheduler"]["state"], at.number)
                    for at in sources
                ]
                scheduler.load_state_dict(_regrouped(saved["state"], own, by_group))

    def _options_of(self, name: str) -> Mapping[str, Any]:
        at = self.groups[name]
        options: Mapping[str, Any] = self.optimizers[at.optimizer]["groups"][at.number]["options"]
        return options

    def _check_kinds(self, name: str, kind: str, scheduler: str | None) -> None:
        saved = self.optimizers[self.groups[name].optimizer]
        if saved["class"] != kind:
            raise ValueError(
                f"checkpoint {self.where} has {name!r} under the optimizer {saved['class']}, and it is under {kind} "
                f"now: expected the same one, or load_state_dict to begin with weights alone"
            )
        before = saved["scheduler"]
        if before is not None and scheduler is not None and before["class"] != scheduler:
            raise ValueError(
                f"checkpoint {self.where} has {name!r} under the schedule {before['class']}, and it is under "
                f"{scheduler} now: expected the same lr_scheduler=, or none to go on with the rates as they were"
            )

    def _check_options(self, name: str, other: str) -> None:
        one, two = self._options_of(name), self._options_of(other)
        differing = sorted(key for key in one.keys() | two.keys() if one.get(key) != two.get(key))
        if differing:
            key = differing[0]
            raise ValueError(
                f"checkpoint {self.where} has {key}={one.get(key)} for {name!r} and {key}={two.get(key)} for {other!r},"
                f" which stand in one parameter group now: expected the groups of the run that saved it"
            )


def _name(stage: StageOptimizers, optimizer: torch.optim.Optimizer, parameter: torch.Tensor) -> str:
    name = stage.names.get(id(parameter))
    if name is None:
        raise ValueError(
            f"optimizer {type(optimizer).__name__} holds a tensor of shape {tuple(parameter.shape)} that is none of "
            f"the model's, so that a checkpoint has no name for it: expected the module that owns it as loss_fn="
        )
    return name


def _options(group: Mapping[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in group.items() if key not in ("params", "param_names")}


def _set_option(group: dict[str, Any], key: str, value: Any) -> None:
    """In place where a tensor holds it, since compiled steps keep that very tensor; a number stays a number."""
    if isinstance(group.get(key), torch.Tensor):
        group[key].fill_(value)
    else:
        group[key] = value.item() if isinstance(value, torch.Tensor) else value


def _regrouped(
    state: Mapping[str, Any], own: Mapping[str, Any], by_group: Sequence[tuple[Mapping[str, Any], int] | None]
) -> dict[str, Any]:
    """A saved schedule for other parameter groups.

    Arguments:
        state: that of one of the optimizers.
        own: of the schedule that takes it over.
        by_group: for each group now, a saved state and the number of its group there.
    """
    found = copy.deepcopy(dict(state))
    for key in found.keys() & set(_BY_GROUP):
        found[key] = [
            own[key][number] if at is None else copy.deepcopy(at[0][key][at[1]]) for number, at in enumerate(by_group)
        ]
    for number, part in enumerate(found.get("_schedulers", ())):  # of SequentialLR and ChainedScheduler
        parts = [None if at is None else (at[0]["_schedulers"][number], at[1]) for at in by_group]
        found["_schedulers"][number] = _regrouped(part, own["_schedulers"][number], parts)
    return found


def _like(value: Any, parameter: torch.Tensor, device: torch.device) -> Any:
    """A state tensor where its parameter is; a step count stays where it was."""
    if not isinstance(value, torch.Tensor):
        return value
    return value.to(device).clone() if value.shape == parameter.shape else value.clone()
