"""The state of a run, saved and loaded: parameters and buffers, optimizers, weight versions.

to resume from a checkpoint: everything is checked on every rank -> agreed -> copied

Everything is kept under the model's original names, and each process reads the pieces that it needs, so that a
checkpoint loads on any number of ranks, stages, replicas and members. Rank 0 warns once of what cannot be kept.
"""

from __future__ import annotations

import difflib
import os
import warnings
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import nn

from ...partition.profiler.memory import storage_bytes
from ...schedules import MemoryPart
from ..context import Run
from ..run.training import Training
from ..shards.shard import Shard
from ..stage.own_state import EXTRA, keys_of, set_extra_states, state_of, tensors_of
from ..stage.ownership import Ownership
from ..stage.weights import WeightVersions
from ..update.interface import Update
from .files import OwnCheckpoints
from .manifest import model_key
from .persist import Processes, SaveResult, persist
from .reader import Checkpoint, ProcessState, lost_text, read_together, some_of
from .saved_optimizers import SavedOptimizers
from .snapshot import HasState, Snapshot, Writers, held, rule_of, take_snapshot

Kind = tuple[tuple[int, ...], torch.dtype]  # of a tensor: shape and type
_Names = Mapping[str, str]


@dataclass(frozen=True, kw_only=True)
class State:
    """Tensors that this process holds, under the model's original names; `training` is drained before they are used."""

    update: Update
    training: Training
    own_checkpoints: OwnCheckpoints = field(default_factory=OwnCheckpoints)
    _writers: list[Writers] = field(default_factory=list)  # once they are agreed on

    @property
    def run(self) -> Run:
        return self.update.run

    @property
    def ownership(self) -> Ownership:
        return self.update.ownership

    @property
    def optimizers(self) -> list[torch.optim.Optimizer]:
        """Optimizers of all local stages (replicas have their own), each stage's in the order of `optimizer=`."""
        return [optimizer for one in self.update.stages for optimizer in one.optimizers]

    def state_dict(self) -> dict[str, torch.Tensor]:
        self.training.unchanged.check_objects()
        self.update.refuse_reading("state_dict")
        keys = self.ownership.keys()
        if not self.update.shards.apart:
            return {keys.get(name, name): value for name, value in self.ownership.state_dict().items()}
        with self.run.guard.together(), self.update.shards.whole_weights():
            return {keys.get(name, name): value.detach() for name, value in self.ownership.state_dict().items()}

    def full_state_dict(self) -> dict[str, Any]:
        self.training.drain()
        with self.run.guard.together():
            self.training.unchanged.check_objects()
            with self.update.shards.whole_weights():
                full = self.ownership.full_state_dict(self.run.collectives)
            everyone = self.run.collectives.gather(self.ownership.extra_states(), what="gathering extra states")
            extra = {key: value for each in reversed(everyone) for key, value in each.items()}
            with self.ownership.asks() as root:
                return state_of(root, full, extra)

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.training.unchanged.check_objects()
        self.update.refuse_changes("load_state_dict")
        self.update.gate.enter()
        state = self.ownership.taken(state)
        with self.update.shards.whole_weights(replaced=True):
            self.ownership.load_state_dict(state)
        self.update.take_state(self.ownership.own_parts(state))

    def snapshot(self, loader: HasState | None) -> Snapshot:
        """References to the state of this process between two steps.

        Collective: a stream is drained first, and the first snapshot agrees on which process writes what.
        """
        self.training.drain()
        with self.run.guard.together():
            self.training.unchanged.check_objects()
            self.update.unite()
            self.ownership.follow_kinds(self.run.collectives)
            if not self._writers or self._writers[0].changes != self.ownership.kinds.changes:
                self._writers[:] = [Writers(self.update)]
            place = None if loader is None else loader.state_dict()
            return take_snapshot(self.update, self._writers[0], step=self.training.num_steps, loader=place)

    def persist(
        self, folder: str | os.PathLike[str], snapshot: Snapshot, *, processes: Processes | None = None
    ) -> SaveResult:
        return persist(folder, snapshot, processes=processes or self.run.collectives, own=self.own_checkpoints)

    def save(self, folder: str | os.PathLike[str], loader: HasState | None) -> SaveResult:
        snapshot = self.snapshot(loader)
        with self.run.guard.together():
            result = self.persist(folder, snapshot)
        if result.is_mistake:
            raise ValueError(result.problem)
        self._say(result.problem or result.caution)
        return result

    def load(self, folder: Path, loader: HasState | None, *, fresh: bool = False) -> None:
        self._rest()
        collectives = self.run.collectives

        def read(checkpoint: Checkpoint) -> tuple[_Fitting, ProcessState]:
            own = ProcessState(checkpoint, loader, process=collectives.rank, num_processes=collectives.size)
            return _Fitting(checkpoint, self.update, fresh=fresh), own

        checkpoint, (found, own) = read_together(folder, read, collectives, self.run.guard)
        own.take()
        self._take(checkpoint, found, [*own.lost, *found.lost])

    def resume(self, place: Path, *, fresh: bool) -> None:
        """Loads the checkpoint at `place`, whose ProcessState was taken before the stages were built."""
        collectives, guard = self.run.collectives, self.run.guard
        checkpoint, found = read_together(place, lambda it: _Fitting(it, self.update, fresh=fresh), collectives, guard)
        self._take(checkpoint, found, found.lost)

    def save_for_others(self, folder: Path) -> None:
        """Saves for processes that join between two steps. Collective; RuntimeError for a full disk."""
        snapshot = self.snapshot(None)
        with self.run.guard.together():
            result = persist(folder, snapshot, processes=self.run.collectives, own=OwnCheckpoints())
        if result.problem:
            raise RuntimeError(f"saving the state for processes that join: {result.problem}")

    def take_from_others(self, folder: Path) -> None:
        """Loads the state that other processes have saved; it is theirs already. Collective."""
        collectives, guard = self.run.collectives, self.run.guard
        names = collectives.gather(zlib.crc32(repr(self.ownership.names()).encode()), what="comparing names of weights")
        if len({*names}) > 1:
            raise ValueError(
                "a process that joins has the model's modules in another order than the others: expected the same "
                "order in every process, so no modules from a set"
            )
        checkpoint, found = read_together(folder, lambda it: _Fitting(it, self.update), collectives, guard)
        found.take()
        self.update.go_on(found.kept)
        self.training.restart(checkpoint.manifest.step)

    def _rest(self) -> None:
        self.update.gate.enter()
        if not self.update.is_lost:
            self.training.drain()
        with self.run.guard.together():
            self.training.unchanged.check_objects()
            self.ownership.follow_kinds(self.run.collectives)

    def _take(self, checkpoint: Checkpoint, found: _Fitting, lost: Sequence[str]) -> None:
        found.take()
        for each in self.run.added:
            each.loaded()
        self.own_checkpoints.adopt(checkpoint.place)
        self.update.go_on(found.kept)
        self.training.restart(checkpoint.manifest.step)
        self._say(lost_text(checkpoint, lost))

    def _say(self, text: str) -> None:
        """Warns on rank 0, at the line that called PipelineModule."""
        if text and self.run.collectives.rank == 0:
            warnings.warn(text, stacklevel=4)

    def at_rest(self) -> Iterator[tuple[int, MemoryPart, torch.Tensor]]:
        """Tensors that are here between two actions, by stage and use; some more than once."""
        local = self.run.local_stages
        for name, tensor in self.ownership.state_dict().items():
            stage = next(s for s in self.ownership.stages[name] if s in local)
            yield stage, MemoryPart.WEIGHTS if isinstance(tensor, nn.Parameter) else MemoryPart.BUFFERS, tensor
            if tensor.is_leaf and tensor.grad is not None:
                yield stage, MemoryPart.GRADIENTS, tensor.grad
        for one in self.update.stages:
            yield from ((one.stage, MemoryPart.OPTIMIZER, tensor) for tensor in one.tensors())
            for tensor in () if one.versions is None else one.versions.tensors():
                yield one.stage, MemoryPart.WEIGHTS if tensor.requires_grad else MemoryPart.GRADIENTS, tensor
        yield from ((local[0], MemoryPart.WEIGHTS, tensor) for tensor in self.update.shards.tensors())

    def held_bytes(self) -> int:
        return storage_bytes(x for *_, x in self.at_rest())


