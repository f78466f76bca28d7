"""The base of styles: a module with divided parameters, and the forward of one member of a tensor group.

Until `uncut` the module has a class derived from its class, with its hooks, names and copies.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Mapping, Sequence
from fnmatch import fnmatchcase
from functools import cache
from typing import Any, NamedTuple

from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor.parallel import ParallelStyle

from .shard import Shard
from .tensor_group import TensorGroup

_RECORD = "_tensor_parallel"  # attribute of a module that is cut: _CutModule


class StyleError(ValueError):
    """A module that a style can't cut."""


class _CutModule(NamedTuple):
    """A module's style, and its class and attributes before; a tuple, so that equal ones compare equal."""

    group: TensorGroup
    style: Style
    before: type[nn.Module]
    attributes: Mapping[str, Any]

    def __deepcopy__(self, memo: dict[int, object]) -> _CutModule:
        return self  # copies of a module belong to the same group


class Style(ParallelStyle):
    """Base class of styles that leave plain local tensors."""

    def check(self, name: str, module: nn.Module, count: int) -> None:
        """StyleError for a module that `count` members can't divide so; the base accepts any."""

    def shards(self, module: nn.Module, *, index: int, count: int) -> dict[str, Shard]:
        """A member's shards of those parameters of the uncut module that are divided; the base divides none."""
        return {}

    def attributes(self, module: nn.Module, count: int) -> dict[str, Any]:
        """Attributes that the module gets while it is cut."""
        return {}

    def forward(self, module: nn.Module, plain: type[nn.Module], group: TensorGroup, *args: Any, **kwargs: Any) -> Any:
        """The forward of the cut module, `plain` being its class before."""
        return plain.forward(module, *args, **kwargs)

    def describe(self) -> str:
        return type(self).__name__.lower()

    def __repr__(self) -> str:
        return f"<{self.describe()}>"

    def cut(self, name: str, module: nn.Module, group: TensorGroup) -> dict[str, Shard]:
        """Divide the module's parameters and make its forward that of one member; shards by parameter name. Raises
        StyleError for a module that is cut already, or fails `check`."""
        if _RECORD in module.__dict__:
            raise StyleError(f"module {name!r} is cut already: expected one style for it")
        self.check(name, module, group.count)
        found = self.shards(module, index=group.index, count=group.count)
        for key, shard in found.items():
            parameter = module.get_parameter(key)
            parameter.data = shard.take(parameter.data)
        cut_module(module, self, group)
        return found

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        self.cut(type(module).__name__, module, TensorGroup.of_mesh(device_mesh))
        return module


@cache
def _cut_class(plain: type[nn.Module]) -> type[nn.Module]:
    def forward(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        cut: _CutModule = self.__dict__[_RECORD]
        return cut.style.forward(self, cut.before, cut.group.inside(self), *args, **kwargs)

    return type(
        plain.__name__, (plain,), {"forward": forward, "__module__": plain.__module__, "__doc__": plain.__doc__}
    )


def cut_module(module: nn.Module, style: Style, group: TensorGroup) -> None:
    """Give a module, whose parameters are local already, the forward and the attributes of a style."""
    changed = style.attributes(module, group.count)
    before = {key: module.__dict__[key] for key in changed}
    module.__dict__.update(changed)
    module.__dict__[_RECORD] = _CutModule(group, style, type(module), before)
    module.__class__ = _cut_class(type(module))  # type: ignore[arg-type]


def uncut(root: nn.Module) -> None:
    for module in root.modules():
        cut: _CutModule | None = module.__dict__.pop(_RECORD, None)
        if cut is not None:
            module.__class__ = cut.before
            module.__dict__.update(cut.attributes)


def style_of(module: nn.Module) -> Style | None:
    cut: _CutModule | None = module.__dict__.get(_RECORD)
    return None if cut is None else cut.style


def numbers_of(module: nn.Module, names: Iterable[str], count: int) -> dict[str, int]:
    own = module.__dict__
    return {name: own[name] // count for name in names if isinstance(own.get(name), int)}


def shard_of(
    module: nn.Module, key: str, dim: int, *, index: int, count: int, blocks: int | Sequence[int] = 1
) -> Shard:
    return Shard.whole(tuple(module.get_parameter(key).shape)).divided(dim, index=index, count=count, blocks=blocks)


def not_divided(name: str, what: str, size: int, count: int, least: int) -> str:
    return (
        f"module {name!r} has {size} {what}, over {count} tensor ranks: expected a multiple of {least}, such as "
        f"{max(1, round(size / least)) * least}, or another size of the tensor axis"
    )


def match(pattern: str, root: nn.Module, *, option: str) -> dict[str, nn.Module]:
    """Modules by name that a pattern matches.

    Arguments:
        pattern: with as many parts between dots as the names that it matches, each as in fnmatch.
        option: the user's option, for the error.

    Raises ValueError with near matches where there is none.
    """
    named = {name: module for name, module in root.named_modules(remove_duplicate=False) if name}
    found = {name: module for name, module in named.items() if matches(pattern, name)}
    if not found:
        usual = dict.fromkeys(".".join("*" if part.isdecimal() else part for part in name.split(".")) for name in named)
        near = difflib.get_close_matches(pattern, usual, n=3, cutoff=0.3) or list(usual)[:3]
        raise ValueError(
            f"{option} matches no module: expected names of the model, where '*' matches one part between dots, such "
            f"as {', '.join(map(repr, near))}"
        )
    return found


def matches(pattern: str, name: str) -> bool:
    """Whether a name fits, part by part.

    >>> matches("blocks.*.up", "blocks.3.up"), matches("blocks.*", "blocks.3.up")
    (True, False)
    """
    parts, split = pattern.split("."), name.split(".")
    return len(split) == len(parts) and all(map(fnmatchcase, split, parts))
