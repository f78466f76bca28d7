"""The generators of a process in checkpoints: torch's, Python's and numpy's, where the user's own code left them.

What the model draws depends on none of them (`stages/randomness`). What a user's loop draws for itself (noise, an
order, augmentation without workers) goes on as it would have.
"""

from __future__ import annotations

import random
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch

GENERATORS = ("torch", "cuda", "python", "numpy")


def generator_states() -> dict[str, Any]:
    """Where they stand, by name."""
    states: dict[str, Any] = {
        "torch": torch.default_generator.get_state(),
        "python": random.getstate(),
        "numpy": np.random.get_state(legacy=False),
    }
    if torch.cuda.is_available():
        states["cuda"] = torch.cuda.get_rng_state()  # of the device of this process
    return states


def check_generator(name: str, state: Any) -> None:
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


def set_generators(states: Mapping[str, Any]) -> None:
    """Let these stand there, each of which has been checked."""
    if "torch" in states:
        torch.default_generator.set_state(states["torch"])
    if "python" in states:
        random.setstate(states["python"])
    if "numpy" in states:
        np.random.set_state(states["numpy"])
    if "cuda" in states and torch.cuda.is_available():
        torch.cuda.set_rng_state(states["cuda"])
