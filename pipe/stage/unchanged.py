"""Things fixed when the stages were built: compared before each batch, and before state is read or replaced.

    any model        parameters and submodules are the same objects; no other parameter requires a gradient
    a chain          its nn.Sequential, whose children run in its place, has no hooks
    compile=         a unit was compiled with the hooks in it (those on the unit itself run around it)

Stages that were built before can't follow such a change as plain PyTorch would: ValueError names it.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from torch import nn

from ...partition.model.chain import given_units, is_sequential
from ...partition.model.modes import changing_hook, hook_tables
from ...partition.model.source_line import module_at
from ..context import Run
from ..settings.precision import is_users_compiled
from .build import CutModel
from .loss import PREFIX, untrained

_AGAIN = "a new PipelineModule after the change (save(folder) before it, load(folder) after it)"


class Unchanged:
    """Record of everything that must not change. `cut`: with the weights of other processes already freed. Raises
    ValueError for a hook that would never run."""

    def __init__(self, run: Run, cut: CutModel) -> None:
        self._trains_others = run.has_loss and run.options.optimizer is None  # a loss may, with tensors of the user's
        wants_gradient = any(spec.requires_grad for spec in cut.train.example.specs[-1])
        self._learning = [
            p for name, p in cut.root.named_parameters() if wants_gradient or name.startswith(f"{PREFIX}.")
        ]
        self._frozen = [(name, p) for name, p in cut.root.named_parameters() if not p.requires_grad]
        self._parts = list(_parts(cut.root))
        inside = dict(_inside_units(run.root, cut)) if run.options.compile is not None else {}
        self._compiled = [
            (name, table, tuple(table)) for name, module in inside.items() for table in hook_tables(module)
        ]
        self._opened = [(name, module, tuple(module._modules)) for name, module in _opened(run.root)]
        self._check_opened()

    def _check_opened(self) -> None:
        for name, module, children in self._opened:
            if added := [child for child in module._modules if child not in children]:
                raise ValueError(
                    f"module {'.'.join(filter(None, (name, added[0])))!r} was added to an nn.Sequential whose children "
                    f"run in its place: no stage runs it. Expected {_AGAIN}"
                )
            if kind := changing_hook(module):
                raise ValueError(
                    f"{module_at(name)} is an nn.Sequential, and a hook on all modules ({kind}) changes what flows "
                    f"through it, which would not happen, since stages run its children: expected a hook that does so "
                    f"for single modules, or on these"
                )
            if any(hook_tables(module)):
                raise ValueError(
                    f"{module_at(name)} is an nn.Sequential with a hook, which would never run, since stages run its "
                    f"children: expected the hook on a child (the first one for inputs, the last one for outputs), or, "
                    f"of the list of stages, before the PipelineModule is built"
                )

    def refuse_untrained(self) -> None:
        if not (self._trains_others or any(p.requires_grad for p in self._learning)):
            raise untrained()

    def check(self, *, training: bool) -> None:
        for name, parameter in self._frozen if training else ():
            if parameter.requires_grad:
                raise ValueError(
                    f"parameter {name!r} requires a gradient and did not when the stages were built, so that it gets "
                    f"none and no optimizer holds it: expected {_AGAIN}"
                )
        self.check_objects()
        self._check_opened()
        for name, hooks, known in self._compiled:
            if tuple(hooks) != known:
                raise ValueError(
                    f"the hooks of {module_at(name)} changed after the unit that it is in was compiled, which would "
                    f"ignore the change: expected hooks on the units themselves, compile=False, or {_AGAIN}"
                )

    def check_objects(self) -> None:
        """ValueError that names a parameter or submodule that is gone or replaced: stages hold the earlier ones."""
        for attributes, table, key, value, name in self._parts:
            if attributes[table].get(key) is not value:
                raise ValueError(
                    f"{name!r} is another object than when the stages were built: expected the same parameters and "
                    f"submodules, with new values copied in (copy_, load_state_dict), or {_AGAIN}"
                )


def _parts(root: nn.Module) -> Iterator[tuple[Mapping[str, Any], str, str, object, str]]:
    """The table and name of each parameter and submodule; an nn.ModuleList makes a new table in `del`."""
    for path, module in root.named_modules():
        attributes = vars(module)
        for table in ("_modules", "_parameters"):
            for key, value in attributes[table].items():
                yield attributes, table, key, value, f"{path}.{key}" if path else key


def _inside_units(root: nn.Module, cut: CutModel) -> Iterator[tuple[str, nn.Module]]:
    names = {module: name for name, module in root.named_modules()}
    for unit in (unit for stage in cut.train.stages for unit in stage.units):
        if is_users_compiled(unit):
            continue
        yield from ((names[each], each) for each in unit.modules() if each is not unit and each in names)


def _opened(model: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    if is_sequential(model):
        yield "", model
    elif type(model) is nn.ModuleList:
        yield from ((name, stage) for name, stage in model.named_children() if "" not in given_units(stage))
