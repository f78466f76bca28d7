"""One rank of `stagewright train`: model, pipeline, training loop, validation, results."""

from __future__ import annotations

import json
import os
import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from functools import partial

import torch
import torch.distributed as dist

from ...partition.plans.plan import Plan
from ...partition.profiler.memory import peaks
from ...pipe import StepResult
from ...schedules import Schedule, simulate
from ..host import MemoryMeter
from ..launcher import report_to_launcher
from .corpus import Corpus, bits_per_byte, load_corpus
from .gpt import GPT, sample
from .options import TrainOptions
from .progress import Progress, make_progress
from .recipe import learning_rate_curve, make_model, make_pipe, may_verify
from .run_folder import Manifest, Metrics, RunFolder, Summary
from .traces import Traces

VALIDATION_WINDOWS = 512
TRACE_EVERY = 20  # steps; the traces of all ranks are gathered then
WATCHED_STEP = 2  # when all memory has been in use once
FIRST_TRACE = 3  # the steps before warm up caches and allocators
SAMPLE_PROMPT = b"import "
SAMPLE_BYTES = 240


def train(options: TrainOptions, what: Schedule | Plan | None) -> int:
    """Run this process's part of the training; exit status.

    Arguments:
        what: the schedule or plan to run; None: planned after measuring the first batch.
    """
    with report_to_launcher():
        rank = int(os.environ.get("RANK", "0"))
        corpus = load_corpus(options.text)
        corpus.check_length(options.length)
        folder = _make_folder(options, corpus) if rank == 0 else None
        _Training(options, what, corpus, folder).run()
    if dist.is_initialized():
        dist.destroy_process_group()
    return 0


@dataclass(slots=True, kw_only=True)
class _Record:
    """Measurements so far."""

    losses: list[float] = field(default_factory=list)  # [nats]
    step_seconds: list[float] = field(default_factory=list)
    bubbles: list[float] = field(default_factory=list)
    predicted_bubbles: list[float] = field(default_factory=list)
    traces: Traces | None = None
    seconds: float = 0.0
    tensor_bytes: int = 0  # of this process at the peak of the watched step


def _metrics(
    loss: float,
    grad_norm: float | None,
    *,
    step: int,
    batch_tokens: int,
    learning_rate: float,
    step_seconds: float,
    bubble: float | None,
    predicted_bubble: float | None,
) -> Metrics:
    return Metrics(
        step=step,
        tokens=(step + 1) * batch_tokens,
        loss=loss,
        bits_per_byte=bits_per_byte(loss),
        learning_rate=learning_rate,
        grad_norm=grad_norm,
        step_seconds=step_seconds,
        tokens_per_s=batch_tokens / step_seconds,
        bubble=bubble,
        predicted_bubble=predicted_bubble,
    )


