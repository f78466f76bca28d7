"""`stagewright plan`: chooses sizes, schedule, microbatch and cuts, and shows how much slower the runners-up are.

stagewright plan --profile gpt.json --ranks 4 --batch 64
stagewright plan --model m.py:make --data m.py:batches --ranks 2 --batch 32
stagewright plan --profile b1.json b2.json b4.json --cluster 4x8:nvlink=300GB/s,net=12GB/s:80GB --batch 512
stagewright plan --transformer layers=100,hidden=8192,heads=64,vocabulary=51200,length=2048 --device a100 \\
    --cluster 128x8:nvlink=300GB/s,infiniband=25GB/s --batch 1536
stagewright plan --calibrate runs.csv --profile ..        measured steps correct what plans are computed from
stagewright plan --check runs/gpt                         the plan of a run compared with its measurement
"""

from __future__ import annotations

import math
import re
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import product
from pathlib import Path
from typing import Literal

from ...partition import Cluster, Plan, Profile, ProfileSource, plan
from ...partition.analytic import TransformerSource
from ...partition.plans.record import Searched
from ...partition.plans.reorder import reorder
from ...partition.search.arguments import CHUNK_SIZES, SCHEDULES, listed
from ...schedules.wording import duration, size, wrapped
from ..options import check_out, plain_help, read, read_tensor_parallel, write_out
from ..train.options import DEFAULT_CLIP
from .plan_source import SourceOptions, read_cluster, read_source

_NO_LINKS = (
    "links: messages and sums take no time (--cluster says what they take; `stagewright profile --links` writes it)"
)
_ALONE = (
    "ranks that share a host slow each other down, which is not in these seconds: `stagewright profile --ranks N` of "
    "each microbatch size measures on N ranks at once, and `plan --profile FILE...` takes its files"
)
PROFILE_SECONDS = 16.0  # for all microbatch sizes together, tracing apart
_EVERY = 1.0  # seconds between two lines of progress
_OPTIONS = {  # as `plan` calls them
    "global_batch": "--batch",
    "schedules": "--schedules",
    "microbatch_sizes": "--microbatches",
    "pipeline_sizes": "--pipeline",
    "data_sizes": "--replicas",
    "tensor_sizes": "--tensor",
    "context": "--context",
    "expert": "--expert",
    "chunk_sizes": "--chunks",
    "recompute": "--recompute",
    "optimizer_sharding": "--optimizer-sharding",
    "max_grad_norm": "--clip",
    "runnable=True": "--runnable",
    "seconds": "--seconds",
}


@plain_help
@dataclass(frozen=True, slots=True, kw_only=True)
class PlanOptions(SourceOptions):
    """Plan the training of a profiled model, of your own (profiled here), of PipeDream's profile or a transformer."""

    batch: int  # Samples of a batch.
    # Memory of a device, such as 80GB (default: the cluster's, or with --transformer the device's).
    memory: str | None = None
    schedules: tuple[str, ...] = SCHEDULES  # Schedules to choose from.
    # Microbatch sizes to choose from (default: all known ones that divide the batch).
    microbatches: tuple[int, ...] | None = None
    pipeline: tuple[int, ...] | None = None  # Pipeline sizes to choose from.
    replicas: tuple[int, ...] | None = None  # Numbers of replicas to choose from.
    # Tensor-parallel sizes to choose from (default: those of the profiles; with --model 1).
    tensor: tuple[int, ...] | None = None
    # With --transformer: numbers of parts of each sequence to choose from; each part has tensor ranks of its own.
    context: tuple[int, ...] = (1,)
    # With --transformer: numbers of ranks that divide the experts of a layer, to choose from.
    expert: tuple[int, ...] = (1,)
    # With --model: how modules are cut: auto, or a JSON file of {pattern: column, row or sequence}.
    tensor_parallel: str = "auto"
    chunks: tuple[int, ...] = CHUNK_SIZES  # Stages per rank to choose from, for schedules with several.
    # Recomputation of a stage to choose from: nothing, the stage as a whole, each of its parts separately, or in each
    # all but matrix products (default: all that the profiles have figures for).
    recompute: tuple[Literal["none", "full", "layer", "selective", "keep_less", "offload"], ...] | None = None
    # Sharding of the optimizer's state to choose from.
    optimizer_sharding: tuple[Literal["none", "full"], ...] = ("none", "full")
    # Largest norm of all gradients, as the run's --clip: ranks wait for the norm. 0: no clipping (default: that of the
    # profiles; with --model 1).
    clip: float | None = None
    runnable: bool = False  # Only plans that `stagewright train --plan` can run.
    # Longest time of the search [s], continued until a plan is found (default: until no other can be faster); of
    # --joint as many more, of CPU time (default: 20).
    seconds: float | None = None
    # Also search for cut, placement and order of a chain of layers together, with any number of stages on a rank, and
    # take the better plan.
    joint: bool = False
    # Time to search for a better order of the plan's actions in no more memory [s] (default: keep the schedule's).
    order_seconds: float = 0.0
    out: Path | None = None  # Write the plan to this file, as JSON.
    json: bool = False  # Print the plan as JSON and no tables.
    # A run: compare its plan with its measurement, by cause (`stagewright plan --check RUN --help`).
    check: tuple[str, ...] = ()
    # Measured steps: fit the device or the cluster to them (`stagewright plan --calibrate RUNS.csv --help`).
    calibrate: Path | None = None


