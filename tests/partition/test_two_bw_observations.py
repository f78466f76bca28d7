"""Observations of Narayanan et al. on 2BW and its planner ("Memory-Efficient Pipeline-Parallel DNN Training", ICML
2021, section 5, and section 3.3 for the planner's model), in its direction: none of their figures is claimed here.

All on formulas for a GPT on V100s (the paper's device), simulated.
"""

from __future__ import annotations

from dataclasses import replace
from functools import cache

from support.inside import DeviceModel, Transformer, TransformerSource

from stagewright.partition import Cluster, Plan, plan

# With a head of its own: over slow links the sum of a tied one would keep all on one device.
GPT = Transformer(layers=24, hidden=2048, heads=16, vocabulary=51200, length=512, head="untied")


@cache
def planned(*, nodes: str = "8x1:nvlink=150GB/s@5us,net=1.25GB/s@20us", batch: int = 64, **options: object) -> Plan:
    cluster = Cluster.parse(nodes)
    source = TransformerSource(transformer=GPT, device=DeviceModel.preset("V100-16GB"), cluster=cluster)
    return plan(source, cluster, global_batch=batch, **options)  # type: ignore[arg-type]


def fixed(schedule: str, *, pipeline: int, batch: int) -> float:
    """Seconds a batch of one straight pipeline, microbatches of one sample, on links that are not in the way."""
    found = planned(
        nodes=f"1x{pipeline}:nvlink=150GB/s@5us,net=12GB/s@10us",
        batch=batch,
        schedules=(schedule,),
        pipeline_sizes=(pipeline,),
        data_sizes=(1,),
        tensor_sizes=(1,),
        microbatch_sizes=(1,),
        recompute=("none",),
    )
    assert found.simulated_step_time is not None
    return found.simulated_step_time


def test_without_a_flush_the_same_configuration_is_faster() -> None:
    """Comparison with PipeDream-Flush (1F1B) at equal configuration."""
    assert fixed("2bw", pipeline=4, batch=16) < fixed("1f1b", pipeline=4, batch=16)


def test_the_deeper_the_pipeline_the_more_a_flush_costs() -> None:
    """The flush's bubble grows with depth over microbatches, 2BW has none."""
    gains = [fixed("1f1b", pipeline=p, batch=16) / fixed("2bw", pipeline=p, batch=16) for p in (2, 4, 8)]
    assert gains == sorted(gains)
    assert gains[-1] > gains[0] + 0.1


def test_the_fewer_the_microbatches_the_more_a_flush_costs() -> None:
    """Smaller batches leave the flush less to hide its bubble behind."""
    gains = [fixed("1f1b", pipeline=4, batch=b) / fixed("2bw", pipeline=4, batch=b) for b in (64, 16, 4)]
    assert gains == sorted(gains)
    assert gains[-1] > gains[0] + 0.1


def test_two_weight_versions_take_more_memory_than_the_flush() -> None:
    """2BW pays for its speed with a second version of the weights."""

    def held(schedule: str) -> dict[str, float]:
        found = planned(
            schedules=(schedule,), pipeline_sizes=(4,), data_sizes=(1,), tensor_sizes=(1,), memory_limit=1e12
        )
        memory = next(iter(found.memory.values()))
        return {"parameters": memory.parameters, "gradients": memory.gradients}

    assert held("2bw")["parameters"] == 2 * held("2bw")["gradients"]
    assert held("1f1b")["parameters"] == held("1f1b")["gradients"]