class _Fitting:
    """A checkpoint that fits this process, before anything is changed.

    Parameters that no optimizer had may begin with `fresh` state. Raises ValueError for one that does not fit.
    """

    def __init__(self, checkpoint: Checkpoint, update: Update, *, fresh: bool = False) -> None:
        self.checkpoint = checkpoint
        self.lost: list[str] = []
        self._update = update
        self._stages = update.stages
        self._schedule = update.schedule
        ownership = update.ownership
        dtypes = ownership.dtypes()
        self._sources = _sources(
            checkpoint,
            ownership.names(),
            ownership.tied_names(),
            ownership.keys(),
            lambda name: (ownership.shard(name).full, dtypes[name]),
        )
        for name, _, shard in held(update):
            checkpoint.check(self._sources[name], shard)
        for one in self._stages:
            if one.versions is not None:
                for key, shard in self._older(one.versions).values():
                    checkpoint.check(key, shard)
        has_none = checkpoint.manifest.kind == "weights" and "optimizers" not in checkpoint.manifest.values
        self._optimizers = None if has_none else SavedOptimizers(checkpoint, fresh=fresh)
        if self._optimizers is not None:
            for one in self._stages:
                self._optimizers.check(one, ownership)
        self.kept = {key: value for key in update.kept if (value := checkpoint.value(key)) is not None}
        self._note_lost()

    def take(self) -> None:
        ownership, checkpoint = self._update.ownership, self.checkpoint
        for extra in reversed(checkpoint.value(EXTRA) or ()):  # by process: of replicas the first one's
            set_extra_states(ownership.model.root, extra or {})
        with torch.no_grad():
            for name, tensor, shard in held(self._update):
                tensor.copy_(checkpoint.read(self._sources[name], shard))
            for one in self._stages:
                if one.versions is not None:
                    self._take_versions(one.versions)
                if self._optimizers is not None:
                    self._optimizers.load_into(one, ownership)

    def _take_versions(self, versions: WeightVersions) -> None:
        for parameter, name in zip(versions.own, versions.names, strict=True):
            shard = self._update.ownership.shard(name)
            parameter.data.copy_(self.checkpoint.read(self._sources[name], shard))
        older: dict[int, dict[str, torch.Tensor]] = {}
        for (number, name), (key, shard) in self._older(versions).items():
            older.setdefault(number, {})[name] = self.checkpoint.read(key, shard)
        versions.restore(self.checkpoint.manifest.step * self._schedule.groups_per_batch, older)

    @property
    def _is_same_rule(self) -> bool:
        return bool(self.checkpoint.value("rule") == rule_of(self._schedule))

    def _older(self, versions: WeightVersions) -> dict[tuple[int, str], tuple[str, Shard]]:
        """By number and parameter, key and shard of each older version in the checkpoint."""
        if not self._is_same_rule:
            return {}
        return {
            (number, name): (keys[name], self._update.ownership.shard(name))
            for number, keys in self.checkpoint.manifest.versions.items()
            for name in versions.names
            if name in keys
        }

    def _note_lost(self) -> None:
        manifest, schedule, own_seed = self.checkpoint.manifest, self._schedule, self._update.run.options.seed
        if manifest.kind == "weights":
            return
        if manifest.versions and not self._is_same_rule:
            rule, groups = self.checkpoint.value("rule") or ("unknown", 1)
            self.lost.append(
                f"it has older weight versions of the rule {rule!r} with {groups} updates a step, and this run has "
                f"{schedule.weight_rule!r} with {schedule.groups_per_batch}: every stage begins with the newest weights"
            )
        if self._optimizers is not None and manifest.step:
            self.lost += self._optimizers.lost(self._stages)
        if manifest.step:
            self.lost += [what for each in self._update.run.added if (what := each.lost()) is not None]
        seed = self.checkpoint.value("seed")
        if seed != own_seed:
            self.lost.append(
                f"it was saved with seed={seed}, and this run has seed={own_seed}: random numbers, such as those of "
                f"dropout, differ from here on"
            )


