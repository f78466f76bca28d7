"""Recomputation in a stage's backward: options, and the modules that they apply to.

    "none"        nothing
    "full"        the stage: it keeps its inputs only                                    (`stage`)
    "layer"       each cut unit of the stage: it keeps its inputs only                    (`reruns`)
    "selective"   each cut unit, but for the results of its matrix products, which stay   (`reruns`)
    "keep_less"   each cut unit keeps no results of GELUs, which are made again           (`model.keep_less`)
    "layer:3"     the first 3 of them; likewise "selective:3", "keep_less:3"              (`reruns`)
    a policy      each cut unit, but for what the policy keeps                            (`reruns`)
    a budget      the units whose recomputation makes the stage fit                       (`run/budget`)

Patterns of module names choose "full", "selective" or a policy for single modules.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import accumulate
from types import MappingProxyType
from typing import Any

from torch import nn

from ...partition import quantities
from ...partition.model.calls import Calls
from ...partition.model.units import StageModule, Together
from ...partition.stage_cost import KEEP_LESS, RULES, count_again, kind_of
from ..shards.style import match

# (torch.utils.checkpoint.SelectiveCheckpointContext, operator, *args, **kwargs) -> CheckpointPolicy, or whether to keep
Policy = Callable[..., Any]
Rule = str | Policy
NamedRule = tuple[str, Rule]  # a module's name, for errors, and its own recomputation

OF_MODULES = ("full", "selective")
BUDGET = "memory_budget"
RecomputeLike = Rule | Sequence[Rule] | Mapping[str, Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class Recompute:
    """Choice of recomputation.

    Raises ValueError for any other value.
    """

    stages: tuple[Rule | float, ...]  # [S] one of RECOMPUTE, a count such as "layer:3", a policy, or a budget [bytes]
    # By pattern of module names, one of OF_MODULES or a policy; every stage is then "none". A pattern has as many parts
    # between dots as the names that it matches, each as in fnmatch.
    modules: Mapping[str, Rule] = field(default_factory=lambda: MappingProxyType({}))

    def __post_init__(self) -> None:
        for kind in self.stages:
            if not callable(kind) and not isinstance(kind, float):
                count_again(kind, expected=f"{RULES}, or a policy")
        for pattern, rule in self.modules.items():
            if not isinstance(pattern, str):
                raise ValueError(f"recompute={{{pattern!r}: ...}}: expected names of modules, as in 'blocks.*'")
            if not callable(rule) and rule not in OF_MODULES:
                raise ValueError(
                    f"recompute={{{pattern!r}: {rule!r}}}: expected {' or '.join(map(repr, OF_MODULES))}, or a policy; "
                    f"a module that nothing matches is not computed again"
                )

    @property
    def runs_again(self) -> bool:
        return bool(self.modules) or any(kind != "none" for kind in self.stages)


def read_recompute(recompute: RecomputeLike, num_stages: int) -> Recompute:
    """The option `recompute=` for `num_stages`. Raises ValueError for other values and other numbers."""
    if isinstance(recompute, Mapping):
        if BUDGET in recompute:
            return Recompute(stages=_budgets(recompute, num_stages))
        return Recompute(stages=("none",) * num_stages, modules=MappingProxyType(dict(recompute)))
    if isinstance(recompute, str) or callable(recompute):
        return Recompute(stages=(recompute,) * num_stages)
    if not isinstance(recompute, Sequence):
        raise ValueError(
            f"recompute={recompute!r:.60}: expected one of {RULES}, a list of one per stage, or {{'blocks.*': 'full'}}"
        )
    if len(recompute) != num_stages:
        raise ValueError(
            f"recompute= has {len(recompute)} entries for {num_stages} stages: expected one value, or one per stage"
        )
    return Recompute(stages=tuple(f"{kind}" if isinstance(kind, float) else kind for kind in recompute))


def _budgets(recompute: Mapping[str, Any], num_stages: int) -> tuple[Rule | float, ...]:
    given, where = recompute[BUDGET], f"recompute={dict(recompute)!r:.80}"
    such = f'expected recompute={{"{BUDGET}": "6GiB"}}, or one per stage, ["6GiB", None, ...]'
    each = list(given) if isinstance(given, list | tuple) else [given] * num_stages
    kinds = {type(one) for one in each} - {str, str if given is None else type(None)}
    if kinds or len(recompute) > 1 or len(each) != num_stages:
        raise ValueError(f"{where} for {num_stages} stages: {such}")
    try:
        return tuple("none" if one is None else quantities.size(where, one) for one in each)
    except ValueError as error:
        raise ValueError(f"{error}; {such}") from None


class RecomputedModules:
    """Modules of a model that are recomputed: `rules` by module, and by stage under a budget the choice and its reason
    (`reasons`).

    `begins` are names of the modules with which a unit of several begins, as a plan's nodes; none: each is one. Raises
    ValueError for a pattern of no module or one that nothing calls, and for modules that two patterns treat
    differently.
    """

    def __init__(self, recompute: Recompute, root: nn.Module, begins: Collection[str] = ()) -> None:
        self._stages = recompute.stages
        self._begins = {module for name, module in root.named_modules() if name in begins}
        self.reasons: dict[int, str] = {}
        self._together: Together = ()
        self._matches = {pattern: _matches(pattern, root) for pattern in recompute.modules}
        self.rules: dict[nn.Module, NamedRule] = {}
        said: dict[nn.Module, str] = {}
        for pattern, rule in recompute.modules.items():
            for name, module in self._matches[pattern].items():
                _, known = self.rules.setdefault(module, (name, rule))
                if known != rule:
                    raise ValueError(
                        f"recompute= has {said[module]!r} and {pattern!r} for module {name!r}, {known!r} and "
                        f"{rule!r}: expected patterns that do not match the same module, such as 'blocks.[!0]' and "
                        f"'blocks.0'"
                    )
                said.setdefault(module, pattern)

    @contextmanager
    def checked(self) -> Iterator[None]:
        """Context in which all stages run once; then raises ValueError for a pattern whose modules were not called."""
        called: set[nn.Module] = set()

        def note(module: nn.Module) -> Callable[..., Any]:
            def call(forward: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
                called.add(module)
                return forward(*args, **kwargs)

            return call

        with Calls({module: note(module) for module in self.rules}).through():
            yield
        for pattern, matches in self._matches.items():
            if called.isdisjoint(matches.values()):
                raise ValueError(
                    f"recompute={{{pattern!r}: ...}} matches {', '.join(map(repr, list(matches)[:3]))}, which no stage "
                    f"calls (its weights may be used without it): expected modules whose forward runs, such as the one "
                    f"that it belongs to"
                )

    def refuse_parted(self, stages: Sequence[StageModule], together: Together) -> None:
        """Raises ValueError for recomputed modules that share tensors with others, not as arguments or results.

        `together`: pairs of units that do so.
        """
        self._together = together
        for index, stage in enumerate(stages):
            for module, (_, rule) in self.of_stage(index, stage).items():
                if rule != KEEP_LESS and (why := self.parted(module)) is not None:
                    raise ValueError(
                        f"recompute={rule!r} of stage {index} ({stage.name}) recomputes units one by one, and "
                        f"{why}, or recompute='full' for the stage, which runs as a whole"
                    )

    def parted(self, module: nn.Module) -> str | None:
        """Why a module cannot be recomputed alone; None if it can."""
        inside = set(module.modules())
        parted = (
            why
            for one, other, why in self._together
            if (one in inside) != (other in inside) or (one is other and one in inside)
        )
        return next(parted, None)

    def of_stage(self, index: int, stage: StageModule) -> dict[nn.Module, NamedRule]:
        kind = self._stages[index]
        if isinstance(kind, float):  # the first batch decides
            return {}
        if kind in ("none", "full"):
            inside = set(stage.module.modules())
            return {module: rule for module, rule in self.rules.items() if module in inside}
        number = None if callable(kind) else count_again(kind)
        word = kind_of(kind) if isinstance(kind, str) else kind
        rule = "full" if word == "layer" else word
        if number is None:
            return dict.fromkeys(stage.units, (stage.name, rule))
        begun = [not self._begins or unit in self._begins or at == 0 for at, unit in enumerate(stage.units)]
        if number > sum(begun):
            raise ValueError(
                f"recompute={kind!r} of stage {index} ({stage.name}), which has {sum(begun)} units that can run "
                f"again: expected at most {f'{word}:{sum(begun)}'!r}, or {word!r}"
            )
        places = list(zip(stage.units, accumulate(begun), strict=True))
        return {unit: (stage.name, rule) for unit, place in places if place <= number}


def _matches(pattern: str, root: nn.Module) -> dict[str, nn.Module]:
    found = match(pattern, root, option=f"recompute={{{pattern!r}: ...}}")
    for name, module in found.items():
        if type(module).forward is nn.Module.forward:
            raise ValueError(
                f"recompute={{{pattern!r}: ...}} matches {name!r}, a {type(module).__name__}, which nothing calls: "
                f"expected the modules in it, {name + '.*'!r}"
            )
    return found
