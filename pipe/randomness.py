"""Random numbers that do not depend on the partition.

At the entry of each cut unit the generators are seeded with `mix(seed, step, microbatch, unit)`. So a dropout
mask is the same on one rank and on any cut of the model, with and without recomputation.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch

_MASK = (1 << 64) - 1
_GOLDEN = 0x9E3779B97F4A7C15


def mix(seed: int, step: int, microbatch: int, unit: int) -> int:
    """A 64-bit seed from four numbers: splitmix64's finalizer (Steele et al., 2014) folded over them.

    >>> mix(0, 0, 0, 0) == mix(0, 0, 0, 0) != mix(0, 0, 1, 0)
    True
    """
    state = seed & _MASK
    for value in (step, microbatch, unit):
        state = (state + _GOLDEN * (value + 1)) & _MASK
        state = ((state ^ (state >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
        state = ((state ^ (state >> 27)) * 0x94D049BB133111EB) & _MASK
        state ^= state >> 31
    return state


class Seeder:
    """Seeds the CPU generator, and the CUDA generator of `device`, for the units of one action at a time."""

    def __init__(self, seed: int, device: torch.device) -> None:
        self._seed = seed
        self._step = 0
        self._microbatch = 0
        self._active = False
        self._generators = [torch.default_generator]
        if device.type == "cuda":
            torch.cuda.init()  # type: ignore[no-untyped-call]
            index = torch.cuda.current_device() if device.index is None else device.index
            self._generators.append(torch.cuda.default_generators[index])

    @contextmanager
    def action(self, *, step: int, microbatch: int) -> Iterator[None]:
        """Within: `enter` seeds for this step and microbatch. Behind: the user's global state, as it was."""
        states = [generator.get_state() for generator in self._generators]
        self._step, self._microbatch, self._active = step, microbatch, True
        try:
            yield
        finally:
            self._active = False
            for generator, state in zip(self._generators, states, strict=True):
                generator.set_state(state)

    def enter(self, unit: int) -> None:
        """The unit begins: seed for it. Outside an action (shape inference) nothing happens."""
        if not self._active:
            return
        seed = mix(self._seed, self._step, self._microbatch, unit)
        for generator in self._generators:
            generator.manual_seed(seed)
