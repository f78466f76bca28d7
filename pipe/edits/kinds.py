"""Kinds of edits, a row each: when it raises an error, what it does to a module, and which others it excludes.

kind         on a plain model                                    in a pipeline
checkpoint   the forward is run again in the backward            recompute={name: ...}
shard        torch's parallelize_module                          Mesh(tensor_parallel={name: ...})
cut          nothing                                             cut=[name]
replace      another module, which takes over hooks, weights and buffers of the same names
compile      nn.Module.compile
dtype        the module's weights in it; inputs and outputs are cast
keep_less    values that a backward can compute again cheaply are not kept    (`keep_less`)
"""

from __future__ import annotations

import inspect
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from glob import escape
from types import MappingProxyType
from typing import Any, NamedTuple

import torch
from torch import nn

from ...partition.deferred.recording import as_recipes
from ...partition.model.keep_less import find, keep_less
from ..settings.recompute import Rule
from ..shards.tensor_option import WORDS
from ..stage.nested import mapped

_AROUND = ("_forward", "_backward", "_is_full_backward", "_non_full_backward")  # hooks that run around a module
_DTYPES = {"float64": torch.float64, "float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


def _nothing(name: str, module: nn.Module, root: nn.Module, **given: Any) -> None:
    pass


class EditKind(NamedTuple):
    """A row of the table. Functions take (name, module, whole model, arguments of the edit by name)."""

    check: Callable[..., object] = _nothing  # raises ValueError if the edit cannot be made; changes nothing
    apply: Callable[..., None] = _nothing  # makes the edit
    # The option of PipelineModule, and its value, that makes it instead of `apply`; of (name, arguments).
    option: Callable[..., tuple[str, Any]] | None = None
    excludes: tuple[str, ...] = ()  # kinds that cannot be on the same module, or on one inside the other


# checkpoint


def _check_operators(name: str, module: nn.Module, root: nn.Module, *, keep: Sequence[str] = ()) -> None:
    if not isinstance(keep, tuple):
        raise ValueError(f"checkpoint(keep={keep!r}): expected a list of operators, such as ['aten.mm.default']")
    for each in keep:
        found: Any = torch.ops
        for part in each.split("."):
            found = getattr(found, part, None)
        if not isinstance(found, torch._ops.OpOverload):
            raise ValueError(f"checkpoint(keep=[{each!r}]): expected operators such as 'aten.mm.default'")


def _recompute(name: str, *, keep: Sequence[str]) -> tuple[str, dict[str, Rule]]:
    return "recompute", {escape(name): partial(_keeps, frozenset(keep)) if keep else "full"}


def _keeps(kept: frozenset[str], context: Any, operator: Any, *args: Any, **kwargs: Any) -> bool:
    return str(operator) in kept


# shard, cut


def _check_names(name: str, module: nn.Module, root: nn.Module, *, plan: Mapping[str, Any]) -> None:
    if not isinstance(plan, Mapping) or not plan:
        raise ValueError(f"shard({plan!r}) of {name!r}: expected its modules, as in {{'up': 'column', 'down': 'row'}}")
    inside = dict(module.named_modules())
    for below, how in plan.items():
        if how not in WORDS and not hasattr(how, "_apply"):  # a ParallelStyle
            raise ValueError(f"shard({{{below!r}: {how!r}}}): expected one of {', '.join(map(repr, WORDS))}")
        if below not in inside:
            near = ", ".join(map(repr, list(inside)[1:4])) or "'', the module itself"
            raise ValueError(f"shard of {name!r}: it has no {below!r}: expected names in it, such as {near}")


def _tensor_parallel(name: str, *, plan: Mapping[str, Any]) -> tuple[str, dict[str, Any]]:
    return "tensor_parallel", {escape(f"{name}.{below}".strip(".")): how for below, how in plan.items()}


# replace


def _check_part(name: str, module: nn.Module, root: nn.Module, *, make: Any) -> None:
    if not callable(make):
        raise ValueError(f"replace({make!r:.60}) of {name!r}: expected a function that takes the module")


def _replace(name: str, module: nn.Module, root: nn.Module, *, make: Callable[[nn.Module], nn.Module]) -> None:
    made = make(module)
    if not isinstance(made, nn.Module):
        raise ValueError(f"replace of {name!r}: make(module) returned {made!r:.60}: expected a torch.nn.Module")
    if made is module:
        return
    if any(isinstance(p, nn.UninitializedParameter) for p in made.parameters()):
        raise ValueError(f"replace of {name!r}: a {type(made).__name__} without shapes: expected one that has run once")
    _check_signature(name, module, made)
    is_inside = module in set(made.modules())
    others = {part: place for place, part in set(root.named_modules()) - set(module.named_modules(prefix=name))}
    shared = [others[each] for each in ((made,) if is_inside else made.modules()) if each in others]
    if shared:
        raise ValueError(
            f"replace of {name!r}: what make(module) returned has {shared[0]!r} in it: expected a new module each time"
        )
    if not is_inside:
        _take_over(name, module, made)
    if module._is_full_backward_hook is not None:
        made._is_full_backward_hook, module._is_full_backward_hook = module._is_full_backward_hook, None
    for key, hooks in [each for each in vars(module).items() if "hook" in each[0]]:
        if isinstance(hooks, OrderedDict) and (not is_inside or key.startswith(_AROUND)):
            # The table itself moves, which the user's handles refer to; around both, hooks run once.
            hooks.update({at: hook for at, hook in vars(made)[key].items() if at not in hooks})  # some may be copies
            vars(made)[key], vars(module)[key] = hooks, OrderedDict()
            for number, hook in hooks.items():
                if getattr(hook, "with_module", False):  # it is called with the module that it holds
                    hooks[number] = type(hook)(hook.hook, made)
    made.train(module.training)
    root.set_submodule(name, made)


def _check_signature(name: str, old: nn.Module, new: nn.Module) -> None:
    # That of its class, where earlier edits wrap the forward.
    bound = (each.forward if "forward" not in vars(each) else type(each).forward.__get__(each) for each in (old, new))
    wanted, found = map(inspect.signature, bound)
    positional = [each for each in wanted.parameters.values() if each.kind <= each.POSITIONAL_OR_KEYWORD]
    keywords = {each.name: None for each in wanted.parameters.values() if each.kind == each.KEYWORD_ONLY}
    try:
        for given in (positional, [each for each in positional if each.default is each.empty]):
            found.bind(*given, **keywords)
    except TypeError as error:
        raise ValueError(
            f"replace of {name!r}: {type(new).__name__}.forward{found} in place of {type(old).__name__}.forward"
            f"{wanted}: {error}; expected one that takes the same arguments"
        ) from None


def _take_over(name: str, old: nn.Module, new: nn.Module) -> None:
    """Parameters of the same name and shape stay the same objects, which ties and optimizers need; buffers as well."""
    lost = []
    theirs = dict(new.named_modules())
    for path, module in old.named_modules():
        for table in ("_parameters", "_buffers"):
            for key, value in getattr(module, table).items():
                into = getattr(theirs.get(path), table, {})
                there = into.get(key)
                if value is not None and there is not None and there.shape == value.shape:
                    into[key] = value
                elif value is not None and table == "_parameters":
                    lost.append(f"{path}.{key}".strip("."))
    if lost:
        raise ValueError(
            f"replace of {name!r} would lose its {', '.join(map(repr, lost[:3]))}: expected a module with the same "
            f"parameters, or one that holds the old one"
        )


# compile


def _check_backend(
    name: str, module: nn.Module, root: nn.Module, *, backend: Any = "inductor", gate: bool = True
) -> None:
    if not callable(backend) and backend not in (known := torch.compiler.list_backends(exclude_tags=())):
        raise ValueError(f"compile(backend={backend!r}): expected one of {', '.join(sorted(known))}")
    if not isinstance(gate, bool):
        raise ValueError(f"compile(gate={gate!r}): expected True or False")


def _compile(name: str, module: nn.Module, root: nn.Module, *, backend: Any, gate: bool) -> None:
    def called(*args: Any, **kwargs: Any) -> Any:
        return module._call_impl(*args, **kwargs)  # type: ignore[no-untyped-call]

    # Not module.compile, which silently compiles nothing of torch's own modules.
    module._compiled_call_impl = torch.compile(called, backend=backend)


# dtype


def _check_own(name: str, module: nn.Module, root: nn.Module, *, dtype: str) -> None:
    if dtype not in _DTYPES:
        raise ValueError(f"dtype({dtype!r}): expected one of {', '.join(map(repr, _DTYPES))}")
    own = {id(p): key for key, p in module.named_parameters()}
    for place, other in root.named_modules(remove_duplicate=False):
        is_inside = f"{place}.".startswith(f"{name}." if name else "")
        for key, p in other.named_parameters(recurse=False):
            if is_inside and p.is_complex():
                raise ValueError(f"dtype of {name!r}: its {key!r} is complex: expected a module with real weights")
            if not is_inside and id(p) in own:
                raise ValueError(
                    f"dtype of {name!r}: its {own[id(p)]!r} is {place + '.' + key!r}, too (tied): expected a module "
                    f"whose weights are its own"
                )


def _convert(name: str, module: nn.Module, root: nn.Module, *, dtype: str) -> None:
    wanted = _DTYPES[dtype]
    own = [p.dtype for p in module.parameters() if p.is_floating_point()]
    given: list[torch.dtype] = []  # types of the inputs of a call, which a module without weights returns
    with as_recipes(module.parameters()):
        module.to(wanted)
    module.register_forward_pre_hook(partial(_cast_inputs, wanted, given), with_kwargs=True)
    module.register_forward_hook(partial(_cast_outputs, own[:1] or given), prepend=True)


def _cast_inputs(dtype: torch.dtype, given: list[torch.dtype], module: nn.Module, args: Any, kwargs: Any) -> Any:
    given.clear()
    mapped((args, kwargs), lambda x: given.append(x.dtype) if x.is_floating_point() else None)
    return mapped((args, kwargs), lambda x: x.to(dtype) if x.is_floating_point() else x)


def _cast_outputs(types: list[torch.dtype], module: nn.Module, args: Any, output: Any) -> Any:
    """Outputs in the first of `types`, those of the inputs as `_cast_inputs` noted them."""
    dtype = types[0] if types else torch.get_default_dtype()
    return mapped(output, lambda x: x.to(dtype) if x.is_floating_point() else x)


KINDS: Mapping[str, EditKind] = MappingProxyType(
    {
        "checkpoint": EditKind(_check_operators, option=_recompute, excludes=("keep_less",)),
        "shard": EditKind(_check_names, option=_tensor_parallel),
        "cut": EditKind(option=lambda name: ("cut", [name])),
        "replace": EditKind(_check_part, _replace),
        "compile": EditKind(_check_backend, _compile, excludes=("keep_less",)),
        "dtype": EditKind(_check_own, _convert),
        "keep_less": EditKind(find, keep_less),
    }
)


@dataclass(frozen=True, slots=True)
class Edit:
    """One edit: a pattern of names, in which `*` is one part between dots, a method, and its arguments."""

    pattern: str
    word: str
    given: Mapping[str, Any]

    def __str__(self) -> str:
        return f"{self.pattern or 'the model'}: {self.call}"

    @property
    def call(self) -> str:
        """The call of its method as text."""
        usual = inspect.signature(KINDS[self.word].check).parameters
        shown = [f"{name}={value!r}" for name, value in self.given.items() if value != usual[name].default]
        return f"{self.word}({', '.join(shown)})"
