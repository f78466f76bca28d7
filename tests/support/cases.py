"""Cases (`Case`), how they are laid out (`Layout`), what comes out (`Outcome`), when two outcomes agree.

The reference and the pipeline follow one protocol:

    call 0       forward_backward    first_grads, first_state (running statistics after M microbatches)
    call 1..n    train_step          parameters
                 eval_step           eval_loss, eval_output
    call n+1     forward_backward    last_grads, state

Gradients are cleared before and after each forward_backward. `losses` has one entry a training call.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor

from .alone import near
from .models import TASKS

GRADIENT_TOLERANCE = 1e-12
# Adam divides by the root of the squared gradients: where they are near 0 it amplifies rounding.
ADAM_TOLERANCE = 1e-10


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """A training run, whatever it runs on.

    sizes: samples of each training call's batch; None: four calls of the task's batch size. A traced model's is made a
        multiple of num_microbatches: it is recorded anew for each size of a microbatch, most of a run's time.
    frozen: prefixes of the parameters with requires_grad False.
    num_stages: only for tasks of kind "stages".
    """

    task: str
    num_microbatches: int
    sizes: tuple[int, ...] | None = None
    optimizer: str = "adamw"
    max_grad_norm: float | None = None
    decay: bool = False  # halve the learning rate after each train_step
    frozen: tuple[str, ...] = ()
    num_stages: int | None = None
    seed: int = 2024

    @property
    def batch_sizes(self) -> tuple[int, ...]:
        task, count = TASKS[self.task], self.num_microbatches
        if self.sizes is None and task.kind == "traced":
            return (task.batch_size // count * count,) * 4
        return self.sizes or (task.batch_size,) * 4

    @property
    def is_exact(self) -> bool:
        """Whether the pipeline adds everything up in the reference's order: then the difference is 0."""
        masked = self.task == "gpt-masked"  # divided by the count before or after the backward
        return TASKS[self.task].kind != "traced" and not masked and self.max_grad_norm is None


@dataclass(frozen=True, slots=True, kw_only=True)
class Layout:
    """How a pipeline runs a case. recompute: a word, or one a stage."""

    schedule: str = "1f1b"
    num_ranks: int = 1
    num_chunks: int | None = None
    recompute: str | tuple[str, ...] = "none"
    cut: tuple[str, ...] | None = None

    @property
    def num_stages(self) -> int:
        return self.num_ranks * (self.num_chunks or 1)

    def __str__(self) -> str:
        chunks = "" if self.num_chunks is None else f"-V{self.num_chunks}"
        recompute = "-recompute" if self.recompute != "none" else ""
        return f"{self.schedule}-P{self.num_ranks}{chunks}{recompute}"


@dataclass(kw_only=True)
class Outcome:
    """Results in one process. Its gradients are those of its own stages, its states the whole model's."""

    losses: list[float] = field(default_factory=list)
    grad_norms: list[float | None] = field(default_factory=list)
    first_grads: dict[str, Tensor] = field(default_factory=dict)
    first_state: dict[str, Tensor] = field(default_factory=dict)
    last_grads: dict[str, Tensor] = field(default_factory=dict)
    state: dict[str, Tensor] = field(default_factory=dict)
    eval_loss: float = float("nan")
    eval_output: Any = None  # None on ranks without the last stage
    complaints: list[str] = field(default_factory=list)  # broken promises that need no reference


def agree(outcomes: Outcome | Sequence[Outcome], expected: Outcome, case: Case) -> None:
    """Asserts that the outcomes of all processes of one run together equal the reference's."""
    outcomes = [outcomes] if isinstance(outcomes, Outcome) else outcomes
    tied = TASKS[case.task].tied
    tolerance = 0.0 if case.is_exact else GRADIENT_TOLERANCE
    late = 0.0 if case.is_exact else ADAM_TOLERANCE if case.optimizer == "adamw" else GRADIENT_TOLERANCE
    for rank, outcome in enumerate(outcomes):
        assert not outcome.complaints, f"rank {rank}: {outcome.complaints}"
        assert outcome.losses == outcomes[0].losses, "the loss differs from rank to rank"
        same("loss of call 0", listed(outcome.losses[:1]), listed(expected.losses[:1]), tolerance)
        same("losses", listed(outcome.losses), listed(expected.losses), late)
        same("grad_norm", listed(outcome.grad_norms), listed(expected.grad_norms), late)
        # Before the first update nothing but the forward has run: running statistics have no excuse.
        same("state after call 0", outcome.first_state, expected.first_state, 0.0)
        same("state", outcome.state, expected.state, late)
        same("eval loss", {0: outcome.eval_loss}, {0: expected.eval_loss}, max(late, GRADIENT_TOLERANCE))
    outputs = [outcome.eval_output for outcome in outcomes if outcome.eval_output is not None]
    assert len(outputs) == 1, f"{len(outputs)} ranks have the output of eval_step"
    same("eval output", _named(outputs[0]), _named(expected.eval_output), max(late, GRADIENT_TOLERANCE))
    for name, limit in (("first_grads", tolerance), ("last_grads", late)):
        wanted = _first_names(getattr(expected, name), tied)
        found: dict[str, Tensor] = {}
        for outcome in outcomes:
            mine = _first_names(getattr(outcome, name), tied)
            same(name, mine, {key: wanted[key] for key in mine if key in wanted}, limit)
            found |= mine
        one_sided = sorted(found.keys() ^ wanted.keys())
        assert not one_sided, f"{name}: on one side only: {one_sided}"


def same(what: str, actual: Mapping[Any, Any], expected: Mapping[Any, Any], tolerance: float) -> None:
    """Asserts that two mappings to tensors or numbers have the same keys, and values within `tolerance`."""
    one_sided = sorted(actual.keys() ^ expected.keys())
    assert not one_sided, f"{what}: on one side only: {one_sided}"
    near(actual, expected, atol=tolerance, where=f"{what} ")


def listed(values: Sequence[Any]) -> dict[int, Any]:
    return dict(enumerate(values))


def _named(output: Any) -> dict[str, Tensor]:
    parts = output if isinstance(output, tuple | list) else (output,)
    return {str(k): part for k, part in enumerate(parts)}


def _first_names(tensors: dict[str, Tensor], tied: dict[str, str]) -> dict[str, Tensor]:
    return {tied.get(name, name): tensor for name, tensor in tensors.items()}
