"""A plan as tables for people: stages, memory, and what the runners-up lose."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import fields
from typing import TYPE_CHECKING

from .memory_use import MemoryUse

if TYPE_CHECKING:
    from .plans import Plan, PlanStage, RunnerUp


def explain(plan: Plan) -> str:
    """A table of the stages, memory by rank, then the runners-up with what each loses, then the notes."""
    lines = [
        f"{describe(plan)}: {_ms(plan.predicted_step_time)} a microbatch at the slowest stage, at most {plan.gap:.2%} "
        f"above the best possible"
    ]
    if plan.simulated_step_time is not None:
        lines.append(
            f"simulated, {plan.schedule}, {plan.num_microbatches} microbatches: {_ms(plan.simulated_step_time)} a "
            f"batch, bubble {plan.bubble:.1%}"
        )
    lines.append("stage  nodes  ranks       F ms       B ms    step ms  in flight  memory GB  recompute")
    lines += [_stage(number, stage) for number, stage in enumerate(plan.stages)]
    lines += _memory(plan)
    lines += [f"runner-up {_label(each)}: {_loss(plan, each)}" for each in plan.runners_up]
    return "\n".join([*lines, *(f"note: {note}" for note in plan.notes)])


def describe(plan: Plan) -> str:
    """The shape of a plan in half a line.

    >>> from stagewright.partition import Cluster, Node, Profile, partition
    >>> nodes = [Node(name=n, forward_seconds=1, backward_seconds=2) for n in "abc"]
    >>> describe(partition(Profile(nodes=nodes), Cluster.from_levels([(3, 1e9)]), straight=True))
    '1-1-1 on 3 devices, default model'
    """
    width = len(plan.stages) // plan.num_chunks
    counts = plan.replicas[:width]
    config = "-".join(map(str, counts)) if len(counts) <= 16 else f"{len(counts)} stages"
    tensor = max(stage.tensor for stage in plan.stages)
    parts = [f"{config} on {plan.num_devices} devices"]
    if plan.num_chunks > 1:
        parts.append(f"{plan.num_chunks} chunks a rank")
    if tensor > 1:
        parts.append(f"tensors over {tensor}")
    if plan.microbatch_size is not None:
        parts.append(f"microbatches of {plan.microbatch_size}")
    return ", ".join([*parts, f"{plan.cost_model} model"])


def _stage(number: int, stage: PlanStage) -> str:
    memory = "-" if stage.memory is None else f"{stage.memory.total / 1e9:.3f}"
    flight = "-" if stage.in_flight is None else str(stage.in_flight)
    figures = (stage.forward_seconds, stage.backward_seconds, stage.step_seconds)
    seconds = " ".join(f"{each * 1e3:10.3f}" for each in figures)
    return (
        f"{number:5}  {len(stage.nodes):5}  {_span(stage.ranks):9} {seconds}  {flight:>9}  {memory:>9}"
        f"  {stage.recompute:9}  {stage.nodes[0]} .. {stage.nodes[-1]}"
    )


def _memory(plan: Plan) -> list[str]:
    """By data structure; equal ranks once."""
    rows: dict[MemoryUse, list[int]] = {}
    for rank, memory in sorted(plan.memory.items()):
        rows.setdefault(memory, []).append(rank)
    if not rows:
        return []
    names = [each.name for each in fields(MemoryUse)]
    lines = [f"memory, MB   {'ranks':<9}" + "".join(f"{name:>14}" for name in (*names, "total"))]
    for memory, ranks in rows.items():
        figures = [*(getattr(memory, name) for name in names), memory.total]
        lines.append(f"             {_span(ranks):<9}" + "".join(f"{each / 1e6:14.3f}" for each in figures))
    return lines


def _label(other: RunnerUp) -> str:
    return other.label or "-".join(map(str, other.replicas))


def _loss(plan: Plan, other: RunnerUp) -> str:
    predicted = f"{_ms(other.predicted_step_time)} a microbatch"
    memory = "" if other.memory_bytes is None else f"; {other.memory_bytes / 1e9:.3f} GB"
    if other.simulated_step_time is None or plan.simulated_step_time is None:
        return f"{predicted}, {other.predicted_step_time / plan.predicted_step_time - 1:+.2%}{memory}"
    return (
        f"{predicted}; simulated {_ms(other.simulated_step_time)} a batch, "
        f"{other.simulated_step_time / plan.simulated_step_time - 1:+.2%}{memory}"
    )


def _span(ranks: Sequence[int]) -> str:
    whole = list(ranks) == list(range(ranks[0], ranks[-1] + 1))
    if len(ranks) == 1:
        return str(ranks[0])
    return f"{ranks[0]}-{ranks[-1]}" if whole else f"{len(ranks)} ranks"


def _ms(seconds: float) -> str:
    return f"{seconds * 1e3:.3f} ms"
