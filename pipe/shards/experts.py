"""Layers of experts over an expert group: each member holds some, and computes them for the rows of all members.

    member 0   its rows, by expert   0 1 | 2 3   ──┐          ┌──>   rows of all for 0 1   ──> experts ──┐
                                                   ├ exchange ┤                                          ├ and back
    member 1   its rows, by expert   0 1 | 2 3   ──┘          └──>   rows of all for 2 3   ──> experts ──┘

Before, all members exchange how many rows each expert gets, so that a member without any takes part, too. The backward
makes the same exchanges in reverse order. A row is a token for one of its experts: whatever a module's own code routes,
weighs or drops, it does on each member's own tokens.

    stacked   weights [n, ...] in one module, called with tokens, [T, k] numbers and weights of their experts
    batched   the same weights, called with as many rows for each expert, [n, R, D] or [n R, D]
    listed    a ModuleList, whose modules another one calls: its forward runs twice, to ask for rows and to get them
"""

from __future__ import annotations

import inspect
import zlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial, reduce
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils import _pytree as pytree

from ...partition.model.calls import checkpoints_as
from ...partition.model.forms import tensors_in
from ...partition.model.made_up import is_made_up
from ...partition.model.untouched import StateSnapshot
from .shard import Shard
from .style import Style, StyleError, shard_of
from .tensor_group import TensorGroup

_TYPES = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
_Table = Sequence[Sequence[int]]  # by member: rows for each of this member's experts, -1 where it has not called one
_Compute = Callable[[Sequence[Tensor], _Table], Tensor]


class _Sent(torch.autograd.Function):
    """Rows to the members, as many as `gives` says to each, and those that they send here."""

    @staticmethod
    def forward(ctx: Any, group: TensorGroup, gives: list[int], takes: list[int], *rows: Tensor) -> tuple[Tensor, ...]:
        ctx.group, ctx.gives, ctx.takes = group, gives, takes
        ctx.save_for_backward(rows[0].new_empty(0))  # checkpoints run again up to the last saved tensor: on all members
        return tuple(group.send(x, gives, takes) for x in rows)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Any, ...]:
        assert len(ctx.saved_tensors) == 1
        return None, None, None, *(ctx.group.send(x, ctx.takes, ctx.gives) for x in gradients)


class _Beside(torch.autograd.Function):
    """`x`, and gradients of 0 for others, which keep their place in the backward."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, *others: Tensor) -> Tensor:
        ctx.others = [(other.shape, other.dtype, other.device) for other in others]
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Any, ...]:
        wanted = zip(ctx.others, ctx.needs_input_grad[1:], strict=True)
        zeros = (torch.zeros(s, dtype=kind, device=at) if wants else None for (s, kind, at), wants in wanted)
        return gradients[0], *zeros


def _beside(x: Tensor, *others: Tensor) -> Tensor:
    found: Tensor = _Beside.apply(x, *others)  # type: ignore[no-untyped-call]
    return found


class ExpertLayer(Style):
    """Base of all forms. `name`: of the module; `number`: n, of all experts."""

    key = ""  # of a list of experts in the module

    def __init__(self, name: str, number: int) -> None:
        super().__init__()
        self.name, self.number = name, number

    @property
    def where(self) -> str:
        """Name of the module or list that holds the weights."""
        return ".".join(filter(None, (self.name, self.key)))

    def experts(self, module: nn.Module) -> list[nn.Module]:
        """Modules that hold the weights."""
        return [module]

    def describe(self) -> str:
        return f"{self.number} experts"

    def check(self, name: str, module: nn.Module, count: int) -> None:
        if self.number % count:
            raise StyleError(
                f"module {name!r} has {self.number} experts, over {count} members of an expert group: expected a "
                f'number that "expert" divides'
            )

    def exchanged(
        self, group: TensorGroup, asked: Sequence[int], rows: Sequence[Tensor], held: Sequence[Tensor], run: _Compute
    ) -> Tensor:
        """Rows [R, D], by expert, after their experts. `asked`: rows for each of all experts; `held`: weights of the
        own ones; `run`: on the own ones' rows, by member and expert. Collective over the group."""
        needs = torch.is_grad_enabled() and any(x.requires_grad for x in (*rows, *held))
        note = [*asked, needs, rows[0].shape[-1], zlib.crc32(self.name.encode())]
        table = group.all(torch.tensor([note], device=rows[0].device), 0).tolist()
        if len({said[-1] for said in table}) > 1:
            raise ValueError(
                f"members of an expert group are in different layers of experts, one of them in {self.name!r}: "
                f"expected a forward that calls the same layers whatever its own tokens are"
            )
        if not rows[0].shape[-1]:  # this member asks for none, and its width is that of others' rows
            rows = [rows[0].new_empty(0, max(said[-2] for said in table)), *rows[1:]]
        rows = [_of_one_type(group, x) for x in rows]
        if any(said[-3] for said in table) and not any(x.requires_grad for x in rows):  # others go backward here
            rows = [rows[0].detach().requires_grad_(), *rows[1:]]
        size = self.number // group.count
        of = [[sum(map(max, part, [0] * size)) for part in _parts(said[:-3], size)] for said in table]
        gives, takes = of[group.index], [each[group.index] for each in of]
        group.note_rows([sum(column) for column in zip(*of, strict=True)])
        sent = _Sent.apply(group, gives, takes, *rows)  # type: ignore[no-untyped-call]
        group.region(True, note[-1])
        try:
            found = run(sent, [_parts(said[:-3], size)[group.index] for said in table])
        finally:
            group.region(False)
        back: Tensor = _Sent.apply(group, takes, gives, _of_one_type(group, found))[0]  # type: ignore[no-untyped-call]
        return back


