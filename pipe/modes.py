"""The pipeline in its modes: training, and evaluation for each form of the model's arguments.

A model that returns its own loss is trained with labels and predicts without: the same stages, run in another way.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Protocol

import torch

from ..comm.process_group import Link
from ..partition.graph.forms import Arguments, Form
from ..schedules import Schedule, check
from ..schedules.messages import Sharing, Transfer
from ..schedules.needs import Needs
from ..schedules.program import RankProgram
from .batch.given import check_like_example
from .batch.reader import BatchReader
from .evaluation import Forwards
from .parallel.sharding import Sharding
from .run.engine import Engine
from .stages.build import CutModel
from .stages.shapes import InferredStages, Signature
from .stages.stage import Stage
from .stages.wiring import Wiring, stage_edges
from .update.flush import batch_programs
from .update.rank_update import RankUpdate
from .update.shards import Shards

StagesOf = dict[int, dict[int, Stage]]  # by local rank and number


@dataclass(frozen=True, slots=True, kw_only=True)
class Mode:
    """The pipeline in one mode: training, or evaluation (forwards alone).

    schedule: with the model's own stage graph.
    """

    inference: InferredStages
    wiring: Wiring
    schedule: Schedule


def wire(
    schedule: Schedule, inference: InferredStages, microbatch: Signature, *, alike: Collection[tuple[int, int]] = ()
) -> Mode:
    """A schedule with the edges of the stages, checked.

    Arguments:
        alike: see Wiring.

    Raises ValueError for a stage that makes a gradient where the schedule runs no backward of it.
    """
    specs = inference.outputs(microbatch)
    for stage in schedule.without_backward:
        slot = next((slot for slot, spec in enumerate(specs[stage]) if spec.requires_grad), None)
        if slot is not None:
            raise ValueError(
                f"output {slot} of stage {stage} ({inference.stages[stage].name}) wants a gradient, and schedule "
                f"{schedule.name!r} runs no backward of it (without_backward={schedule.without_backward}): expected "
                f"torch.no_grad() around it in the model, or a schedule with its backwards"
            )
    wired = schedule.with_edges(stage_edges(inference.stages, specs))
    check(wired)
    wiring = Wiring(inference.stages, specs, Needs(wired).wires, alike=alike)
    return Mode(inference=inference, wiring=wiring, schedule=wired)


def links_of(programs: Sequence[RankProgram]) -> frozenset[Link]:
    """The directed links, (sender, receiver), that any of the programs uses."""
    return frozenset(
        (program.rank, step.peer) if step.is_send else (step.peer, program.rank)
        for program in programs
        for step in program.steps
        if isinstance(step, Transfer)
    )


class _MakeReader(Protocol):
    def __call__(self, mode: Mode, *, has_loss: bool, like: Arguments) -> BatchReader: ...


class EvaluationModes:
    """Makes what runs a batch forwards: (M, whether there is a loss, a microbatch) -> Forwards.

    Arguments:
        built: the mode for arguments of the form that the stages were built for, which `like` has.
        stages: of this process.
        links: that processes are connected by; None: in one process.
        sharding: whether weights are gathered.
        shards: of these weights.
    """

    def __init__(
        self,
        built: Mode,
        *,
        like: Arguments,
        parts: CutModel,
        stages: StagesOf,
        links: frozenset[Link] | None,
        sharding: Sharding,
        shards: Shards,
        device: torch.device,
        make_engine: Callable[[Mode, Mapping[int, RankUpdate], StagesOf], Engine],
        make_reader: _MakeReader,
    ) -> None:
        self._built, self._like = built, like
        self._known: dict[Form, tuple[Mode, Arguments]] = {like.form: (built, like)}
        self._parts = parts
        self._stages = stages
        self._links = links
        self._sharding, self._shards = sharding, shards
        self._device = device
        self._make_engine = make_engine
        self._make_reader = make_reader

    def __call__(self, num_microbatches: int, has_loss: bool, like: Arguments) -> Forwards:
        if like.form not in self._known:
            self._known[like.form] = self._make(like, has_loss=has_loss), like
        mode, first = self._known[like.form]
        stages = self._stages
        smaller = mode.schedule.forward_only(num_microbatches=num_microbatches)
        mode = replace(mode, schedule=smaller)
        programs = batch_programs(smaller, Sharing(loss=has_loss, collectives=self._sharding.collectives()))
        updates = {rank: RankUpdate(rank, smaller, shards=self._shards) for rank in stages}
        return Forwards(
            engine=self._make_engine(mode, updates, stages),
            ranks=list(updates.values()),
            programs={rank: programs[rank] for rank in stages},
            reader=self._make_reader(mode, has_loss=has_loss, like=first),
            inference=mode.inference,
            modules=[mode.inference.stages[s].module for own in stages.values() for s in own],
        )

    def _make(self, like: Arguments, *, has_loss: bool) -> Mode:
        if self._parts.evaluate_like is None:
            check_like_example(like, self._like, has_target=has_loss)
        assert self._parts.evaluate_like is not None
        inference = self._parts.evaluate_like(like)
        mode = wire(self._built.schedule.forward_only(), inference, Signature.of(like))
        if self._links is not None:
            new = sorted(links_of(batch_programs(mode.schedule, Sharing())) - self._links)
            if new:
                raise ValueError(
                    f"with these arguments values flow from rank {new[0][0]} straight to rank {new[0][1]}, which are "
                    f"not linked: expected arguments like those that the stages were built for"
                )
        for number in {s for own in self._stages.values() for s in own}:
            inference.stages[number].module.to(self._device)
        return mode
