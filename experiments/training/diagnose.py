"""`stagewright train --diagnose data`: how long a step waits for its data, for what, and what would help.

    synthetic   one batch, made once, on the device      step = compute
    cached      a few batches from memory                     + transfer
    real        what the loader gives                         + preparation + fetch

Each runs for as many steps in turn (Mohan et al., "Analyzing and Mitigating Data Stalls in DNN Training", VLDB 2021).
From what fetching and preparing a batch took follow the steps with other numbers of workers, with a cache, and with a
faster disk; the best workers and the cache are then tried.
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
from .pipeline import check_samples, make_pipe
from .task import make_task
from .together import gather

WORKERS = (1, 2, 4, 8)  # that a prediction is made for
FASTER_DISKS = (2, 10)  # times
CACHED_BATCHES = 4
WARM_UP_STEPS = 3  # the first ones are slower
CACHE_SHARE = 4  # of the memory, for all processes of a host together: a quarter
NEAR = 1.03  # of the best prediction: fewer workers that reach it are preferred, and gains below it are none


class _Made(NamedTuple):
    """Seconds that one batch took to be made, those of them on a core, and the bytes of its samples."""

    fetch: float
    prepare: float
    cpu: float
    num_bytes: int


class _Fetched(NamedTuple):
    samples: Any
    seconds: float
    cpu: float


class Measured(NamedTuple):
    """Means over the steps of one input [s]: on the rank that waited most for its data."""

    step: float
    fetch: float = 0.0
    prepare: float = 0.0
    transfer: float = 0.0
    made: float = 0.0  # fetching and preparing a batch, whoever waited for it
    fetching: float = 0.0  # of these
    cpu: float = 0.0  # of all processes of this host

    @property
    def waited(self) -> float:
        return self.fetch + self.prepare + self.transfer


class _TimedFetch(Dataset[Any]):
    """A dataset whose samples come with the seconds that they took; those of `kept` come from memory."""

    def __init__(self, within: Any, kept: Mapping[Any, Any] | None = None) -> None:
        self._within = within
        self._kept = kept or {}

    def __getitem__(self, index: Any) -> _Fetched:
        return self._timed(lambda: self._within[index])

    def __getitems__(self, indices: Sequence[Any]) -> _Fetched:
        return self._timed(lambda: self.samples(indices))

    def samples(self, indices: Sequence[Any]) -> list[Any]:
        missing = [index for index in indices if index not in self._kept]
        if getattr(self._within, "__getitems__", None):
            found = list(self._within.__getitems__(missing)) if missing else []
        else:
            found = [self._within[index] for index in missing]
        read = iter(found)
        return [self._kept[index] if index in self._kept else next(read) for index in indices]

    def _timed(self, fetch: Callable[[], Any]) -> _Fetched:
        began, cpu = time.perf_counter(), time.thread_time()
        samples = fetch()
        return _Fetched(samples, time.perf_counter() - began, time.thread_time() - cpu)


class _TimedCollate:
    """A collate_fn whose batches come with what making them took."""

    def __init__(self, within: Callable[[Any], Any]) -> None:
        self._within = within

    def __call__(self, fetched: _Fetched) -> tuple[Any, _Made]:
        num_bytes = _num_bytes(fetched.samples)
        began, cpu = time.perf_counter(), time.thread_time()
        batch = self._within(fetched.samples)
        took, busy = time.perf_counter() - began, time.thread_time() - cpu
        return batch, _Made(fetched.seconds, took, fetched.cpu + busy, num_bytes)


class _Reader:
    """The user's loader, read once more with other workers or a cache; each time samples that come next."""

    def __init__(self, loader: DataLoader[Any], to_batch: Callable[[Any], Batch], *, seed: int) -> None:
        self._loader, self._to_batch, self._seed = loader, to_batch, seed
        self.num_workers = loader.num_workers
        self.num_samples = len(loader.dataset) if hasattr(loader.dataset, "__len__") else None  # type: ignore[arg-type]
        self._draws = self._endless()

    def batches(self, number: int, *, workers: int, cached: float = 0.0) -> Iterator[tuple[Batch, _Made]]:
        """So many batches; `cached` is the share of their samples that is in memory before."""
        loader, draws = self._loader, list(itertools.islice(self._draws, number))
        dataset = _TimedFetch(loader.dataset)
        if cached:
            known = list(dict.fromkeys(itertools.chain.from_iterable(draws)))
            kept = [index for at, index in enumerate(known) if int(at * cached) != int((at + 1) * cached)]
            dataset = _TimedFetch(loader.dataset, {index: dataset.samples([index])[0] for index in kept})
        ahead = {"prefetch_factor": loader.prefetch_factor} if workers else {}
        order: dict[str, Any] = {"sampler": draws, "batch_size": None}
        read = partial(
            DataLoader,
            dataset,
            **(order if loader.batch_sampler is None else {"batch_sampler": draws}),
            num_workers=workers,
            collate_fn=_TimedCollate(loader.collate_fn),
            pin_memory=loader.pin_memory,
            timeout=loader.timeout if workers else 0,
            worker_init_fn=loader.worker_init_fn,
            multiprocessing_context=loader.multiprocessing_context if workers else None,
            generator=loader.generator,
            **ahead,
        )
        with warnings.catch_warnings():
            warnings.filterwarnings(
                "ignore", message="This DataLoader will create"
            )  # more workers than cores: sleepers
            made_batches = iter(read())
        for batch, made in made_batches:
            yield self._to_batch(batch), made

    def _endless(self) -> Iterator[Any]:
        sampler: Iterable[Any] = (
            self._loader.sampler if self._loader.batch_sampler is None else self._loader.batch_sampler
        )
        for epoch in itertools.count():
            seed_generators(self._seed + epoch)  # alike in every process
            yield from sampler


