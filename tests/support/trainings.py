"""Trainings that others measured, their steps as the simulator has them, and a device model fitted to them. No torch.

Megatron-LM's Table 1 (Narayanan et al. 2021, "Efficient Large-Scale Language Model Training on GPU Clusters Using
Megatron-LM", SC'21, arXiv 2104.04473), and files with the columns of vTrain (Bang et al., MICRO 2024,
github.com/VIA-Research/vTrain, data/, MIT licence).
"""

import json
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cache
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np

from stagewright.partition import Cluster, GivenStage, evaluate
from support.inside import CONSTANTS, DeviceModel, LayerFormulas, Transformer, TransformerSource, fit_device, read_rows

DATA = Path(__file__).parents[1] / "data"
NODE = 8  # devices
NOISE = 0.04  # by which equal trainings on a shared cluster differ
SHOWN = tuple(constant for constant in CONSTANTS if constant != "link_efficiency")  # by trainings; that one by sums

_TRAINING = {  # argument of MeasuredTraining: column
    "num_devices": "# GPUs",
    "batch_size": "global batch",
    "microbatch_size": "micro batch",
    "hidden": "hidden size",
    "heads": "attention heads",
    "layers": "# layers",
    "length": "sequence length",
    "tensor": "tensor parallelism",
    "data": "data parallelism",
    "pipeline": "pipeline parallelism",
}
_MILLISECONDS = "iteration time (ms)"


@dataclass(frozen=True, slots=True, kw_only=True)
class MeasuredTraining:
    """Sizes of one training as Megatron-LM trained in 2021, and the seconds of its step.

    Stages of equally many layers, the embedding in the first and the head in the last; recompute by layer; tensor
    groups of neighbouring devices, replicas next to each other, stages outermost. The ranks of a tensor group send 1/T
    of an activation each, gathered on arrival (the scatter/gather of Narayanan et al. 2021, section 4.1).

    Arguments:
        layers, hidden, heads, vocabulary, length: of the model, see `Transformer`.
        tensor, pipeline, chunks, data: T, P, V and replicas.
        microbatch_size: sequences of a microbatch; `num_microbatches` M of one replica.
        batch_size: sequences of all replicas.
        num_devices: T * P * replicas, in nodes of eight (or one node of fewer).
        network: bandwidth of one device out of its node, its part of the node's cards [bytes/s].
        seconds: of a step.
        billion_parameters, teraflops: of the model, and of each device, as Table 1 prints them.
    """

    heads: int
    hidden: int
    layers: int
    tensor: int
    pipeline: int
    chunks: int
    data: int
    microbatch_size: int
    num_microbatches: int
    batch_size: int
    num_devices: int
    seconds: float
    vocabulary: int = 51200
    length: int = 2048
    network: float = 25e9
    billion_parameters: float = 0.0
    teraflops: float = 0.0

    def __post_init__(self) -> None:
        assert self.num_devices == self.tensor * self.pipeline * self.data
        assert self.batch_size == self.data * self.microbatch_size * self.num_microbatches
        assert self.layers % self.num_stages == 0

    @property
    def num_stages(self) -> int:
        return self.pipeline * self.chunks

    @property
    def model(self) -> Transformer:
        sizes = ("layers", "hidden", "heads", "vocabulary", "length")
        return Transformer(**{size: getattr(self, size) for size in sizes})

    @property
    def cluster(self) -> Cluster:
        """Nodes of eight devices that NVLink joins."""
        return _cluster(self.num_devices, self.network)


