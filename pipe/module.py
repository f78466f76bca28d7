"""PipelineModule: from a model, a schedule and a mesh to training over a pipeline of stages."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack, nullcontext
from functools import partial
from types import TracebackType
from typing import TYPE_CHECKING, Any, Literal, Never, NoReturn

import torch
from torch import nn
from torch.utils.data import Dataset

from ..comm import Guard, make_guard
from ..partition.deferred.filling import fill_attributes
from ..partition.model.forms import Arguments
from ..partition.profiler.optimizers import OptimizerFactory
from ..schedules.kinds import at_least, one_of, option
from .batch.loader import Remainder, ReplicaBatches, ReplicaLoader, count_samples
from .building import Building, UntilBuilt, meet
from .checkpoint.plain import take_weights
from .context import choose_layout
from .edits import Edits
from .figures.run_figures import RunFigures
from .results import EvalResult, StepRecord, StepResult
from .settings.arguments import FIRST, AnySchedule, GivenOptions, Inputs, MeshLike, Precision, SchedulerFactory, Weights
from .settings.excludes import INSTEAD, refuse_unknown
from .settings.given import Given
from .settings.options import read_options
from .settings.recompute import RecomputeLike
from .verify.verification import Verification


class PipelineModule(RunFigures):
    """Trains a model as a pipeline of stages.

    The model is cut into S = P * V stages, the schedule decides what each rank computes when, and each `train_step`
    runs one batch of M microbatches. The same script runs under torchrun, one rank per process, and alone, with all
    ranks in one process. Losses, gradients and weights equal those of one process that accumulates the same
    microbatches.

    Arguments:
        model: any module; it is cut between its own modules, which run unchanged (docs/guides/models.md). Or a list of
            S modules, the stages, each called with the outputs of the previous one.
        schedule: a name (see `stagewright.schedules.FAMILIES`), "1f1b" by default; a Schedule, Constraints, or a
            function that returns one; or a file of one: "mine.csv", "mine.json", "mine.py:function"
            (docs/guides/schedules.md). "auto" or `stagewright.Auto`: the first batch is profiled on this machine, and
            the planner chooses schedule, cut, replicas and microbatches; `pipe.plan` holds the result. A Plan or its
            .json file (`stagewright plan`) also fixes stages, ranks and recomputation; all ranks then pass the same
            batch. `stagewright.Asynchronous`, `Synchronous` and `Slices` add the options that only some schedules have.
        num_microbatches: M, the microbatches of the batch that a rank passes; 2P by default.
        num_chunks: V, the stages per rank; 2 by default where the schedule interleaves, else 1.
        loss_fn: loss_fn(output, target) -> scalar mean over the microbatch, or (sum, count); a loss with
            reduction="sum" adds up (docs/guides/models.md). An nn.Module is a part of the last stage, which trains its
            parameters; the names of its tensors begin with `loss_fn.`. "model": the model returns its own loss, as
            `loss` of its output, as the first item of a tuple, or alone.
        optimizer: parameters -> torch optimizer, or a list of several; called for each stage that has parameters.
            Needed by `train_step`. `stagewright.named(function)` is called with (name, parameter) pairs instead.
        lr_scheduler: optimizer -> learning-rate scheduler; called once per optimizer and stepped after each update. One
            whose step takes the loss (ReduceLROnPlateau) is stepped once per batch, with the batch's loss.
        max_grad_norm: `train_step` clips the global gradient norm to this value; None: no clipping.
        mesh: {"pipe": P, "data": D, "context": C, "expert": E, "tensor": T}; `stagewright.Mesh`, which also says what
            the ranks of one stage divide among themselves; or a DeviceMesh with dimensions "pp", "dp", "cp", "ep" and
            "tp". By default one pipeline over all processes, of one rank without torchrun.
        cut: names of the S - 1 modules with which a stage begins, or a split_spec of torch.distributed.pipelining;
            equal weights in parameters by default.
        example_inputs: one local batch, as a tuple or a dict of keywords, for which the stages are built at once;
            without it, the first call builds them. `stagewright.Inputs` also names the dimensions along which batches
            are cut.
        recompute: what the backward computes again instead of keeping it (activation checkpointing). "none"; "full": a
            stage keeps only its inputs; "layer": each cut unit does; "selective": each cut unit also keeps the results
            of its matrix products. A list has one of them per stage; a dict is by module, {"blocks.*": "full", "head":
            "selective"}. {"memory_budget": "6GiB"}, or a list of budgets per stage, ["6GiB", None, ...]: the first
            batch chooses the units whose recomputation makes each stage fit in the least time; `explain()` shows the
            choice.
        precision: "bf16" or "fp16": mixed precision, under torch.autocast; `stagewright.Precision` adds a loss scale
            and torch.compile. By default the autocast that is active around a call, if any.
        verify: "first": the first training batch also runs through a copy of the plain model, in the process of the
            last stage, and losses, gradients, buffers and outputs are compared (see the method `verify`). If a copy
            would take much of the memory, cut units are compared one at a time instead. True: always with a copy. N:
            the first batch and every N-th after it. False: none.
        on_step: on_step(record), called in every process with the StepRecord of each `train_step` once its loss is
            known, in order. It must not make collective calls.
        seed: of random numbers such as those of dropout.
        timeout: of every wait for another rank [s].
        device: on which stages run; by default that of the model's parameters. "cuda": the GPU of LOCAL_RANK
            (docs/guides/gpus.md).
        weights: files with the model's weights, from which each process reads those of its own stages: a path, or
            `stagewright.Weights` (docs/guides/large_models.md).

    BatchNorm normalises each microbatch separately. With replicas, and with schedules such as "chimera" that hold each
    stage on two ranks, its running statistics see only the microbatches of their own rank (in one process they are
    shared), and a checkpoint holds those of a stage's first rank. The same is true for other buffers that a forward
    changes. If a forward reads what the previous one left, as spectral_norm's vectors do, replicas in one process read
    it in the order in which they run, so that numbers differ slightly from those of one pipeline.

    Raises ValueError, on every rank alike, for arguments that do not fit together.
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
        **unknown: Never,
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
        """Batch of a call. If one data replica raises an error for its batch, the others raise it too."""
        alone = self._building.pipeline is None or self._building.replica[1] == 1
        with nullcontext() if alone else self._guard.together():
            return self._calls.batch(args, kwargs) if has_target else self._calls.inputs(args, kwargs)

    def build(self, *inputs_and_target: Any, **keywords: Any) -> None:
        """Cuts the model and connects the ranks for batches like this one, without running it. Collective.

        Under schedule="auto" this includes profiling and planning. Without this call the first `train_step` does the
        same, and in one process the first evaluation prepares evaluation. Does nothing if the stages are built.

        Arguments:
            inputs_and_target, keywords: a batch as for `train_step`.

        Raises ValueError, on every rank alike, for a model that cannot be cut or a batch that does not fit.
        """
        with self._building.alone():
            given = self._given(inputs_and_target, keywords)
            self._building.built_for(given, evaluates=True)

    def read(self, *inputs: Any, **keywords: Any) -> Arguments:
        """Arguments with which the model's forward is called for these inputs.

        Arguments:
            inputs, keywords: as for `predict`.

        Raises ValueError for inputs that the forward does not take.
        """
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
        """Batches for this process: the same on all ranks of a pipeline, a different share for each data replica.

        Each `for batch in loader` is one epoch, shuffled with the module's seed. `save(..., loader=loader)` saves its
        position, from which a run with another batch size or number of replicas can resume: no sample is lost or used
        twice.

        Arguments:
            dataset: with `__len__` and `__getitem__`.
            batch_size: samples of one `train_step` of one data replica.
            shuffle: whether each epoch has an order of its own.
            remainder: treatment of the samples at the end of an epoch that do not fill a batch. "drop": they are left
                out. "carry": the first samples of the next epoch fill the batch (each sample is used exactly once per
                epoch). "keep": the last batch is smaller, so that an evaluation sees each sample once.
            same_shapes: promise that all batches have the shapes of the first. Processes whose stages read neither
                inputs nor target then load one batch only, and pass on its shapes.
            shared: "host": one of the processes of a host that pass the same batches reads and prepares them for all,
                through shared memory; if it ends, the others read for themselves. All processes must loop over the
                loader alike. Collective.
            cache: with shared="host", about so many bytes of samples stay in shared memory for all processes of the
                host, as `__getitem__` first returned them [bytes]; not for random augmentation.
            options: of `torch.utils.data.DataLoader` (num_workers, collate_fn, pin_memory, ...).

        Returns an iterable whose `state_dict` holds its position. Raises ValueError for sizes that make no batch, and
        for an IterableDataset.
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
        """Trains on one batch: forwards, backwards, clipping, update. `train_step(*inputs, target)`,
        `train_step(**batch)`.

        Under an asynchronous schedule it returns while batches are in flight: `result.loss` is that of the newest batch
        whose loss this rank knows, and `flush()` returns the others.

        The target is the keyword `target`, or else the last positional argument; it is passed whole to
        `loss_fn(output, target)`. With loss_fn="model" there is none. All other arguments are passed to the model's
        forward. A dict as the only argument (or the only one before the target) is read as keywords if one of its keys
        is a parameter of the forward. Tensors are cut with `torch.tensor_split` along their `batch_dims`; for each new
        value of a non-tensor the model is recorded again. Ranks of one pipeline pass the same batch.

        A batch may come cut into microbatches: `train_step(microbatches=[(x0, y0), (x1, y1), ...])`, M of them, each a
        tuple or a dict of keywords as for a whole batch. Their tensors may differ in size in any dimension, as
        sequences do that are padded per microbatch.

        Returns a StepResult with loss and gradient norm, the same on every rank. Raises ValueError for a batch that
        does not fit; NonFiniteLossError, before the update, for a loss that is infinite or not a number;
        PipelineTimeout and PeerLost, which name the rank and the message that were waited for.
        """
        with self._building.alone():
            self._building.options.require_optimizer()
            self._building.options.require_loss()
            given = self._given(inputs_and_target, keywords)
            return self._building.life.step_of(self._building.training_for(given))(given)

    def forward_backward(self, *inputs_and_target: Any, **keywords: Any) -> StepResult:
        """Runs forwards and backwards of one batch, without an update. Gradients add up in `.grad` of the model's
        Parameters.

        Arguments:
            inputs_and_target, keywords: a batch as for `train_step`.

        Returns a StepResult; raises as `train_step` does.
        """
        with self._building.alone():
            self._building.options.require_loss()
            given = self._given(inputs_and_target, keywords)
            return self._building.training_for(given).accumulate(given)

    def verify_if_due(self, *inputs_and_target: Any, **keywords: Any) -> None:
        """Verifies this batch if `verify=` asks for it at the next one, without training on it. Collective.

        Arguments:
            inputs_and_target, keywords: a batch as for `train_step`.

        Raises VerificationError, on every rank alike, if the pipeline's results differ (see `verify`).
        """
        if self._building.is_verification_due:
            self._building.training_for(self._given(inputs_and_target, keywords))

    def eval_step(self, *inputs_and_target: Any, **keywords: Any) -> EvalResult:
        """Evaluates one batch in evaluation mode: forwards, and the loss if there is a loss_fn.

        Arguments:
            inputs_and_target, keywords: a batch as for `train_step`, without a target if there is no loss_fn. One of
                fewer samples than M makes fewer microbatches.

        Returns an EvalResult; raises as `train_step` does.
        """
        with self._building.alone():
            given = self._given(inputs_and_target, keywords)
            return self._building.life.outlasting(lambda: self._building.evaluation_for(given).step(given))

    def predict(self, *inputs: Any, **keywords: Any) -> Any:
        """Output of the model for a batch, in evaluation mode, without loss and target.

        Arguments:
            inputs, keywords: the same on all ranks of a pipeline. They may differ in form from those of training.

        Returns the output as `EvalResult.output` has it, in processes of the last stage; None in others. Raises as
        `train_step` does.
        """
        with self._building.alone():
            given = self._given(inputs, keywords, has_target=False)
            return self._building.life.outlasting(lambda: self._building.evaluation_for(given).predict(given))

    def verify(self, *inputs_and_target: Any, **keywords: Any) -> Verification:
        """Runs a batch through the pipeline and through the plain model, and compares; nothing is trained. Collective.

        Compared are the outputs of an evaluation, the loss, each parameter's gradient, and the buffers after the batch
        of stages without replicas, all with the same random numbers. Weights, buffers, gradients, random state, Python
        attributes of modules and the step count are unchanged afterwards. It takes about the time of two steps plus one
        step of the whole model in one process, which meanwhile holds the model, its gradients and the activations of
        one microbatch. Over several processes it needs a `verify=` other than False. If verify="first" found no room
        for a copy, each process compares its own cut units instead: each as its stage runs it, and as a copy of it
        runs.

        Arguments:
            inputs_and_target, keywords: a batch as for `train_step`.

        Returns a Verification. Raises VerificationError, on every rank alike, which names the first module and
        parameter that differ and the likely cause; NotVerifiableError, a ValueError, if the plain model cannot be run.
        """
        with self._building.alone():
            self._building.options.require_loss()
            given = self._given(inputs_and_target, keywords)
            return self._building.verify(given)

    def clip_grad_norm_(self, max_norm: float, norm_type: float = 2.0, error_if_nonfinite: bool = False) -> float:
        """Clips the global gradient norm over all stages, as torch.nn.utils.clip_grad_norm_ does. Collective.

        Each element counts once, however many replicas or tied stages hold it.

        Arguments:
            max_norm: largest norm after the call.
            norm_type: p > 0 of the p-norm; math.inf or "inf": the largest absolute value.
            error_if_nonfinite: whether to raise RuntimeError, on every rank alike, for a norm that is infinite or not a
                number.

        Returns the norm before clipping.
        """
        training = self._building.built("clip_grad_norm_").training
        return training.clip(max_norm, norm_type=norm_type, error_if_nonfinite=error_if_nonfinite)

    def flush(self) -> list[StepResult]:
        """Completes the batches in flight of an asynchronous schedule. Collective.

        Evaluation, `verify`, checkpoints, `full_state_dict` and `close` do the same first.

        Returns results, oldest first, that no `train_step` of this rank has returned.
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
        """A `with` block closes the pipeline at its end; an error in the block reaches all ranks with its text."""
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if error is not None:
            self._guard.fail(error)
        self.close()

    def close(self) -> None:
        """Waits until all messages have arrived, and closes the links. Call it before the process group is destroyed.

        Afterwards weights and figures can still be read; a batch raises PipelineError.
        """
        self._building.is_closed = True
        if self._building.pipeline is not None:
            self._building.pipeline.training.close(self._building.options.timeout)
