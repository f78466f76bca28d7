"""Optimizers and learning-rate schedulers from checkpoints, for another cut or a single process.

Another cut joins stages and divides them. A group then takes the options of its parameters. A scheduler takes the state
of one whose optimizer held them, and figures per group (base_lrs, ...) from the groups that held them.
"""

from __future__ import annotations

import copy
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import prod
from typing import Any

import torch

from ..settings.delay_correction import LAST_UPDATE
from ..shards.shard import Shard
from ..stage.ownership import Ownership
from ..update.optimizers import StageOptimizers, options_of_group, shown
from .manifest import optimizer_entries
from .reader import Checkpoint
from .snapshot import state_shard
from .values import decode, encode

# Entries of the state of torch's schedulers that have a figure per parameter group.
_BY_GROUP = ("base_lrs", "_last_lr", "lr_lambdas", "min_lrs", "max_lrs", "base_momentums", "max_momentums")

_OF_SCHEDULES = {"initial_lr", "max_lr", "min_lr", "max_momentum", "base_momentum"}  # options that schedulers add
_DECOUPLED = "decoupled_weight_decay"  # Adam or AdamW
_Group = tuple[int, int]  # number of an optimizer of a checkpoint, and of a group in it


@dataclass(frozen=True, slots=True)
class _Joined:
    """Groups by their options; for each source group its key, its scheduler's state and its number there."""

    groups: dict[str, tuple[Mapping[str, Any], list[str]]]
    sources: list[tuple[str, tuple[Mapping[str, Any], int] | None]]

    def scheduler(self) -> dict[str, Any] | None:
        first: dict[str, tuple[Mapping[str, Any], int]] = {}
        for key, source in self.sources:
            if source is not None:
                first.setdefault(key, source)
        if not first:
            return None
        state = next(iter(first.values()))[0]
        return _regrouped(state, state, [first.get(key) for key in self.groups])


