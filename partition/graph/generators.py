"""Global random generators that user code may draw from: torch's, Python's and numpy's."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import torch


def torch_generators(device: torch.device) -> list[torch.Generator]:
    """The CPU's, and that of a CUDA device."""
    generators = [torch.default_generator]
    if device.type == "cuda":
        torch.cuda.init()  # type: ignore[no-untyped-call]
        index = torch.cuda.current_device() if device.index is None else device.index
        generators.append(torch.cuda.default_generators[index])
    return generators


class GeneratorStates:
    """Where all generators stand when this is made.

    Arguments:
        device: whose generator counts beside the CPU's.
    """

    def __init__(self, device: torch.device) -> None:
        self._torch = [(generator, generator.get_state()) for generator in torch_generators(device)]
        self._python = random.getstate()
        self._numpy = np.random.get_state(legacy=False)

    def restore(self) -> None:
        """Let them stand there again."""
        for generator, state in self._torch:
            generator.set_state(state)
        random.setstate(self._python)
        np.random.set_state(self._numpy)


def python_and_numpy() -> tuple[object, ...]:
    """Where Python's and numpy's generators stand: equal as long as nobody draws."""
    state: Any = np.random.get_state(legacy=False)
    return random.getstate(), state["state"]["pos"], state["state"]["key"].tobytes()
