"""Snapshots: the part of a run's state that this process writes.

    model/...       parameters and buffers      \\
    version/...     older weights                } each piece on one of the processes that hold it
    optimizer/...   what optimizers keep        /   (optimizer/ENTRY/NAME: for parameter NAME, under ENTRY)
    values          the same where it is not a tensor; the loader's position, generators, seeds
                    optimizers, by process: stage, class, groups (names, options), scheduler (class, state), in order

A snapshot holds references; `to_host` copies. Before the first one of a run, processes agree on which of them writes
what (`Writers`), so that replicas divide the work.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from math import prod
from typing import Any, Protocol, runtime_checkable

import numpy as np
import torch

from ...schedules import Schedule
from ..shards.shard import Shard, TensorBox
from ..stage.own_state import EXTRA
from ..stage.ownership import Ownership
from ..update.interface import Update
from ..update.optimizers import StageOptimizers, options_of_group
from .manifest import model_key, optimizer_key, version_key
from .values import Json, encode

_Place = tuple[str, tuple[int, ...], tuple[int, ...]]  # of a box: tensor, start, sizes


@runtime_checkable
class HasState(Protocol):
    """An object whose state is saved and loaded, such as a data loader of `pipe.loader` or a GradScaler."""

    def state_dict(self) -> Mapping[str, Any]:
        """State as tensors, numbers and text, in dicts and lists."""

    def load_state_dict(self, state: Mapping[str, Any], /) -> object:
        """Resumes from a state. Raises ValueError for one that does not fit."""


def check_loader(loader: object) -> None:
    """ValueError for a loader whose place cannot be saved, such as a plain DataLoader."""
    if loader is not None and not isinstance(loader, HasState):
        raise ValueError(
            f"loader={type(loader).__name__}: it has no state_dict() and load_state_dict(), so its place cannot be "
            f"kept: expected pipe.loader(dataset, batch_size=...), or torchdata's StatefulDataLoader"
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class HeldPiece:
    """A box of a tensor of this shape, from `start`, to be written by this process."""

    key: str
    shape: tuple[int, ...]
    start: tuple[int, ...]
    tensor: torch.Tensor


@dataclass(frozen=True, slots=True, kw_only=True)
class Snapshot:
    """State after `step` steps, the part that this process writes.

    `tied` is the name under which the tensor of a name is kept. Other processes lack a key of `values` or have an equal
    value; of `by_process` each has its own.
    """

    step: int
    kind: str
    names: tuple[str, ...]
    tied: Mapping[str, str]
    pieces: tuple[HeldPiece, ...]
    values: Mapping[str, Json]
    by_process: Mapping[str, Json]

    @property
    def num_bytes(self) -> int:
        return sum(piece.tensor.nbytes for piece in self.pieces)

    def to_host(self, copy: Callable[[torch.Tensor], torch.Tensor]) -> Snapshot:
        """A snapshot that training does not change, made by `copy` of each tensor into host memory."""
        return replace(self, pieces=tuple(replace(piece, tensor=copy(piece.tensor)) for piece in self.pieces))


def one_by_stage(update: Update) -> list[StageOptimizers]:
    """Optimizers of each stage on its first local rank; those of other ranks are equal."""
    found: dict[int, StageOptimizers] = {}
    for one in update.stages:
        found.setdefault(one.stage, one)
    return list(found.values())


def held(update: Update) -> Iterator[tuple[str, torch.Tensor, Shard]]:
    """Name of each parameter and buffer, this process's part of it, and its shard."""
    tied, shards = update.ownership.tied_names(), update.shards
    parts = shards.parts if shards.apart else {}  # where the model's own Parameters are freed
    for name, tensor in update.ownership.state_dict().items():
        part, shard = parts.get(tied.get(name, name)), update.ownership.shard(name)
        yield (name, tensor.data, shard) if part is None else (name, part.parameter.data, part.shard(shard))


