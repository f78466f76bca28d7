"""Five models of `bench suite`, each small enough for one core, three in layers, and their fixed batches."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from itertools import pairwise

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ...cli.train.corpus import loss_fn
from ...cli.train.gpt import Attention, Block, Embedding, GPTConfig, Head
from .models import WholeProblem, adamw, gpt_problem, image_problem, seeded

_SIZE = GPTConfig(layers=4, width=192, length=64)
_GPT = GPTConfig(layers=12, width=256, length=128)
_TOKENS = 8192  # T5's own 32,128 would be most of so small a step


def make_problem(name: str, batch: int) -> tuple[WholeProblem, str, int]:
    """A problem, its unit of throughput, and the number of units in a sample.

    `gpt`; `lstm`: sequence to sequence; `cnn`: slow layers first, large ones last; `unet`; `moe`: a mixture of experts.
    """
    if name in ("gpt", "cnn"):
        problem = gpt_problem(_SIZE, batch=batch) if name == "gpt" else image_problem(64, batch=batch)
    else:
        makes: dict[str, Callable[[], nn.Module]] = {"lstm": Seq2Seq, "unet": UNet, "moe": _mixture}
        torch.manual_seed(1)
        inputs = torch.randn(batch, 3, 64, 64) if name == "unet" else torch.randint(256, (batch, _SIZE.length))
        problem = WholeProblem(
            make_model=partial(seeded, makes[name]),
            inputs=inputs,
            target=inputs.chunk(2, dim=1)[1] if name == "lstm" else inputs,
            loss_fn=F.mse_loss if name == "unet" else loss_fn,
            optimizer=adamw,
        )
    return (problem, "images/s", 1) if name in ("cnn", "unet") else (problem, "tokens/s", problem.target.shape[1])


class Seq2Seq(nn.Module):
    """Tokens [B, 2 T], sources and targets -> logits [B, T, 256]; LSTMs with attention (Luong et al., 2015)."""

    def __init__(self, width: int = 192, layers: int = 2) -> None:
        super().__init__()
        self.source, self.target = nn.Embedding(256, width), nn.Embedding(256, width)
        self.encoder = nn.ModuleList(nn.LSTM(width, width, batch_first=True) for _ in range(layers))
        self.decoder = nn.ModuleList(nn.LSTM(width, width, batch_first=True) for _ in range(layers))
        self.head = nn.Linear(2 * width, 256)

    def forward(self, tokens: Tensor) -> Tensor:
        source, target = tokens.chunk(2, dim=1)
        memory, hidden = self.source(source), self.target(target)
        for encode, decode in zip(self.encoder, self.decoder, strict=True):
            memory, state = encode(memory)
            hidden, _ = decode(hidden, state)
        attended = F.scaled_dot_product_attention(hidden, memory, memory)
        out: Tensor = self.head(torch.cat((hidden, attended), dim=-1))
        return out


class UNet(nn.Module):
    """Images -> images, sides multiples of 8; a skip from each level down to the one up (Ronneberger et al., 2015)."""

    def __init__(self, width: int = 16, levels: int = 3) -> None:
        super().__init__()
        widths = [width << level for level in range(levels)]
        self.stem, self.head = nn.Conv2d(3, width, 3, padding=1), nn.Conv2d(width, 3, 1)
        self.down = nn.ModuleList(_convolved(each, each) for each in widths)
        self.deeper = nn.ModuleList(nn.Conv2d(each, 2 * each, 2, stride=2) for each in widths)
        self.higher = nn.ModuleList(nn.ConvTranspose2d(2 * each, each, 2, stride=2) for each in reversed(widths))
        self.up = nn.ModuleList(_convolved(2 * each, each) for each in reversed(widths))

    def forward(self, images: Tensor) -> Tensor:
        hidden, skips = self.stem(images), []
        for level, deeper in zip(self.down, self.deeper, strict=True):
            skips.append(level(hidden))
            hidden = deeper(skips[-1])
        for higher, level in zip(self.higher, self.up, strict=True):
            hidden = level(torch.cat((higher(hidden), skips.pop()), dim=1))
        out: Tensor = self.head(hidden)
        return out


def _convolved(inputs: int, width: int) -> nn.Sequential:
    first, second = nn.Conv2d(inputs, width, 3, padding=1), nn.Conv2d(width, width, 3, padding=1)
    return nn.Sequential(first, nn.GroupNorm(4, width), nn.ReLU(), second, nn.GroupNorm(4, width), nn.ReLU())


class Mixed(nn.Module):
    """Attention, then E experts, each for the 2 N / E of N tokens with the largest gates (Zhou et al., 2022)."""

    def __init__(self, config: GPTConfig, experts: int) -> None:
        super().__init__()
        width = config.width
        self.norm1, self.attention, self.norm2 = nn.LayerNorm(width), Attention(config), nn.LayerNorm(width)
        self.router = nn.Linear(width, experts, bias=False)
        self.up = nn.Parameter(torch.randn(experts, width, 2 * width) * width**-0.5)
        self.down = nn.Parameter(torch.randn(experts, 2 * width, width) * (2 * width) ** -0.5)

    def forward(self, hidden: Tensor) -> Tensor:
        hidden = hidden + self.attention(self.norm1(hidden))
        flat = self.norm2(hidden).flatten(0, 1)  # [N, D]
        gates = self.router(flat).softmax(dim=-1).t()  # [E, N]
        gate, token = gates.topk(2 * gates.shape[1] // gates.shape[0])
        made = F.gelu(flat[token] @ self.up) @ self.down * gate.unsqueeze(-1)  # [E, 2 N / E, D]
        return hidden + torch.zeros_like(flat).index_add(0, token.flatten(), made.flatten(0, 1)).view_as(hidden)


def layered(name: str, batch: int) -> WholeProblem:
    """`gpt`, `resnet` and `t5` as an nn.Sequential of layers, which torch's pipelines can cut, too.

    t5: source and target, 32 tokens each, in one tensor [B, 64, 512], with the sizes of T5-small; resnet: ResNet-18 at
    half its width, for images of 32 x 32.
    """
    torch.manual_seed(1)
    inputs, target = torch.randn(batch, 3, 32, 32), torch.randint(10, (batch,))
    if name != "resnet":
        count, length = (_GPT.vocabulary, _GPT.length) if name == "gpt" else (_TOKENS, 64)
        inputs, target = (torch.randint(count, (batch, size)) for size in (length, length if name == "gpt" else 32))
    makes: dict[str, Callable[[], nn.Module]] = {
        "gpt": lambda: nn.Sequential(Embedding(_GPT), *(Block(_GPT) for _ in range(_GPT.layers)), Head(_GPT)),
        "resnet": _resnet,
        "t5": lambda: nn.Sequential(
            nn.Embedding(_TOKENS, 512), *(_T5(at < 6) for at in range(12)), _Targets(), nn.Linear(512, _TOKENS)
        ),
    }
    return WholeProblem(
        make_model=partial(seeded, makes[name]),
        inputs=inputs,
        target=target,
        loss_fn=F.cross_entropy if name == "resnet" else loss_fn,
        optimizer=adamw,
    )


class _T5(nn.Module):
    def __init__(self, encodes: bool) -> None:
        super().__init__()
        kind = nn.TransformerEncoderLayer if encodes else nn.TransformerDecoderLayer
        self.layer = kind(512, 8, 2048, dropout=0.0, batch_first=True, norm_first=True)

    def forward(self, both: Tensor) -> Tensor:
        source, target = both.chunk(2, dim=1)
        if isinstance(self.layer, nn.TransformerEncoderLayer):
            return torch.cat((self.layer(source), target), dim=1)
        return torch.cat((source, self.layer(target, source)), dim=1)


class _Targets(nn.Module):
    def forward(self, both: Tensor) -> Tensor:
        return both.chunk(2, dim=1)[1]


class _Residual(nn.Module):
    def __init__(self, inputs: int, width: int) -> None:
        super().__init__()
        stride = 1 if inputs == width else 2
        first, second = nn.Conv2d(inputs, width, 3, stride, 1), nn.Conv2d(width, width, 3, 1, 1)
        self.body = nn.Sequential(first, nn.BatchNorm2d(width), nn.ReLU(), second, nn.BatchNorm2d(width))
        self.skip = nn.Identity() if stride == 1 else nn.Conv2d(inputs, width, 1, stride)

    def forward(self, x: Tensor) -> Tensor:
        return F.relu(self.body(x) + self.skip(x))


def _resnet() -> nn.Sequential:
    widths = [32, *(32 << at // 2 for at in range(8))]
    blocks = (_Residual(*pair) for pair in pairwise(widths))
    stem = nn.Sequential(nn.Conv2d(3, 32, 3, 1, 1), nn.BatchNorm2d(32), nn.ReLU())
    return nn.Sequential(stem, *blocks, nn.Sequential(nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(256, 10)))


def _mixture() -> nn.Sequential:
    return nn.Sequential(Embedding(_SIZE), *(Mixed(_SIZE, 8) for _ in range(_SIZE.layers)), Head(_SIZE))
