"""What the code between blocks reads beside tensors, how that is read, and how a program changes it between steps."""

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import numpy as np

RATE = 1.0
TABLE = {"rate": 1.0}


class Config:
    rate = 1.0


def prepare(model: Any) -> None:
    model.alpha = 1.0
    model.options = {"alpha": 1.0, "deep": {"list": [1.0, 2.0]}}
    model.cfg = SimpleNamespace(sub=SimpleNamespace(alpha=1.0))
    model.array = np.ones(2)
    model.flags = {"plain"}
    model.config = Config()
    model.function = abs


def reset() -> None:
    global RATE
    RATE, Config.rate = 1.0, 1.0
    TABLE["rate"] = 1.0


def _set_global(model: Any, value: float) -> None:
    global RATE  # noqa: PLW0603
    RATE = value


def _first(model: Any) -> Any:
    return next(model.blocks[0].parameters(), model.reads_scale)


Read = Callable[[Any], Any]
Write = Callable[[Any, float], Any]
READS: dict[str, tuple[Read, Write]] = {
    "nothing": (lambda model: 1.0, lambda model, value: None),
    "attribute": (lambda model: model.alpha, lambda model, value: setattr(model, "alpha", value)),
    "options": (lambda model: model.options["alpha"], lambda model, value: model.options.update(alpha=value)),
    "deep": (
        lambda model: model.options["deep"]["list"][0],
        lambda model, value: model.options["deep"]["list"].__setitem__(0, value),
    ),
    "config": (lambda model: model.cfg.sub.alpha, lambda model, value: setattr(model.cfg.sub, "alpha", value)),
    "class": (lambda model: model.config.rate, lambda model, value: setattr(Config, "rate", value)),
    "global": (lambda model: RATE, _set_global),
    "table": (lambda model: TABLE["rate"], lambda model, value: TABLE.update(rate=value)),
    "numpy": (lambda model: float(model.array[0]), lambda model, value: model.array.__setitem__(0, value)),
    "set": (lambda model: 2.0 if "double" in model.flags else 1.0, lambda model, value: model.flags.add("double")),
    "child": (lambda model: model.blocks[0].alpha, lambda model, value: setattr(model.blocks[0], "alpha", value)),
    "training": (lambda model: 2.0 if model.blocks[-1].training else 1.0, lambda model, value: model.blocks[-1].eval()),
    "requires-grad": (
        lambda model: 2.0 if _first(model).requires_grad else 1.0,
        lambda model, value: _first(model).requires_grad_(False),
    ),
    "function": (lambda model: model.function(-1.0), lambda model, value: setattr(model, "function", lambda x: -value)),
    "number": (lambda model: 1.0 + len(model.options), lambda model, value: model.options.update(more=1.0)),
}
