"""`stagewright train --diagnose data`: how long a step waits for its data, why, and what would help.

    synthetic   one batch, made once, on the device      step = compute
    cached      a few batches from memory                     + transfer
    real        batches of the loader                         + preparation + fetch

Each runs for the same number of steps in turn (Mohan et al., "Analyzing and Mitigating Data Stalls in DNN Training",
VLDB 2021). The measured times of fetching and preparing a batch predict the step with other numbers of workers, with a
cache, and with a faster disk; the best number of workers and the cache are then tried.
"""

from __future__ import annotations

import itertools
import json
import platform
import sys
import time
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils import _pytree as pytree
from torch.utils.data import DataLoader, Dataset

from ...partition.plans.plan import Plan
from ...pipe import PipelineModule
from ...pipe.batch.loader import seed_generators
from ...schedules import Schedule
from ...schedules.wording import count, duration, size
from ..host import num_cores, physical_bytes
from ..launcher import report_to_launcher
from ..own_task import Batch
from .options import TrainOptions
from .pipeline import check_samples, gather, make_pipe, own_microbatches
from .task import make_task

WORKERS = (1, 2, 4, 8)  # numbers with a prediction
FASTER_DISKS = (2, 10)  # times
CACHED_BATCHES = 4
WARM_UP_STEPS = 3  # the first ones are slower
CACHE_SHARE = 4  # the cache is a quarter of the host's memory
NEAR = 1.03  # of the best prediction: prefers fewer workers within it, and ignores smaller gains
_Timed = tuple[Any, float, float]  # result of some work, its CPU seconds and its seconds
_WHATS = {
    "fetch": "fetch (Dataset.__getitem__)",
    "preparation": "preparation (collate_fn, rest of the loader)",
    "transfer": "transfer (to the device)",
    "other": "other (steps themselves that were slower)",
}


class _Made(NamedTuple):
    fetch: float
    prepare: float
    cpu: float
    num_bytes: int


class Measured(NamedTuple):
    """Means over the steps of one input [s], on the rank that waited longest for its data."""

    step: float
    fetch: float = 0.0
    prepare: float = 0.0
    transfer: float = 0.0
    made: float = 0.0  # fetching and preparing a batch, in any process
    fetching: float = 0.0  # that part of it
    cpu: float = 0.0  # of all processes of this host


class _TimedFetch(Dataset[Any]):
    def __init__(self, within: Any, kept: Mapping[Any, Any]) -> None:
        self._within, self._kept = within, kept

    def __getitem__(self, index: Any) -> _Timed:
        return _timed(lambda: self._within[index])

    def __getitems__(self, indices: Sequence[Any]) -> _Timed:
        return _timed(lambda: self.samples(indices))

    def samples(self, indices: Sequence[Any]) -> list[Any]:
        missing = [index for index in indices if index not in self._kept]
        if getattr(self._within, "__getitems__", None):
            read = iter(self._within.__getitems__(missing) if missing else ())
        else:
            read = (self._within[index] for index in missing)
        return [self._kept[index] if index in self._kept else next(read) for index in indices]


def _collated(within: Callable[[Any], Any], fetched: _Timed) -> tuple[Any, _Made]:
    samples, fetch_cpu, fetch = fetched
    batch, cpu, seconds = _timed(lambda: within(samples))
    sizes = (x.nbytes if isinstance(x, Tensor | np.ndarray) else sys.getsizeof(x) for x in pytree.tree_leaves(samples))
    return batch, _Made(fetch, seconds, fetch_cpu + cpu, sum(sizes))


def _timed(work: Callable[[], Any]) -> _Timed:
    began, cpu = time.perf_counter(), time.thread_time()
    done = work()
    return done, time.thread_time() - cpu, time.perf_counter() - began


