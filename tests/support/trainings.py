"""Trainings that others measured, and a device model fitted to them. No torch.

Files are CSV with the columns of vTrain (Bang et al., MICRO 2024, github.com/VIA-Research/vTrain, data/).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import numpy as np

from stagewright.partition import Cluster
from support.inside import CONSTANTS, DeviceModel, LayerFormulas, Transformer, fit_device, read_rows

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


def read_trainings(path: Path, *, network: float) -> tuple[MeasuredTraining, ...]:
    """Trainings of a file, under 1F1B with recompute by layer.

    Arguments:
        network: bandwidth of one device out of its node [bytes/s]; the file does not say it.
    """
    found = []
    for _, row in read_rows(path, (*_TRAINING.values(), _MILLISECONDS)):
        sizes = {name: int(row[column]) for name, column in _TRAINING.items()}
        microbatches = sizes["batch_size"] // (sizes["data"] * sizes["microbatch_size"])
        seconds = float(row[_MILLISECONDS]) / 1e3
        found.append(
            MeasuredTraining(**sizes, chunks=1, num_microbatches=microbatches, network=network, seconds=seconds)
        )
    return tuple(found)


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
