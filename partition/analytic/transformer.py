"""The shape of a GPT, and what it says alone: parameters and FLOPs. What its parts cost is in `layers.py`.
 Symbols as in Megatron-LM: l layers, h hidden size, a heads, r MLP ratio, V vocabulary,
s sequence length, B batch size.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, get_args

from ..strict import count, fail, number

VALUE_BYTES = 2  # of a weight or an activation
Head = Literal["tied", "untied"]
Split = Literal["tensor", "sequence"]
Attention = Literal["stored", "flash"]
Loss = Literal["stored", "fused"]
Gradients = Literal["16-bit", "float32"]
Recompute = Literal["none", "layer", "selective"]
Style = Literal["gpt", "llama"]
Precision = Literal["16-bit", "fp8", "fp4"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Transformer:
    """The shape of a GPT, trained in mixed precision.

    Arguments:
        layers, hidden, heads, vocabulary: l, h, a, V.
        length: of a sequence, s; positions are learned.
        mlp_ratio: width of the MLP over h.
        head: "tied": the projection's weights are the embedding's. Where head and embedding lie in different
            stages each holds a copy, so the profile counts V h bytes in both.
        split: what tensor parallelism divides, see `layers.py`.
        attention: "stored": the scores are written to memory; "flash": they are not.
        loss: "stored": all logits are kept until the backward; "fused": it computes them again, a part of the
            vocabulary at a time (`stagewright.LinearCrossEntropy`).
        gradients: of what type they are added up, and summed over replicas.
        style: "llama": no biases, dropout or learned positions; norms without shift, three matrices to an MLP.
        kv_heads: heads of K and V, which groups of queries share (Ainslie et al. 2023); None: a.
        experts, top_k: MLPs of a layer, and of these how many a token takes (Jiang et al. 2024), equally many each.
        predictions: tokens that are predicted; of the second and later ones each has a layer and a head of its own
            (DeepSeek-AI 2024, arXiv 2412.19437, section 2.2, whose heads share weights).
        precision: of the layers' products with weights; "fp8", "fp4": their inputs are cast, and kept so.

    Raises ValueError for sizes that are no whole numbers of at least 1 or do not divide.

    >>> gpt3 = Transformer(layers=96, hidden=12288, heads=96, vocabulary=51200, length=2048)
    >>> round(gpt3.num_parameters / 1e9, 1), gpt3.bytes_per_parameter
    (174.6, 16)
    """

    layers: int
    hidden: int
    heads: int
    vocabulary: int
    length: int
    mlp_ratio: float = 4
    head: Head = "tied"
    split: Split = "tensor"
    attention: Attention = "stored"
    loss: Loss = "stored"
    gradients: Gradients = "16-bit"
    style: Style = "gpt"
    kv_heads: int | None = None
    experts: int = 1
    top_k: int = 1
    predictions: int = 1
    precision: Precision = "16-bit"

    def __post_init__(self) -> None:
        for size in ("layers", "hidden", "heads", "vocabulary", "length", "experts", "top_k", "predictions"):
            count(f"transformer: {size}", getattr(self, size))
        if self.hidden % self.heads:
            fail("transformer: hidden", self.hidden, f"a multiple of heads={self.heads}")
        if self.heads % count("transformer: kv_heads", self.heads if self.kv_heads is None else self.kv_heads):
            fail("transformer: kv_heads", self.kv_heads, f"a divisor of heads={self.heads}")
        if self.top_k > self.experts:
            fail("transformer: top_k", self.top_k, f"at most the {self.experts} experts")
        ratio = number("transformer: mlp_ratio", self.mlp_ratio, positive=True)
        if self.mlp_width < 1 or abs(ratio * self.hidden - self.mlp_width) > 1e-6 * self.hidden:
            fail("transformer: mlp_ratio", self.mlp_ratio, f"a multiple of 1/{self.hidden} (the MLP's width is whole)")
        every = {"head": Head, "split": Split, "attention": Attention, "loss": Loss}
        for name, choices in (every | {"gradients": Gradients, "style": Style, "precision": Precision}).items():
            if getattr(self, name) not in get_args(choices):
                fail(f"transformer: {name}", getattr(self, name), f"one of {', '.join(get_args(choices))}")

    @property
    def mlp_width(self) -> int:
        """r h."""
        return round(self.mlp_ratio * self.hidden)

    @property
    def kv_part(self) -> float:
        """Width of K, and of V, over h."""
        return (self.kv_heads or self.heads) / self.heads

    @property
    def mlp_inputs(self) -> int:
        """Matrices that an MLP begins with."""
        return 2 if self.style == "llama" else 1

    @property
    def positions(self) -> int:
        """The number of positions that are learned."""
        return self.length if self.style == "gpt" else 0

    @property
    def norm_parameters(self) -> int:
        return (2 if self.style == "gpt" else 1) * self.hidden

    @property
    def num_parameters(self) -> int:
        """Parameters, tied weights once: 12 l h^2 (1 + 13 / (12 h) + (V + s) / (12 l h)) + 2h for r = 4 of a GPT."""
        embeddings = (self.vocabulary * (2 if self.head == "untied" else 1) + self.positions) * self.hidden
        later = self.layer_parameters(1) + self.vocabulary * self.hidden + self.norm_parameters
        own = embeddings + self.layers * self.layer_parameters(1) + self.norm_parameters
        return own + (self.predictions - 1) * later

    @property
    def gradient_bytes(self) -> int:
        """Bytes of a gradient."""
        return VALUE_BYTES if self.gradients == "16-bit" else 4

    @property
    def bytes_per_parameter(self) -> int:
        """Weight (2), gradient (2 or 4), float32 master weight and Adam's two moments (12) [bytes]."""
        return VALUE_BYTES + self.gradient_bytes + 12

    @property
    def optimizer_ratio(self) -> float:
        """Bytes of optimizer state per byte of weights, without a gradient as large as the weights: 6 or, in float32,
        7.

        Rajbhandari et al. 2020, section 3.1: 2 + 2 + 12 = 16 bytes a parameter.
        """
        return (self.bytes_per_parameter - 2 * VALUE_BYTES) / VALUE_BYTES

    @property
    def update_bytes(self) -> int:
        """Bytes of memory traffic per parameter in one update, where each pass reads and writes anew: 62 or 58.

                                            read                          written
            gradients emptied               -                             16 bits       2 (float32: 4)
            to float32                      16 bits                       float32       6 (float32: 0)
            divided by the loss scale       gradient                      gradient      8
            their norm                      gradient                      -             4
            clipped by it                   gradient                      gradient      8
            Adam                            gradient, master, 2 moments   the last 3   28
            to 16 bits                      master                        weight        6

        As in Megatron-LM of 2021 (megatron/optimizer/optimizer.py, `step`, and clip_grads.py; Adam and each other pass
        are one fused kernel of Apex's). Clipping scales where the norm is above the limit, as it is at first.
        """
        gradient = self.gradient_bytes
        converted = 0 if gradient == 4 else gradient + 4
        return gradient + converted + 8 + 4 + 8 + 28 + 6

    def flops(self, *, batch_size: int, recompute: Recompute = "none") -> float:
        """FLOP of the matrix products of one step.

        72 B s l h^2 (1 + s / (6h) + V / (12 l h)) for r = 4. With "layer" each layer's forward runs again: 96 B s l h^2
        (1 + s / (6h) + V / (16 l h)) (Narayanan et al. 2021, section 5.1); with "selective" that of its scores alone.
        """
        if recompute not in get_args(Recompute):
            fail("recompute", recompute, f"one of {', '.join(get_args(Recompute))}")
        tokens = count("batch_size", batch_size) * self.length
        layers = self.layers + self.predictions - 1
        weights, scores = layers * self.weight_flops(tokens), layers * self.score_flops(tokens)
        again = {"none": 0.0, "layer": weights + scores, "selective": scores}[recompute]
        return 3 * (weights + scores + self.predictions * self.head_flops(tokens)) + again

    def refuse_tensor(self, tensor: int) -> None:
        """Raises ValueError for a tensor size that does not divide the heads, key-value heads and the MLP width."""
        sizes = {"heads": self.heads, "mlp_width": self.mlp_width, "kv_heads": self.kv_heads or self.heads}
        for name, size in sizes.items():
            if size % count("tensor", tensor):
                fail("tensor", tensor, f"a divisor of {name}={size}")

    def expert_parameters(self, tensor: int) -> int:
        """Parameters of one MLP on one device: matrices and their columns' biases are divided, h others are not."""
        biases, h = self.style == "gpt", self.hidden
        return ((self.mlp_inputs + 1) * h + biases) * self.mlp_width // tensor + biases * h

    def layer_matrices(self, tensor: int, expert: int = 1) -> list[int]:
        """Parameters of each matrix of a layer on one device: Q K V, after the attention, up and down by expert."""
        h, (qkv, *_) = self.hidden, self.product_widths()
        mlp = [each * h * self.mlp_width // (tensor if expert == 1 else 1) for each in (self.mlp_inputs, 1)]
        return [round(qkv) * h // tensor, h * h // tensor, *(self.experts // expert * mlp)]

    def layer_parameters(self, tensor: int, expert: int = 1) -> int:
        """Parameters of a layer on one device, with its share of the experts, which are whole if replicas divide them,
        and with the router."""
        biases, h, kv = self.style == "gpt", self.hidden, round(self.kv_part * self.hidden)
        attention = ((2 * h + 2 * kv) * h + biases * (h + 2 * kv)) // tensor + biases * h
        chooser = h * self.experts if self.experts > 1 else 0
        mlps = self.experts // expert * self.expert_parameters(tensor if expert == 1 else 1)
        return attention + mlps + chooser + 2 * self.norm_parameters

    def product_widths(self) -> tuple[float, float, float, float]:
        """Columns, over all experts of a token, of Q K V, after the attention, of the MLP's up and down."""
        mlp = self.top_k * self.mlp_width
        return (1 + 2 * self.kv_part) * self.hidden, self.hidden, self.mlp_inputs * mlp, mlp

    def weight_flops(self, tokens: int) -> float:
        """FLOP of one layer's forward with its weights: 24 n h^2 for r = 4 of a GPT."""
        chooser = self.experts if self.experts > 1 else 0
        return 2.0 * tokens * (sum(self.product_widths()) + chooser) * self.hidden

    def score_flops(self, tokens: int) -> float:
        """Q K^T and its product with V, not causal: what the kernels of 2021 computed, and what papers count [FLOP]."""
        return 4.0 * tokens * self.length * self.hidden

    def head_flops(self, tokens: int) -> float:
        """FLOP of the projection's forward."""
        return 2.0 * tokens * self.hidden * self.vocabulary
