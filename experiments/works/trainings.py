"""One step of a transformer's training on a device model: a plan that is given, evaluated as any other.

As Megatron-LM trained in 2021: stages of equally many layers, the embedding in the first and the head in the last;
recompute by layer (each layer's forward again in front of its backward); tensor groups of neighbouring devices,
replicas next to each other, stages outermost; no sum of gradients is hidden behind backwards. For fits `estimated` says
the same in a hundredth of the time.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cache
from itertools import pairwise

from ...partition import Cluster, GivenStage, Plan, evaluate
from ...partition.analytic import DeviceModel, Transformer
from ...partition.analytic.layers import LayerFormulas, TransformerSource
from ...partition.strict import count, fail, number
from ...schedules import Costs, Op, Schedule, build

NODE = 8  # devices


@dataclass(frozen=True, slots=True, kw_only=True)
class Training:
    """Sizes of one training. The ranks of a tensor group send 1/T of an activation each, gathered on arrival (the
    scatter/gather of Narayanan et al. 2021, section 4.1); messages travel beside compute.

    Arguments:
        layers, hidden, heads, vocabulary, length: of the model, see `Transformer`.
        tensor, pipeline, chunks, data: T, P, V and replicas.
        microbatch_size: sequences of a microbatch; `num_microbatches` M of one replica.
        batch_size: sequences of all replicas.
        num_devices: T * P * replicas, in nodes of eight (or one node of fewer).
        network: bandwidth of one device out of its node, its part of the node's cards [bytes/s].

    Raises ValueError for sizes that do not divide or multiply as said.
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
    vocabulary: int = 51200
    length: int = 2048
    network: float = 25e9

    def __post_init__(self) -> None:
        for size in ("tensor", "pipeline", "chunks", "data", "microbatch_size", "num_microbatches"):
            count(f"training: {size}", getattr(self, size))
        number("training: network", self.network, positive=True)
        if self.num_devices != self.tensor * self.pipeline * self.data:
            fail("training: num_devices", self.num_devices, f"{self.tensor} x {self.pipeline} x {self.data} of them")
        if self.num_devices > NODE and self.num_devices % NODE:
            fail("training: num_devices", self.num_devices, f"nodes of {NODE}")
        if self.batch_size != self.data * self.microbatch_size * self.num_microbatches:
            expected = f"{self.data} replicas of {self.num_microbatches} microbatches of {self.microbatch_size}"
            fail("training: batch_size", self.batch_size, expected)
        if self.layers % (self.pipeline * self.chunks):
            fail("training: layers", self.layers, f"equally many in {self.pipeline * self.chunks} stages")
        self.model.refuse_tensor(self.tensor)

    @property
    def model(self) -> Transformer:
        return Transformer(
            layers=self.layers,
            hidden=self.hidden,
            heads=self.heads,
            vocabulary=self.vocabulary,
            length=self.length,
        )

    @property
    def cluster(self) -> Cluster:
        """Nodes of eight devices that NVLink joins."""
        return _cluster(self.num_devices, self.network)

    def teraflops(self, seconds: float) -> float:
        """TFLOP/s of each device, by Megatron-LM's count of a step's operations."""
        flops = self.model.flops(batch_size=self.batch_size, recompute="layer")
        return flops / self.num_devices / seconds / 1e12


@dataclass(frozen=True, slots=True, kw_only=True)
class MeasuredTraining(Training):
    """A training and what it took.

    Arguments:
        seconds: of a step.
    """

    seconds: float

    def __post_init__(self) -> None:
        super(MeasuredTraining, self).__post_init__()
        number("training: seconds", self.seconds, positive=True)