class SavedOptimizers:
    """Optimizers of all stages of a checkpoint; parameters that it lacks may begin with `fresh` state.

    Raises ValueError for content that `take_snapshot` does not write.
    """

    def __init__(self, checkpoint: Checkpoint, *, fresh: bool = False) -> None:
        self._checkpoint = checkpoint
        self._fresh = fresh
        self._where = checkpoint.place
        self._optimizers: list[dict[str, Any]] = []
        self._groups: dict[str, _Group] = {}  # by name of a parameter
        try:
            for process, each in enumerate(checkpoint.manifest.values.get("optimizers", [])):
                for saved in each or ():
                    self._take(saved, process)
        except (TypeError, KeyError, AttributeError, ValueError) as error:
            raise checkpoint.error(f"checkpoint {self._where} has optimizers of another form: {error}") from None
        self._values = optimizer_entries(checkpoint.manifest.values)
        self._tensors = optimizer_entries(checkpoint.manifest.tensors)

    def _take(self, saved: Mapping[str, Any], process: int) -> None:
        """Adds an optimizer. Replicas save the same: the first that names a parameter counts."""
        groups = [{"names": one["names"], "options": dict(decode(one["options"]))} for one in saved["groups"]]
        kept = saved["scheduler"]
        scheduler = None if kept is None else {"class": str(kept["class"]), "state": dict(decode(kept["state"]))}
        number = len(self._optimizers)
        found: dict[str, Any] = {"process": process, "stage": int(saved["stage"])}
        found |= {"class": str(saved["class"]), "groups": groups, "scheduler": scheduler}
        self._optimizers.append(found)
        for position, group in enumerate(groups):
            for name in group["names"]:
                self._groups.setdefault(str(name), (number, position))

    def check(self, stage: StageOptimizers, ownership: Ownership) -> None:
        """Raises ValueError for optimizers that cannot resume from these; changes nothing."""
        needed = [name for one in stage.optimizers for group in one.param_groups for name in stage.names_in(one, group)]
        missing = sorted(set(needed) - self._groups.keys())
        if missing and not self._fresh:
            raise ValueError(
                f"checkpoint {self._where} has no optimizer state of {missing[:3]}: expected one saved with an "
                f"optimizer of them, or load(..., new='fresh') to begin them with fresh state"
            )
        for position, optimizer in enumerate(stage.optimizers):
            scheduler = type(stage.schedulers[position]).__name__ if stage.schedulers else None
            stood: dict[_Group, dict[str, Any]] = {}  # -> the group that has its parameters now
            for group in optimizer.param_groups:
                names = self._known(stage, optimizer, group)
                for name in names:
                    self._check_kinds(name, type(optimizer).__name__, scheduler, group)
                    self._check_options(name, names[0])
                    other = stood.setdefault(self._groups[name], group)
                    if options_of_group(other) != options_of_group(group):
                        raise ValueError(
                            f"checkpoint {self._where} has {name!r} and {self._known(stage, optimizer, other)[0]!r} in "
                            f"one parameter group, and they are in groups with different options now: expected the "
                            f"groups of the run that saved it, or load_state_dict to begin with weights alone"
                        )
                for name in (stage.names[id(parameter)] for parameter in group["params"]):
                    for key in self._tensors.get(name, {}).values():
                        self._checkpoint.check(key, self._shard(stage, name, key, ownership))
            self._schedule(stage, position)

    def load_into(self, stage: StageOptimizers, ownership: Ownership) -> None:
        for position, optimizer in enumerate(stage.optimizers):
            for group in optimizer.param_groups:
                for parameter in group["params"]:
                    name = stage.names[id(parameter)]
                    state = self._state(stage, name, parameter, group, ownership)
                    if state:
                        optimizer.state[parameter] = state
                    else:  # it had no gradient yet
                        optimizer.state.pop(parameter, None)
                source = self._source(stage, optimizer, group)
                for key, value in () if source is None else self._options_at(source).items():
                    _set_option(group, key, value)
            schedule = self._schedule(stage, position)
            if schedule is not None:
                stage.schedulers[position].load_state_dict(schedule)

    def _schedule(self, stage: StageOptimizers, position: int) -> dict[str, Any] | None:
        optimizer = stage.optimizers[position]
        sources = [self._source(stage, optimizer, group) for group in optimizer.param_groups]
        saved = next((self._optimizers[at[0]]["scheduler"] for at in sources if at is not None), None)
        if not stage.schedulers or saved is None:
            return None
        by_group = [None if at is None else (self._optimizers[at[0]]["scheduler"]["state"], at[1]) for at in sources]
        return _regrouped(saved["state"], stage.schedulers[position].state_dict(), by_group)

    def _known(self, stage: StageOptimizers, optimizer: torch.optim.Optimizer, group: Mapping[str, Any]) -> list[str]:
        return [name for name in stage.names_in(optimizer, group) if name in self._groups]

    def _source(
        self, stage: StageOptimizers, optimizer: torch.optim.Optimizer, group: Mapping[str, Any]
    ) -> _Group | None:
        """The saved group of a group's first parameter; if all are new, one with the same options."""
        for name in self._known(stage, optimizer, group):
            return self._groups[name]
        kind, options = type(optimizer).__name__, _given(group)
        for number, saved in enumerate(self._optimizers if group["params"] else ()):
            for position, other in enumerate(saved["groups"]):
                if saved["class"] == kind and _given(other["options"]) == options:
                    return number, position
        return None

    def lost(self, stages: Sequence[StageOptimizers]) -> list[str]:
        """Texts about delay correction that cannot resume, or is no longer used."""
        held = [(one, name) for one in stages for name in dict.fromkeys(one.names.values())]
        kept = {name for name, entries in self._tensors.items() if LAST_UPDATE in entries}
        missing = sorted({name for one, name in held if one.corrects(name) and name in self._groups} - kept)
        dropped = sorted({name for one, name in held if not one.corrects(name)} & kept)
        told = []
        if missing:
            told.append(
                f"it has no last update of {shown(missing)} to correct delay with: the first one here is not corrected"
            )
        if dropped:
            told.append(
                f"it has the last update of {shown(dropped)} to correct delay with, and nothing is corrected there now"
            )
        return told

    def joined(self, names: Sequence[str]) -> list[tuple[dict[str, Any], Mapping[str, Any] | None]]:
        """State dicts of optimizers as one process has them, with "param_names", and states of their schedulers.

        Optimizers of one class in all stages become one, and so do groups of equal options. `names` are in the order of
        the parameters of a group.
        """
        order = {name: number for number, name in enumerate(names)}
        found: dict[tuple[str, int], _Joined] = {}
        counted: dict[tuple[int, int, str], int] = {}
        for optimizer, saved in enumerate(self._optimizers):
            mine = [
                [name for name in group["names"] if self._groups[name] == (optimizer, number)]
                for number, group in enumerate(saved["groups"])
            ]
            if not any(mine):
                continue  # a replica's
            place = (saved["process"], saved["stage"], saved["class"])
            counted[place] = counted.get(place, -1) + 1
            joined = found.setdefault((saved["class"], counted[place]), _Joined({}, []))
            for number, (group, own) in enumerate(zip(saved["groups"], mine, strict=True)):
                if own:
                    key = json.dumps(encode(group["options"], what="options"))
                    joined.groups.setdefault(key, (group["options"], []))[1].extend(own)
                    scheduler = saved["scheduler"]
                    joined.sources.append((key, None if scheduler is None else (scheduler["state"], number)))
        return [(self._plain(joined, order), joined.scheduler()) for joined in found.values()]

    def _plain(self, joined: _Joined, order: Mapping[str, int]) -> dict[str, Any]:
        groups = [
            (options, sorted(own, key=lambda each: order.get(each, len(order))))
            for options, own in joined.groups.values()
        ]
        numbers = {name: number for number, name in enumerate(name for _, own in groups for name in own)}
        states = {number: self._full_state(name) for name, number in numbers.items()}
        return {
            "state": {number: state for number, state in states.items() if state},
            "param_groups": [
                {**options, "params": [numbers[name] for name in own], "param_names": own} for options, own in groups
            ],
        }

    def _full_state(self, name: str) -> dict[str, Any]:
        found = {entry: self._checkpoint.value(key) for entry, key in self._values.get(name, {}).items()}
        return found | {entry: self._checkpoint.full(key) for entry, key in self._tensors.get(name, {}).items()}

    def _state(
        self, stage: StageOptimizers, name: str, parameter: torch.Tensor, group: Mapping[str, Any], ownership: Ownership
    ) -> dict[str, Any]:
        found = {entry: self._checkpoint.value(key) for entry, key in self._values.get(name, {}).items()}
        for entry, key in self._tensors.get(name, {}).items():
            if entry == LAST_UPDATE and not stage.corrects(name):
                continue
            value = self._checkpoint.read(key, self._shard(stage, name, key, ownership))
            at_host = entry == "step" and not (group.get("capturable") or group.get("fused"))  # as torch has it
            found[entry] = value.to("cpu" if at_host else parameter.device, copy=True)
        return found

    def _shard(self, stage: StageOptimizers, name: str, key: str, ownership: Ownership) -> Shard:
        shard, shape = state_shard(stage, name, ownership), self._checkpoint.record(key).shape
        if shape == shard.full:
            return shard
        if not shard.is_whole and prod(shape) != 1:
            raise ValueError(
                f"checkpoint {self._where} has {key!r} of shape {shape}, which is not that of the parameter, and this "
                f"process has a part of it, of shape {shard.local}: expected as many processes as the parameter needs "
                f"to be whole on each of them"
            )
        return Shard.whole(shape)

    def _options_at(self, source: _Group) -> Mapping[str, Any]:
        optimizer, number = source
        options: Mapping[str, Any] = self._optimizers[optimizer]["groups"][number]["options"]
        return options

    def _check_kinds(self, name: str, kind: str, scheduler: str | None, group: Mapping[str, Any]) -> None:
        saved = self._optimizers[self._groups[name][0]]
        if not saved["class"]:  # DCP does not keep it, so options are compared
            before, now = self._options_at(self._groups[name]), options_of_group(group)
            if (before.keys() ^ now.keys()) - _OF_SCHEDULES or before.get(_DECOUPLED) != now.get(_DECOUPLED):
                raise ValueError(
                    f"checkpoint {self._where} has {name!r} under an optimizer with {sorted(before)}, and {kind} has "
                    f"{sorted(now)} now: expected the same one, or weights alone: no optimizer=True at the import"
                )
        elif saved["class"] != kind:
            raise ValueError(
                f"checkpoint {self._where} has {name!r} under the optimizer {saved['class']}, and it is under {kind} "
                f"now: expected the same one, or load_state_dict to begin with weights alone"
            )
        before = saved["scheduler"]
        if before is not None and scheduler is not None and before["class"] != scheduler:
            raise ValueError(
                f"checkpoint {self._where} has {name!r} under the schedule {before['class']}, and it is under "
                f"{scheduler} now: expected the same lr_scheduler=, or none to keep the saved rates"
            )

    def _check_options(self, name: str, other: str) -> None:
        one, two = (self._options_at(self._groups[each]) for each in (name, other))
        differing = sorted(key for key in one.keys() | two.keys() if one.get(key) != two.get(key))
        if differing:
            key = differing[0]
            raise ValueError(
                f"checkpoint {self._where} has {key}={one.get(key)} for {name!r} and {key}={two.get(key)} for "
                f"{other!r}, which are in one parameter group now: expected the groups of the run that saved it"
            )


