"""A list of edits of a model: made by name, shown, taken back, saved, and then applied at once.

edits = edit(model)
edits["blocks.*"].checkpoint()          nothing happens yet
edits["blocks.*.mlp"].shard({"up": "column", "down": "row"})
print(edits); edits.undo(); edits.save("edits.json")
PipelineModule(edits, ...)              or edits.build() for a plain model
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

from ...schedules.wording import count
from ..shards.patterns import match
from .kinds import KINDS, Checkpoint, Compile, Cut, Dtype, KeepLess, Kind, Replace, Shard

_FORMAT = "stagewright-edits-1"


@dataclass(frozen=True, slots=True)
class Edit:
    """One edit: the names that it is for, in which `*` stands for one part between dots, and what is done."""

    pattern: str
    kind: Kind

    def __str__(self) -> str:
        return f"{self.pattern}: {self.kind}"


class Edits:
    """Edits of a model, in order; the model is as it was until `build`, or PipelineModule(edits).

    Attributes:
        model: which is edited.
    """

    def __init__(self, model: nn.Module) -> None:
        self.model = model
        self._edits: list[Edit] = []
        self._is_built = False

    def __getitem__(self, pattern: str) -> At:
        """Modules by name or pattern. Raises ValueError, with near matches, where there is none."""
        self._find(pattern)
        return At(self, pattern)

    def __iter__(self) -> Iterator[Edit]:
        return iter(self._edits)

    def __len__(self) -> int:
        return len(self._edits)

    def __str__(self) -> str:
        rows = [
            (each.pattern or "(the model)", str(each.kind), count(len(self._find(each.pattern)), "module"))
            for each in self
        ]
        first, second = (max((len(row[column]) for row in rows), default=0) for column in (0, 1))
        lines = (f"{name:<{first}}  {kind:<{second}}  {number}" for name, kind, number in rows)
        return "\n".join([f"{type(self.model).__name__}, {count(len(rows), 'edit')}", *lines])

    def undo(self) -> Edit:
        """Take the last edit back. Raises ValueError where there is none, or all are applied."""
        self._refuse_built()
        if not self._edits:
            raise ValueError("undo: expected an edit before")
        return self._edits.pop()

    def add(self, edit: Edit) -> None:
        """Note an edit. Raises ValueError where it cannot be done, and for two that exclude each other."""
        self._refuse_built()
        for name, module in self._find(edit.pattern).items():
            edit.kind.check(name, module, self.model)
            for other in self:
                meets = [n for n, m in self._find(other.pattern).items() if _exclude(edit.kind, module, other.kind, m)]
                if meets:
                    raise ValueError(
                        f"{edit} meets {other} at {meets[0] or 'the model'!r}: expected one of them there "
                        f"(edits.undo() takes the last one back)"
                    )
        self._edits.append(edit)

    def verify(self, example: Any, *, mesh: Any = None, seed: int = 0) -> list[str]:
        """Run copies of the model with ever more of the edits beside the untouched one, and compare.

        Compared are outputs, every gradient, gradients of inputs, and which parameters are one. Takes back edits with a
        gate that make a forward and backward slower.

        Arguments:
            example: a tuple of arguments, or a dict of keywords.
            mesh: of a tensor group, all of whose members call this; without one `shard` is not run.

        Returns what was not run or taken back. Raises EditError for the first edit whose numbers depart.
        """
        from .beside import verify

        self._refuse_built()
        return verify(self, example, mesh=mesh, seed=seed)

    def keep_only(self, edits: Sequence[Edit], *, those_not_run: bool) -> None:
        kept = [*edits]
        self._edits = [e for e in self._edits if e in kept or (those_not_run and isinstance(e.kind, Shard))]

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the list as JSON, for `load` on a model with the same names. ValueError for edits that are code."""
        record = [{"at": each.pattern, "do": each.kind.word, **each.kind.record()} for each in self]
        Path(path).write_text(json.dumps({"format": _FORMAT, "edits": record}, indent=1) + "\n", encoding="utf-8")

    def load(self, path: str | os.PathLike[str]) -> None:
        """Add the edits of a file. Raises ValueError for another file, and for names that this model does not have."""
        try:
            content = json.loads(Path(path).read_text(encoding="utf-8"))
            if content["format"] != _FORMAT:
                raise KeyError(content["format"])
            read = [_read(dict(record)) for record in content["edits"]]
        except (OSError, KeyError, TypeError, json.JSONDecodeError) as error:
            raise ValueError(f"{path} holds no edits ({error!r:.100}): expected what edits.save wrote") from None
        before = list(self._edits)
        try:
            for each in read:
                self.add(each)
        except ValueError as error:
            self._edits = before
            raise ValueError(f"{path}: {error}") from None

    def build(self, mesh: Any = None) -> nn.Module:
        """The model with all edits applied, for one process or, with torch's mesh of a tensor group, `shard` as well.

        Modules are edited in place, and nothing can be edited or taken back behind it.
        """
        shards = [(each.pattern, each.kind) for each in self if isinstance(each.kind, Shard)]
        if shards and mesh is None:
            raise ValueError(
                f"{shards[0][0]}: {shards[0][1]}: expected build(mesh=), of the tensor group, or PipelineModule(edits)"
            )
        self.apply(besides=(Shard, Cut))
        for pattern, kind in shards:
            _parallelize(self._find(pattern), kind, mesh)
        return self.model

    def options(self) -> dict[str, Any]:
        """Edits that PipelineModule makes itself, as its options."""
        found: dict[str, Any] = {}
        for each in self:
            for name in self._find(each.pattern):
                for key, value in (each.kind.options(name) or {}).items():
                    found[key] = [*found.get(key, []), *value] if key == "split_points" else found.get(key, {}) | value
        return found

    def apply(self, besides: tuple[type[Kind], ...] = (Checkpoint, Shard, Cut)) -> None:
        """Change the model, by all edits but those that are made otherwise."""
        self._refuse_built()
        self._is_built = True
        for each in self:
            if not isinstance(each.kind, besides):
                for name, module in self._find(each.pattern).items():
                    each.kind.apply(name, module, self.model)

    def _find(self, pattern: str) -> Mapping[str, nn.Module]:
        return {"": self.model} if pattern == "" else match(pattern, self.model, option=f"edits[{pattern!r}]")

    def _refuse_built(self) -> None:
        if self._is_built:
            raise ValueError("these edits are applied: expected edit(model) of a model that is not built yet")


