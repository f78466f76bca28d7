"""One rank of `stagewright train`: model, pipeline, training loop, validation, results."""

from __future__ import annotations

import json
import logging
import os
import statistics
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from itertools import chain
from typing import NamedTuple

import torch
import torch.distributed as dist

from ...partition.plans.as_schedule import expected
from ...partition.plans.plan import Plan
from ...pipe import StepRecord, StepResult
from ...pipe.figures.tracer import FIRST_TRACED
from ...schedules import Schedule, StepSamples, Timeline, simulate
from ...schedules.timing.sampling import with_range
from ...schedules.wording import count, duration, size, wrapped
from ...viz import Exhibit, MeasuredStep
from ..host import MemoryMeter
from ..launcher import report_to_launcher
from ..own_task import Batch
from .checkpoints import Checkpoints, may_go_on
from .corpus import bits_per_byte
from .options import TrainOptions
from .pipeline import check_samples, first, gather, make_pipe, may_verify, own_microbatches
from .progress import Progress, speed
from .run_folder import RUNS, Manifest, Metrics, RunFolder, Summary
from .task import Task, make_task
from .traces import TRACE_NAMES, draw

GATHER_EVERY = 20  # steps between gathers of all ranks' records, for the bubble in metrics.jsonl
WATCHED_STEP = 2  # by then all memory has been in use once


def train(options: TrainOptions, what: Schedule | Plan | None) -> int:
    """Run this process's part of the training under a schedule or plan (None: planned after measuring the first batch).
    Returns the exit status."""
    with report_to_launcher():
        rank = int(os.environ.get("RANK", "0"))
        task = make_task(options)
        folder = _make_folder(options, task) if rank == 0 else None
        _Training(options, what, task, folder).run()
    if dist.is_initialized():
        dist.destroy_process_group()
    return 0


class _Bubble(NamedTuple):
    step: int
    measured: float
    simulated: float


@dataclass(slots=True, kw_only=True)
class _Record:
    losses: list[float] = field(default_factory=list)
    step_seconds: list[float] = field(default_factory=list)
    bubbles: dict[int, _Bubble] = field(default_factory=dict)  # by step
    simulated: Timeline | None = None
    measured: Timeline | None = None  # step
    sampled: StepSamples | None = None  # steps drawn from the spread of durations, in process 0
    samples: int = 0
    seconds: float = 0.0
    tensor_bytes: int = 0  # of this process at the peak of the watched step

    @classmethod
    def of(cls, steps: Sequence[Metrics]) -> _Record:
        """Measurements of the steps before the run resumed."""
        record = cls(
            losses=[one.loss for one in steps],
            step_seconds=[one.step_seconds for one in steps],
            samples=steps[-1].samples if steps else 0,
            seconds=sum(one.step_seconds for one in steps),
        )
        for one in steps:
            if one.bubble is not None and one.simulated_bubble is not None:
                at = one.step if one.bubble_step is None else one.bubble_step
                record.bubbles[at] = _Bubble(at, one.bubble, one.simulated_bubble)
        return record

    def since(self, step: int) -> tuple[list[float], list[float], list[float]]:
        """Seconds, measured bubbles and simulated bubbles of the steps since `step`; of all if there are none."""
        bubbles = [each for each in self.bubbles.values() if each.step >= step] or self.bubbles.values()
        seconds = self.step_seconds[step:] or self.step_seconds
        return seconds, [each.measured for each in bubbles], [each.simulated for each in bubbles]


