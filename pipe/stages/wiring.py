"""The edges of the stage graph, and what travels over its wires: which outputs of a stage go to which others."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence

from ...comm import TensorSpec
from ...partition.graph.units import MODEL_INPUT, StageModule
from ...schedules import Edge, Message, MessageKind
from ...schedules.needs import Wire
from .presence import flag_spec

OutputSpecs = Sequence[Sequence[TensorSpec]]  # of the outputs of each stage


def stage_edges(stages: Sequence[StageModule], specs: OutputSpecs) -> tuple[Edge, ...]:
    """The stage graph for the schedule: a gradient comes back where any of the tensors wants one."""
    grad: dict[tuple[int, int], bool] = {}
    for dst, module in enumerate(stages):
        for ref in module.inputs:
            if ref.producer != MODEL_INPUT:
                edge = ref.producer, dst
                grad[edge] = grad.get(edge, False) or specs[ref.producer][ref.slot].requires_grad
    return tuple(Edge(*edge, grad[edge]) for edge in sorted(grad))


def same_outputs(before: OutputSpecs | None, own: OutputSpecs) -> frozenset[tuple[int, int]]:
    """(stage, slot) of outputs that are as large as before the model was divided: all members hold them alike."""
    return frozenset(
        (stage, slot)
        for stage, specs in enumerate(zip(own, before, strict=True) if before is not None else ())
        for slot, (one, other) in enumerate(zip(*specs, strict=False))
        if one.shape == other.shape
    )


class StageWiring:
    """The tensors of each wire of a schedule with these stages' edges.

    Attributes:
        slots: by wire, the outputs of its producer that any of its consumers takes, ascending; of gradients, those for
            which one may come back.
        wants_grad: [S] by input.
    """

    def __init__(
        self,
        stages: Sequence[StageModule],
        specs: OutputSpecs,
        wires: Iterable[Wire],
        *,
        alike: Collection[tuple[int, int]] = (),
    ) -> None:
        self._alike = frozenset(alike)
        self.wires = tuple(wires)
        self.wants_grad = [
            tuple(r.producer != MODEL_INPUT and specs[r.producer][r.slot].requires_grad for r in module.inputs)
            for module in stages
        ]
        self.slots: dict[Wire, tuple[int, ...]] = {}
        self._layouts: dict[int, tuple[OutputSpecs, dict[tuple[MessageKind, int, int], list[TensorSpec]]]] = {}
        self._wire_of = {(wire.kind, wire.src, wire.dst): wire for wire in self.wires}
        self._inputs: dict[Wire, list[list[tuple[int, int]]]] = {}  # by slot: (consumer, input)
        for wire in self.wires:
            takers: dict[int, list[tuple[int, int]]] = {}
            for stage in wire.consumers:
                for i, ref in enumerate(stages[stage].inputs):
                    is_there = wire.kind is MessageKind.ACT or self.wants_grad[stage][i]
                    if ref.producer == wire.producer and is_there:
                        takers.setdefault(ref.slot, []).append((stage, i))
            self.slots[wire] = tuple(sorted(takers))
            self._inputs[wire] = [takers[slot] for slot in self.slots[wire]]

    def inputs(self, wire: Wire, stage: int) -> tuple[tuple[int, int], ...]:
        """(position among the tensors of a wire, input) of those that a consumer takes, or gives a gradient of."""
        takers = self._inputs[wire]
        return tuple((position, i) for position, each in enumerate(takers) for own, i in each if own == stage)

    def message_specs(
        self, message: Message, specs: OutputSpecs, certain: Sequence[Sequence[bool]]
    ) -> list[TensorSpec]:
        """Layouts of the tensors of an activation or gradient message, remembered by the specs of its microbatch."""
        known = self._layouts.get(id(specs))
        if known is None or known[0] is not specs:
            known = self._layouts[id(specs)] = (specs, {})
        layout = known[1].get(message[:3])
        if layout is None:
            wire = self._wire_of[message[:3]]
            layout = []
            if wire.kind is MessageKind.GRAD:  # whether each always comes: from any of the consumers
                layout = flag_spec([any(certain[stage][i] for stage, i in each) for each in self._inputs[wire]])
            for slot in self.slots[wire]:
                spec, is_alike = specs[wire.producer][slot], (wire.producer, slot) in self._alike
                layout.append(spec._replace(in_parts=True) if is_alike else spec)
            known[1][message[:3]] = layout
        return layout
