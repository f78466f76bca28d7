"""Optimizers and learning-rate schedules in checkpoints: by parameter name, so that another cut may take them.

    tensors     optimizer/ENTRY/NAME: what an optimizer keeps for a parameter under ENTRY
    values      optimizer/ENTRY/NAME: the same where it is no tensor
                optimizers, by process: class, groups (names, options), scheduler (class, state), in order

Another cut joins stages and divides them. A group then takes the options of its parameters, and a schedule its
state from an optimizer that held them, figures a group (base_lrs, ...) from the groups in which they stood.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import prod
from typing import Any, NamedTuple
from urllib.parse import unquote

import torch

from ..parallel.share import Share
from ..stages.ownership import Ownership
from ..update.optimizers import StageOptimizers
from .reader import Checkpoint
from .values import Json, decode, encode

# Entries of the state of torch's schedulers with a figure a parameter group.
_BY_GROUP = ("base_lrs", "_last_lr", "lr_lambdas", "min_lrs", "max_lrs", "base_momentums", "max_momentums")


@dataclass(frozen=True, slots=True, kw_only=True)
class HeldEntry:
    """What an optimizer keeps for a parameter under `entry`.

    Arguments:
        share: of a tensor; None for any other value.
        is_like_parameter: whether the share is that of the parameter here; else each process has all of it.
    """

    name: str
    entry: str
    value: Any
    share: Share | None
    is_like_parameter: bool = False


def state_share(stage: StageOptimizers, name: str, ownership: Ownership) -> Share:
    """Part of a parameter for which the stage's optimizer here keeps state."""
    return stage.share(name, ownership.share(name))


def held_state(stage: StageOptimizers, ownership: Ownership) -> Iterator[HeldEntry]:
    """All that a stage's optimizers keep here.

    Raises ValueError for a tensor that is neither like its parameter nor whole on each process.
    """
    for optimizer in stage.optimizers:
        for parameter, state in optimizer.state.items():
            name = stage.names[id(parameter)]
            share = state_share(stage, name, ownership)
            for entry, value in state.items():
                if not isinstance(entry, str):
                    raise ValueError(
                        f"optimizer {type(optimizer).__name__} keeps {entry!r:.40} for {name!r}: expected text as the "
                        f"key of each entry of its state"
                    )
                if not isinstance(value, torch.Tensor):
                    yield HeldEntry(name=name, entry=entry, value=value, share=None)
                elif tuple(value.shape) == share.local:
                    yield HeldEntry(name=name, entry=entry, value=value, share=share, is_like_parameter=True)
                elif share.is_whole or value.numel() == 1:
                    yield HeldEntry(name=name, entry=entry, value=value, share=Share.whole(tuple(value.shape)))
                else:
                    raise ValueError(
                        f"optimizer {type(optimizer).__name__} keeps {entry!r} of shape {tuple(value.shape)} for "
                        f"{name!r}, of which this process has a part of shape {share.local}: expected state of the "
                        f"parameter's shape, which another number of processes can divide anew, or whole parameters"
                    )


def optimizer_content(stage: StageOptimizers) -> list[Json]:
    """Optimizers of a stage, without what they keep for each parameter.

    Raises ValueError for a tensor without a name in the model.
    """
    written: list[Json] = []
    for position, optimizer in enumerate(stage.optimizers):
        kind = type(optimizer).__name__
        groups = [
            {
                "names": stage.names_in(optimizer, group),
                "options": encode(_options(group), what=f"an option of {kind}"),
            }
            for group in optimizer.param_groups
        ]
        scheduler = stage.schedulers[position] if stage.schedulers else None
        kept = None
        if scheduler is not None:
            state = encode(scheduler.state_dict(), what=f"the state of {type(scheduler).__name__}")
            kept = {"class": type(scheduler).__name__, "state": state}
        written.append({"class": kind, "groups": groups, "scheduler": kept})
    return written


class _Group(NamedTuple):
    """A parameter group of a checkpoint: of which optimizer, and the which of its groups."""

    optimizer: int
    number: int


