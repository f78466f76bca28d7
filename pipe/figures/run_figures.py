"""Figures of a run: what is carried out, where, what it takes; parameters and state under the model's own names."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import torch
from torch import nn

from ...comm import LinkName, World
from ...partition.plans.plan import Plan
from ...schedules import Costs, Links, Schedule, Spread, StageBytes
from ...schedules.kinds import one_of, option
from ...schedules.timing.links import Network
from ..building import Building
from ..checkpoint.checkpointer import Checkpointer, CheckpointRecord, Every, check_options
from ..checkpoint.persist import SaveResult
from ..checkpoint.snapshot import HasState, check_loader
from ..context import Layout
from ..telling import tell
from ..update.local import Averaging, LocalUpdate
from .memory import ActionMemory, stage_bytes, watch

if TYPE_CHECKING:
    from .tracer import Tracer


class RunFigures:
    """Figures, parts and state of a run, for `PipelineModule`."""

    _building: Building

    @property
    def world(self) -> World:
        """The processes of the run: those that are left, where it goes on without some."""
        return self._building.world

    @property
    def plan(self) -> Plan | None:
        """The plan that is carried out: the one that was given, or under schedule="auto" the one that was found."""
        return None if self._building.layout is None else self._building.layout.plan

    @property
    def layout(self) -> Layout | None:
        """The schedule and what each of its ranks does; None before schedule="auto" has decided."""
        return self._building.layout

    @property
    def replica(self) -> tuple[int, int]:
        """Number of this process's data replica, and how many there are."""
        return self._building.replica

    @property
    def is_built(self) -> bool:
        """Whether the stages are: for `example_inputs`, by `build`, or for the first batch."""
        return self._building.pipeline is not None

    def explain(self) -> str:
        """Units of each stage that run again, and under a memory budget why. Collective over the processes."""
        pipeline = self._building.built("explain")
        run, names = pipeline.state.run, pipeline.parts.names
        with run.guard.together():
            told = run.collectives.gather(pipeline.parts.recomputed.told, what="gathering what runs again")
        kinds = {float: "as the first batch to train on decides", str: "{!r}"}
        rules = [kinds.get(type(rule), "by a policy").format(rule) for rule in run.layout.recompute.stages]
        found = [next((each[s] for each in told if s in each), f"recompute={rule}") for s, rule in enumerate(rules)]
        return "\n".join(f"stage {s} ({name}): {found[s]}" for s, name in enumerate(names))

    @property
    def num_steps(self) -> int:
        """Batches trained on so far, those before a loaded checkpoint included."""
        return self._building.num_steps

    @property
    def schedule(self) -> Schedule:
        """Schedule that is executed; with the model's own stage graph once the stages are built."""
        return (
            self._building.decided().schedule if self._building.pipeline is None else self._building.pipeline.schedule
        )

    @property
    def device(self) -> torch.device:
        """Where it runs."""
        return self._building.options.device

    @property
    def rank(self) -> int:
        """This process's rank (0 where all are in one process)."""
        return self.world.rank

    @property
    def num_ranks(self) -> int:
        """P."""
        return self.schedule.num_ranks

    @property
    def stage_names(self) -> tuple[str, ...]:
        """[S] the modules of each stage."""
        return self._building.built("stage_names").parts.names

    @property
    def stage_num_parameters(self) -> tuple[int, ...]:
        """[S] parameter elements of each stage (a tied one counts on each stage that holds it)."""
        return self._building.built("stage_num_parameters").state.ownership.num_parameters()

    @property
    def stages_of(self) -> Mapping[str, tuple[int, ...]]:
        """Stages that hold each parameter and buffer, by name."""
        return dict(self._building.built("stages_of").state.ownership.stages)

    @property
    def optimizers(self) -> list[torch.optim.Optimizer]:
        """Optimizers of this process's stages, in order; of a stage in the order in which they were returned.

        A stage without parameters to train has none. What ranks change in them must be the same for all copies of a
        weight (replicas, tied weights). Under an asynchronous schedule each replica of a stage has optimizers of its
        own, also in one process: a change is for all of them, behind a flush().
        """
        return self._building.built("optimizers").state.optimizers

    def waiting_for_data(self) -> AbstractContextManager[None]:
        """Around the wait for a batch: the timeline of its step shows it. `pipe.loader` does so by itself."""
        return self._building.waiting_for_data()

    def held_bytes(self) -> int:
        """Parameters (all versions), gradients, optimizer state and buffers of this process, as of now [bytes]."""
        return self._building.built("parameters and state").state.held_bytes()

    def watch_memory(self) -> AbstractContextManager[ActionMemory]:
        """Within: what each action of this process takes is watched, for `stage_bytes`; slow on the CPU.

        For whole steps, on a pipeline that is empty at the start and at the end (`flush()` a stream). The ActionMemory
        says what the process held at the most, `peak_bytes`.
        """
        return watch(self._building.built("watch_memory"), self._building.options.device)

    def stage_bytes(self, watched: ActionMemory) -> tuple[StageBytes, ...]:
        """[S] bytes of each stage, of which `memory_curves` makes memory over time. Collective over the processes.

        Arguments:
            watched: what `watch_memory()` gave for a step behind the first one, when the optimizers have their state.
        """
        return stage_bytes(self._building.built("stage_bytes"), watched)

    @property
    def moved_bytes(self) -> dict[int, int]:
        """By stage of this process: the most that one microbatch's activations had when they left the rank [bytes]."""
        ranks = self._building.built("moved_bytes").engine.ranks
        return {stage: size for each in ranks for stage, size in each.worker.moved_bytes.items()}

    @property
    def averaging(self) -> Averaging | None:
        """How the replicas have averaged their weights so far; None where they sum the gradients of each step."""
        update = self._building.built("averaging").state.update
        return update.averaging if isinstance(update, LocalUpdate) else None

    @property
    def sent_bytes(self) -> dict[LinkName, tuple[int, int]]:
        """By link under Mesh(compress=): bytes of tensors that this process has sent in training, without what the
        network puts around them, and those of the same tensors as they were. Links are (sending stage, receiving stage)
        and "data"; none where nothing is packed."""
        added = self._building.built("sent_bytes").state.run.added
        return {link: sent for each in added for link, sent in each.sent.items()}

    def links(self, network: Network) -> Links:
        """The bytes of a microbatch's messages, as they travel, over this network: `simulate(pipe.schedule,
        pipe.measured_costs(), pipe.links(network))`."""
        acts, grads = self._building.built("links").message_bytes()
        return Links(network=network, activation_bytes=acts, gradient_bytes=grads)

    def measured_costs(self) -> Costs:
        """Median seconds by stage and op over the last steps, without waits, what comes between two actions (where the
        process has one rank), and the link's latency. F, B, I and W of a stage's replicas are each rank's own: a row by
        microbatch.

        For `simulate(pipe.schedule, pipe.measured_costs())`. Collective over the processes.
        """
        return self._building.built("measured_costs").measurement.costs()

    def measured_spread(self) -> Spread | None:
        """How durations varied around `measured_costs()` in the last 50 steps: by action, by rank and by step.

        For `simulate_spread(pipe.schedule, pipe.measured_costs(), spread)`; None for fewer than ten steps, which do not
        tell it. Collective over the processes.
        """
        return self._building.built("measured_spread").measurement.spread()

    def forget_measurements(self) -> None:
        """Drop the durations so far (the first steps are slower)."""
        self._building.decided()
        if self._building.pipeline is not None:
            self._building.pipeline.measurement.forget()

    def tracer(self, folder: str | os.PathLike[str], *, every: int | Literal["auto"] = "auto") -> Tracer:
        """Writes some steps to trace files, each process to its own: call its `step()` behind each `train_step`.

        `stagewright timeline folder` draws them. No step waits for another process or gathers anything; `close()` does,
        at the end. `stagewright train` has one of its own. Collective over the processes.

        Arguments:
            folder: of the run. Hosts may have one each; `stagewright timeline` takes them together.
            every: steps from one that is traced to the next, from step 3 on; "auto": 20, and twice as many after each
                eight; 0: none. The last step is always traced.
        """
        from .tracer import Tracer, check_every

        check_every(every)
        return Tracer(Path(folder), self._building.built("a tracer"), every=every)

    # Parameters and state

    def parameters(self) -> list[nn.Parameter]:
        """This process's parameters (all of them where all ranks are in one process)."""
        return [parameter for _, parameter in self.named_parameters()]

    def named_parameters(self) -> list[tuple[str, nn.Parameter]]:
        """This process's parameters with their names."""
        return self._building.built("parameters and state").state.ownership.named_parameters()

    def state_dict(self) -> dict[str, torch.Tensor]:
        """Parameters and buffers of this process's stages. Under data_parallel="fsdp" collective over the processes.

        Where others have more, that is told once, since a file of it would be a part of the model.
        """
        state = self._building.built("parameters and state").state
        run, building = state.run, self._building
        if len(run.local_stages) < run.layout.schedule.num_stages and not building.told_of_part:
            building.told_of_part = True
            tell("state_dict() has the stages of one process; full_state_dict() has all", rank=self.world.rank)
        return state.state_dict()

    def full_state_dict(self) -> dict[str, Any]:
        """The model's own `state_dict()` of all stages, on every rank, on the CPU. Collective over the processes."""

        def whole() -> dict[str, Any]:
            return self._building.built("parameters and state").state.full_state_dict()

        return self._building.life.outlasting(whole)

    def load_state_dict(self, state: Mapping[str, torch.Tensor]) -> None:
        """Load a full or a local state dict. Raises ValueError for missing or unknown names and for wrong shapes."""
        if not isinstance(state, Mapping):
            raise ValueError(
                f"a state dict of type {type(state).__name__}: expected tensors by name, as state_dict() has"
            )
        self._building.built("parameters and state").state.load_state_dict(state)
        self._building.unequal = None

    def save(self, folder: str | os.PathLike[str], *, loader: HasState | None = None) -> SaveResult:
        """Write a checkpoint: weights, optimizers, learning-rate schedulers, step. Collective over the processes.

        A disk that is full on any rank is told in a warning and in the result, alike on all ranks: those before are as
        they were, and the run can go on.

        Arguments:
            folder: several checkpoints follow one another in it; the one before the newest is kept.
            loader: from `pipe.loader`, or any other with state_dict() and load_state_dict(): its place is saved, too.

        Raises ValueError, on every rank alike, for a folder that cannot be written or that ranks do not share.
        """
        check_loader(loader)
        run, place = self._building, _path(folder)
        return run.life.outlasting(lambda: run.built("parameters and state").state.save(place, loader))

    def checkpointer(
        self,
        folder: str | os.PathLike[str],
        *,
        every: Every,
        overhead: float = 0.035,
        loader: HasState | None = None,
        on_saved: Callable[[CheckpointRecord], object] | None = None,
    ) -> Checkpointer:
        """Saves as `save` does, beside training: call its `step()` behind each `train_step`.

        A copy is made while the next step's forwards and backwards run, and written while training goes on. Collective.

        Arguments:
            every: steps from one checkpoint to the next; "auto": as few as take the share `overhead` of the time, found
                from what they cost and kept up while that changes.
            on_saved: on_saved(record) in every process for each checkpoint that is done, or that failed (a full disk is
                told, and the next interval tries again).

        Raises ValueError, on every rank alike, for a folder that cannot be written, or that another run writes.
        """
        check_loader(loader)
        check_options(every, overhead)
        self._building.life.refuse("a checkpointer", instead="expected save(folder) between two steps")
        return Checkpointer(
            _path(folder),
            self._building.built("a checkpointer").state,
            every=every,
            overhead=overhead,
            loader=loader,
            on_saved=on_saved,
        )

    def load(
        self, folder: str | os.PathLike[str], *, loader: HasState | None = None, new: Literal["fresh"] | None = None
    ) -> None:
        """Go on from a checkpoint of the same model, cut in any way. Executes no code from it.

        Collective over the processes: all of them load it, or none. Where the first batch is to build the stages, they
        take their weights then.

        Arguments:
            loader: goes on where the saved one stood: with the batch behind the last one that was trained on.
            new: "fresh": parameters that no optimizer had, such as ones that were frozen, begin with fresh state.

        Raises ValueError for what is no whole checkpoint of this model, and for a loader of other data.
        """
        check_loader(loader)
        fresh = new is not None and option("new", new, one_of(("fresh",))) == "fresh"
        self._building.load(_path(folder), loader, fresh=fresh)


def _path(folder: object) -> Path:
    if not isinstance(folder, str | os.PathLike):
        raise ValueError(f"folder={folder!r:.60}: expected a path, such as 'checkpoints'")
    return Path(folder)
