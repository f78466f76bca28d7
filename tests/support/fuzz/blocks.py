"""Blocks [N, T, D] -> [N, T, D] of all kinds that user code comes in, each a module of its own."""

import random
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from functools import lru_cache
from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from . import block
from .block import Block, D, Y


class Linear(Block):
    """The base as it is."""


class MLP(Block, up=lambda: nn.Linear(D, Y), down=lambda: nn.Linear(Y, D)):
    def body(self, x: Tensor) -> Tensor:
        return self.down(F.gelu(self.up(x)))


class Plain(Block):
    makers: ClassVar[dict[str, Any]] = {}

    def body(self, x: Tensor) -> Tensor:
        return torch.sin(x)


class GRU(Block, rnn=lambda: nn.GRU(D, D, batch_first=True)):
    def body(self, x: Tensor) -> Tensor:
        return self.rnn(x)[0]


class LSTM(GRU, rnn=lambda: nn.LSTM(D, D, batch_first=True)): ...


class RNN(GRU, rnn=lambda: nn.RNN(D, D, batch_first=True)): ...


class Cell(Block, cell=lambda: nn.GRUCell(D, D)):
    def body(self, x: Tensor) -> Tensor:
        h, steps = torch.zeros_like(x[:, 0]), []
        for t in range(x.shape[1]):
            h = self.cell(x[:, t], h)
            steps.append(h)
        return torch.stack(steps, 1)


class MHA(Block, attention=lambda: nn.MultiheadAttention(D, 2, batch_first=True)):
    def body(self, x: Tensor) -> Tensor:
        return self.attention(x, x, x)[0]


class Encoder(Block, layer=lambda: nn.TransformerEncoderLayer(D, 2, Y, dropout=0.0, batch_first=True)):
    def body(self, x: Tensor) -> Tensor:
        return self.layer(x)


