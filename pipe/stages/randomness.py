"""Random numbers that do not depend on the partition.

At the entry of each cut unit the generators are seeded with `mix(seed, step, microbatch, unit)`. So a dropout
mask is the same on one rank and on any cut of the model, with and without recomputation.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

_MASK = (1 << 64) - 1
_GOLDEN = 0x9E3779B97F4A7C15
_LOSS = -1  # its number among the units


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
    """Seeds the CPU generator, and the CUDA generator of `device`, for the units of one action at a time.

    Units that draw nothing are found by shape inference (`watch`) and not seeded. The user's global state is
    saved at the first unit of an action that draws, and restored at its end.
    """

    def __init__(self, seed: int, device: torch.device) -> None:
        self.device = device
        self._seed = seed
        self._step = 0
        self._microbatch = 0
        self._active = False
        self._saved: list[torch.Tensor] = []
        self._drawing: set[int] = set()  # units that draw random numbers
        self._current = -1
        self._generators = [torch.default_generator]
        if device.type == "cuda":
            torch.cuda.init()  # type: ignore[no-untyped-call]
            index = torch.cuda.current_device() if device.index is None else device.index
            self._generators.append(torch.cuda.default_generators[index])

    def begin(self, *, step: int, microbatch: int) -> None:
        """An action begins: `enter` seeds for this step and microbatch until `end`."""
        self._step, self._microbatch, self._active = step, microbatch, True

    def end(self) -> None:
        """The action is over: the user's global state is as it was."""
        self._active = False
        if self._saved:
            for generator, state in zip(self._generators, self._saved, strict=True):
                generator.set_state(state)
            self._saved = []

    def enter(self, unit: int) -> None:
        """The unit begins: seed for it, if it draws. Outside an action (shape inference) nothing is seeded."""
        self._current = unit
        if self._active and unit in self._drawing:
            self._seed_for(unit)

    def enter_loss(self) -> None:
        """The loss begins: a unit of its own, seeded in any case, since shape inference does not run it."""
        if self._active:
            self._seed_for(_LOSS)

    def _seed_for(self, unit: int) -> None:
        if not self._saved:
            self._saved = [generator.get_state() for generator in self._generators]
        seed = mix(self._seed, self._step, self._microbatch, unit)
        for generator in self._generators:
            generator.manual_seed(seed)

    def watch(self) -> TorchDispatchMode:
        """Within: random operations are noted for the unit that was entered last."""
        return _Watch(lambda: self._drawing.add(self._current))


class _Watch(TorchDispatchMode):  # type: ignore[no-untyped-call]
    def __init__(self, note: Callable[[], None]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._note = note

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if torch.Tag.nondeterministic_seeded in func.tags:
            self._note()
        return func(*args, **(kwargs or {}))