def run(argv: Sequence[str]) -> int:
    if any(word.partition("=")[0] == "--check" for word in argv):
        from . import plan_check

        return plan_check.run(argv)
    if any(word.partition("=")[0] == "--calibrate" for word in argv):
        from . import plan_calibrate

        return plan_calibrate.run(argv)
    options = read(PlanOptions, argv, "plan")
    options.check_own({})
    if not 0 <= options.order_seconds < math.inf:
        raise ValueError(f"--order-seconds {options.order_seconds}: expected seconds, at least 0")
    if options.out is not None:
        check_out("--out", options.out, sources=[options.tensor_parallel, *options.files])
    cluster = read_cluster(options)
    source, default_memory = read_source(options, cluster, partial(_profiled, options, cluster))
    if isinstance(source, TransformerSource):
        cluster = source.device.reached(cluster)
    elif {*options.context, *options.expert} != {1}:
        split = f"--context {listed(options.context)} --expert {listed(options.expert)}"
        raise ValueError(f"{split}: expected 1 each, or --transformer, whose formulas alone have them")
    limit = _memory(options.memory) if options.memory is not None else None
    if limit is None and all(kind.memory_bytes is None for kind in cluster.used_kinds):
        limit = default_memory
    started = time.perf_counter()
    try:
        found = _planned(options, source, cluster, limit)
    except ValueError as error:
        raise ValueError(as_typed(str(error))) from None
    if options.order_seconds:
        given = source if isinstance(source, list) else []
        profile = next((each for each in given if each.microbatch_size == found.microbatch_size), None)
        found = reorder(found, profile, seconds=options.order_seconds)
    taken = f"planned in {duration(time.perf_counter() - started)}"
    if options.out is not None:
        write_out(options.out, found.to_json())
    taken = "\n".join([*_origin(options, source, cluster, limit), *_norm(options, source, found), taken])
    print(found.to_json() if options.json else found.explain())
    print(taken if options.json else wrapped(taken), file=sys.stderr if options.json else sys.stdout)
    return 0


def _origin(
    options: PlanOptions, source: list[Profile] | ProfileSource, cluster: Cluster, limit: float | None
) -> Iterator[str]:
    if isinstance(source, TransformerSource):
        others = "a name, such as v100, or the JSON file of a DeviceModel"
        seconds = f"formulas on the device {source.device.name} (--device gives another: {others})"
    elif options.pipedream is not None:
        seconds = f"PipeDream's profile {options.pipedream}"
    elif options.profile:
        files = ", ".join(map(str, options.profile))
        seconds = f"{files}, as measured (`stagewright profile` measures anew)"
    else:
        seconds = "the model, profiled here just now in one process, with the host to itself"
    sizes = {limit} if limit is not None else {kind.memory_bytes for kind in cluster.used_kinds}
    known = sorted(each for each in sizes if each is not None)
    if not known:
        memory = "no limit is known (--memory 80GB gives one)"
    else:
        memory = f"{' to '.join(map(size, dict.fromkeys((known[0], known[-1]))))} (--memory gives another)"
    yield f"seconds and bytes: {seconds}"
    if options.model is not None and cluster.num_devices > 1:
        yield _ALONE
    if options.cluster is None:
        yield _NO_LINKS
    yield f"memory of a device: {memory}"


