"""Activation checkpointing: modules of a stage that keep their inputs, and run again in the backward.

    first run    in the forward; tensors saved for the backward are dropped, but for those that a policy keeps
    second run   in the backward, as soon as an operation of the module needs a saved tensor: with the same inputs,
                 buffers, random numbers, autocast and weights

torch.utils.checkpoint does it (use_reentrant=False). Where one such module is in another, the outer one runs again,
once; for an operation in both the inner one's policy decides. The user's own checkpoints in such a module have no
effect; around one, they replace it.

In a second run's arguments what was one tensor, list or object is one again:

    first run      f(h, h[:, :2], into=h)     in which the module changes h in place
    second run     f(c, c[:, :2], into=c)     c: a copy of h from before

Kept results replace recomputation, while both runs call the same operations. A result that was changed in place
meanwhile is computed again. Writes into its memory are found

    within the run     by the operations' schemas and by memory: chunks of unsafe_chunk, .data and the like share it
                       without counting versions
    after it           by the versions of the result and of the run's outputs
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.utils import _pytree as pytree
from torch.utils import checkpoint as torchs
from torch.utils._python_dispatch import TorchDispatchMode

from ...partition.model.calls import Calls, checkpoints_as
from ...partition.model.forms import tensors_in
from ...partition.model.keep_less import in_checkpoint, without_activations
from ...partition.model.memory import Operations, memory_of, parts_of, written
from ...partition.model.source_line import first_line
from ...partition.stage_cost import KEEP_LESS
from ..guards.randomness import Seeder
from ..settings.recompute import NamedRule, Rule
from .nested import mapped

_aten = torch.ops.aten
# Expensive to compute, with results that are small compared with activations between them. The products inside an
# attention (bmm, or fused) are not among them: their results grow with the square of the length, or are cheap compared
# with it (Korthikanti et al. 2022, 5).
PRODUCTS = frozenset(
    {_aten.mm.default, _aten.addmm.default, _aten.linear.default, _aten._scaled_mm.default, _aten.convolution.default}
)

# Two runs may call these differently often, because of casts that autocast caches and memory of sequence slices.
_UNCOUNTED = {*torchs.SAC_IGNORED_OPS, _aten._to_copy.default, _aten.new_empty.default}
Keeps = Callable[..., bool]  # (torch.utils.checkpoint.SelectiveCheckpointContext, operator, *args, **kwargs)

_SMALL = 1 << 16  # [bytes] of a buffer that is copied before each forward
_KEEPING = (True, torchs.CheckpointPolicy.MUST_SAVE, torchs.CheckpointPolicy.PREFER_SAVE)


class CheckpointedModules(Calls):
    """The modules of one stage on one rank that run again, or save less."""

    def __init__(self, rules: Mapping[nn.Module, NamedRule], seeder: Seeder) -> None:
        active: list[Rule] = []  # in the first run of a module: its rule, and those of modules that it calls
        through = without_activations(module for module, (_, rule) in rules.items() if rule == KEEP_LESS)
        for module, (name, rule) in rules.items():
            if rule == KEEP_LESS:
                continue
            # whether it, or a module that it calls, keeps results by a policy
            selects = any(rules[part][1] != "full" for part in module.modules() if part in rules)
            through[module] = _Rerun(module, name, rule, active=active, selects=selects, seeder=seeder)
        self._names = [name for name, _ in rules.values()]
        super().__init__(through)

    def refuse_changed_inputs(self, error: RuntimeError, *, stage: str) -> None:
        """ValueError where a backward may have failed because inputs of these modules were changed after them."""
        if self._names and "modified by an inplace operation" in str(error):
            raise ValueError(
                f"in the backward of {stage}: {first_line(error)}. Where plain PyTorch does not say so, it is an input "
                f"of a module that runs again (recompute= of {', '.join(map(repr, self._names[:3]))}) and was "
                f"changed in place after it. Expected an operation that is not in-place (inplace=False), or a "
                f"recompute= that leaves the module out, or one for a module around both"
            ) from error


class _Rerun:
    """One module that runs again: called in place of its forward. `selects`: whether it or one in it keeps results."""

    def __init__(
        self, module: nn.Module, name: str, rule: Rule, *, active: list[Rule], selects: bool, seeder: Seeder
    ) -> None:
        self._name = name
        self._rule = rule
        self._active = active
        self._seeder = seeder
        self._buffers = MovingBuffers(module)
        self._changed: dict[tuple[torch.Size, ...], frozenset[int]] = {}  # inputs, by shapes, which select kernels
        self._options: dict[str, Any] = {"use_reentrant": False, "preserve_rng_state": False}
        self._selects = selects

    def __call__(self, forward: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        if not torch.is_grad_enabled():
            return forward(*args, **kwargs)
        is_inside = bool(self._active)
        if not is_inside and in_checkpoint():
            return forward(*args, **kwargs)
        self._active.append(self._rule)
        try:
            return forward(*args, **kwargs) if is_inside else self._checkpointed(forward, args, kwargs)
        finally:
            self._active.pop()

    def _keeps(self, context: Any, operator: Any, *args: Any, **kwargs: Any) -> bool:
        rule = self._active[-1]
        if callable(rule):
            return rule(context, operator, *args, **kwargs) in _KEEPING
        return rule == "selective" and operator in PRODUCTS

    def _checkpointed(self, forward: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        inputs = KeptInputs(args, kwargs)
        shapes = tuple(x.shape for x in inputs.tensors)
        # Inputs that the module changes in place are copied before: all, until the first forward has shown which.
        known = self._changed.get(shapes)
        kept = inputs.copies(range(len(shapes)) if known is None else known)
        results = KeptResults(self._keeps, self._seeder) if self._selects else None
        options = self._options if results is None else self._options | {"context_fn": results.contexts}
        is_first = True
        random, buffers = self._seeder.state(), self._buffers.before_forward()

        def run(*tensors: torch.Tensor) -> Any:
            nonlocal buffers, is_first
            if is_first:  # with the arguments themselves, the second run with what was kept of them
                is_first = False
                with no_checkpoints_inside():
                    value = forward(*args, **kwargs)
                buffers = self._buffers.after_forward(buffers)
                return value
            again, keywords = inputs.with_tensors(tensors)
            with self._seeder.again(random), no_checkpoints_inside(), standing_in(buffers):
                forward(*again, **keywords)
            return None

        value = torchs.checkpoint(run, *kept, **options)
        if results is not None:
            results.returned(value)
        changed = inputs.changed(kept) if known is None else inputs.changed()
        if not changed <= self._changed.setdefault(shapes, changed):
            raise ValueError(
                f"module {self._name!r} changes an input in place, and did not in its first forward: under recompute= "
                f"its earlier value is lost. Expected a forward that does so always or never (inplace=False), or a "
                f"recompute= that leaves the module out"
            )
        return value


def no_checkpoints_inside() -> AbstractContextManager[None]:
    """Context in which torch.utils.checkpoint only calls: code that is recomputed as a whole saves nothing."""
    return checkpoints_as(_without_saving, lambda function, preserve, *args: function(*args))


def _without_saving(*args: Any, **kwargs: Any) -> Iterator[None]:
    yield  # torch's checkpoint runs the function here


@dataclass(frozen=True, slots=True)
class _BufferBefore:
    module: nn.Module
    name: str
    buffer: torch.Tensor
    version: int
    copy: torch.Tensor

    def has_changed(self) -> bool:
        """Whether a forward changed it; batch_norm counts no version."""
        now = self.module._buffers[self.name]
        if now is not self.buffer or now._version != self.version:
            return True
        return self.copy is not now and not torch.equal(now, self.copy)


Snapshot = Sequence[_BufferBefore]


@contextmanager
def standing_in(snapshot: Snapshot) -> Iterator[None]:
    """Context in which modules have these copies of their buffers (the graph may keep them; the real buffers do not
    change)."""
    now = [each.module._buffers[each.name] for each in snapshot]
    try:
        for each in snapshot:
            each.module._buffers[each.name] = each.copy
        yield
    finally:
        for each, buffer in zip(snapshot, now, strict=True):
            each.module._buffers[each.name] = buffer


class MovingBuffers:
    """Buffers of the modules that a forward runs, copied for each microbatch: small ones always (a running mean may
    stay constant for a while), and those large ones, such as masks, that change in the first forward."""

    def __init__(self, *roots: nn.Module) -> None:
        self._modules = list(dict.fromkeys(module for root in roots for module in root.modules()))
        self._large: dict[tuple[nn.Module, str], bool] = {}  # whether they change

    def before_forward(self) -> Snapshot:
        copies: dict[int, torch.Tensor] = {}  # a buffer with two names has one copy
        found = []
        for module in self._modules:
            for name, buffer in module._buffers.items():
                if buffer is None:
                    continue
                copy = copies.get(id(buffer))
                if copy is None:
                    is_still = buffer.nbytes > _SMALL and self._large.get((module, name)) is False
                    copy = copies[id(buffer)] = buffer if is_still else buffer.detach().clone()
                found.append(_BufferBefore(module, name, buffer, buffer._version, copy))
        return found

    def after_forward(self, before: Snapshot) -> Snapshot:
        """The values to restore for the second run. Raises ValueError for a large buffer that changes, and did not in
        the first forward."""
        moving = []
        for each in before:
            if each.buffer.nbytes <= _SMALL:
                moving.append(each)
                continue
            known = self._large.get((each.module, each.name))
            if known is None:
                known = self._large[each.module, each.name] = each.has_changed()
            elif not known and each.has_changed():
                raise ValueError(
                    f"buffer {each.name!r} of {type(each.module).__name__} ({each.buffer.nbytes:,} bytes) changes "
                    f"here and did not in the first forward: under recompute= its earlier value is lost. Expected a "
                    f"large buffer that changes in each forward, or a recompute= that leaves it out"
                )
            if known:
                moving.append(each)
        return moving


class _Slot(int):
    """Number of a tensor in KeptInputs, in place of the tensor."""


class KeptInputs:
    """Arguments of one call of a module, for its second run; `tensors`: those in them, also in objects, each once."""

    def __init__(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        self.tensors: list[torch.Tensor] = []
        self._given = mapped((args, kwargs), self._slot_of)
        self._versions = _versions(self.tensors)

    def _slot_of(self, x: torch.Tensor) -> _Slot:
        self.tensors.append(x)
        return _Slot(len(self.tensors) - 1)

    def with_tensors(self, tensors: Sequence[torch.Tensor]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """(args, kwargs) with other tensors, in containers that the module may change."""
        args, kwargs = mapped(self._given, lambda slot: tensors[slot], kind=_Slot)
        return args, kwargs

    def copies(self, changed: Collection[int]) -> list[torch.Tensor]:
        """The tensors, with copies of those in `changed` and of all that share their memory. A copy is not a leaf,
        since a leaf can't be changed in place."""
        by_memory: dict[object, list[int]] = {}
        for i, x in enumerate(self.tensors):
            by_memory.setdefault((x.untyped_storage()._cdata, x.dtype) if _is_plain(x) else i, []).append(i)
        found = list(self.tensors)
        for numbers in by_memory.values():
            if not set(numbers).isdisjoint(changed):
                for i, copy in zip(numbers, _copies([self.tensors[i] for i in numbers]), strict=True):
                    found[i] = copy
        return found

    def changed(self, copies: Sequence[torch.Tensor] = ()) -> frozenset[int]:
        """Numbers of the tensors that have changed; releases all of them. `copies`: of all of them, if known: not every
        change counts a version."""
        values = copies if copies else self.tensors
        same = zip(self._versions, _versions(self.tensors), map(_equal, self.tensors, values), strict=True)
        found = frozenset(i for i, (before, after, is_equal) in enumerate(same) if before != after or not is_equal)
        self.tensors = []
        return found