def diagnose(options: TrainOptions, what: Schedule | Plan) -> int:
    """Run this process's part, and print what was found; exit status."""
    with report_to_launcher():
        task = make_task(options)
        batches = task.batches()
        reader = _Reader(*batches.loader("--diagnose data"), seed=options.seed)
        known = [batch for batch, _ in reader.batches(CACHED_BATCHES, workers=0)]
        with make_pipe(replace(options, verify=False), what, task, task.make_model(), known[0]) as pipe:
            for batch in known:
                check_samples(batch, num_microbatches=pipe.schedule.num_microbatches, task=task)
            found = _Diagnosis(options, pipe, reader, known).run()
            if pipe.rank == 0:
                print(json.dumps(found) if options.json else text(found))
    if dist.is_initialized():
        dist.destroy_process_group()
    return 0


class _Diagnosis:
    """One rank's steps; the collective calls stand in the same order on all ranks."""

    def __init__(self, options: TrainOptions, pipe: PipelineModule, reader: _Reader, known: Sequence[Batch]) -> None:
        self._steps = options.diagnose_steps
        self._pipe, self._reader, self._known = pipe, reader, known
        self._readers = gather(platform.node()).count(platform.node())  # processes of this host
        whole = options.diagnose_cache or physical_bytes() // CACHE_SHARE
        self._cache = whole // self._readers
        self._bytes_a_sample = 0.0

    def run(self) -> dict[str, Any]:
        device, reader = self._pipe.device, self._reader
        there = self._known[0].map(lambda x: x.to(device))
        self._measure(itertools.repeat((there, None)), WARM_UP_STEPS)
        synthetic = self._measure(itertools.repeat((there, None)), self._steps)
        cached = self._measure(((batch, None) for batch in itertools.cycle(self._known)), self._steps)
        real = self._real(reader.num_workers)
        answers = gather(self._predict(synthetic, real))[0]  # what is tried is decided on figures that all have alike
        self._try(answers, real)
        return {
            "steps": self._steps,
            "samples": self._known[0].num_samples,
            "ranks": len(gather(0)),
            "workers": reader.num_workers,
            "steps_seconds": {"synthetic": synthetic.step, "cached": cached.step, "real": real.step},
            "stall_seconds": real.step - synthetic.step,
            "causes_seconds": {
                "fetch": real.fetch,
                "preparation": real.prepare,
                "transfer": real.transfer,
                "other": real.step - synthetic.step - real.waited,
            },
            "answers": answers,
        }

    def _real(self, workers: int, cached: float = 0.0) -> Measured:
        steps = self._steps if workers == 0 else -(-self._steps // workers) * workers  # whole rounds of all workers
        return self._measure(self._reader.batches(steps + 1, workers=workers, cached=cached), steps, workers)

    def _measure(self, source: Iterator[tuple[Batch, _Made | None]], steps: int, workers: int = 0) -> Measured:
        """Steps on batches of a source, from the moment at which the first one is there."""
        waits, moves, made = list[float](), list[float](), list[_Made]()
        batch, _ = next(source)
        gather(0)  # all ranks begin together
        began, cpu, samples = time.perf_counter(), time.process_time(), 0
        for _ in range(steps):
            before = time.perf_counter()
            moved = self._moved(batch)
            moves.append(time.perf_counter() - before)
            self._pipe.train_step(*moved.args, **moved.kwargs)
            before = time.perf_counter()
            batch, took = next(source)
            if took is not None:
                waits.append(time.perf_counter() - before)
                made.append(took)
                samples += batch.num_samples
        own = (time.perf_counter() - began, time.process_time() - cpu)
        self._pipe.flush()
        if made:
            self._bytes_a_sample = sum(each.num_bytes for each in made) / samples
        return self._together(own, waits, moves, made, workers)

    def _together(
        self,
        own: tuple[float, float],
        waits: Sequence[float],
        moves: Sequence[float],
        made: Sequence[_Made],
        workers: int,
    ) -> Measured:
        steps, fetching = len(moves), sum(each.fetch for each in made)
        making, waited = fetching + sum(each.prepare for each in made), sum(waits)
        if workers == 0:  # all that a batch takes is waited for
            making, fetch = max(making, waited), fetching
        else:  # only what the workers are late with
            fetch = waited * fetching / making
        transfer, busy = sum(moves), sum(each.cpu for each in made) if workers else 0.0
        sums = (own[0], fetch, waited - fetch, transfer, making, fetching)
        mine = Measured(*(each / steps for each in sums), cpu=(own[1] + busy) / steps)
        everybody = gather((platform.node(), mine))
        cpu = sum(each.cpu for node, each in everybody if node == platform.node())
        slowest = max((each for _, each in everybody), key=lambda each: each.waited)
        return slowest._replace(step=max(each.step for _, each in everybody), cpu=cpu)

    def _moved(self, batch: Batch) -> Batch:
        device = self._pipe.device
        moved = batch.map(lambda x: x.to(device))
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        return moved

    def _predict(self, synthetic: Measured, real: Measured) -> list[dict[str, Any]]:
        """Steps under each change, for the processes and cores of this host."""
        reader, now = self._reader, partial(step_with, synthetic, real, cores=num_cores())
        found: list[dict[str, Any]] = [
            {"change": count(n, "worker"), "workers": n, "predicted": now(workers=n)}
            for n in WORKERS
            if n != reader.num_workers
        ]
        now = partial(now, workers=reader.num_workers)
        if reader.num_samples is not None and self._bytes_a_sample:
            share = min(1.0, self._cache / (reader.num_samples * self._bytes_a_sample))
            of = f" ({share:.0%} of the samples)" if share < 1 else ""
            change = f"a cache of {size(self._cache)} a rank{of}"
            found.append({"change": change, "cached": share, "predicted": now(fetched=1 - share)})
        for times in FASTER_DISKS:
            found.append({"change": f"fetching {times} times faster", "predicted": now(fetched=1 / times)})
        return [{**each, "measured": None} for each in found]

    def _try(self, answers: list[dict[str, Any]], real: Measured) -> None:
        """Measure the fewest workers that are as good as any, and the cache, where they should help."""
        ours = [each for each in answers if "workers" in each]
        best = min(each["predicted"] for each in ours)
        tried = [next(each for each in ours if each["predicted"] <= NEAR * best)]
        for each in (*tried, *(one for one in answers if "cached" in one)):
            if NEAR * each["predicted"] < real.step:
                workers = each.get("workers", self._reader.num_workers)
                each["measured"] = self._real(workers, each.get("cached", 0.0)).step


def step_with(synthetic: Measured, real: Measured, *, workers: int, cores: int, fetched: float = 1.0) -> float:
    """Seconds of a step with so many workers a rank, where fetching takes this share of its time.

    Workers make batches while the step computes: the slowest of the two, or the cores, decide.

    >>> synthetic, real = Measured(0.03), Measured(0.09, fetching=0.04, made=0.06)
    >>> [step_with(synthetic, real, workers=n, cores=2) for n in (0, 1, 2)]
    [0.09, 0.06, 0.03]
    """
    making, compute = real.made - (1 - fetched) * real.fetching, synthetic.step + real.transfer
    return compute + making if workers == 0 else max(compute, making / workers, real.cpu / cores)


def text(found: Mapping[str, Any]) -> str:
    """Tables for people, at most 80 columns wide."""
    steps, stall = found["steps_seconds"], found["stall_seconds"]
    lines = [
        f"{count(found['steps'], 'step')} of {count(found['samples'], 'sample')} with each input, on "
        f"{count(found['ranks'], 'rank')}, {count(found['workers'], 'worker')} in each",
        "",
        f"{'input':<44}{'step':>12}{'waits':>12}",
    ]
    for name, seconds in steps.items():
        lines.append(f"{name:<44}{duration(seconds):>12}{max(0.0, seconds - steps['synthetic']) / seconds:>12.1%}")
    lines += ["", f"{'a step waits for':<44}{'seconds':>12}{'of stall':>12}"]
    whats = {
        "fetch": "fetch (Dataset.__getitem__)",
        "preparation": "preparation (collate_fn, rest of the loader)",
        "transfer": "transfer (to the device)",
        "other": "other (the steps themselves were slower)",
    }
    for name, seconds in found["causes_seconds"].items():
        share = f"{seconds / stall:.1%}" if stall > 0 else "-"
        lines.append(f"{whats[name]:<44}{_signed(seconds):>12}{share:>12}")
    lines += ["", f"{'a step with':<44}{'predicted':>12}{'measured':>12}"]
    for each in found["answers"]:
        measured = "-" if each["measured"] is None else duration(each["measured"])
        lines.append(f"{each['change']:<44}{duration(each['predicted']):>12}{measured:>12}")
    return "\n".join(lines)


def _signed(seconds: float) -> str:
    return f"-{duration(-seconds)}" if seconds < 0 else duration(seconds)


def _num_bytes(samples: Any) -> int:
    """Of what a cache would keep."""
    leaves = pytree.tree_leaves(samples)
    return sum(x.nbytes if isinstance(x, Tensor | np.ndarray) else sys.getsizeof(x) for x in leaves)