def test_recomputation_allows_larger_microbatches_and_so_more_throughput() -> None:
    """Larger microbatches compute more efficiently, but fit only where activations are made again.

    The formulas give every microbatch size the same efficiency, so the kernels of small ones are made slower here, in a
    profile a size: a quarter of the speed at one sample, as small matrices are on large devices.
    """
    cluster = Cluster.parse("8x1:nvlink=150GB/s@5us,net=12.5GB/s@20us")
    source = TransformerSource(transformer=GPT, device=DeviceModel.preset("V100-16GB"), cluster=cluster)
    profiles = {}
    for size in (1, 2, 4, 8, 16):
        whole = source.profile(microbatch_size=size)
        slower = 1 + 3 / size
        nodes = [
            replace(n, forward_seconds=n.forward_seconds * slower, backward_seconds=n.backward_seconds * slower)
            for n in whole.nodes
        ]
        profiles[size] = replace(whole, nodes=tuple(nodes))
    options = {"global_batch": 128, "schedules": ("2bw",), "memory_limit": 6e9}
    without = plan(profiles, cluster, recompute=("none",), **options)  # type: ignore[arg-type]
    with_it = plan(profiles, cluster, recompute=("none", "full"), **options)  # type: ignore[arg-type]
    assert with_it.microbatch_size is not None
    assert without.microbatch_size is not None
    assert with_it.microbatch_size > without.microbatch_size
    assert any(stage.recompute == "full" for stage in with_it.stages)
    assert (with_it.simulated_step_time or 0) < (without.simulated_step_time or 0)


def test_less_memory_makes_the_pipeline_deeper_or_recomputes() -> None:
    """The planner trades throughput for memory: deeper pipelines hold less of the model on each worker."""
    plans = [
        planned(
            nodes="2x4:nvlink=150GB/s@5us,net=12.5GB/s@20us",
            schedules=("2bw",),
            tensor_sizes=(1,),
            optimizer_sharding=("none",),
            memory_limit=limit,
        )
        for limit in (64e9, 16e9, 6e9)
    ]
    seconds = [found.simulated_step_time or 0 for found in plans]
    effort = [(len(found.stages), sum(stage.recompute != "none" for stage in found.stages)) for found in plans]
    assert seconds == sorted(seconds)
    assert effort[-1] > effort[0]
    assert max(plans[-1].memory_bytes.values()) <= 6e9


def test_slow_links_make_a_flush_pipeline_deep_and_fast_ones_wide() -> None:
    """Wide pipelines sum gradients over replicas, deep ones send activations: which wins follows the interconnect."""

    def depth(speed: str) -> int:
        found = planned(
            nodes=f"1x4:nvlink={speed}@5us,net={speed}@5us",
            schedules=("1f1b",),
            tensor_sizes=(1,),
            memory_limit=1e12,
        )
        return len(found.stages)

    assert depth("0.1GB/s") > depth("150GB/s")
    assert depth("150GB/s") == 1


def test_being_wide_costs_two_versions_nothing_where_links_are_free() -> None:
    """2BW has no bubble that being wide would save, and what a divided optimizer moves stands behind each update.

    So the wide pipeline falls far behind with slow links, and is even with the best where they are nearly free.
    """

    def loss(speed: str) -> float:
        """Seconds of the wide pipeline over those of the best."""
        nodes = f"1x4:nvlink={speed}@5us,net={speed}@5us"
        wide, best = (
            planned(nodes=nodes, schedules=("2bw",), tensor_sizes=(1,), memory_limit=1e12, **sizes)
            for sizes in ({"pipeline_sizes": (1,), "data_sizes": (4,)}, {})
        )
        return (wide.simulated_step_time or 0) / (best.simulated_step_time or 0)

    assert loss("0.1GB/s") > 2
    assert 1 <= loss("100000GB/s") < 1.002


def test_tensor_parallelism_over_slow_links_loses_to_pipelining() -> None:
    """Intra-layer parallelism sums activations several times a layer, pipelining sends them once a stage."""

    def seconds(*, tensor: int, pipeline: int, speed: str) -> float:
        found = planned(
            nodes=f"1x8:link={speed}@5us,net={speed}@5us",
            batch=16,
            schedules=("2bw",),
            tensor_sizes=(tensor,),
            pipeline_sizes=(pipeline,),
            data_sizes=(1,),
            memory_limit=1e12,
        )
        return found.simulated_step_time or 0

    slow = seconds(tensor=8, pipeline=1, speed="1.25GB/s") / seconds(tensor=1, pipeline=8, speed="1.25GB/s")
    fast = seconds(tensor=8, pipeline=1, speed="150GB/s") / seconds(tensor=1, pipeline=8, speed="150GB/s")
    assert slow > 1.5
    assert slow > fast