def check_model(checkpoint: Checkpoint, root: nn.Module) -> None:
    """Raises ValueError for a checkpoint of another model than this one, which is whole."""
    own = tensors_of(root)
    firsts: dict[int, str] = {}
    tied = {name: first for name, x in own.items() if (first := firsts.setdefault(id(x), name)) != name}
    _sources(checkpoint, list(own), tied, keys_of(root), lambda name: (tuple(own[name].shape), own[name].dtype))


def _sources(
    checkpoint: Checkpoint, own: Sequence[str], tied: _Names, others: _Names, kind: Callable[[str], Kind]
) -> dict[str, str]:
    """Key of each of the model's tensors. Raises ValueError for a checkpoint of another model.

    Arguments:
        own, tied: names of the model's tensors, and for those of tied ones the first name.
        others: keys in the model's state dict that differ from names.
        kind: shape and type of a tensor, by name.
    """
    manifest = checkpoint.manifest
    there = {key: tied.get(name, name) for name, key in others.items() if key in manifest.names}
    own, tied = [*own, *there], {**tied, **there}
    groups: dict[str, list[str]] = {}  # tied names, by the first
    for name in own:
        groups.setdefault(tied.get(name, name), []).append(name)
    saved, known = set(manifest.names), set(own)
    missing = [name for name in own if not saved & set(groups[tied.get(name, name)])]
    unknown = [name for name in manifest.names if name not in known]
    if missing or unknown:
        raise ValueError(f"checkpoint {checkpoint.place} is of another model: {_differing(missing, unknown, own)}")
    sources: dict[str, str] = {}
    for first, names in groups.items():
        keys = dict.fromkeys(model_key(manifest.tied.get(name, name)) for name in names if name in saved)
        key, *more = keys
        for other in more:
            if not _are_equal(checkpoint, key, other):
                raise ValueError(
                    f"checkpoint {checkpoint.place} has different tensors for {names}, which are one tensor in this "
                    f"model: expected a checkpoint of a model whose weights are tied, too"
                )
        sources |= dict.fromkeys(names, key)
        _check_kind(checkpoint, key, first, kind(first))
    return sources


