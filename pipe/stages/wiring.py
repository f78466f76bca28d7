"""The edges of the stage graph: which outputs of a stage go to which other stage."""

from __future__ import annotations

from collections.abc import Sequence

from ...comm import TensorSpec
from ...partition.graph.units import MODEL_INPUT, StageModule
from ...schedules import Edge, Message, MessageKind

OutputSpecs = Sequence[Sequence[TensorSpec]]  # of the outputs of each stage


class Wiring:
    """The slots of each edge. `acts[src, dst]`: the output slots of `src` that `dst` takes, ascending;
    `grads[src, dst]`: those of them for which a gradient comes back."""

    def __init__(self, stages: Sequence[StageModule], specs: OutputSpecs) -> None:
        self.acts: dict[tuple[int, int], tuple[int, ...]] = {}
        for dst, module in enumerate(stages):
            slots: dict[int, set[int]] = {}
            for ref in module.inputs:
                if ref.producer != MODEL_INPUT:
                    slots.setdefault(ref.producer, set()).add(ref.slot)
            for src, used in slots.items():
                self.acts[src, dst] = tuple(sorted(used))
        self.grads = {
            (src, dst): tuple(slot for slot in slots if specs[src][slot].requires_grad)
            for (src, dst), slots in self.acts.items()
        }
        self.consumers = [sorted(d for s, d in self.acts if s == stage) for stage in range(len(stages))]
        self.producers = [sorted(s for s, d in self.acts if d == stage) for stage in range(len(stages))]

    def edges(self) -> tuple[Edge, ...]:
        """The stage graph for the schedule."""
        return tuple(Edge(src, dst, bool(self.grads[src, dst])) for src, dst in sorted(self.acts))

    def message_specs(self, message: Message, specs: OutputSpecs) -> list[TensorSpec]:
        """Shapes of the tensors of an activation or gradient message."""
        if message.kind is MessageKind.ACT:
            return [specs[message.src][slot] for slot in self.acts[message.src, message.dst]]
        return [specs[message.dst][slot] for slot in self.grads[message.dst, message.src]]