def _given(group: Mapping[str, Any]) -> dict[str, Any]:
    """Options without those that a scheduler has changed."""
    moved = {"lr", *_OF_SCHEDULES} - {"initial_lr"}
    return {key: value for key, value in options_of_group(group).items() if key not in moved}


def _set_option(group: dict[str, Any], key: str, value: Any) -> None:
    """Set an option: in place if it is a tensor, which compiled steps hold; a number stays a number."""
    if isinstance(group.get(key), torch.Tensor):
        group[key].fill_(value)
    else:
        group[key] = value.item() if isinstance(value, torch.Tensor) else value


def _regrouped(
    state: Mapping[str, Any], own: Mapping[str, Any], by_group: Sequence[tuple[Mapping[str, Any], int] | None]
) -> dict[str, Any]:
    """The state of a scheduler, from states that were saved for other groups; `own` is its state so far."""
    found = copy.deepcopy(dict(state))
    for key in found.keys() & set(_BY_GROUP):
        found[key] = [
            own[key][number] if at is None else copy.deepcopy(at[0][key][at[1]]) for number, at in enumerate(by_group)
        ]
    for number, part in enumerate(found.get("_schedulers", ())):  # of SequentialLR and ChainedScheduler
        parts = [None if at is None else (at[0]["_schedulers"][number], at[1]) for at in by_group]
        found["_schedulers"][number] = _regrouped(part, own["_schedulers"][number], parts)
    return found
