"""The edges of the stage graph: which outputs of a stage go to which other stage."""

from __future__ import annotations

from collections.abc import Collection, Sequence

from ...comm import TensorSpec
from ...partition.graph.units import MODEL_INPUT, StageModule
from ...schedules import Edge, Message, MessageKind
from .presence import flag_spec

OutputSpecs = Sequence[Sequence[TensorSpec]]  # of the outputs of each stage


class Wiring:
    """The slots of each edge. `acts[src, dst]`: the output slots of `src` that `dst` takes, ascending;
    `grads[src, dst]`: those of them for which a gradient may come back; `positions[src, dst]`: of these among the
    inputs of `dst`.

    Arguments:
        alike: (stage, slot) of outputs that all members of a tensor group hold alike.
    """

    def __init__(
        self, stages: Sequence[StageModule], specs: OutputSpecs, *, alike: Collection[tuple[int, int]] = ()
    ) -> None:
        self._alike = frozenset(alike)
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
        places = [{(ref.producer, ref.slot): i for i, ref in enumerate(module.inputs)} for module in stages]
        self.positions = {
            (src, dst): tuple(places[dst][src, slot] for slot in slots) for (src, dst), slots in self.grads.items()
        }
        self.consumers = [sorted(d for s, d in self.acts if s == stage) for stage in range(len(stages))]
        self.producers = [sorted(s for s, d in self.acts if d == stage) for stage in range(len(stages))]

    def edges(self) -> tuple[Edge, ...]:
        """The stage graph for the schedule."""
        return tuple(Edge(src, dst, bool(self.grads[src, dst])) for src, dst in sorted(self.acts))

    def message_specs(
        self, message: Message, specs: OutputSpecs, certain: Sequence[Sequence[bool]]
    ) -> list[TensorSpec]:
        """Layouts of the tensors of an activation or gradient message.

        Arguments:
            certain: by stage and input, whether its gradient always comes.
        """
        if message.kind is MessageKind.ACT:
            return [self._spec(message.src, slot, specs) for slot in self.acts[message.src, message.dst]]
        return [*flag_spec(self.certain(message, certain)), *self.gradient_specs(message, specs)]

    def gradient_specs(self, message: Message, specs: OutputSpecs) -> list[TensorSpec]:
        """Layouts of the gradients of a message, without what stands in front of them."""
        return [self._spec(message.dst, slot, specs) for slot in self.grads[message.dst, message.src]]

    def _spec(self, stage: int, slot: int, specs: OutputSpecs) -> TensorSpec:
        spec = specs[stage][slot]
        return spec._replace(in_parts=True) if (stage, slot) in self._alike else spec

    def certain(self, message: Message, certain: Sequence[Sequence[bool]]) -> tuple[bool, ...]:
        """By gradient of a message, whether it always comes."""
        own = certain[message.src]
        return tuple(own[position] for position in self.positions[message.dst, message.src])