class _Training:
    """One rank's run; the order of collective calls is the same on all ranks."""

    def __init__(
        self, options: TrainOptions, what: Schedule | Plan | None, task: Task, folder: RunFolder | None
    ) -> None:
        if may_go_on(options):  # it was verified when it began
            options = replace(options, verify=False)
        self.options = options
        self.task = task
        self.folder = folder
        self.meter = MemoryMeter()
        self.record = _Record()
        self.told: list[StepRecord] = []  # by the pipeline, and not yet logged
        model = task.make_model()
        self.num_parameters = sum(parameter.numel() for parameter in model.parameters())
        self.batches = task.batches()
        self.first = next(self.batches)
        self.verifies = may_verify(model)  # before the stages of others are let go
        self.pipe = make_pipe(options, what, task, model, self.first, on_step=self.told.append)
        self.plans_here = what is None
        if self.plans_here:
            if options.json:
                logging.getLogger("stagewright").setLevel(logging.WARNING)
            self.pipe.build(*self.first.args, **self.first.kwargs)
            self.meter.forget_peak()  # a trial has a copy of the model
        self.checkpoints = Checkpoints(options, self.pipe, self.batches, folder)
        self.source: Iterator[Batch] = chain([self.first], self.batches)

    def run(self) -> None:
        with self.pipe:
            self.checkpoints.go_on()
            if self.checkpoints.first_step:
                self.source = iter(self.batches)
                self.record = _Record.of(self.checkpoints.known)
            if self.checkpoints.first_step >= self.options.steps:
                self._is_done()
                return
            # in a folder on each host; torchrun's processes name a run by their own clocks
            path = RUNS / first(str(self.options.name))
            self.tracer = self.pipe.tracer(path, every=self.options.trace_every)
            val_loss, resident, tensors, weights = self._run()
            if self.folder is not None:
                self._write_results(self.folder, val_loss=val_loss, resident=resident, tensors=tensors, weights=weights)
            self.checkpoints.end()

    def _is_done(self) -> None:
        if self.folder is None:
            return
        summary = self.folder.path / "summary.json"
        if self.options.json:
            print(json.dumps({**json.loads(summary.read_text()), "folder": str(self.folder.path)}))
        else:
            print(f"the run {self.options.name} is done, all {count(self.options.steps, 'step')} of it: {summary}")

    def _run(self) -> tuple[float | None, tuple[int, ...], tuple[int, ...], dict[str, torch.Tensor]]:
        with Progress(rank=self.pipe.rank, steps=self.options.steps, json=self.options.json) as progress:
            progress.note(self._title())
            for note in self.checkpoints.notes:
                progress.note(note)
            if self.pipe.plan is not None and not self.plans_here:  # a plan made here was printed
                progress.note(self.pipe.plan.explain())
            self._verify(progress)
            self._train(progress)
            also = "" if self.task.sample_bytes is None else "validating, and "
            progress.note(f"{also}gathering the weights ...")
            self.record.sampled = self.tracer.close()
            val_loss = self._validate(progress)
            weights = self.pipe.full_state_dict()
        resident, tensors = gather(self.meter.peak()), gather(self.record.tensor_bytes)
        return val_loss, resident, tensors, weights

    def _verify(self, progress: Progress) -> None:
        """Compare the first batch with the plain model, before time and memory are measured."""
        if not self.options.verify:
            return
        if not self.verifies:
            progress.note("not verified: a plain copy of the model would take more than an eighth of the memory")
            return
        found = self.pipe.verify(*self.first.args, **self.first.kwargs)
        self.pipe.forget_measurements()
        self.meter.forget_peak()
        progress.note(
            f"verified against the plain model: loss, {count(found.num_gradients, 'gradient')}, outputs "
            f"({duration(found.seconds)}, a copy of {size(found.copy_bytes)})"
        )

    def _train(self, progress: Progress) -> None:
        started, first = time.perf_counter(), self.checkpoints.first_step
        bubbles: dict[int, _Bubble | None] = {}  # the newest when a step had run
        for step in range(first, self.options.steps):
            with self.pipe.waiting_for_data():
                batch = next(self.source)
            check_samples(batch, num_microbatches=own_microbatches(self.pipe, self.options), task=self.task)
            if step == 1:
                self.pipe.measured_costs()  # the link's latency: measured while little is in flight
            if step == first + FIRST_TRACED:
                self.pipe.forget_measurements()  # those of the slower first steps, and of the one that was watched
            before = time.perf_counter()
            result = self._step(step, batch)
            self.record.step_seconds.append(time.perf_counter() - before)
            self.tracer.step()
            if step % GATHER_EVERY == FIRST_TRACED or step == self.options.steps - 1:  # so that any run has a bubble
                self._gather(step, result)
            bubbles[step] = next(reversed(self.record.bubbles.values()), None)  # of the last step that was gathered
            self._log(bubbles, progress)
            self.checkpoints.after(step, partial(self._log, bubbles, progress))
        self.pipe.flush()
        self._log(bubbles, progress)
        self.record.seconds += time.perf_counter() - started

    def _log(self, bubbles: dict[int, _Bubble | None], progress: Progress) -> None:
        for told in self.told:
            self.record.losses.append(told.loss)
            self.record.samples += told.num_samples
            metrics = _metrics(told, self.record.samples, self.task.sample_bytes, bubbles.pop(told.step))
            progress.step(metrics)
            if self.folder is not None:
                self.folder.log(metrics)
        self.told.clear()

    def _step(self, step: int, batch: Batch) -> StepResult:
        """One batch; memory is measured in one of the first, from an empty pipeline."""
        # Not in a resumed run; and only for plans if it slowed the only traced step, or drained a stream.
        watched, last = WATCHED_STEP, self.options.steps - 1
        if self.pipe.plan is not None:
            watched = min(watched, last)
        elif self.pipe.schedule.is_asynchronous or watched == last:
            watched = -1
        if step != watched:
            return self.pipe.train_step(*batch.args, **batch.kwargs)
        self.pipe.flush()
        with self.pipe.watch_memory() as memory:
            result = self.pipe.train_step(*batch.args, **batch.kwargs)
            self.pipe.flush()
        self.record.tensor_bytes = memory.peak_bytes
        self.tracer.note_bytes(self.pipe.stage_bytes(memory))
        return result

    def _gather(self, step: int, result: StepResult) -> None:
        measured, costs = result.timeline(), self.pipe.measured_costs()
        simulated = simulate(measured.schedule, costs)
        if self.record.simulated is None:
            self.tracer.write_simulation(costs)  # for a run that is ended before its end
        self.record.simulated, self.record.measured = simulated, measured
        self.record.bubbles[step] = _Bubble(step, measured.bubble, simulated.bubble)

    def _validate(self, progress: Progress) -> float | None:
        losses = list[float | None]()
        for batch in self.task.validation():
            losses.append(self.pipe.eval_step(*batch.args, **batch.kwargs).loss)
            progress.note_at_times(f"validated {count(len(losses), 'batch')} so far", seconds=4.0)
        return statistics.fmean(loss for loss in losses if loss is not None) if losses else None

    def _title(self) -> str:
        schedule, options, task = self.pipe.schedule, self.options, self.task
        samples, parts = self.first.num_samples, own_microbatches(self.pipe, options)
        what = count(samples, "sample") if task.sample_bytes is None else f"{samples} x {task.sample_bytes} bytes"
        loss = "" if options.model is None else f"; loss: {task.loss_name(self.first)}"
        first = f" (the first {options.flush_first} with a flush)" if options.flush_first else ""
        return (
            f"{count(self.num_parameters, 'parameter')} in {count(schedule.num_stages, 'stage')} on "
            f"{count(schedule.num_ranks, 'rank')}, {schedule.name}, {count(parts, 'microbatch')}; "
            f"{count(options.steps, 'step')}{first} of {what} of {task.source}{loss}"
        )

    def _write_results(
        self,
        folder: RunFolder,
        *,
        val_loss: float | None,
        resident: tuple[int, ...],
        tensors: tuple[int, ...],
        weights: dict[str, torch.Tensor],
    ) -> None:
        record, schedule, plan = self.record, self.pipe.schedule, self.pipe.plan
        sampled = record.sampled
        assert record.simulated is not None
        assert record.measured is not None
        text = self.task.sample_bytes
        train_loss = statistics.fmean(record.losses[-20:])
        flush_first = self.options.flush_first or 0
        step_seconds, bubbles, simulated_bubbles = record.since(flush_first)
        summary = Summary(
            schedule=schedule.name,
            num_ranks=schedule.num_ranks,
            num_stages=schedule.num_stages,
            num_microbatches=own_microbatches(self.pipe, self.options),
            parameters=self.num_parameters,
            steps=self.options.steps,
            flush_first=flush_first,
            samples=record.samples,
            tokens=None if text is None else record.samples * text,
            seconds=record.seconds,
            samples_per_s=record.samples / record.seconds,
            tokens_per_s=None if text is None else record.samples * text / record.seconds,
            train_loss=train_loss,
            train_bits_per_byte=None if text is None else bits_per_byte(train_loss),
            val_loss=val_loss,
            val_bits_per_byte=None if text is None or val_loss is None else bits_per_byte(val_loss),
            step_seconds=statistics.median(step_seconds),
            simulated_step_seconds=record.simulated.batch_seconds,
            predicted_step_seconds=None if sampled is None else sampled.median,
            predicted_step_range=None if sampled is None else sampled.range(),
            bubble=statistics.median(bubbles),
            simulated_bubble=statistics.median(simulated_bubbles),
            predicted_bubble=None if sampled is None else sampled.bubble,
            peak_memory_bytes=resident,
            peak_tensor_bytes=tensors if any(tensors) else None,
            planned_step_seconds=None if plan is None or (step := expected(plan)) is None else step[0],
            planned_memory_bytes=None if plan is None else _by_process(plan.memory_bytes, len(resident)),
            resumed_at=tuple(resume["step"] for resume in folder.resumes()),
            **self.checkpoints.summary,
        )
        if plan is not None:
            folder.write_plan(plan.to_json())
        folder.write_summary(summary)
        newest = MeasuredStep(self.options.steps - 1, record.measured)
        picture, trace = draw(
            Exhibit(
                name=str(self.options.name),
                simulated=record.simulated,
                measured=(newest,),
                sampled=sampled,
                context=schedule.num_microbatches // summary.num_microbatches,
            ),
            folder.path,
        )
        if self.options.json:
            print(json.dumps({**asdict(summary), "folder": str(folder.path)}))
            return
        print(wrapped(report(summary)))
        if self.task.describe is not None:
            print(f"\n{self.task.describe(weights)}")
        files = f"summary.json, metrics.jsonl, {picture.name}, {trace.name}, {TRACE_NAMES}"
        print(wrapped(f"\n{folder.path}/: {files}"))


