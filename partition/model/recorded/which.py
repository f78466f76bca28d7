"""Which modules of a model are cut units: they run as they are; the ones that are opened are recorded.

model                opened: its forward is recorded, as calls of units and of torch's functions between them
  embedding          a unit, since it holds no list of modules
  encoder            opened, since it does
    layers.0         a unit, as every element of a ModuleList, ModuleDict or Sequential
    layers.1
    norm             a unit
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass

from torch import nn

_LISTS = (nn.ModuleList, nn.ModuleDict, nn.Sequential)


@dataclass(frozen=True, slots=True, kw_only=True)
class Roles:
    """The modules of a model by what happens when they are called."""

    opened: dict[str, nn.Module]  # recorded, by path ("" is the model)
    units: dict[str, nn.Module]  # run whole, by path
    opened_units: frozenset[str]  # paths of the opened ones that would be units


def roles_of(model: nn.Module, *, also_open: Collection[str] = (), keep_whole: Collection[str] = ()) -> Roles:
    """The rule above, but for paths of modules that are opened, or units, all the same."""
    opened: dict[str, nn.Module] = {"": model}
    units: dict[str, nn.Module] = {}
    opened_units: set[str] = set()
    known = {id(model)}

    def look_into(module: nn.Module, path: str) -> None:
        is_list = isinstance(module, _LISTS)
        for name, child in module._modules.items():
            if child is None or id(child) in known:
                continue
            known.add(id(child))
            inner = f"{path}.{name}" if path else name
            is_opened = inner not in keep_whole and _is_opened(child, is_element=is_list)
            if inner in also_open and not is_opened:
                opened_units.add(inner)
            if inner in also_open or is_opened:
                opened[inner] = child
                look_into(child, inner)
            else:
                units[inner] = child

    look_into(model, "")
    return Roles(opened=opened, units=units, opened_units=frozenset(opened_units))


def is_compiled(module: nn.Module) -> bool:
    """Whether a call runs what torch.compile has made of all of it."""
    own = vars(module)
    return own.get("_compiled_call_impl") is not None or "_torchdynamo_orig_callable" in own


def has_parts(module: nn.Module) -> bool:
    return any(child is not None for child in module._modules.values())


def _is_opened(child: nn.Module, *, is_element: bool) -> bool:
    if isinstance(child, nn.ModuleList | nn.ModuleDict):
        return True  # it is never called
    if is_element:
        return False
    return any(isinstance(part, _LISTS) for part in child.modules())