class SavedOptimizers:
    """Optimizers of all stages of a checkpoint.

    Raises ValueError for what `optimizer_content` does not make.
    """

    def __init__(self, checkpoint: Checkpoint) -> None:
        self._checkpoint = checkpoint
        self._where = checkpoint.place
        self._optimizers: list[dict[str, Any]] = []
        self._groups: dict[str, _Group] = {}  # name -> where it stood
        try:
            for saved in (one for each in checkpoint.manifest.values.get("optimizers", []) for one in each or ()):
                self._take(saved)
        except (TypeError, KeyError, AttributeError, ValueError) as error:
            raise checkpoint.error(f"checkpoint {self._where} has no optimizers as they are saved: {error}") from None
        self._values: dict[str, dict[str, str]] = {}  # name -> entry -> key
        for key in checkpoint.manifest.values:
            section, _, rest = key.partition("/")
            if section == "optimizer":
                entry, _, name = rest.partition("/")
                self._values.setdefault(name, {})[unquote(entry)] = key
        self._tensors = checkpoint.manifest.optimizer_entries

    def _take(self, saved: Mapping[str, Any]) -> None:
        """Replicas save the same: the first that names a parameter counts."""
        groups = [{"names": one["names"], "options": dict(decode(one["options"]))} for one in saved["groups"]]
        kept = saved["scheduler"]
        scheduler = None if kept is None else {"class": str(kept["class"]), "state": dict(decode(kept["state"]))}
        number = len(self._optimizers)
        self._optimizers.append({"class": str(saved["class"]), "groups": groups, "scheduler": scheduler})
        for position, group in enumerate(groups):
            for name in group["names"]:
                self._groups.setdefault(str(name), _Group(number, position))

    def check(self, stage: StageOptimizers, ownership: Ownership) -> None:
        """ValueError for optimizers that cannot go on from these; nothing is changed."""
        needed = [name for one in stage.optimizers for group in one.param_groups for name in stage.names_in(one, group)]
        missing = sorted(set(needed) - self._groups.keys())
        if missing:
            raise ValueError(
                f"checkpoint {self._where} has no optimizer state of {missing[:3]}: expected one saved with an "
                f"optimizer"
            )
        for position, optimizer in enumerate(stage.optimizers):
            scheduler = type(stage.schedulers[position]).__name__ if stage.schedulers else None
            stood: dict[_Group, dict[str, Any]] = {}  # -> the group in which its parameters stand now
            for group in optimizer.param_groups:
                names = stage.names_in(optimizer, group)
                for name in names:
                    self._check_kinds(name, type(optimizer).__name__, scheduler)
                    self._check_options(name, names[0])
                    other = stood.setdefault(self._groups[name], group)
                    if _options(other) != _options(group):
                        raise ValueError(
                            f"checkpoint {self._where} has {name!r} and {stage.names_in(optimizer, other)[0]!r} in one "
                            f"parameter group, and they stand in groups with different options now: expected the "
                            f"groups of the run that saved it, or load_state_dict to begin with weights alone"
                        )
                for name in (stage.names[id(parameter)] for parameter in group["params"]):
                    for key in self._tensors.get(name, {}).values():
                        self._checkpoint.check(key, self._share(stage, name, key, ownership))

    def load_into(self, stage: StageOptimizers, ownership: Ownership) -> None:
        """Take over state, options and schedules of the parameters of a stage that `check` has passed."""
        for position, optimizer in enumerate(stage.optimizers):
            sources: list[_Group | None] = []  # by group; None: an empty one
            for group in optimizer.param_groups:
                names = stage.names_in(optimizer, group)
                sources.append(self._groups[names[0]] if names else None)
                for parameter in group["params"]:
                    name = stage.names[id(parameter)]
                    state = self._state(stage, name, parameter, group, ownership)
                    if state:
                        optimizer.state[parameter] = state
                    else:  # it had no gradient yet
                        optimizer.state.pop(parameter, None)
                for key, value in self._options_of(names[0]).items() if names else ():
                    _set_option(group, key, value)
            saved = next((self._optimizers[at.optimizer]["scheduler"] for at in sources if at is not None), None)
            if stage.schedulers and saved is not None:
                scheduler = stage.schedulers[position]
                own = scheduler.state_dict()
                by_group = [
                    None if at is None else (self._optimizers[at.optimizer]["scheduler"]["state"], at.number)
                    for at in sources
                ]
                scheduler.load_state_dict(_regrouped(saved["state"], own, by_group))

    def _state(
        self,
        stage: StageOptimizers,
        name: str,
        parameter: torch.Tensor,
        group: Mapping[str, Any],
        ownership: Ownership,
    ) -> dict[str, Any]:
        found = {entry: self._checkpoint.value(key) for entry, key in self._values.get(name, {}).items()}
        for entry, key in self._tensors.get(name, {}).items():
            value = self._checkpoint.read(key, self._share(stage, name, key, ownership))
            at_host = entry == "step" and not (group.get("capturable") or group.get("fused"))  # as torch has it
            found[entry] = value.to("cpu" if at_host else parameter.device, copy=True)
        return found

    def _share(self, stage: StageOptimizers, name: str, key: str, ownership: Ownership) -> Share:
        """The part of a tensor of the state that this process needs."""
        share, shape = state_share(stage, name, ownership), self._checkpoint.record(key).shape
        if shape == share.full:
            return share
        if not share.is_whole and prod(shape) != 1:
            raise ValueError(
                f"checkpoint {self._where} has {key!r} of shape {shape}, which is not that of the parameter, and this "
                f"process has a part of it, of shape {share.local}: expected as many processes as the parameter needs "
                f"to be whole on each of them"
            )
        return Share.whole(shape)

    def _options_of(self, name: str) -> Mapping[str, Any]:
        at = self._groups[name]
        options: Mapping[str, Any] = self._optimizers[at.optimizer]["groups"][at.number]["options"]
        return options

    def _check_kinds(self, name: str, kind: str, scheduler: str | None) -> None:
        saved = self._optimizers[self._groups[name].optimizer]
        if saved["class"] != kind:
            raise ValueError(
                f"checkpoint {self._where} has {name!r} under the optimizer {saved['class']}, and it is under {kind} "
                f"now: expected the same one, or load_state_dict to begin with weights alone"
            )
        before = saved["scheduler"]
        if before is not None and scheduler is not None and before["class"] != scheduler:
            raise ValueError(
                f"checkpoint {self._where} has {name!r} under the schedule {before['class']}, and it is under "
                f"{scheduler} now: expected the same lr_scheduler=, or none to go on with the rates as they were"
            )

    def _check_options(self, name: str, other: str) -> None:
        one, two = self._options_of(name), self._options_of(other)
        differing = sorted(key for key in one.keys() | two.keys() if one.get(key) != two.get(key))
        if differing:
            key = differing[0]
            raise ValueError(
                f"checkpoint {self._where} has {key}={one.get(key)} for {name!r} and {key}={two.get(key)} for "
                f"{other!r}, which stand in one parameter group now: expected the groups of the run that saved it"
            )


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