def _copies(tensors: list[torch.Tensor]) -> list[torch.Tensor]:
    """Copies of tensors that share memory, with their strides, on which kernels, and so saved tensors, depend."""
    first = tensors[0]
    if len(tensors) == 1:
        copy = first.detach().requires_grad_(first.requires_grad).clone()
        if not _is_plain(first) or copy.stride() == first.stride():
            return [copy]
    begin = min(x.storage_offset() for x in tensors)
    end = max(begin, *map(_end, tensors))
    wants_grad = any(x.requires_grad for x in tensors)
    memory = first.detach().as_strided((end - begin,), (1,), begin).requires_grad_(wants_grad).clone()
    views = [memory.as_strided(x.shape, x.stride(), x.storage_offset() - begin) for x in tensors]
    return [view if x.requires_grad else view.detach() for x, view in zip(tensors, views, strict=True)]


def _end(x: torch.Tensor) -> int:
    last = sum((size - 1) * stride for size, stride in zip(x.shape, x.stride(), strict=True))
    return int(x.storage_offset()) + last + 1


def _is_plain(x: torch.Tensor) -> bool:
    return type(x) is torch.Tensor and x.layout is torch.strided


def _versions(tensors: Sequence[torch.Tensor]) -> list[int]:
    return [0 if x.is_inference() else x._version for x in tensors]