def _check_kind(checkpoint: Checkpoint, key: str, name: str, kind: Kind) -> None:
    (shape, dtype), record = kind, checkpoint.record(key)
    expected = str(dtype).removeprefix("torch.")
    if record.shape != shape:
        raise ValueError(
            f"checkpoint {checkpoint.place} is of another model: {name!r} has shape {record.shape}, expected {shape}"
        )
    if record.dtype != expected:
        raise ValueError(
            f"checkpoint {checkpoint.place} has {name!r} in {record.dtype}, and it is in {expected} here: expected the "
            f"same type, or a new run with its weights: stagewright export, then load_state_dict"
        )


def _are_equal(checkpoint: Checkpoint, one: str, other: str) -> bool:
    first, second = checkpoint.record(one), checkpoint.record(other)
    if (first.shape, first.dtype) != (second.shape, second.dtype):
        return False
    return torch.equal(checkpoint.full(one), checkpoint.full(other))


def _differing(missing: Sequence[str], unknown: Sequence[str], own: Sequence[str]) -> str:
    near = [(name, close[0]) for name in unknown if (close := difflib.get_close_matches(name, own, n=1))]
    hint = f"; its {near[0][0]!r} looks like {near[0][1]!r}" if near else ""
    return (
        f"it lacks {some_of(missing)} and has {some_of(unknown)}, which the model has not: expected the model's "
        f"original names{hint}"
    )