def _by_process(by_rank: Mapping[int, float], num_processes: int) -> tuple[float, ...]:
    """Figures of each process: of its rank, or of all ranks if one process runs them all."""
    if num_processes == 1:
        return (sum(by_rank.values()),)
    return tuple(by_rank.get(rank, 0.0) for rank in range(num_processes))


def report(summary: Summary) -> str:
    lines = ["", f"loss         {_loss_line(summary)}", f"speed        {_speed_line(summary)}"]
    seconds, ends, bubble = summary.predicted_step_seconds, summary.predicted_step_range, summary.predicted_bubble
    if seconds is None or ends is None or bubble is None:
        step, bubble, how = duration(summary.simulated_step_seconds), summary.simulated_bubble, "simulated"
    else:
        step, how = with_range(seconds, ends), "predicted"
    lines += [
        f"step         {duration(summary.step_seconds)} measured, {step} {how}",
        f"bubble       {summary.bubble:.1%} measured, {bubble:.1%} {how}",
        f"peak memory  {', '.join(map(size, summary.peak_memory_bytes))}, by process, above that at its start",
    ]
    if summary.checkpoint_every is not None:
        share = "" if summary.checkpoint_overhead is None else f", {summary.checkpoint_overhead:.1%} of the time"
        failed = f", {summary.failed_checkpoints} failed" if summary.failed_checkpoints else ""
        every = count(summary.checkpoint_every, "step")
        lines.append(f"saved        {count(summary.checkpoints, 'checkpoint')}, one in {every} at last{share}{failed}")
    planned, held, expected = summary.planned_step_seconds, summary.peak_tensor_bytes, summary.planned_memory_bytes
    if planned is not None and held is not None and expected is not None:
        memory = ", ".join(
            f"{size(each)} / {size(there)} ({each / max(there, 1) - 1:+.1%})"
            for each, there in zip(expected, held, strict=True)
        )
        lines.append(
            f"plan         step {duration(planned)} / {duration(summary.step_seconds)} "
            f"({planned / summary.step_seconds - 1:+.1%}), tensors at the peak {memory}: predicted / measured, by "
            f"process"
        )
    return "\n".join(lines)


