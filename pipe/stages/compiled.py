"""torch.compile of stages: each cut unit's forward by itself.

A stage seeds random numbers between its units, hooks stand around them, and recomputation runs them again: compiled
whole, a stage would break at each. Equal units share one compiled graph. Parameters are inputs of such a graph, so
that it computes with whatever weight version the unit holds when it is called, and is not compiled again for it.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Mapping
from types import MappingProxyType
from typing import Any

import torch
from torch import nn

from .calls import Calls
from .recompute import NamedRule

_OPTIONS = tuple(name for name in inspect.signature(torch.compile).parameters if name not in ("model", "disable"))


def read_compile(option: object) -> Mapping[str, Any] | None:
    """The option `compile=` as arguments of torch.compile; None: stages are not compiled. ValueError for others."""
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
        raise ValueError(f"compile={options}: torch.compile refuses it: {error}") from error
    return MappingProxyType(options)


class Compiled(Calls):
    """The units of one stage on one rank, compiled; without options none is.

    A unit that the user has compiled stays as it is.

    Arguments:
        units: that the stage calls.
        rules: the modules that run again by themselves.

    Raises ValueError for modules that run again and are no units.
    """

    def __init__(
        self, options: Mapping[str, Any] | None, units: Iterable[nn.Module], rules: Mapping[nn.Module, NamedRule]
    ) -> None:
        through: dict[nn.Module, Callable[..., Any]] = {}
        if options is not None:
            own = dict.fromkeys(units)
            for module, named in rules.items():
                _refuse_rerun(named, is_unit=module in own)
            for unit in own:
                if not is_users_compiled(unit):
                    through[unit] = _instead(torch.compile(unit.forward, **options))
        super().__init__(through)


def is_users_compiled(unit: nn.Module) -> bool:
    """Whether the user has compiled this module, or its forward."""
    compiled = getattr(unit, "_compiled_call_impl", None) is not None or hasattr(unit, "_orig_mod")
    return compiled or hasattr(getattr(unit, "forward", None), "get_compiler_config")


def refuse_split(options: Mapping[str, Any] | None, module: nn.Module, *, stage: str, schedule: str) -> None:
    """ValueError for a stage with compiled parts, whose backward comes in two halves: theirs is one piece."""
    _refuse_backward(
        options,
        module,
        f"schedule {schedule!r} splits the backward of {stage} into I and W, and the backward of",
        "is one piece",
        "a schedule with whole backwards, such as schedule='1f1b'",
    )


def refuse_changes_in_flight(
    options: Mapping[str, Any] | None, module: nn.Module, *, stage: str, schedule: str
) -> None:
    """ValueError for a stage with compiled parts, whose weights change between a forward and its backward."""
    _refuse_backward(
        options,
        module,
        f"schedule {schedule!r} updates the weights of {stage} between a forward and its backward, and whether it sees "
        f"the new ones the compiler decides in the backward of",
        "",
        "schedule='pipedream' or '2bw'",
    )


def _refuse_backward(
    options: Mapping[str, Any] | None, module: nn.Module, front: str, back: str, expected: str
) -> None:
    """ValueError that says `front` what is compiled `back`, if anything is."""
    what, instead = None, "compile=False"
    if options is not None:
        what = "what compile= compiles"
    for part in module.modules() if what is None else ():
        if is_users_compiled(part) and any(parameter.requires_grad for parameter in part.parameters()):
            what, instead = f"the compiled {type(part).__name__} in it", "it without torch.compile"
            break
    if what is not None:
        raise ValueError(f"{front} {what}{back and ' ' + back}: expected {instead}, or {expected}")


def _refuse_rerun(named: NamedRule, *, is_unit: bool) -> None:
    if named.rule != "full":
        raise ValueError(
            f"recompute= keeps results of operations in {named.name!r} (selective, or a policy), and beside compile= "
            f"nobody sees its operations: expected recompute='layer' or 'full', or compile=False"
        )
    if not is_unit:
        raise ValueError(
            f"recompute= runs {named.name!r} again, which is a part of a module that compile= compiles whole: expected "
            f"recompute='layer' or 'full', or compile=False"
        )


def _instead(compiled: Callable[..., Any]) -> Callable[..., Any]:
    def call(_: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        return compiled(*args, **kwargs)

    return call
