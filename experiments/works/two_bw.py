"""PipeDream-2BW against flush schedules over the batch: throughput and memory.

The shape of the figures of Narayanan et al., "Memory-Efficient Pipeline-Parallel DNN Training" (ICML 2021, arXiv
2006.09503), section 5: throughput by batch size within the memory of the device, and memory by schedule, recomputed or
not. Model and devices are this experiment's own: a GPT of 1.3 billion parameters on one node of eight V100s of 16 GB.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from functools import cache
from statistics import median

from ...partition import Cluster, Plan, plan
from ...partition.analytic.device_model import DeviceModel
from ...partition.analytic.layers import TransformerSource
from ...partition.analytic.transformer import Transformer
from ...schedules import simulate
from ..jobs.case import Case
from ..jobs.figure import Figure, How, repeated
from ..measure.equal_stages import costs_of, schedule_of

_GPT = Transformer(layers=24, hidden=2048, heads=16, vocabulary=51200, length=512)
_RANKS = 8
_REFERENCE = "1f1b"
_GAIN = f"throughput / {_REFERENCE}'s"
_BATCHES = 4  # in a row, of a repetition of one schedule


def planned(case: Case, repetitions: int) -> Iterator[Figure]:
    """Throughput of the best plan of `schedule` for a `batch` that fits 16 GB, any microbatch and recomputation."""
    del repetitions
    limit = DeviceModel.preset("V100-16GB").memory_bytes
    seconds = {}
    for schedule in dict.fromkeys((_REFERENCE, case.text("schedule"))):
        found = _plan(schedule, case.count("batch"), limit=limit)
        assert found.simulated_step_time is not None
        seconds[schedule] = found.simulated_step_time
    own = seconds[case.text("schedule")]
    how = f"microbatches of {found.microbatch_size}, recompute {'/'.join(sorted({s.recompute for s in found.stages}))}"
    rate = case.count("batch") / own
    yield Figure(case=case, name="throughput", value=rate, unit="sequences/s", how=How.SIMULATED, note=how)
    yield Figure(case=case, name=_GAIN, value=seconds[_REFERENCE] / own, unit="ratio", how=How.SIMULATED, note=how)


def footprint(case: Case, repetitions: int) -> Iterator[Figure]:
    """Most bytes of any rank, for a `batch` in microbatches of one sequence, recomputed or not."""
    del repetitions
    found = _plan(case.text("schedule"), case.count("batch"), limit=1e15, recompute=case.text("recompute"), size=1)
    most = max(found.memory_bytes.values())
    yield Figure(case=case, name="memory of a rank", value=most, unit="bytes", how=How.SIMULATED)


@cache
def _plan(schedule: str, batch: int, *, limit: float, recompute: str | None = None, size: int | None = None) -> Plan:
    cluster = Cluster.parse(f"1x{_RANKS}:nvlink=150GB/s@5us,net=12GB/s@10us")
    source = TransformerSource(transformer=_GPT, device=DeviceModel.preset("V100-16GB"), cluster=cluster)
    return plan(
        source,
        cluster,
        global_batch=batch,
        memory_limit=limit,
        schedules=(schedule,),
        pipeline_sizes=(_RANKS,),
        data_sizes=(1,),
        tensor_sizes=(1,),
        microbatch_sizes=None if size is None else (size,),
        recompute=None if recompute is None else (recompute,),
        num_runners_up=0,
    )


def emulated(case: Case, repetitions: int) -> Iterator[Figure]:
    """Throughput of 2bw, 1f1b and gpipe in turn, batches in a row, on stages that sleep; on all of the case's ranks."""
    import torch.distributed as dist

    from ..measure.sleeping import SleepingPipe, in_turn_asleep
    from ..measure.timing import slowest

    schedules = {name: schedule_of(case.also(schedule=name)) for name in ("2bw", _REFERENCE, "gpipe")}
    ideals = {name: [simulate(each, costs_of(each)).batch_seconds] for name, each in schedules.items()}
    yield from _gains(case, ideals, How.SIMULATED)

    def seconds(pipe: SleepingPipe) -> float:
        dist.barrier()
        return slowest(pipe.run(_BATCHES))

    times = in_turn_asleep(str(case), schedules, seconds, repetitions=repetitions)
    yield from _gains(case, times, How.EMULATED)


def _gains(case: Case, seconds: Mapping[str, Sequence[float]], how: How) -> Iterator[Figure]:
    """Throughput over that of 1f1b, repetition by repetition."""
    for schedule, own in seconds.items():
        gains = [theirs / mine for mine, theirs in zip(own, seconds[_REFERENCE], strict=True)]
        yield from repeated(gains, case=case.also(schedule=schedule), name=_GAIN, unit="ratio", how=how)


def measured_memory(case: Case, repetitions: int) -> Iterator[Figure]:
    """Peak growth of resident memory over a few steps of a small GPT with AdamW; on both ranks, in fresh processes."""
    del repetitions
    from ...cli.train.gpt import GPTConfig
    from ..measure.models import gpt_problem
    from ..measure.sides import OurSide
    from .bench_plans import resident_peaks

    def side() -> OurSide:
        problem = gpt_problem(GPTConfig(layers=8, width=256, length=128), batch=4 * case.count("microbatches"))
        return OurSide.of_model(problem, schedule=case.text("schedule"), num_microbatches=case.count("microbatches"))

    most = max(resident_peaks(side))
    yield Figure(case=case, name="memory of a rank", value=most, unit="bytes", how=How.MEASURED)


def findings(figures: Sequence[Figure]) -> Iterator[str]:
    """How far 2bw stays behind what was simulated of it, and what it holds more than 1f1b."""
    found: dict[tuple[Case, str, How], list[float]] = defaultdict(list)
    for figure in figures:
        found[figure.case, figure.name, figure.how].append(figure.value)
    for (case, name, how), values in found.items():
        beside = (case, name, How.SIMULATED) if name == _GAIN else (case.also(schedule=_REFERENCE), name, how)
        if case.get("schedule") != "2bw" or how is How.SIMULATED or beside not in found:
            continue
        own, other = median(values), median(found[beside])
        where = f"P = {case.get('ranks')}, M = {case.get('microbatches')}: 2bw"
        if name == _GAIN:
            yield f"{where} is {own:.3f} times as fast as 1f1b, simulated {other:.3f} times ({own / other - 1:+.1%})."
        else:
            yield f"{where} holds {own / other - 1:.0%} more than 1f1b."