def _loss_line(summary: Summary) -> str:
    train, val = summary.train_bits_per_byte, summary.val_bits_per_byte
    if train is not None and val is not None:
        return f"{val:.3f} bits/byte in validation, {train:.3f} in training"
    validation = "" if summary.val_loss is None else f", {summary.val_loss:.4g} in validation"
    return f"{summary.train_loss:.4g} over the last steps{validation}"


def _speed_line(summary: Summary) -> str:
    done = count(summary.samples, "sample") if summary.tokens is None else count(summary.tokens, "token")
    rate = speed(samples_per_s=summary.samples_per_s, tokens_per_s=summary.tokens_per_s)
    return f"{rate} ({done} in {duration(summary.seconds)})"


def _metrics(told: StepRecord, samples: int, sample_bytes: int | None, bubble: _Bubble | None) -> Metrics:
    rate = told.num_samples / told.seconds
    at, measured, simulated = (None, None, None) if bubble is None else bubble
    return Metrics(
        step=told.step,
        samples=samples,
        tokens=None if sample_bytes is None else samples * sample_bytes,
        loss=told.loss,
        bits_per_byte=None if sample_bytes is None else bits_per_byte(told.loss),
        learning_rate=told.learning_rates[0] if told.learning_rates else None,
        grad_norm=told.grad_norm,
        step_seconds=told.seconds,
        samples_per_s=rate,
        tokens_per_s=None if sample_bytes is None else rate * sample_bytes,
        bubble=measured,
        simulated_bubble=simulated,
        bubble_step=at,
    )


def _make_folder(options: TrainOptions, task: Task) -> RunFolder:
    assert options.name is not None
    made = RunFolder.go_on if options.resume else RunFolder.create
    return made(
        Manifest.of(name=options.name, config=asdict(options), corpus_source=task.source, corpus_sha256=task.sha256)
    )
