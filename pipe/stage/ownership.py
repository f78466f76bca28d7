"""Ranks of each tensor, by the model's original names; gathering, loading and freeing tensors."""

from __future__ import annotations

import difflib
import sys
import warnings
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from math import prod
from types import FrameType
from typing import Any, SupportsIndex, TypeVar
from unittest.mock import patch
from weakref import WeakSet

import torch
from torch import nn
from torch.utils import _pytree as pytree

from ...comm import Collectives
from ...partition.model.source_line import is_ours, is_users
from ..context import Run
from ..guards.separable import refuse_shared_statistic
from ..shards.shard import Shard
from .build import CutModel
from .members import MemberShards
from .own_state import TensorKinds, extra_states, keys_of, tensors_from, tensors_of

T = TypeVar("T")

# Why a module's own state can't be read: it would be incomplete, without a warning.
META = "whose weights another process holds: they would be meta tensors, which have no values"
DIVIDED = "whose weights a group divides: they would be this process's parts, under the names of whole ones"
BETWEEN_BATCHES = "whose weights fsdp divides between two batches: they would be NaN"


class Ownership:
    """Stages that hold each tensor, by name. Built on every rank alike, before anything is freed. `by_name`: whether
    tensors are sorted by name, since processes have them in different orders. Also has the `run` and the cut `model`
    for its users."""

    def __init__(self, run: Run, cut: CutModel, *, group: MemberShards, by_name: bool = False) -> None:
        self.run = run
        self.model = cut
        self.group = group
        self._by_name = by_name
        self.reads_state = False  # while the pipeline reads modules' state
        self._owners = run.layout.schedule.owners  # of replicas, the first represents all
        self._local = frozenset(run.local_stages)
        held: dict[int, set[int]] = {}
        for mode in cut.prepared:
            for stage, each in enumerate(mode.stages):
                for tensor in [*each.module.parameters(), *each.module.buffers()]:
                    held.setdefault(id(tensor), set()).add(stage)
        everything = self._ordered(
            [*cut.root.named_parameters(remove_duplicate=False), *cut.root.named_buffers(remove_duplicate=False)]
        )
        # A tensor that no stage uses is the first stage's.
        self.stages = {name: tuple(sorted(held.get(id(tensor), {0}))) for name, tensor in everything}
        self._shares = {name: group.shard(name, tensor) for name, tensor in everything}
        self.kinds = TensorKinds(dict(everything))
        self._first_name: dict[str, str] = {}  # of tied names, the first represents all
        by_id: dict[int, str] = {}
        for name, tensor in everything:
            self._first_name[name] = by_id.setdefault(id(tensor), name)
        modules = [*cut.root.modules()]
        for mode in cut.prepared:
            for each in mode.stages:
                modules += each.module.modules()
        self._modules = tuple(dict.fromkeys(modules))
        gone = [tensor for name, tensor in everything if not self.is_local(name)]
        self.refuse_plain_state(gone, META)
        self.refuse_plain_state([x for name, x in everything if not self._shares[name].is_whole], DIVIDED)
        self.has_warned = False  # of a gradient that another process has
        self.tried: WeakSet[torch.optim.Optimizer] = WeakSet()  # the user's own, by Elsewhere
        self._free({id(x): name for name, x in reversed(everything) if not self.is_local(name)})

    def refuse_plain_state(self, tensors: Collection[torch.Tensor], why: str) -> None:
        """Let `state_dict` and pickling of modules that hold any of these tensors themselves raise ValueError. `why`:
        "whose weights ...: they would be ..."."""
        wanted = {id(tensor) for tensor in tensors}
        for module in self._modules:
            if any(id(value) in wanted for value in (*module._parameters.values(), *module._buffers.values())):
                module.register_state_dict_pre_hook(_Refusal(self, why))  # type: ignore[no-untyped-call]

    def follow(self, run: Run) -> None:
        """Update the owners of stages; this process holds the same ones."""
        self.run = run
        self._owners = run.layout.schedule.owners

    def is_local(self, name: str) -> bool:
        return not self._local.isdisjoint(self.stages[name])

    def shard(self, name: str) -> Shard:
        return self._shares[name]

    def names(self) -> list[str]:
        return list(self._tensors())

    def tied_names(self) -> dict[str, str]:
        """Names of the model's state whose tensor has an earlier name: name -> that one."""
        firsts: dict[str, str] = {}
        for name in self._tensors():
            firsts.setdefault(self._first_name[name], name)
        return {name: first for name in self._tensors() if (first := firsts[self._first_name[name]]) != name}

    def dtypes(self) -> dict[str, torch.dtype]:
        return {name: tensor.dtype for name, tensor in self._tensors().items()}

    def num_parameters(self) -> tuple[int, ...]:
        """[S] number of elements of each stage's full parameters."""
        stages, root = self.model.train.stages, self.model.root
        full = {id(p): prod(self.group.shard(name, p).full) for name, p in root.named_parameters()}
        return tuple(sum(full.get(id(p), p.numel()) for p in stage.module.parameters()) for stage in stages)

    def stage_parameters(self, stage: int, *, frozen: bool = False) -> list[tuple[str, nn.Parameter]]:
        """Trainable (or all) parameters for the optimizer of a local stage, the first local one that holds them."""
        local = [(name, p) for name, p in self.named_parameters() if frozen or p.requires_grad]
        return [(name, p) for name, p in local if min(s for s in self.stages[name] if s in self._local) == stage]

    def holders(self, name: str) -> tuple[int, ...]:
        """Ranks that hold the same of a tensor: of experts those of this process's number in their expert group."""
        index, count = self.run.layout.place.expert
        ranks = self.stage_ranks(name)
        return tuple(rank for rank in ranks if rank % count == index) if self.group.is_of_experts(name) else ranks

    def all_holders(self) -> set[tuple[int, ...]]:
        """Several ranks that hold the same of a trainable parameter, of any; the same on every rank."""
        found, count = set(), self.run.layout.place.mesh.expert
        for name, parameter in self.parameters():
            ranks, is_of_experts = self.stage_ranks(name), self.group.is_of_experts(name)
            if parameter.requires_grad:
                found |= {ranks[i::count] for i in range(count)} if is_of_experts else {ranks}
        return {ranks for ranks in found if len(ranks) > 1}

    def stage_ranks(self, name: str) -> tuple[int, ...]:
        return tuple(sorted({rank for s in self.stages[name] for rank in self._owners[s]}))

    def missing(self, modules: Sequence[nn.Module]) -> tuple[str, int] | None:
        """(name, stage) of a tensor that one of these modules, by stage, uses, and that its ranks do not hold."""
        names = {id(x): name for name, x in [*self.model.root.named_parameters(), *self.model.root.named_buffers()]}
        for stage, module in enumerate(modules):
            used = [names[id(x)] for x in (*module.parameters(), *module.buffers()) if id(x) in names]
            for name in used:
                if not set(self._owners[stage]) <= {*self.stage_ranks(name)}:
                    return name, stage
        return None

    def counted_parameters(self, ranks: Collection[int], *, among: Collection[int]) -> list[nn.Parameter]:
        """The parameters that count in the gradient norm on these ranks: shared ones count on their first rank.
        `among`: the ranks of the norm."""
        counted = [(name, p) for name, p in self.parameters() if self.group.counts(name)]
        return [p for name, p in counted if next(rank for rank in self.holders(name) if rank in among) in ranks]

    def tied(self) -> list[tuple[str, tuple[int, ...]]]:
        """(name, ranks) of trainable parameters that several ranks hold; the same list on every rank."""
        held = [(name, self.holders(name)) for name, parameter in self.parameters() if parameter.requires_grad]
        return [(name, ranks) for name, ranks in held if len(ranks) > 1]

    def shared(self) -> dict[tuple[int, ...], list[str]]:
        """Trainable parameters that several ranks hold, by the stages that hold them; the same on every rank."""
        found: dict[tuple[int, ...], list[str]] = {}
        for name, _ in self.tied():
            found.setdefault(self.stages[name], []).append(name)
        return found

    def named_parameters(self) -> list[tuple[str, nn.Parameter]]:
        return [(name, p) for name, p in self.parameters() if self.is_local(name)]

    def held(self) -> dict[str, torch.Tensor]:
        root = self.model.root
        named = [*root.named_parameters(remove_duplicate=False), *root.named_buffers(remove_duplicate=False)]
        return {name: x for name, x in named if self.is_local(name)}

    def state_dict(self) -> dict[str, torch.Tensor]:
        return {name: value for name, value in self._tensors().items() if self.is_local(name)}

    @contextmanager
    def asks(self) -> Iterator[nn.Module]:
        with patch.object(self, "reads_state", True):
            yield self.model.root

    def keys(self) -> dict[str, str]:
        with self.asks() as root:
            return keys_of(root)

    def extra_states(self) -> dict[str, Any]:
        stages = self.model.train.stages
        used = [{*stage.module.modules()} for stage in stages]
        own = {module for stage in self._local for module in used[stage]}
        rest = set(self.model.root.modules()).difference(*used) if 0 in self._local else set()
        return extra_states(self.model.root, own | rest)

    def follow_kinds(self, collectives: Collectives) -> None:
        """Take over types and shapes of tensors that a forward changed, of processes that hold them. Collective over
        the processes. Raises ValueError, on all, where those processes differ."""
        tensors = self._tensors()
        own = {name: x for name, x in tensors.items() if self.is_local(name)}
        followed = self.kinds.follow(own, tensors, collectives, self.group.is_divided)
        self._shares |= {name: self.group.shard(name, tensors[name]) for name in followed}

    def full_state_dict(self, collectives: Collectives) -> dict[str, torch.Tensor]:
        """Everything on every rank, on the CPU. Collective over the processes."""
        self.follow_kinds(collectives)
        tensors = self._tensors()
        full: dict[str, torch.Tensor] = {}
        for name, tensor in tensors.items():
            first = self._first_name[name]
            if first != name and first in full:
                full[name] = full[first]
                continue
            full[name] = self.whole(name, tensor.detach(), collectives, what="gathering").cpu().clone()
        return full

    def whole(self, name: str, tensor: torch.Tensor, collectives: Collectives, *, what: str) -> torch.Tensor:
        """A full parameter or buffer, or its gradient, of its first holder, on every process. Collective over the
        processes. `tensor`: this process's part; where it holds none, it gives the type."""
        stage = self.stages[name][0]
        is_here, source = stage in self._local, self._owners[stage][0]
        full = self.group.gather(name, tensor) if is_here else tensor.new_empty(self.group.shard(name, tensor).full)
        return collectives.broadcast(full, source, what=f"{what} {name!r} from rank {source}")

    def spread_from_first_owners(self, collectives: Collectives) -> None:
        """Give all processes that hold a tensor the values of the first one's model. Collective."""
        for name, tensor in self._tensors().items():
            ranks = self.stage_ranks(name)
            value = self.group.original(name, tensor.detach())
            if len(ranks) > 1:
                value = collectives.broadcast(value, ranks[0], what=f"spreading {name!r} from rank {ranks[0]}")
            if self.is_local(name):
                if self.group.is_whole_here(name):
                    value = collectives.tensor_first(value, what=f"spreading {name!r}")
                tensor.data.copy_(self.group.own_part(name, tensor, value))

    def _ordered(self, named: Iterable[tuple[str, T]]) -> list[tuple[str, T]]:
        return sorted(named, key=lambda each: each[0]) if self._by_name else list(named)

    def parameters(self) -> list[tuple[str, nn.Parameter]]:
        """Parameters of all stages, each once, under its first name."""
        named = self._ordered(self.model.root.named_parameters(remove_duplicate=False))
        firsts: dict[int, tuple[str, nn.Parameter]] = {}
        for name, parameter in named:
            firsts.setdefault(id(parameter), (name, parameter))
        return list(firsts.values())

    def taken(self, state: Mapping[str, Any]) -> Mapping[str, torch.Tensor]:
        """A full or a local state dict under the names used here, read by the model's own `load_state_dict`."""
        names, named = {key: name for name, key in self.keys().items()}, self._tensors()
        found = {names.get(key, key): value for key, value in state.items()}
        if found.keys() <= named.keys() and all(name in found for name in named if self.is_local(name)):
            return found
        with self.asks() as root:
            if root.state_dict(keep_vars=True).keys() == named.keys():  # it has no other keys
                return found
            like = {name: torch.empty(self.shard(name).full, dtype=x.dtype) for name, x in named.items()}
            return tensors_from(root, state, like)

    def load_state_dict(self, state: Mapping[str, torch.Tensor]) -> None:
        self.check_state_dict(state)
        tensors = self._tensors()
        parts = self.own_parts(state)
        with torch.no_grad():
            for name in tensors:
                if self.is_local(name):
                    tensors[name].copy_(parts[name])

    def own_parts(self, state: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        return {name: self.group.own_part(name, tensor, state[name]) for name, tensor in self.state_dict().items()}

    def check_state_dict(self, state: Mapping[str, torch.Tensor]) -> None:
        """ValueError names missing and unknown keys and wrong shapes of a full or a local state dict."""
        tensors = self._tensors()
        wanted = {name for name in tensors if self.is_local(name)}
        missing, unknown = sorted(wanted - state.keys()), sorted(state.keys() - tensors.keys())
        if missing or unknown:
            near = difflib.get_close_matches(unknown[0], tensors, n=1) if unknown else []
            hint = f"; {unknown[0]!r} looks like {near[0]!r}" if near else ""
            raise ValueError(
                f"state dict: missing {missing[:5]}{'...' if len(missing) > 5 else ''}, "
                f"unknown {unknown[:5]}{'...' if len(unknown) > 5 else ''}: expected the model's original names{hint}"
            )
        for name in wanted:
            shard, shape = self.group.shard(name, tensors[name]), tuple(state[name].shape)
            if shape not in (shard.full, shard.local):
                raise ValueError(f"state dict: {name!r} has shape {shape}, expected {shard.full}")

    def _tensors(self) -> dict[str, torch.Tensor]:
        state = tensors_of(self.model.root)
        late = [name for name in state if name not in self.stages]
        if late:
            raise ValueError(
                f"{late[0]!r} is in the model's state and was not when the stages were built, so that its stage is not "
                f"known: expected register_buffer with a tensor, not None, before the PipelineModule is made, "
                f"or persistent=False"
            )
        return dict(self._ordered(state.items()))

    def _free(self, gone: Mapping[int, str]) -> None:
        """Replace tensors that this process does not hold, by id and name, by meta tensors."""
        metas: dict[int, Elsewhere] = {}
        for module in self._modules:
            for table in (module._parameters, module._buffers):
                for key, value in list(table.items()):
                    if value is None or id(value) not in gone:
                        continue
                    if id(value) not in metas:
                        metas[id(value)] = _elsewhere(value, self, gone[id(value)])
                    setattr(module, key, metas[id(value)])


def _callers() -> Iterator[FrameType]:
    """Frames outwards, beginning with the caller of the function that calls this one."""
    frame: FrameType | None = sys._getframe(2)
    while frame is not None:
        yield frame
        frame = frame.f_back


class Elsewhere(torch.Tensor):
    """A parameter or buffer that another process holds, or a result of such alone: a shape without values. A use that
    needs values is a ValueError, as is one together with other tensors: a norm, a mean over time."""

    owner: Ownership
    known_as: str

    @property
    def grad(self) -> None:
        """None, which a step skips; a norm that would miss it, of torch or an optimizer, is a ValueError. Other code of
        the user's that reads it gets one warning."""
        for frame in _callers():
            code = frame.f_code
            if code.co_name == "clip_grad_norm_" and frame.f_globals["__name__"] == "torch.nn.utils.clip_grad":
                raise self.refusal()
            optimizer = frame.f_locals.get(code.co_varnames[0]) if code.co_name == "step" and code.co_varnames else None
            if isinstance(optimizer, torch.optim.Optimizer):
                if optimizer not in self.owner.tried:
                    self.owner.tried.add(optimizer)
                    refuse_shared_statistic(optimizer, [p for _, p in self.owner.parameters()])
                return
            if code.co_name == "zero_grad":
                return
        caller = sys._getframe(1).f_code.co_filename
        if is_users(caller) and not self.owner.has_warned:
            self.owner.has_warned = True
            warnings.warn(f"a gradient that is None here: {self.refusal()}", stacklevel=2)

    @grad.setter
    def grad(self, value: object) -> None:
        """It stays None."""

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        given = [x for x in pytree.tree_leaves((args, kwargs)) if isinstance(x, torch.Tensor)]
        first = next(x for x in given if isinstance(x, Elsewhere))
        try:
            if any(not isinstance(x, Elsewhere) and not x.is_meta for x in given):
                raise RuntimeError("together with tensors that have values")
            found = super().__torch_function__(func, types, args, kwargs)  # type: ignore[no-untyped-call]
        except (RuntimeError, TypeError) as error:
            raise first.refusal() from error
        for x in pytree.tree_leaves(found):
            if isinstance(x, Elsewhere) and not hasattr(x, "known_as"):
                x.owner, x.known_as = first.owner, first.known_as
        return found

    def refusal(self) -> ValueError:
        instead = (
            "pipe.full_state_dict() for all weights, pipe.named_parameters() for this process's, "
            "pipe.clip_grad_norm_(...) for a norm over all stages, or pipe.predict(...) for the model's output"
        )
        if any(frame.f_code.co_name == "loss_of" and is_ours(frame.f_code.co_filename) for frame in _callers()):
            instead = "the module that has it as a child of the loss module (an nn.Module as loss_fn=)"
        return ValueError(
            f"{self.known_as!r} is held by rank {self.owner.holders(self.known_as)[0]}, and this process has no values "
            f"of it or of its gradient. Expected {instead}"
        )

    def __deepcopy__(self, memo: dict[int, object]) -> Elsewhere:
        return _elsewhere(self, self.owner, self.known_as)

    def __reduce_ex__(self, protocol: object) -> Any:
        raise self.refusal()


def _elsewhere(like: torch.Tensor, owner: Ownership, name: str) -> Elsewhere:
    with torch._C.DisableTorchFunctionSubclass():
        made = torch.empty_like(like, device="meta", requires_grad=False).as_subclass(Elsewhere)
        made.owner, made.known_as, made._is_param = owner, name, isinstance(like, nn.Parameter)
        made.requires_grad_(like.requires_grad)
    return made


class _Refusal:
    """A hook before `state_dict`; it raises ValueError when its module is pickled whole, too."""

    def __init__(self, owner: Ownership, why: str) -> None:
        self._owner = owner
        self._why = why

    def __call__(self, module: nn.Module, prefix: str, keep_vars: bool) -> None:
        if not self._owner.reads_state:
            raise self._error(f"state_dict() of {type(module).__name__} {prefix.rstrip('.')!r}")

    def __deepcopy__(self, memo: object) -> _Refusal:
        return self

    def __reduce_ex__(self, protocol: SupportsIndex) -> str:
        raise self._error("pickling a module")

    def _error(self, what: str) -> ValueError:
        return ValueError(
            f"{what}, {self._why}. Expected pipe.full_state_dict() for all weights, pipe.state_dict() for this "
            f"process's, or pipe.save(folder)"
        )