def _exclude(kind: Kind, module: nn.Module, other: Kind, others: nn.Module) -> bool:
    """Whether two edits cannot both be: the same one twice, or such as exclude each other, one inside the other."""
    if kind.word == other.word:
        return module is others and getattr(kind, "what", None) == getattr(other, "what", None)
    meet = module in set(others.modules()) or others in set(module.modules())
    return meet and (other.word in kind.excludes or kind.word in other.excludes)


class At:
    """Modules of one pattern: each method notes an edit of them, and returns this."""

    def __init__(self, edits: Edits, pattern: str) -> None:
        self._edits = edits
        self._pattern = pattern

    def _add(self, kind: Kind) -> At:
        self._edits.add(Edit(self._pattern, kind))
        return self

    def checkpoint(self, keep: Sequence[str] = ()) -> At:
        """Compute again in the backward, but for results of these operators, such as "aten.mm.default"."""
        return self._add(Checkpoint(tuple(keep)))

    def replace(self, make: Callable[[nn.Module], nn.Module]) -> At:
        """Put make(module) in its place; hooks go over, and parameters and buffers of the same names."""
        return self._add(Replace(make))

    def shard(self, plan: Mapping[str, Any]) -> At:
        """Divide modules in it among a tensor group, by their names below it, as in {"up": "column", "down": "row"}."""
        return self._add(Shard(plan))

    def compile(self, backend: str = "inductor", *, gate: bool = True) -> At:
        """Compile it by torch.compile; with a gate `verify` takes it back where it is slower."""
        return self._add(Compile(backend, gate))

    def cut(self) -> At:
        """Begin a stage of the pipeline there."""
        return self._add(Cut())

    def dtype(self, dtype: torch.dtype | str) -> At:
        """Compute in another type, weights included; inputs are cast, and outputs cast back."""
        return self._add(Dtype(str(dtype).removeprefix("torch.")))

    def keep_less(self, what: str) -> At:
        """Keep less for the backward: "gelu", "layernorm" or "attention" in it."""
        return self._add(KeepLess(what))


def edit(model: nn.Module) -> Edits:
    """An empty list of edits of a model. Raises ValueError for what is no module."""
    if not isinstance(model, nn.Module):
        raise ValueError(f"edit({model!r:.60}): expected a torch.nn.Module")
    return Edits(model)


def _read(record: dict[str, Any]) -> Edit:
    pattern, word = record.pop("at"), record.pop("do")
    if "keep" in record:
        record["keep"] = tuple(record["keep"])
    return Edit(pattern, KINDS[word](**record))


def _parallelize(modules: Mapping[str, nn.Module], kind: Shard, mesh: Any) -> None:
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

    words = {"column": ColwiseParallel, "row": RowwiseParallel}
    for module in modules.values():
        parallelize_module(
            module, mesh, {name: words[how]() if isinstance(how, str) else how for name, how in kind.plan.items()}
        )
