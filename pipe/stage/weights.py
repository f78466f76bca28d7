"""Weight versions of one stage: forwards and backwards of several versions in flight at once.

    version v is in slot v % count:  a set of leaf Parameters with separate storage
    bind(v)     puts the set into the module (module._parameters), before a forward and before a backward
    release()   puts the module's own Parameters back
    update(u)   copies the newest set over the oldest, points the own Parameters at it, and lets the optimizer step

The own Parameters are the optimizer's and always hold the newest version: optimizers, schedulers and state dicts see no
other versions. Gradients are kept by update group, for any version that they were computed with. The checker has proved
that `count` slots are enough: a version is overwritten only after its last use.

Where weights change in flight (PACI) there is one slot: an update changes it in place between the forward and the
backward of a microbatch, and the backward reads the new values. Precisely, a backward uses

    new   weights that an operation saved unchanged, or as a view (transposed, sliced, expanded); recomputation
          (recompute=, checkpoints) computes with new weights, on the inputs that it kept
    old   everything else that an operation saved: inputs, results, masks, statistics, and results of a forward's
          operations on weights (casts under autocast, weights scaled, normed, joined or copied)
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence

import torch
from torch import nn

from ...schedules.weight_rules import WeightRule
from ..shards.shard import ShardedParameter

_SAMPLED = 1024  # elements of a parameter

Gradients = list[torch.Tensor | None]


class WeightVersions:
    """The newest `count` versions of one stage's trainable parameters on one rank. `copied`: names of those for which
    this rank has separate Parameters, since another rank of this process has the module's (replicas, tied weights).
    Raises ValueError for a module that keeps a parameter where it can't be exchanged, and for one that changes it in
    its forward."""

    def __init__(
        self,
        *,
        name: str,
        module: nn.Module,
        parameters: Sequence[tuple[str, nn.Parameter]],
        rule: WeightRule,
        count: int,
        copied: Collection[str] = (),
    ) -> None:
        self.name = name
        self.newest = 0
        self._rule = rule
        self._count = count
        self.names = [name for name, _ in parameters]
        originals = [parameter for _, parameter in parameters]
        self.own = [nn.Parameter(p.detach().clone()) if name in copied else p for name, p in parameters]
        self._originals = originals
        self._entries = _entries(module, originals)
        self._flat_entries = _flat_entries(module, originals)
        _refuse_other_references(module, parameters)
        _refuse_renorm(module, parameters)
        self._sets: list[list[nn.Parameter] | None] = [None] * count
        self._sets[0] = [nn.Parameter(p.data) for p in self.own]
        self._parts: list[ShardedParameter | None] = [None] * len(self.own)
        self.take_hooks()
        self._gradients: dict[int, Gradients] = {}
        self._untouched: list[tuple[int, int] | None] = []  # gradients of the originals before a backward
        steps = [max(1, -(-own.numel() // _SAMPLED)) for own in self.own]
        self._sampled_at = [(own.numel() // step, step) for own, step in zip(self.own, steps, strict=True)]
        self.note()

    # Forward and backward

    def bind(self, version: int) -> None:
        self._put(self._leaves(version))

    def release(self) -> None:
        self._put(self._originals)

    def _put(self, parameters: Sequence[nn.Parameter]) -> None:
        for table, key, i in self._entries:
            table[key] = parameters[i]
        for module, positions in self._flat_entries:
            flat = list(module.__dict__["_flat_weights"])
            for position, i in positions:
                flat[position] = parameters[i]
            module.__dict__["_flat_weights"] = flat

    def begin_backward(self, version: int, group: int) -> None:
        """Bind, and let a backward, whose forward used `version`, add to the gradients of its update group."""
        version = self._rule.version_in_backward(version, self.newest)
        self._untouched = self._own_gradients()
        self.bind(version)
        known = self._gradients.get(group)
        if known is not None:
            for leaf, gradient in zip(self._leaves(version), known, strict=True):
                leaf.grad = gradient

    def end_backward(self, version: int, group: int) -> None:
        """Take the gradients that the backward added. Raises ValueError for one that went to the module's own
        Parameters, where it would be lost."""
        version = self._rule.version_in_backward(version, self.newest)
        self.release()
        leaves = self._leaves(version)
        self._gradients[group] = [leaf.grad for leaf in leaves]
        for leaf in leaves:
            leaf.grad = None
        pairs = zip(self.names, self._untouched, self._own_gradients(), strict=True)
        name = next((name for name, before, now in pairs if before != now), None)
        if name is not None:
            raise ValueError(
                f"a gradient of {self.name} went to parameter {name!r} itself, and not to the version that its forward "
                f"was given: something there keeps the parameter, or a view of it, from one forward to the next (in a "
                f"closure, a tuple, functools.partial). Expected a forward that reads it from its module each time, as "
                f"in self.weight, or a flush schedule such as schedule='1f1b'"
            )

    def _own_gradients(self) -> list[tuple[int, int] | None]:
        gradients = [parameter.grad for parameter in self._originals]
        return [None if gradient is None else (id(gradient), gradient._version) for gradient in gradients]

    def divide(self, parts: Mapping[str, ShardedParameter]) -> None:
        self._parts = [parts.get(name) for name in self.names]

    def kept(self, version: int, name: str) -> torch.Tensor | None:
        if version <= self.newest - self._count:
            return None
        return self._leaves(version)[self.names.index(name)].data

    def tensors(self) -> list[torch.Tensor]:
        leaves: list[torch.Tensor] = [leaf for version in self._sets for leaf in version or ()]
        return leaves + [g for gradients in self._gradients.values() for g in gradients if g is not None]

    # Gradients of an update group, in the order of the parameters

    def gradients(self, group: int) -> Gradients:
        return self._gradients.setdefault(group, [None] * len(self.own))

    # Updates

    def update(self, group: int, step: Callable[[], None]) -> None:
        """Make the next version: `step` updates the own Parameters with the gradients of `group`."""
        version = self.newest + 1
        current = self._leaves(self.newest)
        slot = version % self._count
        leaves = self._sets[slot]
        if leaves is None:
            leaves = self._sets[slot] = [nn.Parameter(torch.empty_like(p), p.requires_grad) for p in current]
            self.take_hooks()
        if leaves is not current and leaves:
            with torch.no_grad():
                torch._foreach_copy_([p.data for p in leaves], [p.data for p in current])
        for own, leaf, part, gradient in zip(self.own, leaves, self._parts, self.gradients(group), strict=True):
            own.data = leaf.data
            if part is None:
                own.grad = gradient
            else:
                part.follow()
                part.parameter.grad = gradient
        del self._gradients[group]
        step()
        self._check_storage(leaves)
        if leaves and not self._rule.changes_in_flight:  # a graph that held the overwritten version fails loudly
            torch.autograd.graph.increment_version(leaves)
        self.newest = version
        self.note()

    def skip(self, group: int) -> None:
        self._gradients[group] = [None] * len(self.own)
        self.update(group, lambda: None)

    def _check_storage(self, leaves: Sequence[nn.Parameter]) -> None:
        for name, own, leaf in zip(self.names, self.own, leaves, strict=True):
            if own.data_ptr() != leaf.data_ptr():
                raise ValueError(
                    f"the optimizer of {self.name} put parameter {name!r} into other memory: expected one that updates "
                    f"its parameters in place (torch.optim's do), or a flush schedule such as schedule='1f1b'"
                )

    # What changes from outside

    def changed_outside(self) -> list[str]:
        """Names of the parameters that were changed by other code since the last update.

        An edit in place through `.data` counts no version and moves nothing: it is found if it changes a sampled
        element: all of a parameter of up to 1,024, else 1,024 in equal steps.
        """
        changed = {
            name
            for name, own, (version, pointer) in zip(self.names, self.own, self._seen, strict=True)
            if own._version != version or own.data_ptr() != pointer
        }
        now, was = self._sample(), self._sampled
        if not _equal_bits(now, was):
            lengths = [length for length, _ in self._sampled_at]
            parts = zip(self.names, torch.split(now, lengths), torch.split(was, lengths), strict=True)
            changed |= {name for name, one, other in parts if not _equal_bits(one, other)}
        return [name for name in self.names if name in changed]

    def take_hooks(self) -> str | None:
        """Give every version the gradient hooks of the module's own Parameters. Returns the name of a parameter with a
        hook after the accumulation, or None. Such a hook would get a version, and could not, for example, step an
        optimizer of the Parameter."""
        for i, (name, original) in enumerate(zip(self.names, self._originals, strict=True)):
            if getattr(original, "_post_accumulate_grad_hooks", None):
                return name
            hooks = original._backward_hooks
            for leaves in self._sets if hooks is not None else ():
                if leaves is not None and leaves[i]._backward_hooks is not hooks:
                    leaves[i]._backward_hooks = hooks  # the same table, so that later changes are shared
        return None

    def frozen_outside(self) -> list[str]:
        pairs = zip(self.names, self._originals, self._leaves(self.newest), strict=True)
        return [name for name, original, leaf in pairs if original.requires_grad is not leaf.requires_grad]

    def follow(self) -> None:
        """Set requires_grad of every version to that of the module's own Parameters. No graph may be in flight."""
        for leaves in self._sets:
            for leaf, original in zip(leaves or (), self._originals, strict=False):
                leaf.requires_grad_(original.requires_grad)

    def adopt(self, names: Collection[str]) -> None:
        """Copy the own Parameters' present values of these names into every kept version."""
        newest = self._leaves(self.newest)
        with torch.no_grad():
            for leaves in self._sets:
                for name, leaf, own in zip(self.names, leaves or (), self.own, strict=False):
                    if name in names and leaf.data_ptr() != own.data_ptr():
                        leaf.data.copy_(own.data)
        for own, leaf in zip(self.own, newest, strict=True):
            own.data = leaf.data
        self.note()

    def older(self) -> dict[int, dict[str, torch.Tensor]]:
        numbers = range(max(0, self.newest - self._count + 1), self.newest)
        return {v: {name: p.data for name, p in zip(self.names, self._leaves(v), strict=True)} for v in numbers}

    def restore(self, newest: int, older: Mapping[int, Mapping[str, torch.Tensor]]) -> None:
        """Take the own Parameters for version `newest`, and `older` for those before (missing ones are equal)."""
        values = [own.data.clone() for own in self.own]
        self.newest = newest
        self._sets = [None] * self._count
        for version in range(max(0, newest - self._count + 1), newest + 1):
            known = older.get(version, {}) if version < newest else {}
            self._sets[version % self._count] = [
                nn.Parameter(known[name].to(value).clone() if name in known else value.clone())
                for name, value in zip(self.names, values, strict=True)
            ]
        self.follow()
        self.take_hooks()
        for own, leaf in zip(self.own, self._leaves(newest), strict=True):
            own.data = leaf.data
        self.note()

    def drop_gradients(self) -> None:
        self._gradients.clear()

    def note(self) -> None:
        """Remember the present values, from which `changed_outside` finds changes."""
        for part in self._parts:
            if part is not None:
                part.follow()
        self._seen = [(own._version, own.data_ptr()) for own in self.own]
        self._sampled = self._sample()

    def _sample(self) -> torch.Tensor:
        parts = [
            own.detach().as_strided((length,), (step,))
            for own, (length, step) in zip(self.own, self._sampled_at, strict=True)
        ]
        return torch.cat(parts) if parts else torch.empty(0)

    def _leaves(self, version: int) -> list[nn.Parameter]:
        leaves = self._sets[version % self._count]
        if leaves is None or not self.newest - self._count < version <= self.newest:
            raise AssertionError(
                f"{self.name} has no weight version {version}: the newest is {self.newest}, and {self._count} are kept"
            )
        return leaves


