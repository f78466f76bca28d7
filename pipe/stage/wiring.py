"""The stages in one mode: the edges of their graph, and the messages over its wires."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence

from ...comm import TensorSpec
from ...comm.codecs import num_bytes
from ...partition.model.units import MODEL_INPUT, StageModule, ValueRef
from ...schedules import Edge, Message, MessageKind, Schedule, check
from ...schedules.dependencies import Dependencies, Wire
from ...schedules.messages import receives_ahead
from ..guards.presence import OutputSpecs, flag_spec
from .shapes import MOST_SIGNATURES, Inferred, InferredStages, Signature


def _edges(stages: Sequence[StageModule], specs: OutputSpecs) -> tuple[Edge, ...]:
    """The stage graph for the schedule, with a gradient for edges of which any tensor requires one."""
    grad: dict[tuple[int, int], bool] = {}
    for dst, module in enumerate(stages):
        for ref in module.inputs:
            if ref.producer != MODEL_INPUT:
                edge = ref.producer, dst
                grad[edge] = grad.get(edge, False) or specs[ref.producer][ref.slot].requires_grad
    return tuple(Edge(*edge, grad[edge]) for edge in sorted(grad))


class Mode:
    """The pipeline in one mode, training or evaluation (forwards alone), and the tensors of each wire in it.
    `undivided`: outputs before a tensor group divided the model: those of unchanged size are equal on all members.

    Raises ValueError for a stage that makes a gradient where the schedule runs no backward of it.
    """

    def __init__(
        self,
        schedule: Schedule,
        inference: InferredStages,
        microbatch: Signature,
        *,
        undivided: OutputSpecs | None = None,
    ) -> None:
        specs, stages = inference.outputs(microbatch), inference.stages
        for stage in schedule.without_backward:
            slot = next((slot for slot, spec in enumerate(specs[stage]) if spec.requires_grad), None)
            if slot is not None:
                raise ValueError(
                    f"output {slot} of stage {stage} ({stages[stage].name}) requires a gradient, and schedule "
                    f"{schedule.name!r} runs no backward of it (without_backward={schedule.without_backward}): "
                    f"expected torch.no_grad() around it in the model, or a schedule with its backwards"
                )
        self.inference = inference
        self.schedule = schedule.with_edges(_edges(stages, specs))  # with the model's own stage graph
        check(self.schedule)
        self.wires = tuple(Dependencies(self.schedule).wires)

        def wants(ref: ValueRef) -> bool:
            return ref.producer != MODEL_INPUT and specs[ref.producer][ref.slot].requires_grad

        self.wants_grad = [tuple(map(wants, module.inputs)) for module in stages]  # [S] by input
        # By wire, the outputs of its producer that any of its consumers takes, ascending; for gradients, the outputs
        # that may get one.
        self.slots: dict[Wire, tuple[int, ...]] = {}
        self._alike: set[tuple[int, int]] = set()
        for stage, both in enumerate(zip(specs, undivided, strict=True) if undivided is not None else ()):
            pairs = enumerate(zip(*both, strict=False))
            self._alike |= {(stage, slot) for slot, (one, other) in pairs if one.shape == other.shape}
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
        sizes = [num_bytes(self.message_specs(wire.message(0), inference.of(microbatch))) for wire in self.wires]
        # Receives posted ahead per link, by the largest message, the same on all ranks.
        self.receives_ahead = receives_ahead(max(sizes, default=0), schedule)

    def unsent(self, specs: OutputSpecs) -> tuple[int, int] | None:
        """The first (stage, slot) whose output requires a gradient, by these specs, and gets none over its wire."""
        for module, wanted in zip(self.inference.stages, self.wants_grad, strict=True):
            for ref, is_sent in zip(module.inputs, wanted, strict=True):
                if ref.producer != MODEL_INPUT and not is_sent and specs[ref.producer][ref.slot].requires_grad:
                    return ref.producer, ref.slot
        return None

    def forwards(self, num_microbatches: int) -> Mode:
        found = copy.copy(self)
        found.schedule = self.schedule.forward_only(num_microbatches=num_microbatches)
        return found

    def inputs(self, wire: Wire, stage: int) -> tuple[tuple[int, int], ...]:
        """(position among the tensors of a wire, input) of those that a consumer takes, or makes a gradient of."""
        takers = self._inputs[wire]
        return tuple((position, i) for position, each in enumerate(takers) for own, i in each if own == stage)

    def message_specs(self, message: Message, inferred: Inferred) -> list[TensorSpec]:
        """Layouts of the tensors of an activation or gradient message, cached by the specs of its microbatch."""
        specs, certain = inferred.specs, inferred.certain
        known = self._layouts.get(id(specs))
        if known is None or known[0] is not specs:
            if len(self._layouts) > MOST_SIGNATURES:
                self._layouts.clear()
            known = self._layouts[id(specs)] = (specs, {})
        layout = known[1].get(message[:3])
        if layout is None:
            wire = self._wire_of[message[:3]]
            layout = []
            if wire.kind is MessageKind.GRAD:  # whether each is certain: from any of the consumers
                layout = flag_spec([any(certain[stage][i] for stage, i in each) for each in self._inputs[wire]])
            for slot in self.slots[wire]:
                spec, is_alike = specs[wire.producer][slot], (wire.producer, slot) in self._alike
                layout.append(spec._replace(in_parts=True) if is_alike else spec)
            known[1][message[:3]] = layout
        return layout


Layouts = Callable[[Message, Sequence[TensorSpec]], Sequence[TensorSpec]]


def message_bytes(mode: Mode, inferred: Inferred, layouts: Layouts) -> tuple[list[float], list[float]]:
    """Bytes of a microbatch's activations and gradients over each edge of the schedule, as `Links` takes them.
    `layouts`: of a message as it is sent."""
    sizes: dict[tuple[MessageKind, int, int], float] = {}
    for wire in mode.wires:
        message, specs = wire.message(0), mode.message_specs(wire.message(0), inferred)
        size = float(num_bytes(layouts(message, specs)))
        sizes |= {(wire.kind, wire.producer, consumer): size for consumer in wire.consumers}
    acts, grads = (
        [sizes.get((kind, src, dst), 0.0) for src, dst, _ in mode.schedule.stage_edges]
        for kind in (MessageKind.ACT, MessageKind.GRAD)
    )
    return acts, grads
