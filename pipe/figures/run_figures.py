"""The part of `PipelineModule` that reports on a run, and saves and loads it under the model's own names."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Mapping
from contextlib import AbstractContextManager
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import torch
from torch import nn

from ...comm import LinkName, PipelineError, World
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
    from ..run.fills import FillWork
    from .tracer import Tracer


class RunFigures:
    """Properties of a run for `PipelineModule`: layout, memory, traffic, background work, parameters and state."""

    _building: Building

    @property
    def world(self) -> World:
        """The processes of the run; under on_failure="reroute" those that are left."""
        return self._building.world

    @property
    def plan(self) -> Plan | None:
        """The Plan that is carried out: the given one, or the one that schedule="auto" chose; None without."""
        return None if self._building.layout is None else self._building.layout.plan

    @property
    def layout(self) -> Layout | None:
        """The schedule and what each of its ranks does; None until schedule="auto" has decided."""
        return self._building.layout

    @property
    def replica(self) -> tuple[int, int]:
        """(number of this process's data replica, number of data replicas)."""
        return self._building.replica

    @property
    def is_built(self) -> bool:
        """Whether the stages are built, for `example_inputs`, by `build`, or for the first batch."""
        return self._building.pipeline is not None

    def explain(self) -> str:
        """Text with the units of each stage that are recomputed, and under a memory budget the reason. Collective.

        Raises ValueError if the stages are not built.
        """
        pipeline = self._building.built("explain")
        run, names = pipeline.state.run, pipeline.parts.names
        with run.guard.together():
            told = run.collectives.gather(pipeline.parts.recomputed.reasons, what="gathering what runs again")
        kinds = {float: "as the first batch to train on decides", str: "{!r}"}
        rules = [kinds.get(type(rule), "by a policy").format(rule) for rule in run.layout.recompute.stages]
        found = [next((each[s] for each in told if s in each), f"recompute={rule}") for s, rule in enumerate(rules)]
        return "\n".join(f"stage {s} ({name}): {found[s]}" for s, name in enumerate(names))

    @property
    def num_steps(self) -> int:
        """Number of batches trained on so far, those before a loaded checkpoint included."""
        return self._building.num_steps

    @property
    def schedule(self) -> Schedule:
        """The Schedule that is executed, with the model's own stage graph once the stages are built.

        Raises ValueError until schedule="auto" has decided.
        """
        pipeline = self._building.pipeline
        return self._building.decided().schedule if pipeline is None else pipeline.schedule

    @property
    def device(self) -> torch.device:
        """Device on which stages run."""
        return self._building.options.device

    @property
    def rank(self) -> int:
        """Number of this process; 0 if all ranks are in one process."""
        return self.world.rank

    @property
    def num_ranks(self) -> int:
        """Number of ranks of the schedule, over all replicas."""
        return self.schedule.num_ranks

    @property
    def stage_names(self) -> tuple[str, ...]:
        """[S] names of the modules of each stage."""
        return self._building.built("stage_names").parts.names

    @property
    def stage_num_parameters(self) -> tuple[int, ...]:
        """[S] number of parameter elements of each stage; a tied one counts on each stage that holds it."""
        return self._building.built("stage_num_parameters").state.ownership.num_parameters()

    @property
    def stages_of(self) -> Mapping[str, tuple[int, ...]]:
        """Numbers of the stages that hold each parameter and buffer, by name."""
        return dict(self._building.built("stages_of").state.ownership.stages)

    @property
    def optimizers(self) -> list[torch.optim.Optimizer]:
        """Optimizers of this process's stages, in order; of one stage in the order in which `optimizer` returned them.

        A stage without parameters to train has none. Changes must be the same for all copies of a weight (replicas,
        tied weights). Under an asynchronous schedule each replica of a stage has its own optimizers, in one process
        too: change all of them, after a flush().
        """
        return self._building.built("optimizers").state.optimizers

    def waiting_for_data(self) -> AbstractContextManager[None]:
        """Context around the wait for a batch, which the step's timeline then shows; `pipe.loader` uses it."""
        return self._building.waiting_for_data()

    def held_bytes(self) -> int:
        """Size of this process's parameters (all versions), gradients, optimizer state and buffers [bytes]."""
        return self._building.built("parameters and state").state.held_bytes()

    def watch_memory(self) -> AbstractContextManager[ActionMemory]:
        """Context that measures what each action of this process takes, for `stage_bytes`; slow on the CPU.

        Use it around whole steps. No batch may be in flight at its beginning and end (`flush()` a stream). It gives an
        ActionMemory, whose `peak_bytes` is the most that the process held [bytes]. Raises ValueError where forwards and
        backwards overlap.
        """
        return watch(self._building.built("watch_memory"), self._building.options.device)

    def stage_bytes(self, watched: ActionMemory) -> tuple[StageBytes, ...]:
        """[S] sizes of what each stage holds, from which `memory_curves` computes memory over time. Collective.

        Arguments:
            watched: result of `watch_memory()` around a step after the first, when the optimizers have their state.
        """
        return stage_bytes(self._building.built("stage_bytes"), watched)

    @property
    def moved_bytes(self) -> dict[int, int]:
        """By local stage, the most that the offloaded activations of one microbatch took on their rank [bytes]."""
        ranks = self._building.built("moved_bytes").engine.ranks
        return {stage: size for each in ranks for stage, size in each.worker.moved_bytes.items()}

    @property
    def averaging(self) -> Averaging | None:
        """Record of the averages of weights so far under Mesh(sync=); None if gradients are summed in each step."""
        update = self._building.built("averaging").state.update
        return update.averaging if isinstance(update, LocalUpdate) else None

    @property
    def sent_bytes(self) -> dict[LinkName, tuple[int, int]]:
        """By link under Mesh(compress=), (sent bytes, bytes of the same tensors uncompressed) of this process in
        training.

        Headers of the network are not counted. A link is (sending stage, receiving stage) or "data"; links that are not
        compressed are not in it.
        """
        added = self._building.built("sent_bytes").state.run.added
        return {link: sent for each in added for link, sent in each.sent.items()}

    def links(self, network: Network) -> Links:
        """Links of the run over a network, with the sizes of a microbatch's messages as they are sent.

        For `simulate(pipe.schedule, pipe.measured_costs(), pipe.links(network))`.

        Arguments:
            network: latencies and bandwidths between ranks.
        """
        acts, grads = self._building.built("links").message_bytes()
        return Links(network=network, activation_bytes=acts, gradient_bytes=grads)

    def measured_costs(self) -> Costs:
        """Costs measured in the last steps: median seconds by stage and op, time between two actions, latency of links.

        Waits are not counted; the time between two actions is known only if the process has one rank. F, B, I and W of
        a stage with replicas differ by rank: one row per microbatch. For `simulate(pipe.schedule,
        pipe.measured_costs())`. Collective.

        Raises ValueError, on every rank alike, if no step was measured.
        """
        return self._building.built("measured_costs").measurement.costs()

    def measured_spread(self) -> Spread | None:
        """Spread of durations around `measured_costs()` in the last 50 steps: by action, by rank and by step.
        Collective.

        Returns None after fewer than ten steps. For `simulate_spread(pipe.schedule, pipe.measured_costs(), spread)`.
        """
        return self._building.built("measured_spread").measurement.spread()

    def forget_measurements(self) -> None:
        """Drops the durations measured so far; the first steps are slower than others."""
        self._building.decided()
        if self._building.pipeline is not None:
            self._building.pipeline.measurement.forget()

    def tracer(self, folder: str | os.PathLike[str], *, every: int | Literal["auto"] = "auto") -> Tracer:
        """Writer of trace files, one per process: call its `step()` after each `train_step`. Collective.

        `stagewright timeline folder` draws them. No step waits for another process or gathers anything; `close()` does,
        at the end. `stagewright train` has its own tracer.

        Arguments:
            folder: of the run. If hosts have different folders, `stagewright timeline` takes them together.
            every: steps from one traced step to the next, from step 3 on. "auto": 20, doubled after every eight traced
                steps. 0: only the last step, which is always traced.

        Raises ValueError for another `every`, and if the stages are not built.
        """
        from .tracer import Tracer, check_every

        check_every(every)
        return Tracer(Path(folder), self._building.built("a tracer"), every=every)

    def fill(
        self, work: Iterable[Callable[[], object]], *, name: str | None = None, seconds: float | None = None
    ) -> FillWork:
        """Runs background work of this process in small pieces while its ranks wait for messages in training steps.

        A piece begins only where the last steps waited for longer than it takes, so that steps do not get longer. Works
        run in the order in which they were given, each piece once, with the random generators kept and autocast off.
        Evaluation runs none. In one process, where other ranks compute during a wait, steps get longer.

        Arguments:
            work: callables without arguments, or a generator that yields them: its own code between two counts as work,
                too.
            name: for error messages.
            seconds: that a piece takes [s]; None: the first pieces run in the longest wait and are measured.

        Returns the work: `finish()` runs the rest, `is_done` and `num_done` report its progress. A piece that fails
        ends the step on every rank, with the work's name. Raises ValueError for other values of `work`, for stages that
        are not built, and on CUDA devices.
        """
        fills = self._building.built("fill").fills
        self._building.life.refuse("fill(...)", instead='expected on_failure="stop"')
        if self._building.is_closed:
            raise PipelineError("this pipeline has ended: expected fill(...) before close()")
        return fills()(work, name=name, seconds=seconds)

    # Parameters and state

    def parameters(self) -> list[nn.Parameter]:
        """This process's parameters; those of all ranks if they are in one process."""
        return [parameter for _, parameter in self.named_parameters()]

    def named_parameters(self) -> list[tuple[str, nn.Parameter]]:
        """This process's parameters with their names in the model."""
        return self._building.built("parameters and state").state.ownership.named_parameters()

    def state_dict(self) -> dict[str, torch.Tensor]:
        """Parameters and buffers of this process's stages, by name. Collective under data_parallel="fsdp".

        If other processes have more stages, a message says so once, since a file of this dict is only a part of the
        model.
        """
        state = self._building.built("parameters and state").state
        run, building = state.run, self._building
        if len(run.local_stages) < run.layout.schedule.num_stages and not building.told_of_part:
            building.told_of_part = True
            tell("state_dict() has the stages of one process; full_state_dict() has all", rank=self.world.rank)
        return state.state_dict()

    def full_state_dict(self) -> dict[str, Any]:
        """The model's own `state_dict()` with all stages, on every rank, on the CPU. Collective."""

        def whole() -> dict[str, Any]:
            return self._building.built("parameters and state").state.full_state_dict()

        return self._building.life.outlasting(whole)

    def load_state_dict(self, state: Mapping[str, torch.Tensor]) -> None:
        """Loads a full or a local state dict.

        Raises ValueError for missing or unknown names and for wrong shapes.
        """
        if not isinstance(state, Mapping):
            raise ValueError(
                f"a state dict of type {type(state).__name__}: expected tensors by name, as state_dict() has"
            )
        self._building.built("parameters and state").state.load_state_dict(state)
        self._building.unequal = None

    def save(self, folder: str | os.PathLike[str], *, loader: HasState | None = None) -> SaveResult:
        """Writes a checkpoint: weights, optimizers, learning-rate schedulers, step, random generators. Collective.

        If the disk of any rank is full, all ranks get a warning and a result without a path; earlier checkpoints are
        unchanged, and the run can continue.

        Arguments:
            folder: for the checkpoints of one run. The newest two are kept.
            loader: from `pipe.loader`, or any object with state_dict() and load_state_dict(): its position is saved,
                too.

        Returns a SaveResult. Raises ValueError, on every rank alike, for a folder that cannot be written or that ranks
        do not share.
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
        """A Checkpointer, which saves as `save` does, but during training: call its `step()` after each `train_step`.
        Collective.

        It copies the state while the next step's forwards and backwards run, and writes the copy while training
        continues.

        Arguments:
            folder, loader: as for `save`.
            every: steps from one checkpoint to the next. "auto": the fewest with which checkpoints take at most the
                share `overhead` of the time; measured, and adjusted during the run.
            overhead: share of the time, above 0 and below 1.
            on_saved: on_saved(record), called in every process with a CheckpointRecord of each checkpoint that was
                written or failed. One that failed, as on a full disk, is reported by a warning, and the next interval
                tries again.

        Raises ValueError, on every rank alike, for a folder that cannot be written or that another run writes.
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
        """Resumes from a checkpoint of the same model, cut in any way. Executes no code from it. Collective.

        All processes load it, or none. If the stages are not built yet, they take their weights when they are.

        Arguments:
            folder: as passed to `save`, whose newest checkpoint is loaded; or one of the checkpoints in it.
            loader: continues at the saved position, with the batch after the last one that was trained on.
            new: "fresh": parameters that no optimizer had, such as frozen ones, begin with fresh optimizer state.

        Raises ValueError for a folder without a whole checkpoint of this model, and for a loader of other data.
        """
        check_loader(loader)
        fresh = new is not None and option("new", new, one_of(("fresh",))) == "fresh"
        self._building.load(_path(folder), loader, fresh=fresh)


def _path(folder: object) -> Path:
    if not isinstance(folder, str | os.PathLike):
        raise ValueError(f"folder={folder!r:.60}: expected a path, such as 'checkpoints'")
    return Path(folder)
