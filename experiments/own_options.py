"""Options that name the user's own model, data, loss and optimizer, for every command that takes them. No torch."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields

from ..schedules.user_code import check_call, load
from .help_text import plain_help

_CALLS = {"model": (0, ()), "data": (0, ("batch_size",)), "loss": (2, ()), "optimizer": (1, ("lr",))}  # how each is


@plain_help
@dataclass(frozen=True, slots=True, kw_only=True)
class OwnOptions:
    """Functions of the user's, each as package.module:function or file.py:function."""

    model: str | None = None
    """Your own model, package.module:function or file.py:function: called without arguments, it returns the nn.Module
    (default: the example GPT)."""
    data: str | None = None
    """Its data, a function that returns a Dataset, or an iterable of batches: (inputs..., target), or a dict of
    keywords."""
    loss: str | None = None
    """Its loss(output, target), or an nn.Module class; model: the model returns it (default: cross-entropy of
    whole-number targets, mean squared error of others, the model's own for keywords without a target)."""
    optimizer: str | None = None
    """Its optimizer(parameters) (default: AdamW)."""

    def check_own(self, others: Mapping[str, object], *, optimizers: Sequence[str] = ()) -> None:
        """Raise ValueError for functions that are not there, and for what does not go together.

        Arguments:
            others: options of the example GPT by name that were given.
            optimizers: of the example GPT, by the names that --optimizer takes.
        """
        if self.model is None:
            for name in ("data", "loss", "optimizer"):
                value = getattr(self, name)
                if value is None or (name == "optimizer" and value in optimizers):
                    continue
                known = f", or {' or '.join(optimizers)}" if name == "optimizer" and optimizers else ""
                raise ValueError(f"--{name} {value} without --model: expected --model beside it{known}")
            return
        if self.optimizer in optimizers:
            others = {**others, "optimizer": self.optimizer}
        if self.data is None:
            raise ValueError(
                f"--model {self.model} without --data: expected --data package.module:function, which gives batches, "
                f"such as `def batches(): return DataLoader(...)` of (inputs..., target)"
            )
        for name, value in others.items():
            raise ValueError(f"--{name} {value} beside --model: leave it away, it is for the example GPT")
        for name, (num_arguments, options) in _CALLS.items():
            value = getattr(self, name)
            if value is None or (name == "loss" and value == "model"):
                continue
            function = load(name, value)
            made_first = name == "loss" and isinstance(function, type)
            check_call(name, value, function, num_arguments=0 if made_first else num_arguments, options=options)


def given(options: object, names: tuple[str, ...]) -> dict[str, object]:
    """By name those of a record's options that differ from their defaults."""
    defaults = {each.name: each.default for each in fields(options)}  # type: ignore[arg-type]
    return {name: getattr(options, name) for name in names if getattr(options, name) != defaults[name]}