def _equal_bits(one: torch.Tensor, other: torch.Tensor) -> bool:
    return torch.equal(one.view(torch.uint8), other.view(torch.uint8))


def _entries(
    module: nn.Module, parameters: Sequence[nn.Parameter]
) -> list[tuple[dict[str, nn.Parameter | None], str, int]]:
    """(table, key, number) of each parameter in the module; a tied one has several."""
    number = {id(parameter): i for i, parameter in enumerate(parameters)}
    tables = [part._parameters for part in module.modules()]
    return [(table, key, number[id(p)]) for table in tables for key, p in table.items() if id(p) in number]


def _flat_entries(
    module: nn.Module, parameters: Sequence[nn.Parameter]
) -> list[tuple[nn.Module, list[tuple[int, int]]]]:
    """The weights that RNNs keep in a list as well, with which they compute."""
    number = {id(parameter): i for i, parameter in enumerate(parameters)}
    found: list[tuple[nn.Module, list[tuple[int, int]]]] = []
    for part in module.modules():
        if isinstance(part, nn.RNNBase):
            weights = part.__dict__["_flat_weights"]
            positions = [(at, number[id(weight)]) for at, weight in enumerate(weights) if id(weight) in number]
            if positions:
                found.append((part, positions))
    return found


def _refuse_renorm(module: nn.Module, parameters: Sequence[tuple[str, nn.Parameter]]) -> None:
    names = {id(parameter): name for name, parameter in parameters}
    for part in module.modules():
        if isinstance(part, nn.Embedding | nn.EmbeddingBag) and part.max_norm is not None and id(part.weight) in names:
            raise ValueError(
                f"parameter {names[id(part.weight)]!r} belongs to {type(part).__name__}(max_norm={part.max_norm:g}), "
                f"which writes into it in each forward, and under an asynchronous schedule other batches in flight use "
                f"it. Expected max_norm=None, or a flush schedule such as schedule='1f1b'"
            )


def _refuse_other_references(module: nn.Module, parameters: Sequence[tuple[str, nn.Parameter]]) -> None:
    names = {id(parameter): name for name, parameter in parameters}
    for part in module.modules():
        for key, value in part.__dict__.items():
            if key in ("_parameters", "_modules", "_buffers", "_flat_weights"):
                continue
            values = value.values() if isinstance(value, dict) else value
            values = values if isinstance(value, list | tuple | set | dict) else (value,)
            held = next((names[id(one)] for one in values if id(one) in names), None)
            if held is not None:
                raise ValueError(
                    f"{type(part).__name__} keeps parameter {held!r} in its attribute {key!r} too, where an "
                    f"asynchronous schedule cannot exchange its versions: expected parameters as module attributes "
                    f"alone (an nn.ParameterList for a list), or a flush schedule such as schedule='1f1b'"
                )
