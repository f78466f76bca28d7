"""State that a checkpoint has of a process itself, beside its stages: its place in the data, and its random generators.

The user's code goes on with both as soon as `load` returns, while stages may be built by the first batch alone.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import torch

from ...comm import Collectives, Guard
from .reader import Checkpoint
from .snapshot import HasState, random_key

T = TypeVar("T")

_GENERATORS = ("torch", "cuda", "python", "numpy")


def read_together(
    folder: Path, read: Callable[[Checkpoint], T], collectives: Collectives, guard: Guard
) -> tuple[Checkpoint, T]:
    """The checkpoint in `folder`, and what `read` makes of it; ValueError on every rank unless all read the same."""
    name, place, problem = "", folder, ""
    try:
        checkpoint = Checkpoint(folder)
        name, place = checkpoint.manifest.name, checkpoint.place
        with checkpoint.as_refusals():
            found = read(checkpoint)
    except ValueError as error:
        if collectives.alone:
            raise
        problem = f"rank {collectives.rank} cannot load the checkpoint, so no rank does: {error}"
    with guard.together():
        collectives.alike((name, place), _differing, what="loading a checkpoint", problem=problem)
    return checkpoint, found


def _differing(first: int, one: tuple[str, Path], rank: int, its: tuple[str, Path]) -> str | None:
    if one[0] == its[0]:
        return None
    return (
        f"rank {first} read {one[1]} and rank {rank} read {its[1]}: expected one folder that all ranks see and nobody "
        f"saves into meanwhile, or pipe.load of one checkpoint in it"
    )


def lost_text(checkpoint: Checkpoint, lost: Sequence[str]) -> str:
    """For a warning of what cannot be kept; empty where all can."""
    return f"of the checkpoint {checkpoint.folder}: {'; '.join(lost)}" if lost else ""


class ProcessState:
    """The part of one process, before anything is changed. Raises ValueError for one that does not fit. `lost`: what
    cannot be kept, for people."""

    def __init__(self, checkpoint: Checkpoint, loader: HasState | None, *, process: int, num_processes: int) -> None:
        self.lost: list[str] = []
        self._checkpoint = checkpoint
        self._loader = loader
        self._process = {"process": process, "num_processes": num_processes}
        self._generators = self._check_generators()
        self._place = self._check_loader()

    def take(self) -> None:
        """Go on there."""
        with self._checkpoint.as_refusals():
            if self._loader is not None and self._place is not None:
                self._loader.load_state_dict(self._place)  # it alone may still refuse
        _set_generators(self._generators)

    def _check_generators(self) -> Mapping[str, Any]:
        """States of the generators that can go on; the others are told of."""
        found: dict[str, Any] = {}
        for generator in _GENERATORS:
            key = random_key(generator)
            there, state = self._checkpoint.of_process(key, **self._process)
            if there and state is not None:
                _check_generator(generator, state)
                found[generator] = state
            elif generator == "torch" and key in self._checkpoint.manifest.values:  # the others may never be seeded
                self.lost.append(
                    f"torch's generator stood elsewhere in each of its {len(self._checkpoint.manifest.values[key])} "
                    f"processes, and there are {self._process['num_processes']} now: what your own code draws goes on "
                    f"from where it stands here"
                )
        return found

    def _check_loader(self) -> Mapping[str, Any] | None:
        there, place = self._checkpoint.of_process("loader", **self._process)
        is_saved = "loader" in self._checkpoint.manifest.values
        if self._loader is None:
            if is_saved:
                self.lost.append(
                    f"it knows where the data loader stood ({place!r:.120}), and nobody takes it: data begins from the "
                    f"start. Type pipe.load(folder, loader=loader)"
                )
            return None
        if not is_saved and self._checkpoint.manifest.kind == "training":
            raise ValueError(
                f"checkpoint {self._checkpoint.place} has no place in the data: expected one from "
                f"pipe.save(..., loader=)"
            )
        if is_saved and not there:
            raise ValueError(
                f"checkpoint {self._checkpoint.place} has another place in the data for each of "
                f"{len(self._checkpoint.manifest.values['loader'])} processes, and there are "
                f"{self._process['num_processes']} now: expected as many, or a loader whose state is the same for all, "
                f"as that of pipe.loader"
            )
        found: Mapping[str, Any] | None = place
        return found


def _check_generator(name: str, state: Any) -> None:
    """ValueError for what is no state of this generator."""
    try:
        if name == "torch":
            torch.Generator().set_state(state)
        elif name == "python":
            random.Random().setstate(state)
        elif name == "numpy":
            np.random.RandomState().set_state(state)
    except (KeyError, TypeError, ValueError, RuntimeError) as error:
        raise ValueError(f"state of the generator {name!r} is none: {error}") from None


def _set_generators(states: Mapping[str, Any]) -> None:
    if "torch" in states:
        torch.default_generator.set_state(states["torch"])
    if "python" in states:
        random.setstate(states["python"])
    if "numpy" in states:
        np.random.set_state(states["numpy"])
    if "cuda" in states and torch.cuda.is_available():
        torch.cuda.set_rng_state(states["cuda"])
