"""Number types in which a run computes, and compilation.

Float16 needs a loss scale; a batch keeps the autocast of its call.

torch.compile of stages compiles each cut unit's forward separately. A stage seeds random numbers between its units,
hooks run around them, and recomputation runs them again: compiled whole, a stage would break at each. Equal units share
one compiled graph. Parameters are inputs of the graph, so that it computes with the weight version that the unit holds
when it is called, and is not compiled again for another one.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Mapping
from contextlib import AbstractContextManager
from functools import partial
from types import MappingProxyType
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.amp import GradScaler

from ...partition.model.calls import Calls
from ...schedules import Schedule
from ..guards.contexts import NOTHING
from .arguments import Precision
from .recompute import NamedRule

_DTYPES = {"bf16": torch.bfloat16, "bfloat16": torch.bfloat16, "fp16": torch.float16, "float16": torch.float16}
_OPTIONS = tuple(name for name in inspect.signature(torch.compile).parameters if name not in ("model", "disable"))


def read_dtype(given: Precision | str | torch.dtype | None) -> torch.dtype | None:
    named = given.dtype if isinstance(given, Precision) else given
    dtype = _DTYPES.get(named, named) if isinstance(named, str) else named
    if isinstance(dtype, str) or dtype not in (None, *_DTYPES.values()):
        raise ValueError(
            f"precision={given!r}: expected 'bf16' or 'fp16', or stagewright.Precision(dtype=, grad_scaler=, compile=)"
        )
    return dtype


def read_grad_scaler(option: object) -> GradScaler | None:
    """The option `grad_scaler=`; None for a scaler that is not enabled. Raises ValueError for other values."""
    if option is None:
        return None
    if not isinstance(option, GradScaler):
        raise ValueError(
            f"grad_scaler={option!r:.60}: expected torch.amp.GradScaler('cpu' or 'cuda'), with init_scale=, "
            f"growth_factor=, backoff_factor= and growth_interval= as in plain PyTorch"
        )
    return option if option.is_enabled() else None


def refuse_float16_parameters(*modules: object) -> None:
    for module in modules:
        for name, parameter in module.named_parameters() if isinstance(module, nn.Module) else ():
            if parameter.dtype is torch.float16:
                raise ValueError(
                    f"parameter {name!r} is torch.float16: expected float32 parameters under "
                    f"torch.autocast(..., torch.float16) with a torch.amp.GradScaler, which divides no "
                    f"float16 gradients, or torch.bfloat16 (predict, without loss_fn=, runs)"
                )


def refuse_float16_autocast(device: torch.device, *, scales_loss: bool) -> None:
    if (
        not scales_loss
        and torch.is_autocast_enabled(device.type)
        and torch.get_autocast_dtype(device.type) is torch.float16
    ):
        raise ValueError(
            f"torch.autocast({device.type!r}, dtype=torch.float16) around training, where small gradients become 0 "
            f"without a loss scale: expected PipelineModule(..., precision='fp16'), "
            f"or torch.bfloat16, which needs none"
        )


def read_compile(option: object) -> Mapping[str, Any] | None:
    if option is False or option is None:
        return None
    if option is not True and not isinstance(option, Mapping):
        raise ValueError(
            f"compile={option!r:.60}: expected True, or arguments of torch.compile, as in "
            f"compile={{'mode': 'max-autotune'}}"
        )
    options = {} if option is True else dict(option)
    unknown = sorted(map(str, options.keys() - set(_OPTIONS)))
    if unknown:
        raise ValueError(
            f"compile={{{unknown[0]!r}: ...}}: expected arguments of torch.compile ({', '.join(_OPTIONS)})"
        )
    try:
        torch.compile(lambda x: x, **options)
    except Exception as error:
        raise ValueError(f"compile={options}: torch.compile raises an error: {error}") from error
    return MappingProxyType(options)


def compiled_units(
    options: Mapping[str, Any] | None, units: Iterable[nn.Module], rules: Mapping[nn.Module, NamedRule]
) -> Calls:
    """Units of one stage on one rank, compiled, except those that the user compiled; none without options.

    Raises ValueError for recomputed modules (`rules`) that are not units.
    """
    if options is None:
        return Calls({})
    own = dict.fromkeys(units)
    for module, (name, rule) in rules.items():
        if rule != "full":
            raise ValueError(
                f"recompute= chooses among results of operations in {name!r} (selective, keep_less, or a policy), and "
                f"compile= hides its operations: expected recompute='layer' or 'full', or compile=False"
            )
        if module not in own:
            raise ValueError(
                f"recompute= runs {name!r} again, which is a part of a module that compile= compiles whole: expected "
                f"recompute='layer' or 'full', or compile=False"
            )
    return Calls(
        {unit: partial(_instead, torch.compile(unit.forward, **options)) for unit in own if not is_users_compiled(unit)}
    )


def is_users_compiled(unit: nn.Module) -> bool:
    compiled = getattr(unit, "_compiled_call_impl", None) is not None or hasattr(unit, "_orig_mod")
    return compiled or hasattr(getattr(unit, "forward", None), "get_compiler_config")


def refuse_backward(
    options: Mapping[str, Any] | None, module: nn.Module, schedule: Schedule, *, stage: str, is_split: bool
) -> None:
    """Raises ValueError for compiled parts whose backward is split, or sees new weights."""
    parts = [each for each in module.modules() if is_users_compiled(each)]
    trained = next((each for each in parts if any(p.requires_grad for p in each.parameters())), None)
    if options is not None:
        what, instead = "what compile= compiles", "compile=False"
    elif trained is not None:
        what, instead = f"the compiled {type(trained).__name__} in it", "it without torch.compile"
    else:
        return
    if is_split:
        raise ValueError(
            f"schedule {schedule.name!r} splits the backward of {stage} into I and W, and the backward of {what} is "
            f"one piece: expected {instead}, or a schedule with whole backwards, such as schedule='1f1b'"
        )
    if schedule.rule.changes_in_flight:
        raise ValueError(
            f"schedule {schedule.name!r} updates the weights of {stage} between a forward and its backward, and "
            f"whether it sees the new ones the compiler decides in the backward of {what}: expected {instead}, or "
            f"schedule='pipedream' or '2bw'"
        )


def _instead(compiled: Callable[..., Any], _: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    return compiled(*args, **kwargs)


class Autocast(NamedTuple):
    """The type that autocast uses on a kind of device; None: no autocast."""

    kind: str
    dtype: torch.dtype | None

    @classmethod
    def now(cls, kind: str) -> Autocast:
        return cls(kind, torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else None)

    def off(self) -> AbstractContextManager[None]:
        """Context of backwards, without autocast: operations have the types of the forward's results already."""
        return torch.autocast(self.kind, enabled=False) if torch.is_autocast_enabled(self.kind) else NOTHING

    def again(self) -> AbstractContextManager[None]:
        if self.dtype is None:
            return self.off()
        if Autocast.now(self.kind) == self:
            return NOTHING
        return torch.autocast(self.kind, dtype=self.dtype)
