"""Random numbers that do not depend on the partition: torch's, Python's and numpy's.

At the entry of each cut unit the generators are seeded with `mix(seed, step, microbatch, unit)`. So a dropout mask, or
the layer that LayerDrop leaves out, is the same on one rank and on any cut, with and without recomputation.

torch's generator is seeded for every unit. Seeding Python's takes longer than a small layer, and saving numpy's has a
cost, too: both are seeded for units that drew from them in shape inference. A unit that begins to draw later, after an
attribute was changed, is noticed in its first batch.
"""

from __future__ import annotations

import ctypes
import math
import random
import warnings
import zlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from typing import Any
from unittest.mock import patch

import numpy as np
import torch
from numpy.random.mtrand import get_bit_generator

from ...partition.model.untouched import StateSnapshot, torch_generators, untouched

_MASK = (1 << 64) - 1
_GOLDEN = 0x9E3779B97F4A7C15
_LOSS = -1  # its number among the units
_INSIDE = 1 << 62  # marks seeds in regions of divided tensors
_COMMON = (1 << 30) - 1  # bits of them that all members have, above the own 32, all that the CPU's generator uses
_OF_ACTION = ("_step", "_microbatch", "_folded", "_active", "_unit", "_outside")  # attributes of a Seeder
MERSENNE_WORDS = 624  # of the state of Python's and numpy's generators, before the index of the next word


def mix(seed: int, step: int, microbatch: int, unit: int) -> int:
    """A 64-bit seed from four numbers: splitmix64's finalizer (Steele et al., 2014) folded over them.

    >>> mix(0, 0, 0, 0) == mix(0, 0, 0, 0) != mix(0, 0, 1, 0)
    True
    """
    return _fold(_fold(_fold(seed & _MASK, step), microbatch), unit)