class Writers:
    """Parts of each tensor that this process writes, agreed on once. Making it is collective."""

    def __init__(self, update: Update) -> None:
        mine: dict[_Place, int] = {}
        ownership, collectives, layout = update.ownership, update.run.collectives, update.run.layout
        self.changes = ownership.kinds.changes  # of types and shapes, until which it holds
        parameters, tied = dict(ownership.named_parameters()), ownership.tied_names()
        for name, tensor, shard in held(update):
            is_first = layout.schedule.owners[ownership.stages[name][0]][0] in layout.place.local_ranks
            if name not in tied and (name in parameters or is_first):  # only the first owner writes a buffer
                mine |= {
                    (model_key(name), box.start, box.sizes): prod(box.sizes) * tensor.element_size()
                    for box in _boxes(shard)
                }
        for one in one_by_stage(update):
            for name in dict.fromkeys(one.names.values()):
                boxes = _boxes(state_shard(one, name, ownership))
                mine |= {(_state(name), box.start, box.sizes): 2 * prod(box.sizes) for box in boxes}
                mine |= {(_rest(name), (), ()): 1} if boxes else {}
        everyone = collectives.gather(mine, what="agreeing on who writes what of a checkpoint")
        self._mine = _shared_out(everyone)[collectives.rank]

    def boxes(self, what: str, shard: Shard) -> list[TensorBox]:
        """Boxes of a shard of this tensor that this process writes."""
        return [box for box in _boxes(shard) if (what, box.start, box.sizes) in self._mine]

    def rest(self, name: str) -> bool:
        return (_rest(name), (), ()) in self._mine


def take_snapshot(update: Update, writers: Writers, *, step: int, loader: Mapping[str, Any] | None) -> Snapshot:
    """State of this process, with the tensors that train; a tied weight of several local stages is in it once.

    Raises ValueError for state that a checkpoint has no name or no form for.
    """
    ownership = update.ownership
    tied, keys = ownership.tied_names(), ownership.keys()
    pieces: list[HeldPiece] = []
    for name, tensor, shard in held(update):
        if name not in tied:
            boxes = writers.boxes(model_key(name), shard)
            pieces += _pieces(model_key(keys.get(name, name)), tensor, shard, boxes)
    values: dict[str, Json] = {"rule": encode(rule_of(update.schedule), what="the weight rule")}
    optimizers: list[Json] = []
    for one in one_by_stage(update):
        optimizers += _optimizer_content(one)
        of_stage, rest = _stage_state(one, ownership, writers)
        pieces += of_stage
        values |= rest
    by_process: dict[str, Json] = {"optimizers": optimizers}
    for name, (state, *_) in generators().items():
        by_process[random_key(name)] = encode(state(), what=f"the state of the generator of {name}")
    if loader is not None:
        by_process["loader"] = encode(dict(loader), what="the loader's state")
    if extra := ownership.extra_states():
        by_process[EXTRA] = encode(extra, what="what get_extra_state of modules returns")
    values["seed"] = update.run.options.seed
    values |= {key: encode(kept, what=f"the {key} of updates") for key, kept in update.kept.items()}
    return Snapshot(
        step=step,
        kind="training",
        names=tuple(keys.get(name, name) for name in ownership.names()),
        tied={keys.get(name, name): keys.get(first, first) for name, first in tied.items()},
        pieces=tuple({(piece.key, piece.start): piece for piece in pieces}.values()),
        values=values,
        by_process=by_process,
    )


def _stage_state(
    stage: StageOptimizers, ownership: Ownership, writers: Writers
) -> tuple[list[HeldPiece], dict[str, Json]]:
    """Pieces and other values of a stage's optimizer state and older weights.

    Raises ValueError for a tensor that is neither like its parameter nor whole on each process.
    """
    pieces: list[HeldPiece] = []
    values: dict[str, Json] = {}
    states = [
        (type(optimizer).__name__, stage.names[id(parameter)], entry, value)
        for optimizer in stage.optimizers
        for parameter, state in optimizer.state.items()
        for entry, value in state.items()
    ]
    for kind, name, entry, value in states:
        if not isinstance(entry, str):
            raise ValueError(
                f"optimizer {kind} keeps {entry!r:.40} for {name!r}: expected text as the key of each entry of its "
                f"state"
            )
        key, shard = optimizer_key(entry, name), state_shard(stage, name, ownership)
        is_tensor = isinstance(value, torch.Tensor)
        if is_tensor and tuple(value.shape) == shard.local:
            pieces += _pieces(key, value, shard, writers.boxes(_state(name), shard))
        elif is_tensor and not shard.is_whole and value.numel() != 1:
            raise ValueError(
                f"optimizer {kind} keeps {entry!r} of shape {tuple(value.shape)} for {name!r}, of which this process "
                f"has a part of shape {shard.local}: expected state of the parameter's shape, which another number of "
                f"processes can divide anew, or whole parameters"
            )
        elif is_tensor and writers.rest(name):
            whole = Shard.whole(tuple(value.shape))
            pieces += _pieces(key, value, whole, _boxes(whole))
        elif writers.rest(name):
            values[key] = encode(value, what=f"{entry!r} of the optimizer's state of {name!r}")
    for number, tensors in ({} if stage.versions is None else stage.versions.older()).items():
        for name, tensor in tensors.items():
            shard = ownership.shard(name)
            pieces += _pieces(version_key(number, name), tensor, shard, writers.boxes(model_key(name), shard))
    return pieces, values


