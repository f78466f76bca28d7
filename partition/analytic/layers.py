"""Costs of each part of a GPT on one of the t devices that compute a microbatch together.

Symbols as in Megatron-LM: b microbatch size, s sequence length, h hidden size, a heads, r MLP ratio, V vocabulary,
n = b s tokens. Values take 2 bytes, dropout masks 1.

    embedding -> layer0 -> layer1 -> ... -> head (norm, projection to the vocabulary, loss) [-> later1 -> head1 -> ...]

A layer, forward (backward):

    matrix products   (8 + 4r) n h^2 + 4 n s h         over t     (twice that: half I, half W; but the scores, 8 n s h,
                                                                  have no weights: all I)
    memory traffic    22 n h                                      (34 n h)      norms, dropout, residuals
                    + 4r n h + 13 n a s                over t     (6r n h + 19 n a s)      GeLU; scores
    tensor links      2 sums of 2 n h bytes                       (2 sums)
    kernels           20                                          (40: 28 of I, 12 of W)
    kept until B      10 n h  +  ((8 + 4r) n h + 5 n a s) over t  Korthikanti et al. 2022, section 4
      selective       10 n h  +  (8 + 4r) n h              over t  section 5; F of the scores runs again
      by layer         2 n h                                       F runs again; embedding and head keep theirs

Memory traffic: each fused kernel of Megatron-LM reads its inputs and writes its outputs once. With split="sequence"
norms, dropouts and residuals are divided by t as well (same paper, section 4.2.2); with attention="flash" the memory
terms in a s are gone, and the backward multiplies Q K^T again (Dao et al. 2022). Besides these

    style="llama"     no masks (2 n h kept less), 20 n h (24 n h) of norms and residuals; an MLP of two matrices in
                      front keeps 6 r n h, moves 6 (10) r n h; Q K V are rotated and copied apart (Megatron-Core's
                      attention.py, Transformer Engine's get_qkv_layout): 8 (8) n h + 8 (12) n g/a h over t
    kv_heads g        K and V of g/a h each: 8 n h kept over t are 4 (1 + g/a) n h
    top_k of experts  n k tokens in the MLP; its inputs and outputs in experts' order, 4 n k h kept, 8 (8) n k h moved
    loss "fused"      the head keeps 4 bytes a token for each logit's 4, and computes logits again in I, or in W alone
    fp8               products with weights in half the time; inputs kept as one byte less each; casts of inputs
                      (gradients of outputs) 4 bytes a value, as many as are here before casts are gathered; two more
                      then on Hopper, and T parts that userbuffers adds; two bytes a weight more, whose casts are kept
    fp4               likewise, kept as 9/16 bytes each (a scale for 16 values); casts 41/8 bytes a value: read for the
                      largest, then read, and written by rows and by columns (NVIDIA 2025, arXiv 2509.25149)
    context c         n / c tokens on a device; K and V are gathered, and all of them kept; their gradients are summed:
                      half a sum of 4 n g/a h / t bytes over c devices (two halves)
    expert e          all-to-all of 2 n k h bytes over e replicas, which hold E/e experts each, twice (twice); tensor
                      ranks then hold these whole, and compute the same rows: without a sum (with sequence, half a one)

The update is memory traffic (`Transformer.update_bytes`); a tied embedding's gradient is summed over its two stages.
Nothing overlaps, but what a `Runtime` says, and kernels that the host starts, those of Megatron-LM, while others run.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace

from ...schedules.messages import ALONE_BYTES
from ..cluster import Cluster, Level
from ..profile import Node, Profile, Tied
from ..strict import count, fail
from ..topology import Topology
from .device_model import DeviceModel
from .runtime import BLOCK_SPEED, FAST_SPEED, PLAIN, SPLITS, Runtime
from .transformer import VALUE_BYTES, Transformer

LAYER_KERNELS = (20, 28, 12)  # of a layer's F, I and W
END_KERNELS = (6, 6, 3)  # of the embedding and the head
LEAST_ROWS = 256  # of the vocabulary in a chunk of a fused loss, as in `model.linear_loss`
_CASTS = {"fp8": (1.0, 4.0), "fp4": (9 / 16, 41 / 8)}  # bytes kept, and moved, of a value
_Products = Sequence[tuple[float, float]]


def transformer_profile(
    model: Transformer,
    *,
    microbatch_size: int,
    tensor: int = 1,
    device: DeviceModel,
    cluster: Cluster | None = None,
    context: int = 1,
    expert: int = 1,
    runtime: Runtime = PLAIN,
) -> Profile:
    """Costs of each part on one of `tensor` devices that compute a microbatch together.

    Arguments:
        microbatch_size: b [sequences].
        tensor: t c; t divides the heads.
        device: how fast it computes.
        cluster: whose groups of `tensor` neighbouring devices compute so, at the pace of the slowest; None: one
            node of t devices, `device.link_bandwidth`.
        context: c, parts of a sequence, each on t neighbours.
        expert: e, of replicas in a row that divide the experts among themselves, part by part of the sequence.
        runtime: what it overlaps.

    The output of each part is whole on every device: activation_bytes is 2 n h for any t. Where the devices send
    1/t of it each and gather it after the link (Megatron-LM's scatter/gather, Narayanan et al. 2021, section 4.1),
    the caller divides by t. Point-to-point messages and data parallelism are not in it.

    Raises ValueError for sizes that do not divide or fit.
    """
    for name, size, of in (("tensor", context, tensor), ("length", context, model.length)):
        if of % count("context", size):
            fail(name, of, f"a multiple of context={context}")
    if model.experts % count("expert", expert):
        fail("expert", expert, f"a divisor of the model's experts={model.experts}")
    t = tensor // context
    model.refuse_tensor(t)
    layers = LayerFormulas(
        model,
        microbatch_size=microbatch_size,
        tensor=t,
        device=device,
        cluster=cluster,
        split=(context, expert),
        runtime=runtime,
    )
    nodes = layers.nodes()
    seconds, layer, kernels = sum(n.seconds for n in nodes), nodes[1], model.layers * sum(LAYER_KERNELS)
    pairs = min(1.0, 3 * model.layers * (layer.selective_seconds or 0.0) / seconds)  # B of scores is twice F
    return Profile(
        nodes=nodes,
        device=device.name,
        dtype="bfloat16",
        origin="formula",
        microbatch_size=microbatch_size,
        optimizer_ratio=model.optimizer_ratio,
        gradient_ratio=2.0 if model.gradients == "float32" else 1.0,
        gather_ratio=0.5 if runtime.gathers_bytes and model.precision == "fp8" else 1.0,
        gathers_ahead=runtime.gathers_ahead,
        sums_early=runtime.sums_early,
        sums_whole=runtime.sums_whole,
        sums_by_chunk=runtime.sums_by_chunk,
        action_seconds=device.action_seconds,
        sequence_tokens=model.length,
        pair_share=pairs,
        slice_share=min(1.0 - pairs, device.kernel_seconds * kernels / seconds),  # the host starts all anew
        kv_share=VALUE_BYTES * (4 * layers.wide * model.kv_part / t + model.length**2 / 2) / layer.stash_bytes,
        tied=layers.tied,
        context=context,
        expert=expert,
    )


class LayerFormulas:
    def __init__(
        self,
        model: Transformer,
        *,
        microbatch_size: int,
        tensor: int,
        device: DeviceModel,
        cluster: Cluster | None,
        split: tuple[int, int] = (1, 1),
        runtime: Runtime = PLAIN,
    ) -> None:
        if runtime.scales_blocks:
            device = replace(device, fp8_efficiency=BLOCK_SPEED * device.fp8_efficiency)
        self.model, self.tensor, self.device, self.runtime = model, tensor, device, runtime
        self.overlaps = runtime.overlaps_sums and model.precision != "fp4"
        (self.context, self.expert), size = split, tensor * split[0] * split[1]
        if cluster is None:
            cluster = Cluster(levels=(Level(name="link", size=size, bandwidth=device.link_bandwidth),))
        if size > cluster.num_devices:
            name = "tensor" if max(split) == 1 else "tensor x context x expert"
            fail(name, size, f"at most the {cluster.num_devices} devices of the cluster")
        self.tokens = count("microbatch_size", microbatch_size) * model.length // self.context
        self.wide = self.tokens * model.hidden  # values in one activation
        self.whole = self.wide / (tensor if model.split == "sequence" else 1)  # where only sequence parallelism divides
        self.scores = 0.0 if model.attention == "flash" else self.tokens * model.heads * model.length / tensor
        self.vocabulary = -(-model.vocabulary // tensor)
        # Groups are T neighbouring devices; where T does not divide a node, the slowest one spans two.
        summing = Topology(device.summed(cluster))
        self.sum_seconds = max(each.seconds(VALUE_BYTES * self.wide) for each in summing.rings_of_groups(tensor))
        kv_bytes = 2 * VALUE_BYTES * self.wide * self.context * model.kv_part / tensor
        gathers = summing.rings_of_groups(self.context, stride=tensor)
        self.kv_seconds = max(each.seconds(kv_bytes) for each in gathers) / 2 if self.context > 1 else 0.0
        # Tensor ranks that divide an expert, and its rows on each of them.
        self.dividing, rows = (tensor, self.whole) if self.expert == 1 else (1, self.wide)
        self.routed = rows * model.top_k
        ways = [summing.all_to_all(each) for each in summing.groups(self.expert, stride=tensor * self.context)]
        self.routed_seconds = max(each.seconds(VALUE_BYTES * self.routed) for each in ways) if self.expert > 1 else 0.0
        self.topology = Topology(device.reached(cluster))

    @property
    def tied(self) -> tuple[Tied, ...]:
        """The weights that embedding and head share, on one device; none where the head has its own."""
        shared = float(VALUE_BYTES * self.vocabulary * self.model.hidden)
        return ((("embedding", "head"), shared),) if self.model.head == "tied" else ()

    def parts(self) -> tuple[Node, Node, Node]:
        """Embedding, a layer, head."""
        return self._embedding(), self._layer(), self._head()

    def nodes(self) -> tuple[Node, ...]:
        """All of them; equal layers differ by name only."""
        embedding, layer, head = self.parts()
        found = [embedding, *(replace(layer, name=f"layer{i}") for i in range(self.model.layers)), head]
        for i in range(1, self.model.predictions):  # takes what the head before it took
            found[-1] = replace(found[-1], activation_bytes=layer.activation_bytes)
            found += [replace(layer, name=f"later{i}"), replace(head, name=f"head{i}")]
        return tuple(found)

    def _layer(self) -> Node:
        model, t, m = self.model, self.tensor, self.dividing
        routed, mlp = self.wide * model.top_k, self.tokens * model.top_k * model.mlp_width / m
        heads, ahead = self.wide / t, model.mlp_inputs
        # Each product with its outputs, forward and of I: Q K V, after the attention, up, down.
        every = zip(model.product_widths(), (t, t, m, m), strict=True)
        flops = [2.0 * self.tokens * model.hidden / own * width for width, own in every]
        inputs = self.wide, heads, routed, mlp
        outputs = (1 + 2 * model.kv_part) * heads, self.wide, ahead * mlp, routed
        whole, inward = list(zip(flops, outputs, strict=True)), list(zip(flops, inputs, strict=True))
        parts = [own if self.overlaps else min(own, self.runtime.pieces) for own in (t, m)]  # of products beside sums
        cuts = [cut for own in parts for cut in (own, min(own, SPLITS) if self.overlaps else 1)]
        speed = FAST_SPEED if self.runtime.adds_fast and model.precision == "fp8" and not self.device.fp4_flops else 1.0
        forward = [(each / speed, out / cut) for (each, out), cut in zip(whole, cuts, strict=True)]
        inward[1::2] = [(each, out / own) for (each, out), own in zip(inward[1::2], parts, strict=True)]
        sums = 2.0 if m == t else 1.0 + (model.split == "sequence") / 2
        again = sums / 2 * (self.runtime.gathers_again and model.split == "sequence")
        every_score, (scores, inner) = self.tokens * model.heads * model.length / t, self._score_flops()
        choices = self.tokens * model.experts * (model.experts > 1)
        ordered, chooser = self.routed * (choices > 0), [(2.0 * choices * model.hidden, float(choices))] * (choices > 0)
        reads, writes = self._traffic(mlp, heads, ordered)
        attention = 4 * (1 + model.kv_part * self.context) * heads
        kept = (8 if model.style == "llama" else 10) * self.whole + attention + (2 * ahead + 2) * mlp + 4 * ordered
        matrices, casts, norm = model.layer_matrices(t, self.expert), 0.0, model.norm_parameters
        parameters = model.layer_parameters(t, self.expert)
        if model.precision != "16-bit":
            cast = _CASTS[model.precision][0]
            casts = (2.0 * cast - VALUE_BYTES * (self.runtime.keeps_bytes and cast == 1)) * parameters
            kept -= (VALUE_BYTES - cast) * (self.whole + self.routed + heads + mlp)
        node = self._node(
            "layer",
            (
                self._seconds([(scores, every_score), *chooser], reads, sums=sums, weights=forward),
                self._seconds([(inner, every_score), *chooser], writes, sums=sums + again, weights=inward),
                # Split along the tokens, where their own outputs are few.
                self._seconds(chooser, self._added(sum(matrices)), weights=whole),
            ),
            parameters=[*matrices, norm, parameters - sum(matrices) - norm],
            stash=kept + 5 * self.scores,
            selective=(kept, self._seconds([(scores, every_score)], 13 * self.scores)),
            # One gradient of GeLU's or softmax's size: the next takes the place of what the product let go of.
            workspace=max(2 * ahead * mlp, 2 * self.scores),
            output=VALUE_BYTES * self.wide * self.context,
        )
        experts = model.experts // self.expert if self.expert > 1 else 0
        node = replace(node, buffer_bytes=casts, expert_bytes=float(VALUE_BYTES * experts * model.expert_parameters(m)))
        return self._exchanging(node, (scores, inner), every_score)

    def _traffic(self, mlp: float, heads: float, ordered: float) -> tuple[float, float]:
        """Bytes that F and I of a layer move besides products; values in an MLP, in heads, in experts' order."""
        model, kv, is_llama = self.model, self.model.kv_part, self.model.style == "llama"
        of_whole, of_mlp, of_heads, casts, ends, added = (22, 34), (4, 6), (0.0, 0.0), 0.0, 0.0, 0.0
        if is_llama:
            of_whole, of_mlp = (20, 24), (6, 10) if self.runtime.fuses else (10, 26)
            of_heads = (8 + 8 * kv, 8 + 12 * kv) if self.runtime.fuses else (36, 40)
        if model.precision != "16-bit":
            casts, ends = _CASTS[model.precision][1], self.wide * (1 + model.top_k)
            if self.runtime.gathers_casts and self.whole < self.wide:  # casts go round; Hopper transposes them for W
                ends = self.whole + self.routed + (0.0 if self.device.fp4_flops else 2 * ends / casts)
            added = 2 * VALUE_BYTES * (self.wide + self.whole) * (self.overlaps and self.tensor > 1)
        cast = ends + heads + mlp, ends + (1 + 2 * kv) * heads + model.mlp_inputs * mlp
        reads, writes = (
            one * self.whole + two * mlp + three * heads + of_scores * self.scores + 8 * ordered + casts * each
            for one, two, three, of_scores, each in zip(of_whole, of_mlp, of_heads, (13, 19), cast, strict=True)
        )
        return reads + added, writes

    def _score_flops(self) -> tuple[float, float]:
        """Of F and I, as many as take their time as a product."""
        model = self.model
        scores = model.score_flops(self.tokens) / self.tensor
        if model.attention != "flash" or self.runtime.attention is None:
            return scores, (2.5 if model.attention == "flash" else 2) * scores
        forward, backward, start = self.runtime.attention
        causal = scores / 2 * (1 + start * max(1, self.context * self.runtime.overlaps_context) / model.length)
        return causal / forward, 2.5 * causal / backward

    def _exchanging(self, node: Node, attention: tuple[float, float], outputs: float) -> Node:
        """The node with the seconds in which members exchange keys and values, and rows for experts. In a ring the
        former travel while all parts but the last attend."""
        part = 1 - 1 / self.context if self.runtime.overlaps_context else 0.0
        hidden = [part * self.device.matrix_seconds(flops, outputs=outputs) for flops in attention]
        keys = [max(0.0, halves * self.kv_seconds - own) for halves, own in zip((1, 2), hidden, strict=True)]
        there, back = (each + 2 * self.routed_seconds for each in keys)
        return replace(
            node,
            forward_seconds=node.forward_seconds + there,
            backward_seconds=node.backward_seconds + back,
            input_grad_seconds=node.input_grad_seconds + back,
            forward_exchange_seconds=there,
            backward_exchange_seconds=back,
        )

    def _embedding(self) -> Node:
        """Row, position and dropout; the vocabulary is divided, so the rows of all devices are added. No I."""
        return self._node(
            "embedding",
            (self._seconds([], 15 * self.whole, sums=1), 0.0, self._seconds([], 13 * self.whole)),
            parameters=[rows * self.model.hidden for rows in (self.vocabulary, self.model.positions, 0)],
            stash=self.whole,  # the dropout's mask
            workspace=VALUE_BYTES * self.whole,
            output=VALUE_BYTES * self.wide * self.context,
        )

    def _head(self) -> Node:
        """Norm, projection, and the loss in float32 over the device's part of the vocabulary."""
        flops, logits = self.model.head_flops(self.tokens) / self.tensor, self.tokens * self.vocabulary
        is_fused = self.model.loss == "fused"
        again = [(flops, logits)] * is_fused  # in I and W alike, where they run apart
        chunk = self.tokens * min(self.vocabulary, max(LEAST_ROWS, self.model.hidden))
        node = self._node(
            "head",
            (
                self._seconds(
                    [(flops, logits)], 4 * self.whole + (18 if self.runtime.fuses or is_fused else 38) * logits
                ),
                self._seconds([(flops, self.wide), *again], 6 * self.whole + (32 if is_fused else 14) * logits, sums=1),
                self._seconds([(flops, logits)], self._added(self.vocabulary * self.model.hidden)),
            ),
            parameters=[self.vocabulary * self.model.hidden, self.model.norm_parameters],
            stash=4 * self.whole + 4 * (self.tokens if is_fused else logits),
            # The logits' gradient in float32 and in 16 bits; or both types of a chunk's, and the float32 one of hidden.
            workspace=max(10 * chunk, 8 * chunk + 4 * self.wide) if is_fused else 6 * logits,
            output=0.0,
        )
        if not is_fused:
            return node
        alone = self._seconds(again, 32 * logits)
        return replace(node, weight_grad_seconds=node.weight_grad_seconds + alone)

    def _added(self, parameters: int) -> float:
        """Bytes that W reads and writes to add a microbatch's gradients, and those in 16 bits that a kernel adds."""
        apart = 0 if self.runtime.fuses else 2 * VALUE_BYTES
        return (2.0 * self.model.gradient_bytes + apart) * parameters if self.runtime.adds_gradients else 0.0

    def _seconds(self, products: _Products, num_bytes: float, *, sums: float = 0, weights: _Products = ()) -> float:
        """Products (FLOPs and outputs), those with a layer's `weights` in its precision, then memory traffic, then sums
        over the tensor ranks, which wait for each other, or of a layer overlap with its products in T parts."""
        plain, own = (
            [self.device.matrix_seconds(flops, outputs=outputs, precision=precision) for flops, outputs in every]
            for every, precision in ((products, "16-bit"), (weights, self.model.precision))
        )
        summed = sums * self.sum_seconds
        if weights and self.runtime.gathers_casts and self.model.precision != "16-bit":
            summed *= (1 + _CASTS[self.model.precision][0] / VALUE_BYTES) / 2  # scattered sums stay in 16 bits
        if weights and self.overlaps:
            is_all = self.dividing == self.tensor  # whole experts sum nothing, and wait for what is gathered for them
            apart, beside = (0.0, sum(own)) if is_all else (summed * (1 - 1 / max(sums, 1)), sum(own[:2]))
            summed = apart + max((summed - apart) / self.tensor, summed - apart - beside * (1 - 1 / self.tensor))
        return sum(plain) + sum(own) + self.device.memory_seconds(num_bytes) + summed

    def _node(
        self,
        name: str,
        seconds: tuple[float, float, float],
        *,
        parameters: Sequence[int],
        stash: float,
        workspace: float,
        output: float,
        selective: tuple[float, float] | None = None,
    ) -> Node:
        """One part; it runs again where it has figures of selective recompute (bytes, seconds). Seconds: of F, I and
        W; parameters: of each matrix, and of all vectors together."""
        kernels = LAYER_KERNELS if selective is not None else END_KERNELS
        host = [self.device.kernel_seconds * each for each in kernels]
        forward, input_grad, weight_grad = seconds
        weights, alone = VALUE_BYTES * sum(parameters), [VALUE_BYTES * each for each in parameters[:-1]]
        waits = max(1.0, (host[1] + host[2]) / (input_grad + weight_grad))
        input_grad, weight_grad = waits * input_grad, waits * weight_grad
        return Node(
            name=name,
            forward_seconds=max(forward, host[0]),
            backward_seconds=input_grad + weight_grad,
            activation_bytes=output,
            parameter_bytes=weights,
            largest_parameter_bytes=max(alone),
            small_parameter_bytes=weights - sum(each for each in alone if each >= ALONE_BYTES),
            stash_bytes=stash,
            input_grad_seconds=input_grad,
            weight_grad_seconds=weight_grad,
            update_seconds=self.device.memory_seconds(self.model.update_bytes * sum(parameters)),
            workspace_bytes=workspace,
            runs_again=selective is not None,
            selective_bytes=None if selective is None else selective[0],
            selective_seconds=None if selective is None else selective[1],
            part_seconds=self.runtime.part_seconds * sum(each > 0 for each in parameters),
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class TransformerSource:
    """Profiles of one model on one kind of device, by microbatch and tensor size; each is made once.

    Arguments:
        transformer, device, cluster, context, expert, runtime: as for `transformer_profile`.
        splits: pairs (context, expert) from which a plan chooses, in place of these; none: these.
    """

    transformer: Transformer
    device: DeviceModel
    cluster: Cluster | None = None
    context: int = 1
    expert: int = 1
    runtime: Runtime = PLAIN
    splits: tuple[tuple[int, int], ...] = ()
    _made: dict[tuple[int, int], Profile] = field(default_factory=dict, init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        for context, expert in self.splits:
            count("context", context), count("expert", expert)

    def alternatives(self) -> Iterator[tuple[str, TransformerSource]]:
        """The source with each of `splits`."""
        for context, expert in self.splits or [(self.context, self.expert)]:
            name = ", ".join(f"{what}={size}" for what, size in (("context", context), ("expert", expert)) if size > 1)
            yield name or "whole sequences and experts", replace(self, context=context, expert=expert, splits=())

    def profile(self, *, microbatch_size: int, tensor: int = 1) -> Profile:
        """`transformer_profile`; what it needs besides the sizes is known."""
        key = (microbatch_size, tensor)
        if key not in self._made:
            self._made[key] = transformer_profile(
                self.transformer,
                microbatch_size=microbatch_size,
                tensor=tensor,
                device=self.device,
                cluster=self.cluster,
                context=self.context,
                expert=self.expert,
                runtime=self.runtime,
            )
        return self._made[key]

    def tensor_sizes(self, limit: int | None = None) -> tuple[int, ...]:
        """The tensor sizes worth trying, t c of a context c: t divides heads and MLP and stays within a node, and t c
        within `limit`.

        >>> model = Transformer(layers=2, hidden=96, heads=6, vocabulary=100, length=8)
        >>> cluster = Cluster.parse("2x4:nvlink=300GB/s,net=25GB/s")
        >>> TransformerSource(transformer=model, device=DeviceModel.preset("A100-80GB"), cluster=cluster).tensor_sizes()
        (1, 2, 3)
        """
        model, c = self.transformer, self.context
        most = model.heads if limit is None else count("limit", limit) // c
        if not most:
            fail("context", c, f"at most the {limit} devices")
        if self.cluster is not None:
            most = min(most, self.cluster.levels[0].size)
        sizes = range(1, min(most, model.heads) + 1)
        shapes = model.heads, model.mlp_width, model.kv_heads or model.heads
        return tuple(t * c for t in sizes if not any(shape % t for shape in shapes))