def _equal(x: torch.Tensor, copy: torch.Tensor) -> bool:
    return x is copy or not _is_plain(x) or torch.equal(x.detach(), copy.detach())


class _Result(NamedTuple):
    """An operation's results, its tensors' versions, and the generators' states after one that may draw."""

    value: Any
    versions: list[tuple[torch.Tensor, int]]
    random: Sequence[Any] | None


class KeptResults:
    """Kept results of one run of a module; random numbers continue as if they had been computed."""

    def __init__(self, keeps: Keeps, seeder: Seeder) -> None:
        self._keeps = keeps
        self._seeder = seeder
        self._operators: list[Any] = []
        self._next = 0  # in the second run
        self._results: dict[int, _Result] = {}
        self._in_memory: dict[object, list[int]] = {}

    def contexts(self) -> tuple[TorchDispatchMode, TorchDispatchMode]:
        return Operations(self._first), Operations(self._second)

    def returned(self, value: object) -> None:
        for x in tensors_in(value):
            for number in self._kept_in(x):
                self._results[number].versions.append((_detached(x), x._version))

    def _first(self, operator: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        value = operator(*args, **kwargs)
        if operator in _UNCOUNTED:
            return value
        number = len(self._operators)
        self._operators.append(operator)
        changed = list(written(operator, args, kwargs))
        for x in changed:
            for spoilt in self._kept_in(x):
                self._results.pop(spoilt, None)
        context = torchs.SelectiveCheckpointContext(is_recompute=False)
        context.op_output = value  # as in newer releases of torch
        if self._keeps(context, operator, *args, **kwargs) and not changed:
            kept = pytree.tree_map_only(torch.Tensor, _detached, value)
            draws = torch.Tag.nondeterministic_seeded in getattr(operator, "tags", ())
            versions = [(x, x._version) for x in tensors_in(kept)]
            self._results[number] = _Result(kept, versions, self._seeder.state() if draws else None)
            for x in tensors_in(kept):
                for memory in _memories(x):
                    self._in_memory.setdefault(memory, []).append(number)
        return value

    def _second(self, operator: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        if operator in _UNCOUNTED:
            return operator(*args, **kwargs)
        number, self._next = self._next, self._next + 1
        if number >= len(self._operators) or self._operators[number] is not operator:
            self._results.clear()  # the runs differ from here, for example since the first one filled a cache
        result = self._results.pop(number, None)
        if result is None or any(x._version != version for x, version in result.versions):
            return operator(*args, **kwargs)
        if result.random is not None:
            self._seeder.resume(result.random)
        return result.value

    def _kept_in(self, x: torch.Tensor) -> list[int]:
        numbers = [number for memory in _memories(x) for number in self._in_memory.get(memory, ())]
        return [number for number in numbers if number in self._results]


def _memories(x: torch.Tensor) -> list[object]:
    return [memory for part in parts_of(x) if (memory := memory_of(part)) is not None]


def _detached(x: torch.Tensor) -> torch.Tensor:
    with torch._C._SetExcludeDispatchKeyGuard(torch._C.DispatchKey.ADInplaceOrView, False):
        return x.detach()
