"""Kinds of edits: what each one does to a module, what it is refused for, and how it is written down.

kind         of a plain model                                    of a pipeline
checkpoint   torch.utils.checkpoint around the forward           recompute={name: ...}
shard        torch's parallelize_module                          Mesh(tensor_parallel={name: ...})
cut          nothing                                             cut=[name]
replace      another module, which takes over hooks, weights and buffers of the same names
compile      nn.Module.compile
dtype        the module's weights in it; inputs and outputs are cast
keep_less    what a backward can make again cheaply is not kept    (`keep_less`)
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields
from functools import partial
from types import MappingProxyType
from typing import Any, ClassVar

import torch
from torch import nn
from torch.utils import checkpoint

from ..stage.nested import mapped
from .keep_less import WHAT, keep_less

_HOOKS = ("_forward_pre_hooks", "_forward_hooks", "_backward_pre_hooks", "_backward_hooks")
_DTYPES = {"float64": torch.float64, "float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


@dataclass(frozen=True, slots=True)
class Kind:
    """One kind; of a pipeline it either becomes an option of PipelineModule or is applied to the model before."""

    word: ClassVar[str]
    excludes: ClassVar[tuple[str, ...]] = ()  # words, on one module or one inside the other

    def check(self, name: str, module: nn.Module, root: nn.Module) -> None:
        """ValueError where it cannot be done, before anything is changed."""

    def apply(self, name: str, module: nn.Module, root: nn.Module) -> None:
        """Change the model."""

    def options(self, name: str) -> Mapping[str, Any] | None:
        """Options of PipelineModule in place of `apply`, if there are such."""
        return None

    def record(self) -> dict[str, Any]:
        """As JSON. Raises ValueError for what is code."""
        return {field.name: getattr(self, field.name) for field in fields(self)}

    def __str__(self) -> str:
        shown = (f"{field.name}={getattr(self, field.name)!r}" for field in fields(self) if _is_given(self, field))
        return f"{self.word}({', '.join(shown)})"


def _is_given(kind: Kind, field: Any) -> bool:
    return bool(getattr(kind, field.name) != field.default)


@dataclass(frozen=True, slots=True)
class Checkpoint(Kind):
    """The forward is computed again in the backward, but for results of the operators `keep`, as "aten.mm.default"."""

    word = "checkpoint"
    excludes = ("keep_less",)
    keep: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        for each in self.keep:
            _operator(each)

    def apply(self, name: str, module: nn.Module, root: nn.Module) -> None:
        module.forward = partial(_again, self._policy(), module.forward)

    def options(self, name: str) -> Mapping[str, Any]:
        return {"recompute": {name: self._policy() or "full"}}

    def _policy(self) -> Callable[..., bool] | None:
        return partial(_keeps, frozenset(map(_operator, self.keep))) if self.keep else None


def _operator(name: str) -> Any:
    found: Any = torch.ops
    try:
        for part in name.split("."):
            found = getattr(found, part)
    except AttributeError:
        found = None
    if not isinstance(found, torch._ops.OpOverload):
        raise ValueError(f"checkpoint(keep=[{name!r}]): expected operators such as 'aten.mm.default'")
    return found


def _keeps(kept: frozenset[Any], context: Any, operator: Any, *args: Any, **kwargs: Any) -> bool:
    return operator in kept


def _again(policy: Callable[..., bool] | None, forward: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    options: dict[str, Any] = {}
    if policy is not None:
        options["context_fn"] = partial(checkpoint.create_selective_checkpoint_contexts, policy)
    return checkpoint.checkpoint(forward, *args, use_reentrant=False, **options, **kwargs)


@dataclass(frozen=True, slots=True)
class Shard(Kind):
    """Modules in this one are divided among a tensor group, by names below it: {"fc1": "column", "fc2": "row"}."""

    word = "shard"
    plan: Mapping[str, Any]

    def check(self, name: str, module: nn.Module, root: nn.Module) -> None:
        for below in self.plan:
            try:
                module.get_submodule(below)
            except AttributeError:
                raise ValueError(
                    f"shard of {name!r}: it has no {below!r}: expected names in it, such as "
                    f"{', '.join(repr(inner) for inner, _ in list(module.named_modules())[1:4])}"
                ) from None

    def options(self, name: str) -> Mapping[str, Any]:
        return {"tensor_parallel": {f"{name}.{below}" if below else name: how for below, how in self.plan.items()}}


@dataclass(frozen=True, slots=True)
class Cut(Kind):
    """A stage of the pipeline begins here."""

    word = "cut"

    def options(self, name: str) -> Mapping[str, Any]:
        return {"split_points": [name]}


@dataclass(frozen=True, slots=True)
class Replace(Kind):
    """Another module in its place: make(module). Hooks go over, and parameters and buffers of the same names."""

    word = "replace"
    make: Callable[[nn.Module], nn.Module]

    def check(self, name: str, module: nn.Module, root: nn.Module) -> None:
        if not name:
            raise ValueError("replace of the whole model: expected a module in it")

    def apply(self, name: str, module: nn.Module, root: nn.Module) -> None:
        made = self.make(module)
        if not isinstance(made, nn.Module):
            raise ValueError(f"replace of {name!r}: make(module) returned {made!r:.60}: expected a torch.nn.Module")
        _check_signature(name, module, made)
        if made is not module and module not in list(made.modules()):
            _take_over(name, module, made)
        for table in _HOOKS:
            if not getattr(made, table):
                getattr(made, table).update(getattr(module, table))
                if module in list(made.modules()):
                    getattr(module, table).clear()  # they run once, around both
        made.train(module.training)
        for place in [place for place, each in root.named_modules(remove_duplicate=False) if each is module]:
            root.set_submodule(place, made)

    def record(self) -> dict[str, Any]:
        raise ValueError(f"replace({self.make!r:.60}) is code, which no file of edits holds: expected it in the script")


def _check_signature(name: str, old: nn.Module, new: nn.Module) -> None:
    wanted, found = (inspect.signature(each.forward) for each in (old, new))
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
    """Parameters of the same name and shape stay the same objects, so that ties and optimizers do; buffers as well."""
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
                    lost.append(f"{path}.{key}" if path else key)
    if lost:
        raise ValueError(
            f"replace of {name!r} would lose its {', '.join(map(repr, lost[:3]))}: expected a module with the same "
            f"parameters, or one that holds the old one"
        )


@dataclass(frozen=True, slots=True)
class Compile(Kind):
    """Compiled by torch.compile, by itself."""

    word = "compile"
    backend: str = "inductor"
    gate: bool = True  # `verify` takes it back where it is slower

    def check(self, name: str, module: nn.Module, root: nn.Module) -> None:
        if self.backend not in (known := torch.compiler.list_backends(exclude_tags=())):
            raise ValueError(f"compile(backend={self.backend!r}): expected one of {', '.join(sorted(known))}")

    def apply(self, name: str, module: nn.Module, root: nn.Module) -> None:
        module.compile(backend=self.backend)


@dataclass(frozen=True, slots=True)
class Dtype(Kind):
    """Its weights in another type, in which it computes: what it is given is cast, and what it returns cast back."""

    word = "dtype"
    dtype: str

    def __post_init__(self) -> None:
        if self.dtype not in _DTYPES:
            raise ValueError(f"dtype({self.dtype!r}): expected one of {', '.join(map(repr, _DTYPES))}")

    def check(self, name: str, module: nn.Module, root: nn.Module) -> None:
        inside = set(module.modules())
        own = {id(p): key for key, p in module.named_parameters()}
        for place, other in root.named_modules():
            for key, p in other.named_parameters(recurse=False):
                if other not in inside and id(p) in own:
                    raise ValueError(
                        f"dtype of {name!r}: its {own[id(p)]!r} is {place + '.' + key!r}, too (tied): expected a "
                        f"module whose weights are its own"
                    )

    def apply(self, name: str, module: nn.Module, root: nn.Module) -> None:
        wanted = _DTYPES[self.dtype]
        before = next((p.dtype for p in module.parameters() if p.is_floating_point()), torch.get_default_dtype())
        module.to(wanted)
        module.register_forward_pre_hook(partial(_cast_inputs, wanted), with_kwargs=True, prepend=False)
        module.register_forward_hook(partial(_cast_outputs, before), prepend=True)


def _cast_inputs(dtype: torch.dtype, module: nn.Module, args: Any, kwargs: Any) -> Any:
    return mapped((args, kwargs), lambda x: x.to(dtype) if x.is_floating_point() else x)


def _cast_outputs(dtype: torch.dtype, module: nn.Module, args: Any, output: Any) -> Any:
    return mapped(output, lambda x: x.to(dtype) if x.is_floating_point() else x)


@dataclass(frozen=True, slots=True)
class KeepLess(Kind):
    """What its backward makes again at little cost is not kept: see `keep_less`."""

    word = "keep_less"
    excludes = ("checkpoint", "compile")
    what: str

    def __post_init__(self) -> None:
        if self.what not in WHAT:
            raise ValueError(f"keep_less({self.what!r}): expected one of {', '.join(map(repr, WHAT))}")

    def check(self, name: str, module: nn.Module, root: nn.Module) -> None:
        WHAT[self.what].find(name, module)

    def apply(self, name: str, module: nn.Module, root: nn.Module) -> None:
        keep_less(self.what, name, module)


KINDS: Mapping[str, type[Kind]] = MappingProxyType(
    {each.word: each for each in (Checkpoint, Shard, Cut, Replace, Compile, Dtype, KeepLess)}
)
