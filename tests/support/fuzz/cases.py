"""A case: a model, how it is laid out as a pipeline, and the calls that are made. Its repr is Python that makes it."""

from dataclasses import dataclass, field, fields
from typing import Any

import torch

Call = tuple[Any, ...]  # ("train", samples, length), ("change", kind, block, value), ...


def _shown(record: Any) -> str:
    """As dataclasses do, without what is as by default."""
    given = [
        (one.name, getattr(record, one.name)) for one in fields(record) if getattr(record, one.name) != one.default
    ]
    return f"{type(record).__name__}({', '.join(f'{name}={value!r}' for name, value in given)})"


@dataclass(frozen=True, slots=True, kw_only=True, repr=False)
class Model:
    """What a case trains.

    style: how blocks are put together (models.STYLES); blocks: names in blocks.BLOCKS; inputs, head, loss: see models;
    reads: what the code between blocks reads (reads.READS).
    """

    style: str = "sequential"
    blocks: tuple[str, ...] = ("linear", "linear")
    inputs: str = "floats"
    head: str = "none"
    loss: str = "mse"
    reads: str = "nothing"

    __repr__ = _shown


@dataclass(frozen=True, slots=True, kw_only=True, repr=False)
class Case:
    """P, V, M: as everywhere; builder: options of the schedule; options: of PipelineModule, as literals.

    data, tensor: sizes of the mesh beside P. is_lazy: the first batch builds the stages. refill: batches of one size
    stand in the same memory. is_deferred: the pipeline's model is built without memory.
    """

    model: Model = field(default_factory=Model)
    schedule: str = "1f1b"
    P: int = 2
    V: int | None = None
    M: int = 2
    builder: tuple[tuple[str, Any], ...] = ()
    data: int = 1
    tensor: int = 1
    gloo: bool = False
    optimizer: str = "sgd"
    options: tuple[tuple[str, Any], ...] = ()
    is_lazy: bool = False
    refill: bool = False
    is_deferred: bool = False
    calls: tuple[Call, ...] = (("train", 4, 3), ("train", 4, 3))
    seed: int = 0

    __repr__ = _shown

    @property
    def is_async(self) -> bool:
        return self.schedule in ("2bw", "pipedream", "paci")

    @property
    def num_processes(self) -> int:
        return self.P * self.data * self.tensor

    def option(self, name: str, default: Any = None) -> Any:
        return dict((*self.builder, *self.options)).get(name, default)

    @property
    def dtype(self) -> torch.dtype:
        return torch.float32 if self.option("autocast") else torch.float64

    @property
    def num_stages(self) -> int:
        replicas = self.option("replicas")
        return len(replicas) if replicas else self.P * (self.V or 1)

    @property
    def group_size(self) -> int:
        """Microbatches from update to update."""
        if self.schedule not in ("pipedream", "paci"):
            return self.M
        return self.option("update_every", 1 if self.schedule == "pipedream" else self.M)

    @property
    def parts_outputs(self) -> bool:
        """Whether each process of the last stage has the outputs of its own microbatches alone."""
        return self.gloo and (self.data > 1 or self.schedule in ("chimera", "dualpipe"))

    @property
    def tolerance(self) -> float:
        """Relative to a tensor's largest element, or 1."""
        if self.option("autocast"):
            return 3e-2
        if self.optimizer.startswith("adam"):  # steps of rounding where gradients are zero, as in front of BatchNorm
            return 1e-6 if "batchnorm" in self.model.blocks else 1e-8
        return 1e-11


@dataclass(kw_only=True, slots=True)
class Outcome:
    """What one process saw, by name; error: that ended it, where there was one, and at which call; stages: of each
    parameter, which over processes may be others than in one (sets of strings have an order of their own in each)."""

    seen: dict[str, Any] = field(default_factory=dict)
    stages: dict[str, int] = field(default_factory=dict)
    error: str = ""
    is_clear: bool = False  # a ValueError of the library's own
    at: int = -1
