"""Steps of Megatron-LM's published trainings on A100s, by formulas and simulation. No torch.

Narayanan et al. 2021, "Efficient Large-Scale Language Model Training on GPU Clusters Using Megatron-LM" (SC'21, arXiv
2104.04473). What is predicted is one step: the simulated schedule with recompute by layer (each layer's forward again
in front of its backward), then the data-parallel sum of the gradients, then the optimizer. Stages have equally many
layers.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from ...partition.cluster import Cluster
from ...partition.formulas.device_model import DeviceModel
from ...partition.formulas.source import TransformerSource
from ...partition.formulas.transformer import Transformer
from ...partition.topology import Topology
from ...schedules import Costs, Schedule, build, simulate

_TABLE_1 = Path(__file__).parent / "data" / "megatron_table1.json"
DEVICE = "A100-80GB"


@dataclass(frozen=True, slots=True, kw_only=True)
class Training:
    """One training of a GPT with a vocabulary of 51,200 on sequences of 2,048 tokens.

    Arguments:
        tensor, pipeline, chunks, data: T, P, V and replicas.
        microbatch_size: sequences of a microbatch; `num_microbatches` M of one replica.
        batch_size: sequences of all replicas.
        parts_sent: whether the ranks of a tensor group send 1/T of an activation each, gathered on arrival (the paper's
            scatter/gather), or all of it.
        sends_wait: whether a rank computes on only when its message has left, or messages travel beside compute.
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
    parts_sent: bool = True
    sends_wait: bool = False

    @property
    def model(self) -> Transformer:
        """Sizes of the model."""
        return Transformer(layers=self.layers, hidden=self.hidden, heads=self.heads, vocabulary=51200, length=2048)

    @property
    def cluster(self) -> Cluster:
        """Nodes of eight devices, eight cards of 200 Gbit/s each."""
        return Cluster.parse(f"{self.num_devices // 8}x8:nvlink=300GB/s,net=25GB/s")

    def teraflops(self, seconds: float) -> float:
        """TFLOP/s of each device, by the paper's count of a step's operations."""
        flops = self.model.flops(batch_size=self.batch_size, recompute="layer")
        return flops / self.num_devices / seconds / 1e12


@dataclass(frozen=True, slots=True, kw_only=True)
class Run(Training):
    """A line of Table 1.

    Arguments:
        billion_parameters: as printed.
        teraflops_published: of each device.
        seconds: of a step, computed from them.
    """

    billion_parameters: float
    teraflops_published: int
    seconds: float


@cache
def table() -> tuple[Run, ...]:
    """Table 1, smallest model first."""
    runs = json.loads(_TABLE_1.read_text(encoding="utf-8"))["runs"]
    return tuple(Run(teraflops_published=run.pop("teraflops"), **run) for run in runs)


def step_costs(training: Training, device: DeviceModel) -> Costs:
    """P * V stages of equally many layers, the embedding before and the head behind them."""
    source = TransformerSource(transformer=training.model, device=device, cluster=training.cluster)
    profile = source.profile(microbatch_size=training.microbatch_size, tensor=training.tensor)
    embedding, *layers, head = profile.nodes
    num_stages = training.pipeline * training.chunks
    assert len(layers) % num_stages == 0
    size = len(layers) // num_stages
    stages = [layers[first : first + size] for first in range(0, len(layers), size)]
    recompute = [sum(node.forward_seconds for node in stage) for stage in stages]
    stages[0], stages[-1] = [embedding, *stages[0]], [*stages[-1], head]
    ring = Topology(training.cluster).ring(range(0, training.data * training.tensor, training.tensor))
    sent = layers[0].activation_bytes / (training.tensor if training.parts_sent else 1)
    on_link = sent / training.cluster.levels[1].bandwidth
    waited = on_link if training.sends_wait else 0.0
    return Costs(
        forward=[waited + sum(node.forward_seconds for node in stage) for stage in stages],
        backward=[
            waited + again + sum(node.backward_seconds for node in stage)
            for again, stage in zip(recompute, stages, strict=True)
        ],
        latency=on_link - waited,
        update=[
            sum(node.update_seconds for node in stage)
            + ring.seconds(sum(node.parameter_bytes for node in stage))  # gradients of 16 bits
            for stage in stages
        ],
    )


@cache
def schedule_of(training: Training) -> Schedule:
    """1F1B, or interleaved where a rank has several chunks."""
    sizes = {"num_ranks": training.pipeline, "num_microbatches": training.num_microbatches}
    if training.chunks == 1:
        return build("1f1b", **sizes)
    return build("interleaved", num_chunks=training.chunks, **sizes)


def simulated(training: Training, device: DeviceModel) -> float:
    """Seconds of one step."""
    return simulate(schedule_of(training), step_costs(training, device)).makespan


def estimated(training: Training, device: DeviceModel) -> float:
    """The same without the simulator, for the fit: all work of the busiest rank, and a fill and drain of the others.

    Latency as in the closed forms of 1F1B, 2 ((P-1) + floor((M-1) (P-1) / P)), and of its interleaved form, 2 (PV-1).
    """
    P, V, M = training.pipeline, training.chunks, training.num_microbatches
    costs = step_costs(training, device)
    in_table = costs.table(num_stages=P * V)
    chunks = [f + b for f, b in zip(in_table.forward, in_table.backward, strict=True)]
    busiest = max(sum(chunks[rank::P]) for rank in range(P))
    fill = sum(chunks[:P]) - max(chunks[:P]) if V > 1 else sum(chunks) - max(chunks)
    messages = 2 * ((P - 1) + (M - 1) * (P - 1) // P) if V == 1 else 2 * (P * V - 1)
    return M * busiest + fill + messages * in_table.latency[0] + sum(in_table.update[::P])


def fitted(runs: Sequence[Run], constants: Sequence[str] = ("matrix_efficiency",)) -> DeviceModel:
    """The device with the constants that fit these runs best."""
    return DeviceModel.preset(DEVICE).fit(
        [run.seconds for run in runs], lambda device: [estimated(run, device) for run in runs], constants=constants
    )