def _norm(options: PlanOptions, source: list[Profile] | ProfileSource, found: Plan) -> Iterator[str]:
    measured = {each.max_grad_norm for each in source} if isinstance(source, list) else set()
    known = next(iter(measured), None)
    if known is None and options.clip is None:
        yield f"norm of gradients: ranks wait for none (--clip {DEFAULT_CLIP:g}, as `stagewright train` has it)"
    elif found.costs.norm is not None:
        yield f"norm of gradients: ranks wait {duration(found.costs.norm)} for it (--clip 0: none)"
    if known is not None and options.clip is not None and bool(known) != bool(options.clip):
        with_it = "with" if known else "without"
        yield (
            f"--clip {options.clip:g}: the update's seconds are {with_it} clipping all the same: `stagewright profile "
            f"--clip {options.clip:g}` measures them"
        )


def _planned(
    options: PlanOptions, source: Sequence[Profile] | ProfileSource, cluster: Cluster, memory_limit: float | None
) -> Plan:
    last = time.perf_counter()

    def report(searched: Searched, best: float | None) -> None:
        nonlocal last
        if time.perf_counter() - last < _EVERY:
            return
        last = time.perf_counter()
        known = "" if best is None else f", best so far {duration(best)} a batch"
        counts = f"{searched.considered:,} configurations, {searched.cut:,} cut, {searched.simulated:,} simulated"
        print(f"planning: {counts}{known}", file=sys.stderr, flush=True)

    if isinstance(source, TransformerSource):
        source = replace(source, splits=tuple(product(options.context, options.expert)))
    return plan(
        source,
        cluster,
        global_batch=options.batch,
        memory_limit=memory_limit,
        schedules=options.schedules,
        microbatch_sizes=options.microbatches,
        pipeline_sizes=options.pipeline,
        data_sizes=options.replicas,
        tensor_sizes=options.tensor,
        chunk_sizes=options.chunks,
        recompute=options.recompute,
        optimizer_sharding=options.optimizer_sharding,
        runnable=options.runnable,
        seconds=options.seconds,
        max_grad_norm=options.clip,
        search="joint" if options.joint else "named",
        progress=report,
    )


def as_typed(message: str) -> str:
    """The message of `plan` with each argument replaced by the option that sets it.

    >>> as_typed("chunk_sizes: 1: expected at least 2")
    '--chunks 1: expected at least 2'
    """
    message = re.sub("^unknown schedule", "--schedules: unknown schedule", message).replace("search='joint'", "--joint")
    for name, option in _OPTIONS.items():
        message = re.sub(rf"\b{name}: (?=-?\d)|\b{name}=\b", f"{option} ", message)
        message = re.sub(rf"(?<!-)\b{name}(?=[:=])|\b{name}$|(?<=with ){name}\b", option, message)
    return message


def _profiled(options: PlanOptions, cluster: Cluster) -> list[Profile]:
    from ...pipe.auto.layout import sizes_to_profile
    from ..own_profile import profile_own

    sizes = options.microbatches or sizes_to_profile(options.batch, cluster.num_devices)
    return profile_own(
        options,
        sizes,
        batch_size=options.batch,
        seconds=PROFILE_SECONDS,
        split_backward=False,
        max_grad_norm=DEFAULT_CLIP if options.clip is None else options.clip,
        tensor_sizes=options.tensor or (1,),
        tensor_parallel=read_tensor_parallel(options.tensor_parallel),
    )


def _memory(text: str) -> float | None:
    try:
        return Cluster.parse(f"1:link=1GB/s:{text}").kinds[0].memory_bytes
    except ValueError:
        raise ValueError(f"--memory {text!r}: expected a number above 0 and a unit, such as 80GB or 64GiB") from None