@cache
def _cluster(num_devices: int, network: float) -> Cluster:
    nodes, size = max(1, num_devices // NODE), min(NODE, num_devices)
    return Cluster.parse(f"{nodes}x{size}:nvlink=300GB/s,net={network:.0f}B/s")


@cache
def published(table: str) -> dict[int, MeasuredTraining]:
    """Trainings by row, from 1; both are of nodes with eight A100.

    Arguments:
        table: "megatron", smallest model first, its seconds computed from the published rate and eight cards of
            200 Gbit/s a node; or "vtrain", every second row, with four of them.
    """
    runs: list[dict[str, Any]] = json.loads((DATA / "megatron_table1.json").read_text(encoding="utf-8"))["runs"]
    if table == "vtrain":
        runs = []
        for _, row in read_rows(DATA / "vtrain_multi_half.csv", (*_TRAINING.values(), _MILLISECONDS)):
            sizes = {name: int(row[column]) for name, column in _TRAINING.items()}
            number = sizes["batch_size"] // (sizes["data"] * sizes["microbatch_size"])
            seconds = float(row[_MILLISECONDS]) / 1e3
            runs.append(sizes | {"chunks": 1, "num_microbatches": number, "network": 12.5e9, "seconds": seconds})
    return {at: MeasuredTraining(**run) for at, run in enumerate(runs, 1)}


def estimated(training: MeasuredTraining, device: DeviceModel) -> float:
    """Seconds of one step without a simulation: all work of the busiest rank, one microbatch of the other ranks (fill
    and drain), messages of the first and the last microbatch, and the update with the sums of gradients."""
    P, S = training.pipeline, training.num_stages
    formulas = LayerFormulas(
        training.model,
        microbatch_size=training.microbatch_size,
        tensor=training.tensor,
        device=device,
        cluster=training.cluster,
    )
    embedding, layer, head = formulas.parts()
    size = training.layers // S
    work = np.full(S, size * (2 * layer.forward_seconds + layer.backward_seconds))  # each layer's forward runs again
    update, gradients = np.full(S, size * layer.update_seconds), np.full(S, size * layer.parameter_bytes)  # of 16 bits
    for stage, node in ((0, embedding), (-1, head)):
        work[stage] += node.forward_seconds + node.backward_seconds
        if node is embedding or S > 1:  # in one stage the head's weights are the embedding's
            update[stage] += node.update_seconds
            gradients[stage] += node.parameter_bytes
    topology = formulas.topology
    ring = topology.ring(range(0, training.data * training.tensor, training.tensor))
    update += [ring.seconds(num_bytes) for num_bytes in gradients]
    ends = topology.ring((0, training.num_devices - training.num_devices // P))
    tied = sum(ends.seconds(shared) for _, shared in formulas.tied) if P > 1 else 0.0
    inner, outer = topology.cluster.levels  # in one node no message goes over the network
    link = outer if training.num_devices > NODE else inner
    message = layer.activation_bytes / training.tensor / link.bandwidth
    busiest = max(work[rank::P].sum() for rank in range(P))
    first = work[:P]  # the first chunk of each rank
    fill = first.sum() - first.max()
    return float(training.num_microbatches * busiest + fill + 2 * (S - 1) * message + tied + update[::P].sum())


@cache
def simulated(training: MeasuredTraining, device: DeviceModel) -> float:
    """Seconds of one step of the training's own plan. `estimated` has the same in a hundredth of the time, for fits.

    No all-reduce of gradients overlaps a backward; messages travel in parts and overlap computation.
    """
    reached = device.reached(training.cluster)
    names = ["embedding", *(f"layer{at}" for at in range(training.layers)), "head"]
    wide, size = training.num_devices // training.pipeline, training.layers // training.num_stages
    ends = [0, *range(size + 1, training.layers + 1, size), len(names)]
    ranks = [range(wide * at, wide * (at + 1)) for at in range(training.pipeline)]
    plan = evaluate(
        TransformerSource(transformer=training.model, device=device, cluster=training.cluster),
        replace(reached, levels=tuple(replace(level, sum_busy=1.0) for level in reached.levels)),
        [
            GivenStage(names[a:b], ranks[stage % training.pipeline], training.tensor, "layer")
            for stage, (a, b) in enumerate(pairwise(ends))
        ],
        num_microbatches=training.data * training.num_microbatches,
        schedule="1f1b" if training.chunks == 1 else "interleaved",
        microbatch_size=training.microbatch_size,
    )
    assert plan.simulated_step_time is not None
    return plan.simulated_step_time


def fit_measured(
    device: DeviceModel,
    trainings: Sequence[MeasuredTraining],
    *,
    constants: Sequence[str] = SHOWN,
    noise: float | None = NOISE,
) -> DeviceModel:
    """The device as measured trainings show it; a constant that they do not show stays near the value that it has here.

    A training that is off by more than others (a slow node, a busy network) counts little: see `fit_device`, also for
    the arguments.
    """
    return fit_device(
        device,
        [training.seconds for training in trainings],
        lambda model: [estimated(training, model) for training in trainings],
        constants=constants,
        noise=noise,
    )