@cache
def _cluster(num_devices: int, network: float) -> Cluster:
    nodes, size = max(1, num_devices // NODE), min(NODE, num_devices)
    return Cluster.parse(f"{nodes}x{size}:nvlink=300GB/s,net={network:.0f}B/s")


def step_costs(training: Training, device: DeviceModel) -> Costs:
    """P * V stages of equally many layers, the embedding before and the head behind them; sums over replicas are in the
    update."""
    formulas = LayerFormulas(
        training.model,
        microbatch_size=training.microbatch_size,
        tensor=training.tensor,
        device=device,
        cluster=training.cluster,
    )
    embedding, layer, head = formulas.parts()
    num_stages = training.pipeline * training.chunks
    size = training.layers // num_stages
    recompute = size * layer.forward_seconds
    forward = [size * layer.forward_seconds] * num_stages
    backward = [recompute + size * layer.backward_seconds] * num_stages
    update = [size * layer.update_seconds] * num_stages
    gradients = [size * layer.parameter_bytes] * num_stages  # of 16 bits
    for stage, node in ((0, embedding), (-1, head)):
        forward[stage] += node.forward_seconds
        backward[stage] += node.backward_seconds
        if node is embedding or num_stages > 1:  # in one stage the head's weights are the embedding's
            update[stage] += node.update_seconds
            gradients[stage] += node.parameter_bytes
    topology = formulas.topology
    ring = topology.ring(range(0, training.data * training.tensor, training.tensor))
    sent = layer.activation_bytes / training.tensor
    ends = topology.ring((0, training.num_devices - training.num_devices // training.pipeline))
    inner, outer = topology.cluster.levels  # in one node no message goes over the network
    way = outer if training.num_devices > NODE else inner
    on_link = sent / way.bandwidth if num_stages > 1 else 0.0
    tied = sum(ends.seconds(shared) for _, shared in formulas.tied) if training.pipeline > 1 else 0.0
    return Costs(
        forward=forward,
        backward=backward,
        update=[seconds + ring.seconds(each) for seconds, each in zip(update, gradients, strict=True)],
        latency=on_link,
        tied=(((0, num_stages - 1), tied),) if tied else (),
    )


@cache
def schedule_of(training: Training) -> Schedule:
    """1F1B, or interleaved where a rank has several chunks."""
    sizes = {"num_ranks": training.pipeline, "num_microbatches": training.num_microbatches}
    if training.chunks == 1:
        return build("1f1b", **sizes)
    return build("interleaved", num_chunks=training.chunks, **sizes)


def evaluated(training: Training, device: DeviceModel) -> Plan:
    """Its plan: messages in parts that travel beside compute, whatever the training says of them."""
    reached = device.reached(training.cluster)
    names = ["embedding", *(f"layer{at}" for at in range(training.layers)), "head"]
    num_stages, wide = training.pipeline * training.chunks, training.num_devices // training.pipeline
    size = training.layers // num_stages
    ends = [0, *range(size + 1, training.layers + 1, size), len(names)]
    ranks = [range(wide * at, wide * (at + 1)) for at in range(training.pipeline)]
    return evaluate(
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


@cache
def simulated(training: Training, device: DeviceModel) -> float:
    """Seconds of one step."""
    seconds = evaluated(training, device).simulated_step_time
    assert seconds is not None
    return seconds


def estimated(training: Training, device: DeviceModel) -> float:
    """The same without the simulator, for the fit: all work of the busiest rank, and a fill and drain of the others.

    The first microbatch's messages and the last one's: the stage of the head, which is slower, hides the others.
    """
    P, V, M = training.pipeline, training.chunks, training.num_microbatches
    costs = step_costs(training, device)
    table = costs.table(num_stages=P * V)
    chunks = [f + b for f, b in zip(table.column(Op.F), table.column(Op.B), strict=True)]
    busiest = max(sum(chunks[rank::P]) for rank in range(P))
    fill = sum(chunks[:P]) - max(chunks[:P]) if V > 1 else sum(chunks) - max(chunks)
    messages = 2 * (P * V - 1)
    tied = sum(seconds for _, seconds in costs.tied)
    return M * busiest + fill + messages * table.latency[0] + tied + sum(table.update[::P])