class Attention(Block, qkv=lambda: nn.Linear(D, 3 * D), out=lambda: nn.Linear(D, D)):
    def body(self, x: Tensor) -> Tensor:
        q, k, v = (part.unflatten(-1, (2, D // 2)).transpose(1, 2) for part in self.qkv(x).chunk(3, -1))
        h = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return x + self.out(h.transpose(1, 2).flatten(-2))


class Conv(Block, conv=lambda: nn.Conv1d(D, D, 3, padding=1)):
    def body(self, x: Tensor) -> Tensor:
        return self.conv(x.transpose(1, 2)).transpose(1, 2)


class Batchnorm(Block, norm=lambda: nn.BatchNorm1d(D)):
    def body(self, x: Tensor) -> Tensor:
        return self.norm(x.transpose(1, 2)).transpose(1, 2)


class Norm(Block, norm=lambda: nn.LayerNorm(D), fc=lambda: nn.Linear(D, D)):
    def body(self, x: Tensor) -> Tensor:
        return x + F.silu(self.fc(self.norm(x)))


class WeightNorm(Block, fc=lambda: nn.utils.parametrizations.weight_norm(nn.Linear(D, D))): ...


class Nested(Block, layers=lambda: nn.ModuleList(nn.Sequential(nn.Linear(D, D), nn.Tanh()) for _ in range(2))):
    def body(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = x + layer(x)
        return x


class Dropout(Block, fc=lambda: nn.Linear(D, D), drop=lambda: nn.Dropout(0.3)):
    def body(self, x: Tensor) -> Tensor:
        return self.drop(self.fc(x))


class Layerdrop(Block):
    def body(self, x: Tensor) -> Tensor:
        return x * 1.5 if self.training and random.random() < 0.4 else self.fc(x)


class TopOne(Block, gate=lambda: nn.Linear(D, 2), experts=lambda: nn.ModuleList(nn.Linear(D, D) for _ in range(2))):
    def body(self, x: Tensor) -> Tensor:
        weights = self.gate(x).softmax(-1)
        top, best = weights.max(-1)
        out = torch.zeros_like(x)
        for e, expert in enumerate(self.experts):
            mine = best == e
            if mine.any():
                out[mine] = expert(x[mine]) * top[mine].unsqueeze(-1)
        return out


class Soft(TopOne):
    def body(self, x: Tensor) -> Tensor:
        weights = self.gate(x).softmax(-1)
        return sum(weights[..., e : e + 1] * expert(x) for e, expert in enumerate(self.experts))  # type: ignore[return-value]


class Assigned(Block, fc=lambda: nn.Linear(D, D), seen=lambda: torch.ones(D)):
    def body(self, x: Tensor) -> Tensor:
        if self.training:
            self.seen = 0.9 * self.seen + 0.1 * x.detach().abs().mean((0, 1))
        return self.fc(x) / (1 + self.seen)


class Written(Assigned):
    def body(self, x: Tensor) -> Tensor:
        if self.training:
            self.seen.mul_(0.9).add_(x.detach().abs().mean((0, 1)), alpha=0.1)
        return self.fc(x) / (1 + self.seen.clone())


class Counter(Block, fc=lambda: nn.Linear(D, D), calls=int):
    def body(self, x: Tensor) -> Tensor:
        self.calls += self.training
        return self.fc(x) * (1 + self.calls % 3)


class InPlace(Block):
    def body(self, x: Tensor) -> Tensor:
        h = self.fc(x)
        h += x
        h.mul_(0.5)
        return F.relu_(h)


class Argument(Block):
    def body(self, x: Tensor) -> Tensor:
        return self.fc(x.add_(0.5))


class Scale(torch.autograd.Function):
    """A gradient that is not that of the forward."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x * 2.0

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return grad * 3.0


class Custom(Block):
    def body(self, x: Tensor) -> Tensor:
        return Scale.apply(self.fc(x))


class Checkpointed(Block, fc=lambda: nn.Linear(D, D), second=lambda: nn.Linear(D, D)):
    def body(self, x: Tensor) -> Tensor:
        return checkpoint(lambda h: self.second(torch.tanh(self.fc(h))), x, use_reentrant=False)


class ForwardHook(Block):
    def make(self) -> None:
        self.fc.register_forward_hook(lambda module, args, out: out * 1.3)


class PreHook(Block):
    def make(self) -> None:
        self.register_forward_pre_hook(lambda module, args: (args[0] + 0.1,))


class BackwardHook(Block):
    def make(self) -> None:
        self.fc.register_full_backward_hook(
            lambda module, inputs, outputs: tuple(None if g is None else 2 * g for g in inputs)
        )


class ParameterHook(Block):
    def make(self) -> None:
        self.fc.weight.register_hook(lambda grad: grad * 1.5)


class TensorHook(Block):
    def body(self, x: Tensor) -> Tensor:
        h = self.fc(x)
        if h.requires_grad:
            h.register_hook(lambda grad: grad * 1.2)
        return h


class Branch(Block, fc=lambda: nn.Linear(D, D), other=lambda: nn.Linear(D, D)):
    def body(self, x: Tensor) -> Tensor:
        return self.fc(x) if x[..., 0].sum() > 0 else self.other(x)


class Detached(Block):
    def body(self, x: Tensor) -> Tensor:
        return self.fc(x) + x.detach()


class Frozen(Block):
    def make(self) -> None:
        self.fc.weight.requires_grad_(False)


class Unused(Block, fc=lambda: nn.Linear(D, D), other=lambda: nn.Linear(D, D)): ...


class Raw(Block, weights=lambda: nn.ParameterList([torch.eye(D) * 0.7, torch.ones(D)])):
    def body(self, x: Tensor) -> Tensor:
        return x @ self.weights[0] + self.weights[1]


class NoGrad(Block):
    def body(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            mean = x.mean(-1, keepdim=True)
        return self.fc(x - mean)


class Compound(Block):
    def body(self, x: Tensor) -> Tensor:
        a, b = torch.einsum("ntd,ed->nte", x, self.fc.weight).split(D // 2, -1)
        h = torch.cat([b, torch.where(a > 0, a, 0.1 * a)], -1).cumsum(1)
        return h.index_select(-1, torch.tensor([2, 0, 3, 1], device=x.device))


class Stash(Block):
    """Leaves a tensor for a `Pop` behind it, past arguments; `connect` gives both one dict."""

    store: dict[str, Tensor]

    def body(self, x: Tensor) -> Tensor:
        self.store["kept"] = self.fc(x)
        return x


class Pop(Stash):
    def body(self, x: Tensor) -> Tensor:
        return self.fc(x) + self.store.pop("kept")


@lru_cache
def _table(length: int, dtype: torch.dtype) -> Tensor:
    return torch.arange(1, 1 + length, dtype=dtype)[:, None] / length


class Cached(Block):
    """Functions' results that are kept: by functools, in a dict of the class, and as the longest one so far."""

    tables: dict[tuple[int, torch.dtype], Tensor] = {}  # noqa: RUF012
    longest: Tensor | None = None

    def make(self) -> None:
        # Not in a state dict: a table outlives it, and which process has one is a matter of stages.
        self.register_buffer("rates", torch.arange(1.0, 1 + D), persistent=False)

    def body(self, x: Tensor) -> Tensor:
        length, kind = x.shape[1], type(self)
        key = (length, x.dtype)
        if key not in self.tables:
            self.tables[key] = torch.outer(torch.arange(length, dtype=x.dtype), self.rates.to(x.dtype)).cos()
        if kind.longest is None or len(kind.longest) < length or kind.longest.dtype != x.dtype:
            kind.longest = torch.arange(length, dtype=x.dtype)[:, None] / 8
        return self.fc(x) * _table(length, x.dtype) * self.tables[key] + kind.longest[:length]


FACTOR = ContextVar("factor", default=1.0)


class Scoped(Block):
    def body(self, x: Tensor) -> Tensor:
        return self.fc(x) * FACTOR.get() * len(SCOPES)


SCOPES = ["the module"]


@contextmanager
def scope(number: int) -> Iterator[None]:
    token = FACTOR.set(1.0 + number / 4)
    SCOPES.append(f"scope {number}")
    with torch.profiler.record_function(SCOPES[-1]):
        yield
    SCOPES.pop()
    FACTOR.reset(token)


class StateHooks(Block):
    def make(self) -> None:
        self.factor = torch.ones(1)
        self.register_state_dict_post_hook(_without_fc)
        self.register_load_state_dict_pre_hook(_with_fc)

    def body(self, x: Tensor) -> Tensor:
        return self.fc(x) * self.factor.to(x)

    def get_extra_state(self) -> Tensor:
        return self.factor.clone()

    def set_extra_state(self, state: Tensor) -> None:
        self.factor = state.clone()


def _without_fc(module: Any, state: dict[str, Any], prefix: str, metadata: Any) -> None:
    for key in ("weight", "bias"):
        state[prefix + key] = state.pop(f"{prefix}fc.{key}")


def _with_fc(module: Any, state: dict[str, Any], prefix: str, *rest: Any) -> None:
    for key in ("weight", "bias"):
        state[f"{prefix}fc.{key}"] = state.pop(prefix + key)


class Compiled(Block):
    def make(self) -> None:
        self.compile(backend="eager")


def connect(blocks: list[nn.Module]) -> None:
    store: dict[str, Tensor] = {}
    for one in blocks:
        if isinstance(one, Stash):
            one.store = store


BLOCKS = block.BLOCKS  # all of these, by name
RANDOM = {"dropout", "layerdrop"}
STATEFUL = {"batchnorm", "assigned", "written", "counter"}  # a microbatch leaves something for the next
AGAIN = {"checkpointed", "weight-norm"}  # a backward that comes later reads other weights than those of the forward
CAUSAL = ("linear", "mlp", "norm", "attention", "raw", "plain")  # a token needs those before it alone