class _Reader:
    """The user's loader, read again with other workers or a cache, each time from the next samples on."""

    def __init__(self, loader: DataLoader[Any], to_batch: Callable[[Any], Batch], *, seed: int) -> None:
        self._loader, self._to_batch, self._seed = loader, to_batch, seed
        self.num_workers = loader.num_workers
        dataset: Any = loader.dataset
        self.num_samples = len(dataset) if hasattr(dataset, "__len__") else None
        self._draws = self._endless()

    def batches(self, number: int, *, workers: int, cached: float = 0.0) -> Iterator[tuple[Batch, _Made]]:
        """The next `number` batches; `cached`: share of their samples that is already in memory."""
        loader, draws = self._loader, list(itertools.islice(self._draws, number))
        dataset = _TimedFetch(loader.dataset, {})
        if cached:
            known = list(dict.fromkeys(itertools.chain.from_iterable(draws)))
            kept = [index for at, index in enumerate(known) if int(at * cached) != int((at + 1) * cached)]
            dataset = _TimedFetch(loader.dataset, {index: dataset.samples([index])[0] for index in kept})
        same = ("pin_memory", "worker_init_fn", "generator", "timeout", "prefetch_factor", "multiprocessing_context")
        how: dict[str, Any] = {name: getattr(loader, name) for name in same[: None if workers else 3]}
        how |= {"sampler": draws, "batch_size": None} if loader.batch_sampler is None else {"batch_sampler": draws}
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message="This DataLoader will create")  # more workers than cores
            timed = partial(_collated, loader.collate_fn)
            read = iter(DataLoader(dataset, collate_fn=timed, num_workers=workers, **how))
        for batch, made in read:
            yield self._to_batch(batch), made

    def _endless(self) -> Iterator[Any]:
        loader = self._loader
        sampler: Iterable[Any] = loader.sampler if loader.batch_sampler is None else loader.batch_sampler
        for epoch in itertools.count():
            seed_generators(self._seed + epoch)  # equally in every process
            yield from sampler


def diagnose(options: TrainOptions, what: Schedule | Plan) -> int:
    """Run this process's part and print the results. Returns the exit status."""
    with report_to_launcher():
        task = make_task(options)
        reader = _Reader(*task.batches().loader("--diagnose data"), seed=options.seed)
        known = [batch for batch, _ in reader.batches(CACHED_BATCHES, workers=0)]
        with make_pipe(replace(options, verify=False), what, task, task.make_model(), known[0]) as pipe:
            for batch in known:
                check_samples(batch, num_microbatches=own_microbatches(pipe, options), task=task)
            found = _Diagnosis(options, pipe, reader, known).run()
            if pipe.rank == 0:
                print(json.dumps(found) if options.json else text(found))
    if dist.is_initialized():
        dist.destroy_process_group()
    return 0


