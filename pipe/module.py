"""PipelineModule: the front door. A model, a schedule and a mesh become a training run over a pipeline."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import ExitStack, nullcontext
from functools import partial
from types import TracebackType
from typing import TYPE_CHECKING, Any, Literal, NoReturn

import torch
from torch import nn
from torch.utils.data import Dataset

from ..comm import Guard, PipelineError, make_guard
from ..partition.deferred.filling import fill_attributes
from ..partition.model.forms import Arguments
from ..partition.profiler.optimizers import OptimizerFactory
from ..schedules.kinds import at_least, one_of, option
from .batch.loader import Remainder, ReplicaBatches, ReplicaLoader, count_samples
from .building import Building, meet
from .checkpoint.plain import take_weights
from .context import choose_layout
from .edits import Edits, UntilBuilt
from .figures.run_figures import RunFigures
from .results import EvalResult, StepRecord, StepResult
from .settings.arguments import FIRST, AnySchedule, GivenOptions, Inputs, MeshLike, Precision, SchedulerFactory, Weights
from .settings.excludes import INSTEAD, refuse_unknown
from .settings.given import Given
from .settings.options import read_options
from .settings.recompute import RecomputeLike
from .verify.verification import Verification

if TYPE_CHECKING:
    from .run.fills import FillWork


class PipelineModule(RunFigures):
    """Trains a model as a pipeline of stages.

    The model is cut into S = P * V stages, the schedule says who computes what when, and each `train_step` runs
    one batch of M microbatches. The same script runs under torchrun (a process a rank) and alone (all ranks
    in this process). The result equals one process that accumulates the same microbatches.

    Arguments:
        model: any module; cut between its own modules, which run as they are (docs/guides/models.md). Or a list of S
            modules, the stages, each called with the outputs of the one before.
        schedule: a name (`stagewright.schedules.FAMILIES`); a Schedule, Constraints, or a function that makes one; or
            the file of one: "mine.csv", "mine.json", "mine.py:function" (docs/guides/schedules.md). "1f1b" by default.
            "auto" (`stagewright.Auto`): the first batch is profiled on this machine, and the planner decides on
            schedule, cut, replicas and microbatches; `plan` then tells. A Plan or its .json file (`stagewright plan`):
            stages, ranks and recomputation, too; all ranks pass the same batch. What only some schedules have stands in
            `stagewright.Asynchronous`, `Synchronous` and `Slices` around them.
        num_microbatches: M of the batch that a rank passes; 2P by default.
        num_chunks: V stages a rank; 2 by default where the schedule interleaves, else 1.
        loss_fn: loss_fn(output, target) -> scalar mean over the microbatch, or (sum, count); reduction="sum" adds up
            (docs/guides/models.md). An nn.Module belongs to the last stage, which trains its parameters; its tensors
            are named `loss_fn.` and their names in it.
            "model": the model returns its own loss, as `loss` in its output, as the first of a tuple, or alone.
        optimizer: parameters -> torch optimizer, or a list of several; called once a stage that has any. Needed by
            `train_step`. `stagewright.named(function)` is called with (name, parameter) pairs.
        lr_scheduler: optimizer -> learning-rate scheduler; called once an optimizer, stepped behind each update. One
            whose step takes the loss (ReduceLROnPlateau) is stepped once a batch, with that batch's.
        max_grad_norm: `train_step` clips the global gradient norm to it.
        mesh: {"pipe": P, "data": D, "tensor": T}; `stagewright.Mesh`, which also says what ranks side by side divide
            among themselves; or a DeviceMesh with dimensions "pp", "dp" and "tp". By default a pipeline over all
            processes (alone: over 1).
        cut: names of the S - 1 modules that begin a stage, or a split_spec; equal parameter weights by default.
        example_inputs: one local batch, a tuple or a dict of keywords, for which the stages are built at once; without
            it, the first call builds them. `stagewright.Inputs` also says along which dimensions batches are cut.
        recompute: what is computed again in the backward instead of being kept (activation checkpointing): "none";
            "full" (a stage keeps its inputs only), "layer" (each cut unit does), "selective" (each cut unit, but the
            results of its matrix products are kept, too); or one a stage; or for single modules, {"blocks.*": "full",
            "head": "selective"}; or {"memory_budget": "6GiB"}, of every stage (or ["6GiB", None, ...]): the units that
            must, so that a stage fits in the least seconds, which the first batch decides and `explain()` tells.
        precision: "bf16" or "fp16": mixed precision, under torch.autocast; `stagewright.Precision` has a loss scale of
            your own and torch.compile, too. By default the autocast that calls are made in, if any.
        verify: "first": the first batch to train on also runs through a copy of the plain model, in the process of the
            last stage, and losses, gradients, buffers and outputs are compared (see the method), where a copy takes
            little of the memory; else unit by unit. True: with the copy. N: that batch and every N-th. False: none.
        on_step: on_step(record), called in every process with a StepRecord of each `train_step` as soon as its loss is
            known, in order; it must not call what is collective.
        seed: of dropout and the like.
        timeout: of every wait for another rank [s].
        device: of the run; where the model's parameters are, by default. "cuda": of LOCAL_RANK (docs/guides/gpus.md).
        weights: files with the model's weights, of which each process reads those of its own stages: a path, or
            `stagewright.Weights` (docs/guides/large_models.md).

    BatchNorm normalises each microbatch by itself; under replicas, and schedules such as "chimera" that have each
    stage on two ranks, its running statistics see only the microbatches of their own rank (in one process they are
    shared), and a checkpoint holds those of a stage's first rank. The same is true for other buffers that a forward
    changes. Where a forward reads what the one before it has left, such as spectral_norm's vectors, replicas in one
    process read in the order in which they run: as long as each can go on, one after the other, so that numbers
    differ a little from one pipeline's.

    Raises ValueError, on every rank alike, for anything that does not fit together.
    """

    def __init__(
        self,
        model: nn.Module | Edits | Sequence[nn.Module] | None = None,
        *,
        schedule: AnySchedule | None = None,
        num_microbatches: int | None = None,
        num_chunks: int | None = None,
        loss_fn: Callable[[Any, Any], Any] | str | None = None,
        optimizer: OptimizerFactory | None = None,
        lr_scheduler: SchedulerFactory | None = None,
        max_grad_norm: float | None = None,
        mesh: MeshLike | None = None,
        cut: Sequence[str] | Mapping[str, Any] | None = None,
        example_inputs: Inputs | Sequence[Any] | Mapping[str, Any] | None = None,
        recompute: RecomputeLike = "none",
        precision: Precision | str | torch.dtype | None = None,
        verify: bool | int | str = FIRST,
        on_step: Callable[[StepRecord], object] | None = None,
        seed: int = 0,
        timeout: float = 300.0,
        device: torch.device | str | None = None,
        weights: str | os.PathLike[str] | Mapping[str, torch.Tensor] | Weights | None = None,
        **unknown: Any,
    ) -> None:
        refuse_unknown(unknown)
        edits = model if isinstance(model, Edits) else None
        given = GivenOptions(
            model=model.model if isinstance(model, Edits) else model,
            schedule=schedule,
            num_microbatches=num_microbatches,
            num_chunks=num_chunks,
            loss_fn=loss_fn,
            optimizer=optimizer,
            lr_scheduler=lr_scheduler,
            max_grad_norm=max_grad_norm,
            mesh=mesh,
            cut=cut,
            example_inputs=example_inputs,
            recompute=recompute,
            precision=precision,
            verify=verify,
            on_step=on_step,
            seed=seed,
            timeout=timeout,
            device=device,
            weights=weights if isinstance(weights, Weights | None) else Weights(weights),
        )
        self._begin(given, edits)

    def _begin(self, given: GivenOptions, edits: Edits | None) -> None:
        with ExitStack() as stack, ExitStack() as undo:
            options = read_options(given, {} if edits is None else stack.enter_context(edits.applied()))
            make_layout = choose_layout(options) if edits is None else edits.in_group(choose_layout(options))
            self._calls = options.calls
            self._name = "stages" if options.model is None else type(options.model).__name__
            world = meet(options)
            guard = make_guard(world)
            with guard.together():
                if options.weights is not None:
                    take_weights(options.root, options.weights, undo)
                fill_attributes(options.root, options.loss_fn, undo=undo)
            self._building = Building(options, make_layout, world=world, guard=guard)
            if edits is not None and self._building.pipeline is None:
                building = self._building
                building.around = UntilBuilt(
                    stack.pop_all(), partial(edits.applied, [*edits]), lambda: building.pipeline is not None
                )
            undo.pop_all()

    @property
    def _guard(self) -> Guard:
        return self._building.guard

    def _given(self, args: Sequence[Any], kwargs: Mapping[str, Any], *, has_target: bool = True) -> Given:
        """The batch of a call; data replicas have their own: one that refuses its batch tells the others."""
        alone = self._building.pipeline is None or self._building.replica[1] == 1
        with nullcontext() if alone else self._guard.together():
            return self._calls.batch(args, kwargs) if has_target else self._calls.inputs(args, kwargs)

    def build(self, *inputs_and_target: Any, **keywords: Any) -> None:
        """Cut the model and connect the ranks for batches like this one, without running it.

        Under schedule="auto" that includes profiling and planning. The first `train_step` would do it otherwise, and in
        one process leave it to the first evaluation whether the model can be evaluated. Nothing where it is done.
        Collective over the processes.
        """
        with self._building.alone():
            given = self._given(inputs_and_target, keywords)
            self._building.built_for(given, evaluates=True)

    def read(self, *inputs: Any, **keywords: Any) -> Arguments:
        """The arguments that the model's forward is called with for these inputs, as `predict` takes them."""
        return self._calls.inputs(inputs, keywords).arguments

    def loader(
        self,
        dataset: Dataset[Any],
        *,
        batch_size: int,
        shuffle: bool = True,
        remainder: Remainder = "drop",
        same_shapes: bool = False,
        shared: Literal["host"] | None = None,
        cache: int = 0,
        **options: Any,
    ) -> ReplicaLoader:
        """Batches for this process: the same on all ranks of a pipeline, a share of its own for each data replica.

        Each `for batch in loader` is one epoch, shuffled by the module's seed; `save(..., loader=loader)` keeps its
        place, from which any other batch size and number of replicas may go on: no sample is lost or used twice.

        Arguments:
            batch_size: samples of one `train_step` of one data replica.
            remainder: samples at the end of an epoch that make no whole batch: "drop" leaves them out, "carry" fills
                the batch with the first ones of the next epoch (each sample is then used exactly once an epoch), "keep"
                gives a smaller batch, as to evaluate each sample once.
            same_shapes: a promise that all batches have the first one's shapes. Processes whose stages read neither
                inputs nor target then load one batch only, and pass on its shapes.
            shared: "host": of the processes of a host that pass the same batches, the first one reads and prepares them
                for all, through shared memory; where it ends, the others read by themselves. Collective over the
                processes, which loop over the loader alike.
            cache: beside it, about so many bytes of samples, as `__getitem__` returned them in the epoch that read them
                first, are kept in shared memory for all processes of the host: not for random augmentation.
            options: of `torch.utils.data.DataLoader` (num_workers, collate_fn, pin_memory, ...).

        Raises ValueError for sizes that make no batch, and for an IterableDataset.
        """
        cache = option("cache", cache, at_least(0))
        if shared is not None:
            option("shared", shared, one_of(("host",)))
        elif cache:
            raise ValueError(f'cache={cache} without shared="host": expected both, or neither')
        replica, num_replicas = self._building.replica
        batches = ReplicaBatches(
            count_samples(dataset),
            batch_size=batch_size,
            replica=replica,
            num_replicas=num_replicas,
            shuffle=shuffle,
            seed=self._building.options.seed,
            remainder=remainder,
        )
        run = self._building
        options |= {"is_idle": lambda: run.reads_nothing, "waiting": run.waiting_for_data, "same_shapes": same_shapes}
        if shared is None:
            return ReplicaLoader(dataset, batches, **options)
        from .batch.shared import SharedLoader, share_on_host

        share = share_on_host(run.decided().place, timeout=run.options.timeout)
        return SharedLoader(dataset, batches, share=share, cache=cache, **options)

    # Training

    def train_step(self, *inputs_and_target: Any, **keywords: Any) -> StepResult:
        """One batch: forwards, backwards, clipping, update. `train_step(*inputs, target)`, `train_step(**batch)`.

        Under an asynchronous schedule it returns with the pipeline full: `result.loss` is that of the newest batch this
        rank knows of, and `flush()` returns the rest.

        The target, passed whole to `loss_fn(output, target)`, is the keyword `target`, or else the last positional
        argument; under loss_fn="model" there is none. All else goes to the model's forward as it is given, and a dict
        as the only argument (or the only one in front of the target) stands for keywords if a key of it is a parameter
        of forward. Tensors are cut with `torch.tensor_split` along their `batch_dims`; what is no tensor is
        recorded once a value. Ranks of one pipeline pass the same batch.

        A batch may come in microbatches: `train_step(microbatches=[(x0, y0), (x1, y1), ...])`, M of them, each what
        would be a batch of its own, as a tuple or as a dict of keywords. Their tensors may differ in size in any
        dimension, as sequences that are padded microbatch by microbatch do.

        Raises ValueError for a batch that does not fit, NonFiniteLossError (no update is made), PipelineTimeout
        and PeerLost with who waited for what.
        """
        with self._building.alone():
            self._building.options.require_optimizer()
            self._building.options.require_loss()
            given = self._given(inputs_and_target, keywords)
            return self._building.life.step_of(self._building.training_for(given))(given)

    def forward_backward(self, *inputs_and_target: Any, **keywords: Any) -> StepResult:
        """Forwards and backwards of one batch; gradients add up on the user's own Parameters (`.grad`)."""
        with self._building.alone():
            self._building.options.require_loss()
            given = self._given(inputs_and_target, keywords)
            return self._building.training_for(given).accumulate(given)

    def verify_if_due(self, *inputs_and_target: Any, **keywords: Any) -> None:
        """`verify` with this batch, which is not trained on yet, if `verify=` says so of the next one. Collective."""
        if self._building.is_verification_due:
            self._building.training_for(self._given(inputs_and_target, keywords))

    def eval_step(self, *inputs_and_target: Any, **keywords: Any) -> EvalResult:
        """Forwards alone, in evaluation mode, of a batch as for `train_step`; without a loss_fn there is no target.

        A batch of fewer samples than M makes fewer microbatches.
        """
        with self._building.alone():
            given = self._given(inputs_and_target, keywords)
            return self._building.life.outlasting(lambda: self._building.evaluation_for(given).step(given))

    def predict(self, *inputs: Any, **keywords: Any) -> object:
        """The output for a batch, in evaluation mode, without loss and target: see EvalResult.output.

        Where the last stage runs; None in other processes. All ranks of a pipeline pass the same inputs, which may be
        others than those to train on: the stages then run in another way.
        """
        with self._building.alone():
            given = self._given(inputs, keywords, has_target=False)
            return self._building.life.outlasting(lambda: self._building.evaluation_for(given).predict(given))

    def verify(self, *inputs_and_target: Any, **keywords: Any) -> Verification:
        """Run a batch through the pipeline and through the plain model, and compare; nothing is trained.

        Compared are the outputs of an evaluation, the loss, each parameter's gradient and, where a stage has no
        replicas, the buffers after the batch, with the same random numbers. Weights, buffers, gradients, random state,
        what modules count in Python, and the step count are as before. It takes about the time of two steps, and one of
        the whole model in one process, which meanwhile holds the model, its gradients and the activations of one
        microbatch. Over several processes it needs a `verify=` other than False. Where "first" has no room for a copy,
        each process compares its own cut units instead, each as its stage runs it and as a copy of it does. Collective.

        Raises VerificationError, on every rank alike, that names the first module and parameter that differ and the
        likely cause.
        """
        with self._building.alone():
            self._building.options.require_loss()
            given = self._given(inputs_and_target, keywords)
            return self._building.verify(given)

    def clip_grad_norm_(self, max_norm: float, norm_type: float = 2.0, error_if_nonfinite: bool = False) -> float:
        """Clip the global gradient norm over all stages, as torch.nn.utils.clip_grad_norm_; returns the norm before.

        Each element counts once, however many replicas or tied stages hold it. Collective over the processes.

        Arguments:
            norm_type: p > 0 of the p-norm; math.inf (or "inf"): the largest absolute value.
            error_if_nonfinite: whether a norm that is infinite or not a number is a RuntimeError, on every rank alike.
        """
        training = self._building.built("clip_grad_norm_").training
        return training.clip(max_norm, norm_type=norm_type, error_if_nonfinite=error_if_nonfinite)

    def fill(
        self, work: Iterable[Callable[[], object]], *, name: str | None = None, seconds: float | None = None
    ) -> FillWork:
        """Background work of this process, done in small pieces while its ranks wait for messages in training steps.

        A piece begins where the last steps waited for longer than it takes; so a step is no longer. Works are done in
        the order in which they were given, their pieces in theirs, each once, with the random generators kept and
        autocast off. Evaluation fills nothing. In one process, where other ranks compute meanwhile, steps are longer.

        Arguments:
            work: callables without arguments, or a generator that yields them: what it computes in between counts.
            name: for people.
            seconds: that a piece takes; None: the first ones are given the longest wait, and tell.

        Returns the work: `finish()` runs what is left, `is_done` and `num_done` tell how far it is. A piece that fails
        ends the step on every rank, by name. Raises ValueError for no such work, unbuilt stages, and a CUDA device.
        """
        fills = self._building.built("fill").fills
        self._building.life.refuse("fill(...)", instead='expected on_failure="stop"')
        if self._building.is_closed:
            raise PipelineError("this pipeline has ended: expected fill(...) before close()")
        return fills()(work, name=name, seconds=seconds)

    def flush(self) -> list[StepResult]:
        """End what is under way: batches of a stream. Collective.

        Returns, oldest first, what became known of batches that no `train_step` of this rank has returned. Evaluation,
        `verify`, checkpoints, `full_state_dict` and `close` drain the pipeline by themselves.
        """
        self._building.decided()
        return [] if self._building.pipeline is None else self._building.pipeline.training.flush()

    def __call__(self, *inputs: Any, **keywords: Any) -> NoReturn:
        raise TypeError(f"a PipelineModule is not called: expected {INSTEAD['forward']}")

    def __reduce_ex__(self, protocol: object) -> NoReturn:
        raise TypeError("a PipelineModule is not pickled or copied: expected save(folder), or full_state_dict()")

    if not TYPE_CHECKING:

        def __getattr__(self, name: str) -> NoReturn:
            instead = f": expected {INSTEAD[name]}" if name in INSTEAD else ""
            raise AttributeError(f"a PipelineModule has no {name!r}{instead}")

    def __repr__(self) -> str:
        schedule = "to be planned" if self._building.layout is None else repr(self.schedule)
        return f"<PipelineModule {self._name}: {schedule}>"

    def __enter__(self) -> PipelineModule:
        """A `with` block closes the pipeline at its end; an error in it reaches all ranks with its text."""
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if error is not None:
            self._guard.fail(error)
        self.close()

    def close(self) -> None:
        """Wait until all messages are through, and give links back. Call it before the process group is destroyed.

        Weights and figures can be read behind it; a batch is a PipelineError.
        """
        self._building.is_closed = True
        if self._building.pipeline is not None:
            self._building.pipeline.training.close(self._building.options.timeout)