def _of_one_type(group: TensorGroup, rows: Tensor) -> Tensor:
    """The rows in the type of all members' rows: under autocast one without any has another. Collective."""
    own = _TYPES.index(rows.dtype) if len(rows) else -1
    types = {_TYPES[at] for at in group.all(torch.tensor([own], device=rows.device), 0).tolist() if at >= 0}
    return rows.to(reduce(torch.promote_types, types)) if types else rows


def _parts(numbers: Sequence[int], size: int) -> list[Sequence[int]]:
    return [numbers[at : at + size] for at in range(0, len(numbers), size)]


def _has_no_values(tensors: Sequence[Tensor]) -> bool:
    return is_made_up() or any(x.is_meta or isinstance(x, FakeTensor) for x in tensors)


class StackedExperts(ExpertLayer):
    def shards(self, module: nn.Module, *, index: int, count: int) -> dict[str, Shard]:
        return {key: shard_of(module, key, 0, index=index, count=count) for key in module._parameters}

    def attributes(self, module: nn.Module, count: int) -> dict[str, Any]:
        own = {key: value for key, value in vars(module).items() if "expert" in key and type(value) is int}
        return {key: self.number // count for key, value in own.items() if value == self.number}

    def forward(self, module: nn.Module, plain: type[nn.Module], group: TensorGroup, *args: Any, **kwargs: Any) -> Any:
        _, tokens, numbers, weights = inspect.signature(plain.forward).bind(module, *args, **kwargs).args
        held = [*module.parameters()]
        if _has_no_values((tokens, numbers)):
            return _beside(torch.zeros_like(tokens), tokens, weights, *held)
        flat, choices = numbers.reshape(-1), numbers.shape[-1]
        asked: list[int] = torch.bincount(flat, minlength=self.number).tolist()
        if len(asked) > self.number + 1:
            raise ValueError(f"module {self.name!r} got expert {len(asked) - 1}: expected 0 to {self.number}")
        chosen = flat.argsort(stable=True)[: sum(asked[: self.number])]  # n is none of them
        of_token = chosen // choices
        rows = tokens.reshape(-1, tokens.shape[-1])[of_token], weights.reshape(-1, 1)[chosen]

        def run(given: Sequence[Tensor], table: _Table) -> Tensor:
            x, weights = given
            if not len(x):
                return _beside(x, x, weights, *held)
            own = torch.arange(len(table[0]), device=x.device).repeat(len(table))
            each = torch.tensor([count for said in table for count in said], device=x.device)
            found: Tensor = plain.forward(module, x, own.repeat_interleave(each)[:, None], weights)
            return found

        back = self.exchanged(group, asked[: self.number], rows, held, run)
        out = torch.zeros_like(tokens).view(-1, tokens.shape[-1]).index_add(0, of_token, back.to(tokens.dtype))
        return out.view(tokens.shape)


class BatchedExperts(StackedExperts):
    def by_expert(self, x: Tensor) -> Tensor:
        """[n, R, D]. Raises ValueError for other rows than as many for each."""
        if x.dim() not in (2, 3) or x.shape[0] % self.number or (x.dim() == 3 and len(x) != self.number):
            raise ValueError(
                f"module {self.name!r}, of {self.number} experts, is called with {_shown(x)}: expected as many rows "
                f"for each, [{self.number}, rows, width] or [{self.number} * rows, width]"
            )
        return x.view(self.number, x.numel() // (self.number * x.shape[-1]), x.shape[-1])

    def forward(self, module: nn.Module, plain: type[nn.Module], group: TensorGroup, *args: Any, **kwargs: Any) -> Any:
        _, x = inspect.signature(plain.forward).bind(module, *args, **kwargs).args
        held, (_, asked, width) = [*module.parameters()], self.by_expert(x.contiguous()).shape
        if _has_no_values((x,)):
            return _beside(torch.zeros_like(x), x, *held)

        def run(given: Sequence[Tensor], table: _Table) -> Tensor:
            (rows,), counts = given, [said[0] for said in table]  # the same for each expert of a member
            if not len(rows):
                return _beside(rows, rows, *held)
            of = torch.split(rows, [len(said) * said[0] for said in table])
            whole = torch.cat([one.view(len(said), said[0], width) for one, said in zip(of, table, strict=True)], 1)
            passed = whole if x.dim() == 3 else whole.reshape(-1, width)
            found: Tensor = plain.forward(module, passed)
            if found.shape != passed.shape:
                raise ValueError(f"experts of {self.name!r} give {_shown(found)} for {_shown(passed)}: {_EXPECTED}")
            return torch.cat([one.reshape(-1, width) for one in torch.split(found.view_as(whole), counts, 1)])

        return self.exchanged(group, [asked] * self.number, [x.reshape(-1, width)], held, run).view(x.shape)


class ListedExperts(ExpertLayer):
    """`key`: of the list in the module that calls its experts; empty where the list itself does."""

    def __init__(self, name: str, number: int, key: str) -> None:
        super().__init__(name, number)
        self.key = key

    def experts(self, module: nn.Module) -> list[nn.Module]:
        return [expert for _, expert in with_weights(module.get_submodule(self.key))]

    def shards(self, module: nn.Module, *, index: int, count: int) -> dict[str, Shard]:
        held = range(index * self.number // count, (index + 1) * self.number // count)
        found = {}
        for number, (name, expert) in enumerate(with_weights(module.get_submodule(self.key))):
            for key, parameter in expert.named_parameters():
                whole, path = Shard.whole(tuple(parameter.shape)), f"{name}.{key}"
                none = Shard(full=whole.full, local=(0, *whole.full[1:]), boxes=())
                found[f"{self.key}.{path}" if self.key else path] = whole if number in held else none
        return found

    def forward(self, module: nn.Module, plain: type[nn.Module], group: TensorGroup, *args: Any, **kwargs: Any) -> Any:
        experts, given = self.experts(module), [x for x in tensors_in((args, kwargs)) if x.is_floating_point()]
        own = [*_parts(range(self.number), self.number // group.count)[group.index]]
        held = [p for number in own for p in experts[number].parameters()]
        if _has_no_values(given):
            with _called_instead(experts, lambda _, x: _beside(torch.zeros_like(x), x, *held)):
                return plain.forward(module, *args, **kwargs)
        calls = self._calls(module, plain, experts, given, args, kwargs)
        order = sorted(range(len(calls)), key=lambda at: calls[at][0])
        asked = [-1] * self.number
        for number, x in calls:
            asked[number] = max(asked[number], 0) + x.numel() // x.shape[-1]
        rows = [x.reshape(-1, x.shape[-1]) for _, x in (calls[at] for at in order)] or [given[0].new_empty(0, 0)]
        run = partial(self._run, [experts[number] for number in own])
        back = self.exchanged(group, asked, [torch.cat(rows)], held, run)
        parts = dict(zip(order, torch.split(back, [len(x) for x in rows]), strict=False))
        left = iter(enumerate(calls))

        def give(number: int, x: Tensor) -> Tensor:
            at, (its, before) = next(left, (0, (-1, x)))
            if its != number or not (x.shape == before.shape and torch.allclose(x, before, 0, 0, equal_nan=True)):
                raise ValueError(otherwise)
            given: Tensor = parts[at].view(x.shape)
            return given

        otherwise = (
            f"module {self.name!r} calls its experts otherwise when it runs again: expected inputs that do not depend "
            f"on what other experts of the layer give, or on calls before"
        )
        with _called_instead(experts, give):
            found = plain.forward(module, *args, **kwargs)
        if next(left, None) is not None:
            raise ValueError(otherwise)
        if len(back):
            return found
        leaves, spec = pytree.tree_flatten(found)
        first = next(at for at, x in enumerate(leaves) if isinstance(x, Tensor) and x.is_floating_point())
        leaves[first] = _beside(leaves[first], back)  # others' backward waits for that of this member
        return pytree.tree_unflatten(leaves, spec)

    def _calls(
        self,
        module: nn.Module,
        plain: type[nn.Module],
        experts: Sequence[nn.Module],
        given: Sequence[Tensor],
        *call: Any,
    ) -> list[tuple[int, Tensor]]:
        """Number and input of each call of an expert; the module, all that it reaches, and generators are as before."""
        calls: list[tuple[int, Tensor]] = []

        def ask(number: int, x: Tensor) -> Tensor:
            calls.append((number, x))
            return torch.zeros_like(x)

        versions, before = [x._version for x in given], StateSnapshot([module], device=given[0].device)
        try:
            with _called_instead(experts, ask):
                plain.forward(module, *call[0], **call[1])
        finally:
            before.restore()
        if [x._version for x in given] != versions:
            raise ValueError(f"module {self.name!r}, which calls experts, changes its input in place: expected a copy")
        return calls

    def _run(self, experts: Sequence[nn.Module], given: Sequence[Tensor], table: _Table) -> Tensor:
        (rows,) = given
        pieces = torch.split(rows, [max(count, 0) for said in table for count in said])
        found, idle = list(pieces), list[Tensor]()
        for number, expert in enumerate(experts):
            places = range(number, len(pieces), len(experts))
            x = torch.cat([pieces[at] for at in places])
            if len(x):
                y = expert(x)
                if not isinstance(y, Tensor) or y.shape != x.shape:
                    raise ValueError(f"an expert of {self.name!r} gives {_shown(y)} for {_shown(x)}: {_EXPECTED}")
                for at, part in zip(places, torch.split(y, [len(pieces[at]) for at in places]), strict=True):
                    found[at] = part
            elif any(said[number] == 0 for said in table):  # called, with no row: in one process it has gradients of 0
                idle += expert.parameters()
        out = torch.cat([x for x in found if len(x)] or found)  # rows of none have the type from before the experts
        return _beside(out, rows, *idle) if idle or not len(rows) else out


def with_weights(experts: nn.Module) -> list[tuple[str, nn.Module]]:
    return [(name, x) for name, x in experts.named_children() if any(True for _ in x.parameters())]


def _shown(x: object) -> str:
    return f"a tensor of shape {tuple(x.shape)}" if isinstance(x, Tensor) else type(x).__name__


_EXPECTED = "expected a tensor of rows for a tensor of rows, each as wide"


@contextmanager
def _called_instead(experts: Sequence[nn.Module], call: Callable[[int, Tensor], Tensor]) -> Iterator[None]:
    """Context in which calls of experts go to `call`, with their number. A checkpoint inside would run them later, and
    raises ValueError."""

    def instead(number: int, *args: Any, **kwargs: Any) -> Tensor:
        given = (*args, *kwargs.values())
        if len(given) != 1 or not isinstance(given[0], Tensor) or given[0].dim() < 2:
            raise ValueError(f"expert {number} is called with {len(given)} arguments: {_EXPECTED}")
        return call(number, given[0])

    def refuse(*_: Any, **__: Any) -> Any:
        raise ValueError(
            "a module that calls experts has a torch.utils.checkpoint inside: expected it around, or recompute="
        )

    with checkpoints_as(refuse, refuse), ExitStack() as stack:
        for number, expert in enumerate(experts):
            stack.enter_context(patch.object(expert, "forward", partial(instead, number)))
        yield