class _Diagnosis:
    def __init__(self, options: TrainOptions, pipe: PipelineModule, reader: _Reader, known: Sequence[Batch]) -> None:
        self._steps = options.diagnose_steps
        self._pipe, self._reader, self._known = pipe, reader, known
        self._host, self._bytes_a_sample = platform.node(), 0.0
        whole = options.diagnose_cache or physical_bytes() // CACHE_SHARE
        self._cache = whole // gather(self._host).count(self._host)

    def run(self) -> dict[str, Any]:
        there = _moved(self._known[0], self._pipe.device)
        self._measure(itertools.repeat((there, None)), WARM_UP_STEPS)
        synthetic = self._measure(itertools.repeat((there, None)), self._steps)
        cached = self._measure(((batch, None) for batch in itertools.cycle(self._known)), self._steps)
        real = self._real(self._reader.num_workers)
        stall = real.step - synthetic.step
        # All ranks decide on the same figures.
        answers = self._tried(gather(self._predict(synthetic, real))[0], real)
        waits = (real.fetch, real.prepare, real.transfer)
        return {
            "steps": self._steps,
            "samples": self._known[0].num_samples,
            "ranks": len(gather(0)),
            "workers": self._reader.num_workers,
            "steps_seconds": {"synthetic": synthetic.step, "cached": cached.step, "real": real.step},
            "stall_seconds": stall,
            "causes_seconds": dict(zip(_WHATS, (*waits, stall - sum(waits)), strict=True)),
            "answers": answers,
        }

    def _real(self, workers: int, cached: float = 0.0) -> Measured:
        steps = -(-self._steps // max(1, workers)) * max(1, workers)  # whole rounds of all workers
        return self._measure(self._reader.batches(steps + 1, workers=workers, cached=cached), steps, workers)

    def _measure(self, source: Iterator[tuple[Batch, _Made | None]], steps: int, workers: int = 0) -> Measured:
        wait, move, made, samples = 0.0, 0.0, list[_Made](), 0
        batch, _ = next(source)
        gather(0)  # all ranks begin together
        began, cpu = time.perf_counter(), time.process_time()
        for _ in range(steps):
            moved, _, seconds = _timed(partial(_moved, batch, self._pipe.device))
            move += seconds
            self._pipe.train_step(*moved.args, **moved.kwargs)
            (batch, took), _, seconds = _timed(partial(next, source))
            if took is not None:
                wait, samples = wait + seconds, samples + batch.num_samples
                made.append(took)
        step, cpu = time.perf_counter() - began, time.process_time() - cpu
        self._pipe.flush()
        making = fetch = fetching = sum(each.fetch for each in made)
        if made:
            making += sum(each.prepare for each in made)
            self._bytes_a_sample = sum(each.num_bytes for each in made) / samples
        if workers:  # the step waits while they are late
            fetch, cpu = wait * fetching / max(making, 1e-9), cpu + sum(each.cpu for each in made)
        else:  # the step waits for the whole batch
            making = max(making, wait)
        sums = (step, fetch, wait - fetch, move, making, fetching, cpu)
        everybody = gather((self._host, Measured(*(each / steps for each in sums))))
        cpu = sum(each.cpu for host, each in everybody if host == self._host)
        slowest = max((each for _, each in everybody), key=lambda each: each.fetch + each.prepare + each.transfer)
        return slowest._replace(step=max(each.step for _, each in everybody), cpu=cpu)

    def _predict(self, synthetic: Measured, real: Measured) -> list[dict[str, Any]]:
        """Predicted steps for each change, with this host's processes and cores."""
        reader, now = self._reader, partial(step_with, synthetic, real, cores=num_cores())
        found = list[dict[str, Any]]()
        for n in (n for n in WORKERS if n != reader.num_workers):
            found.append({"change": count(n, "worker"), "workers": n, "predicted": now(workers=n)})
        now = partial(now, workers=reader.num_workers)
        if reader.num_samples is not None and self._bytes_a_sample:
            share = min(1.0, self._cache / (reader.num_samples * self._bytes_a_sample))
            change = f"a cache of {size(self._cache)} a rank ({share:.0%} of samples)"
            found.append({"change": change, "cached": share, "predicted": now(fetched=1 - share)})
        for times in FASTER_DISKS:
            found.append({"change": f"fetching {times} times faster", "predicted": now(fetched=1 / times)})
        return [{**each, "measured": None} for each in found]

    def _tried(self, answers: list[dict[str, Any]], real: Measured) -> list[dict[str, Any]]:
        """Measured steps with the fewest workers near the best prediction, and with the cache, if they should help."""
        best = min(each["predicted"] for each in answers if "workers" in each)
        first = next(each for each in answers if "workers" in each and each["predicted"] <= NEAR * best)
        for each in answers:
            if (each is first or "cached" in each) and NEAR * each["predicted"] < real.step:
                workers = each.get("workers", self._reader.num_workers)
                each["measured"] = self._real(workers, each.get("cached", 0.0)).step
        return answers


def _moved(batch: Batch, device: torch.device) -> Batch:
    moved = batch.map(lambda x: x.to(device))
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return moved


def step_with(synthetic: Measured, real: Measured, *, workers: int, cores: int, fetched: float = 1.0) -> float:
    """Predicted seconds of a step with `workers` per rank, if fetching takes only the share `fetched` of its time.

    Workers make batches while the step computes: the slower of both decides, or the CPU time of all processes of this
    host divided by its `cores`.

    >>> synthetic, real = Measured(0.03), Measured(0.09, fetching=0.04, made=0.06)
    >>> [step_with(synthetic, real, workers=n, cores=2) for n in (0, 1, 2)]
    [0.09, 0.06, 0.03]
    """
    making, compute = real.made - (1 - fetched) * real.fetching, synthetic.step + real.transfer
    return compute + making if workers == 0 else max(compute, making / workers, real.cpu / cores)


def text(found: Mapping[str, Any]) -> str:
    """Tables of at most 80 columns."""

    def row(*cells: str) -> str:
        return f"{cells[0]:<50}" + "".join(f"{cell:>12}" for cell in cells[1:])

    steps, stall = found["steps_seconds"], found["stall_seconds"]
    of = [count(found[name], name[:-1]) for name in ("steps", "samples", "ranks", "workers")]
    lines = [f"{of[0]} of {of[1]} with each input; {of[2]}, {of[3]} in each", "", row("input", "step", "waits")]
    for name, seconds in steps.items():
        lines.append(row(name, duration(seconds), f"{max(0.0, 1 - steps['synthetic'] / seconds):.1%}"))
    lines += ["", row("a step waits for", "seconds", "of stall")]
    for name, seconds in found["causes_seconds"].items():
        told = duration(abs(seconds)) if seconds >= 0 else f"-{duration(-seconds)}"
        lines.append(row(_WHATS[name], told, f"{seconds / stall:.1%}" if stall > 0 else "-"))
    lines += ["", row("a step with", "predicted", "measured")]
    for each in found["answers"]:
        measured = "-" if each["measured"] is None else duration(each["measured"])
        lines.append(row(each["change"], duration(each["predicted"]), measured))
    return "\n".join(lines)