class _Training:
    """One rank's run; the collective calls stand in the same order on all ranks."""

    def __init__(
        self, options: TrainOptions, what: Schedule | Plan | None, corpus: Corpus, folder: RunFolder | None
    ) -> None:
        self.options = options
        self.corpus = corpus
        self.folder = folder
        self.meter = MemoryMeter()
        model = make_model(options)
        self.config = model.config
        self.num_parameters = sum(parameter.numel() for parameter in model.parameters())
        first = self._batch(0)
        self.verifies = may_verify(model)  # before the stages of others are let go
        self.pipe = make_pipe(options, what, model, first[0])
        if what is None:
            if self.pipe.rank == 0 and not options.json:
                print("profiling the model and the links, and planning ...", file=sys.stderr, flush=True)
            self.pipe.build(*first)
        self.record = _Record()

    def run(self) -> None:
        with self.pipe:
            val_bits, resident, tensors, weights = self._run()
        if self.folder is not None:
            self._leave_behind(self.folder, val_bits=val_bits, resident=resident, tensors=tensors, weights=weights)

    def _run(self) -> tuple[float, tuple[int, ...], tuple[int, ...], dict[str, torch.Tensor]]:
        """Validation bits a byte, peak bytes of processes and of tensors, and the weights."""
        with make_progress(rank=self.pipe.rank, steps=self.options.steps, json=self.options.json) as progress:
            progress.note(self._title())
            if self.pipe.plan is not None:
                progress.note(self.pipe.plan.explain())
            self._verify(progress)
            self._train(progress)
        val_bits = bits_per_byte(self._validate())
        weights = self.pipe.full_state_dict()
        resident, tensors = gather(self.meter.peak()), gather(self.record.tensor_bytes)
        return val_bits, resident, tensors, weights

    def _batch(self, step: int) -> tuple[torch.Tensor, torch.Tensor]:
        options = self.options
        return self.corpus.batch(seed=options.seed, step=step, batch_size=options.batch, length=options.length)

    def _verify(self, progress: Progress) -> None:
        """The first batch against the plain model, before the clock and the memory meter count."""
        if not self.options.verify:
            return
        if not self.verifies:
            progress.note("not verified: a plain copy of the model would take more than an eighth of the memory")
            return
        found = self.pipe.verify(*self._batch(0))
        self.pipe.forget_measurements()
        self.meter.forget_peak()
        progress.note(
            f"verified against the plain model: loss, {found.num_gradients} gradients, outputs "
            f"({found.seconds:.1f} s, a copy of {found.copy_bytes / 1e6:.0f} MB)"
        )

    def _train(self, progress: Progress) -> None:
        started = time.perf_counter()
        rate = learning_rate_curve(self.options.steps)
        under_way: dict[int, Callable[[float, float | None], Metrics]] = {}  # steps whose loss is not known yet

        def known(result: StepResult) -> None:
            make_metrics = None if result.loss_step is None else under_way.pop(result.loss_step, None)
            if make_metrics is None or result.loss is None:
                return
            metrics = make_metrics(result.loss, result.grad_norm)
            self.record.losses.append(result.loss)
            progress.step(metrics)
            if self.folder is not None:
                self.folder.log(metrics)

        for step in range(self.options.steps):
            if step == 1:
                self.pipe.measured_costs()  # the link's latency: measured while little is under way
            tokens, targets = self._batch(step)
            before = time.perf_counter()
            result, *late = self._step(step, tokens, targets)
            seconds = time.perf_counter() - before
            self.record.step_seconds.append(seconds)
            if self._is_traced(step):
                self._trace(result)
            under_way[step] = partial(
                _metrics,
                step=step,
                batch_tokens=tokens.numel(),
                learning_rate=self.options.lr * rate(step),
                step_seconds=seconds,
                bubble=self.record.bubbles[-1] if self.record.bubbles else None,
                predicted_bubble=self.record.predicted_bubbles[-1] if self.record.bubbles else None,
            )
            for each in sorted((result, *late), key=lambda one: -1 if one.loss_step is None else one.loss_step):
                known(each)
        for result in self.pipe.flush():
            known(result)
        self.record.seconds = time.perf_counter() - started

    def _step(self, step: int, tokens: torch.Tensor, targets: torch.Tensor) -> list[StepResult]:
        """One batch; one of the first of a plan is watched for what it allocates, in a pipeline that was empty.

        Returns its result, and then those of earlier and later batches that a flush has told.
        """
        if self.pipe.plan is None or step != min(WATCHED_STEP, self.options.steps - 1):
            return [self.pipe.train_step(tokens, targets)]
        results: list[StepResult] = []
        before = self.pipe.flush()
        held = self.pipe.held_bytes()

        def watched() -> None:
            results.append(self.pipe.train_step(tokens, targets))
            results.extend(self.pipe.flush())

        self.record.tensor_bytes = held + peaks([watched], self.pipe.device)[0][0]
        return [*results, *before]

    def _trace(self, result: StepResult) -> None:
        measured = result.timeline()
        predicted = simulate(measured.schedule, self.pipe.measured_costs())
        self.record.traces = Traces(predicted=predicted, measured=measured)
        self.record.bubbles.append(measured.bubble)
        self.record.predicted_bubbles.append(predicted.bubble)

    def _is_traced(self, step: int) -> bool:
        """Now and then, and at the end, so that a run of any length has a trace."""
        return step % TRACE_EVERY == FIRST_TRACE or step == self.options.steps - 1

    def _validate(self) -> float:
        """Mean loss over the fixed windows of the held-out text [nats]."""
        batches = self.corpus.validation_batches(
            num_batches=max(1, VALIDATION_WINDOWS // self.options.batch),
            batch_size=self.options.batch,
            length=self.options.length,
        )
        losses = [self.pipe.eval_step(tokens, targets).loss for tokens, targets in batches]
        return statistics.fmean(loss for loss in losses if loss is not None)  # None: without a loss_fn only

    def _title(self) -> str:
        schedule, options = self.pipe.schedule, self.options
        return (
            f"{self.num_parameters:,} parameters in {schedule.num_stages} stages on "
            f"{schedule.num_ranks} ranks, {schedule.name}, {schedule.num_microbatches} microbatches; "
            f"{options.steps} steps of "
            f"{options.batch} x {options.length} bytes of {self.corpus.source}"
        )

    def _leave_behind(
        self,
        folder: RunFolder,
        *,
        val_bits: float,
        resident: tuple[int, ...],
        tensors: tuple[int, ...],
        weights: dict[str, torch.Tensor],
    ) -> None:
        record, schedule, plan = self.record, self.pipe.schedule, self.pipe.plan
        assert record.traces is not None
        tokens = self.options.steps * self.options.batch * self.options.length
        summary = Summary(
            schedule=schedule.name,
            num_ranks=schedule.num_ranks,
            num_stages=schedule.num_stages,
            num_microbatches=schedule.num_microbatches,
            parameters=self.num_parameters,
            steps=self.options.steps,
            tokens=tokens,
            seconds=record.seconds,
            tokens_per_s=tokens / record.seconds,
            train_bits_per_byte=bits_per_byte(statistics.fmean(record.losses[-20:])),
            val_bits_per_byte=val_bits,
            step_seconds=statistics.median(record.step_seconds),
            predicted_step_seconds=record.traces.predicted.batch_seconds,
            bubble=statistics.median(record.bubbles),
            predicted_bubble=statistics.median(record.predicted_bubbles),
            peak_memory_bytes=resident,
            peak_tensor_bytes=None if plan is None else tensors,
            planned_step_seconds=None if plan is None else plan.simulated_step_time,
            planned_memory_bytes=None if plan is None else _by_process(plan, len(resident)),
        )
        if plan is not None:
            folder.write_plan(plan.to_json())
        folder.write_summary(summary)
        record.traces.write(folder.path)
        picture, _ = record.traces.draw(folder.path)
        if self.options.json:
            print(json.dumps({**asdict(summary), "folder": str(folder.path)}))
            return
        print(report(summary))
        print(f"\nsample after {SAMPLE_PROMPT.decode()!r}, from the gathered weights:\n")
        print(self._sample(weights))
        print(f"\n{folder.path}/: summary.json, metrics.jsonl, {picture.name}, timeline.perfetto.json")

    def _sample(self, weights: dict[str, torch.Tensor]) -> str:
        """Text from a fresh model with the gathered weights: proof that they are whole."""
        fresh = GPT(self.config)
        fresh.load_state_dict(weights)
        text = sample(fresh, SAMPLE_PROMPT, num_bytes=SAMPLE_BYTES, length=self.config.length, seed=self.options.seed)
        return printable(SAMPLE_PROMPT + text)


def _by_process(plan: Plan, num_processes: int) -> tuple[float, ...]:
    """Predicted bytes of each process: of its rank, or of all ranks where one process has them all."""
    by_rank = plan.memory_bytes
    if num_processes == 1:
        return (sum(by_rank.values()),)
    return tuple(by_rank.get(rank, 0.0) for rank in range(num_processes))


def printable(text: bytes) -> str:
    """Text that a terminal shows as it is: a young model may well write escape sequences."""
    decoded = text.decode(errors="replace")
    return "".join(
        letter if letter.isprintable() or letter in "\n\t" else "\N{REPLACEMENT CHARACTER}" for letter in decoded
    )


def gather(number: int) -> tuple[int, ...]:
    """One number from each process, by rank; collective."""
    if not dist.is_initialized():
        return (number,)
    numbers: list[int] = [0] * dist.get_world_size()
    dist.all_gather_object(numbers, number)
    return tuple(numbers)


def report(summary: Summary) -> str:
    """The summary for people."""
    bits, predicted = summary.val_bits_per_byte, summary.predicted_step_seconds
    peaks = ", ".join(f"{peak / 1e6:.0f} MB" for peak in summary.peak_memory_bytes)
    planned = ""
    step, held, expected = summary.planned_step_seconds, summary.peak_tensor_bytes, summary.planned_memory_bytes
    if step is not None and held is not None and expected is not None:
        memory = ", ".join(
            f"{each / 1e6:.1f} / {there / 1e6:.1f} MB ({each / max(there, 1) - 1:+.1%})"
            for each, there in zip(expected, held, strict=True)
        )
        planned = (
            f"\nplan         step {step * 1e3:.1f} / {summary.step_seconds * 1e3:.1f} ms "
            f"({step / summary.step_seconds - 1:+.1%}), tensors at the peak {memory}: predicted / measured, by process"
        )
    return f"""
validation   {bits:.3f} bits/byte (training {summary.train_bits_per_byte:.3f})
speed        {summary.tokens_per_s:,.0f} tokens/s ({summary.tokens:,} tokens in {summary.seconds:.0f} s)
step         {summary.step_seconds * 1e3:.1f} ms measured, {predicted * 1e3:.1f} ms predicted without clipping
bubble       {summary.bubble:.1%} measured, {summary.predicted_bubble:.1%} predicted
peak memory  {peaks}, by process, above what stood at its start{planned}"""


def _make_folder(options: TrainOptions, corpus: Corpus) -> RunFolder:
    assert options.name is not None
    return RunFolder.create(
        Manifest.of(
            name=options.name,
            config=asdict(options),
            corpus_source=corpus.source,
            corpus_sha256=corpus.sha256,
        )
    )