def _fold(state: int, value: int) -> int:
    state = (state + _GOLDEN * (value + 1)) & _MASK
    state = ((state ^ (state >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
    state = ((state ^ (state >> 27)) * 0x94D049BB133111EB) & _MASK
    return state ^ (state >> 31)


class Seeder:
    """Seeds the generators for the units of one action at a time.

        call: the user's states are saved    action: begin, enter(unit), ..., end    action: ...    they are restored

    Arguments:
        device: of the run, whose generator is seeded as well as the CPU's.
        runs_again: whether anything is recomputed: an action's numbers must then not depend on what ran before it.
        member: this process's number in its tensor group.
    """

    def __init__(self, seed: int, device: torch.device, *, runs_again: bool = False, member: int = 0) -> None:
        self.device = device
        self._seed = seed
        self._runs_again = runs_again
        self._member = member
        # Seed of the region entered last, whether it has a module's number, and states outside before it
        self._outside: tuple[int, bool, list[torch.Tensor]] | None = None
        self._drew_apart: bool | None = None  # None: not within `drawing_apart`
        self._torch = torch_generators(device)
        self._others: tuple[_Global, ...] = (_Global(), _Numpy())
        self._step = self._microbatch = self._newest = 0
        self._folded: int | None = None  # seed, step and microbatch, once an action needs them
        self._called = self._active = self._watching = self._drawn = False
        self._unit: int | None = None  # entered last
        self._knows_loss = False

    @contextmanager
    def call(self) -> Iterator[None]:
        """Context of all actions of a call, after which the user's generators have their states again."""
        self._called = True
        before, kept = [each.position() for each in self._others], [each.get_state() for each in self._torch]
        try:
            yield
        finally:
            self._called = False
            self._set(kept)
            for each, position in zip(self._others, before, strict=True):
                if not each.put_back() and each.position() != position:
                    each.seed_all_after(self._newest)

    def _set(self, states: Sequence[torch.Tensor]) -> None:
        for generator, state in zip(self._torch, states, strict=True):
            generator.set_state(state)

    def begin(self, *, step: int, microbatch: int) -> None:
        """Begin an action: `enter` seeds for this step and microbatch until `end`."""
        self._step, self._microbatch, self._folded = step, microbatch, None
        if step > self._newest:
            self._newest = step
        self._active = True
        self._unit = None
        self._outside = None
        if self._runs_again:
            for each in self._others:
                each.seed(self._begun, keep=self._called)
                each.is_for_unit = False

    @property
    def _begun(self) -> int:
        if self._folded is None:
            self._folded = _fold(_fold(self._seed & _MASK, self._step), self._microbatch)
        return self._folded

    def end(self) -> None:
        self._active = False
        if self._runs_again:
            for each in self._others:
                if not each.is_for_unit and each.has_moved():
                    each.seed_all_after(self._newest)
        if self._unit == _LOSS and not self._knows_loss:
            self._knows_loss = True
            for each in self._others:
                if not each.has_moved():
                    each.units.discard(_LOSS)

    def enter(self, unit: int) -> None:
        """Seed for a unit that begins. In shape inference, note what the unit before drew from."""
        if self._active:
            self._outside = None
            seed = _fold(self._begun, unit)
            for generator in self._torch:
                generator.manual_seed(seed & ~_INSIDE)
            for each in self._others:
                if self._step > each.known_until or unit in each.units:
                    each.seed(seed, keep=self._called)
                    each.is_for_unit = True
        elif self._watching:
            self._look()
            self._start(unit)
        self._unit = unit

    def enter_loss(self) -> None:
        """Seed for the loss, a separate unit. Shape inference does not run it: its first run shows what it draws."""
        self.enter(_LOSS)

    def region(self, is_own: bool, module: int | None = None) -> None:
        """Enter or leave a region of tensors that are divided over the tensor group. Outside, all members draw the same
        numbers. Inside, each member has its own stream: masks of different heads must not be the same. All of it
        follows from the generator's state, which a checkpoint restores in a backward: inside, its seed is marked, and
        has in it the seed of what follows outside. `module`: a number of the module, one of experts, which a
        tensor group does not divide; with it, what is drawn inside changes nothing outside."""
        if not self._active or is_own is bool((seed := self._torch[0].initial_seed()) & _INSIDE):
            return
        here = [generator.get_state() for generator in self._torch]
        if is_own:
            state = zlib.crc32(b"".join(each.numpy().tobytes() for each in here))
            common = _fold(_fold(self._begun, state), module or 0) & _COMMON
            seed = _INSIDE | common << 32 | _fold(common, self._member if module is None else 0) & 0xFFFFFFFF
            self._outside = seed, module is not None, here
        for generator in self._torch:
            generator.manual_seed(seed)
        if is_own:
            return
        drew = not all(map(torch.equal, here, [generator.get_state() for generator in self._torch]))
        if drew and self._drew_apart is not None:
            self._drew_apart = True
        if self._outside is not None and self._outside[0] == seed and (self._outside[1] or not drew):
            self._set(self._outside[2])
        else:
            for generator in self._torch:
                generator.manual_seed(_fold(seed >> 32 & _COMMON, _LOSS) & ~_INSIDE)

    @contextmanager
    def drawing_apart(self) -> Iterator[Callable[[], bool]]:
        """Context whose function returns whether anything was drawn in a region of divided tensors."""
        with patch.object(self, "_drew_apart", False):
            yield lambda: bool(self._drew_apart)

    def state(self) -> Sequence[Any]:
        """States of the generators within a unit, for `resume`; outside of actions those of the user's."""
        if not self._active:
            return (StateSnapshot((), device=None),)
        moved = [each.state() if each.is_for_unit or each.has_moved() else None for each in self._others]
        return [generator.get_state() for generator in self._torch], moved, self._outside, self._unit

    def resume(self, state: Sequence[Any]) -> None:
        """Set the generators to these states in a later action of the same microbatch, to recompute what followed."""
        if len(state) == 1:
            state[0].restore()
            return
        of_torch, others, self._outside, self._unit = state
        self._set(of_torch)
        for each, then in zip(self._others, others, strict=True):
            if then is not None:
                each.set(then)
                each.is_for_unit = True
            elif each.has_moved():
                each.seed(self._begun, keep=self._called)

    @contextmanager
    def again(self, state: Sequence[Any]) -> Iterator[None]:
        """Context of a recomputation; outside of actions the user's generators have their states again after it."""
        with nullcontext() if self._active else untouched(device=None):
            self.resume(state)
            yield

    @contextmanager
    def interrupted(self) -> Iterator[None]:
        """Context in which another action runs; afterwards this one continues where it was."""
        own = {name: getattr(self, name) for name in _OF_ACTION}
        here = [generator.get_state() for generator in self._torch]
        others = [(each.state(), each.is_for_unit) for each in self._others]
        yield
        for name, value in own.items():
            setattr(self, name, value)
        self._set(here)
        for each, (then, is_for_unit) in zip(self._others, others, strict=True):
            each.set(then)
            each.is_for_unit = is_for_unit

    @contextmanager
    def watch(self) -> Iterator[None]:
        """Context of shape inference: it is noted which units draw from Python's and numpy's generators. They draw the
        same on every rank. The caller restores the generators."""
        self._watching, self._unit = True, None
        self._start(0)
        try:
            yield
        finally:
            self._watching = False

    def has_drawn(self) -> bool:
        self._look()
        self._start(0)
        drawn, self._drawn = self._drawn, False
        return drawn

    def _start(self, unit: int) -> None:
        for generator in self._torch:
            generator.manual_seed(unit)
        for each in self._others:
            each.seed(unit, keep=False)

    def _look(self) -> None:
        for each in self._others:
            if each.has_moved():
                self._drawn = True
                if self._unit is not None:
                    each.units.add(self._unit)


class _Global:
    """A global generator other than torch's: Python's."""

    name = "Python's random numbers"

    def __init__(self) -> None:
        self.units = {_LOSS}  # that draw from it; the loss until it is known
        self.known_until = math.inf  # the last step for which only these are seeded, then all. A batch has one rule
        self.is_for_unit = False  # whether it was last seeded for a unit, not for an action
        self._kept: Any = None

    def position(self) -> object:
        return random.getstate()

    def has_moved(self) -> bool:
        return bool(random.getstate()[1][-1] != MERSENNE_WORDS)

    def state(self) -> Any:
        return random.getstate()

    def set(self, state: Any) -> None:
        random.setstate(state)

    def _start(self, seed: int) -> None:
        random.seed(seed)

    def seed(self, seed: int, *, keep: bool) -> None:
        """Seed it; `keep`: save its state for `put_back`."""
        if keep and self._kept is None:
            self._kept = self.state()
        self._start(seed)

    def put_back(self) -> bool:
        """Restore the state before it was seeded; False where it was not."""
        kept, self._kept = self._kept, None
        if kept is not None:
            self.set(kept)
        return kept is not None

    def seed_all_after(self, step: int) -> None:
        """Seed all units after this step, since one drew that did not when the stages were built."""
        if self.known_until == math.inf:
            self.known_until = step
            warnings.warn(
                f"the model drew from {self.name}, and did not when its stages were built: in this batch these numbers "
                f"depend on how it is cut; from the next batch they do not. Expected options that switch them on, such "
                f"as LayerDrop's probability, to be set before the pipeline is built",
                stacklevel=2,
            )


class _Numpy(_Global):
    name = "numpy's random numbers"

    def position(self) -> object:
        """The bytes of its memory: reading its state takes 20 times as long."""
        generator = get_bit_generator()
        if isinstance(generator, np.random.MT19937):
            return ctypes.string_at(generator.ctypes.state_address, 4 * (MERSENNE_WORDS + 1))
        return str(generator.state)

    def has_moved(self) -> bool:
        generator = get_bit_generator()
        if not isinstance(generator, np.random.MT19937):
            return True
        index = ctypes.c_uint32.from_address(generator.ctypes.state_address + 4 * MERSENNE_WORDS)
        return index.value != MERSENNE_WORDS

    def state(self) -> Any:
        return np.random.get_state(legacy=False)

    def set(self, state: Any) -> None:
        np.random.set_state(state)

    def _start(self, seed: int) -> None:
        generator = get_bit_generator()
        if isinstance(generator, np.random.MT19937):
            np.random.seed(seed & 0xFFFFFFFF)
        else:  # the user's choice
            generator.state = type(generator)(seed).state