def state_shard(stage: StageOptimizers, name: str, ownership: Ownership) -> Shard:
    return stage.shard(name, ownership.shard(name))


def _optimizer_content(stage: StageOptimizers) -> list[Json]:
    """Optimizers of a stage, without their state of each parameter."""
    written: list[Json] = []
    for position, optimizer in enumerate(stage.optimizers):
        kind = type(optimizer).__name__
        groups = [
            {
                "names": stage.names_in(optimizer, group),
                "options": encode(options_of_group(group), what=f"an option of {kind}"),
            }
            for group in optimizer.param_groups
        ]
        scheduler = stage.schedulers[position] if stage.schedulers else None
        kept = None
        if scheduler is not None:
            state = encode(scheduler.state_dict(), what=f"the state of {type(scheduler).__name__}")
            kept = {"class": type(scheduler).__name__, "state": state}
        written.append({"stage": stage.stage, "class": kind, "groups": groups, "scheduler": kept})
    return written


Generator = tuple[Callable[[], Any], Callable[[Any], object], Callable[[Any], object]]  # see `generators`


def generators() -> dict[str, Generator]:
    """This process's random generators, by name: get a state, set it, set it in another generator as a check.

    The model's random numbers depend on none of them (`guards/randomness`); those that a user's loop draws (noise, an
    order, augmentation without workers) do.
    """
    own, numpy = torch.default_generator, partial(np.random.get_state, legacy=False)
    found: dict[str, Generator] = {
        "torch": (own.get_state, own.set_state, lambda state: torch.Generator().set_state(state)),
        "python": (random.getstate, random.setstate, lambda state: random.Random().setstate(state)),
        "numpy": (numpy, np.random.set_state, lambda state: np.random.RandomState().set_state(state)),
    }
    if torch.cuda.is_available():  # that of the device of this process
        found["cuda"] = (torch.cuda.get_rng_state, torch.cuda.set_rng_state, lambda state: None)
    return found


def rule_of(schedule: Schedule) -> list[str | int]:
    """The weight rule, and the number of updates per step, by which versions are numbered."""
    return [schedule.weight_rule, schedule.groups_per_batch]


def random_key(generator: str) -> str:
    return f"random/{generator}"


def _pieces(key: str, tensor: torch.Tensor, shard: Shard, boxes: Sequence[TensorBox]) -> list[HeldPiece]:
    assert tuple(tensor.shape) == shard.local, f"{key} of shape {tuple(tensor.shape)}, and the shard is {shard.local}"
    own = tensor.detach()
    return [
        HeldPiece(
            key=key,
            shape=shard.full,
            start=box.start,
            tensor=own[box.of_local()] if prod(box.sizes) else own.new_empty(box.sizes),
        )
        for box in boxes
    ]


def _boxes(shard: Shard) -> Sequence[TensorBox]:
    """Boxes of a shard; an empty tensor has one empty box, so that it is not forgotten."""
    if prod(shard.full):
        return shard.boxes
    start = (0,) * len(shard.full)
    return (TensorBox(start=start, local=start, sizes=shard.full),)


def _state(name: str) -> str:
    return f"optimizer state of {name}"


def _rest(name: str) -> str:
    return f"rest of {_state(name)}"


def _shared_out(everyone: Sequence[Mapping[_Place, int]]) -> list[set[_Place]]:
    """Pieces that each process writes: the largest first, each by the holder that has least to write."""
    holders: dict[_Place, list[int]] = {}
    sizes: dict[_Place, int] = {}
    for process, held in enumerate(everyone):
        for place, num_bytes in held.items():
            holders.setdefault(place, []).append(process)
            sizes[place] = num_bytes
    loads = [0] * len(everyone)
    found: list[set[_Place]] = [set() for _ in everyone]
    for place in sorted(sizes, key=lambda place: (len(holders[place]) > 1, -sizes[place], place)):
        writer = min(holders[place], key=loads.__getitem__)
        loads[writer] += sizes[place]
        found[writer].add(place)
    return found
