"""Models that are no nn.Sequential and whose Python does what no graph of operations shows: one a thing.

Each takes [N, WIDTH] and returns [N, WIDTH]; `blocks` are its units, `forward` is what runs between them.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

WIDTH = 8


def linear() -> nn.Linear:
    return nn.Linear(WIDTH, WIDTH)


class Reversal(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:  # type: ignore[override]
        return -0.5 * grad


class Rounded(torch.autograd.Function):
    """Straight through: rounded forwards, as if it were not backwards."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return (x * 4).round() / 4

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:  # type: ignore[override]
        return grad


class Negated(torch.autograd.Function):
    """In the other style, with setup_context."""

    @staticmethod
    def forward(x: Tensor, factor: float) -> Tensor:  # type: ignore[override]
        return x * factor

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        ctx.factor = inputs[1]

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:  # type: ignore[override]
        return -grad * ctx.factor, None


reversal = Reversal.apply  # as tutorials do: bound when the module is imported


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(torch.tanh(self.up(self.norm(x))))


class Stack(nn.Module):
    def __init__(self, block: Callable[[], nn.Module] = Block, count: int = 4) -> None:
        super().__init__()
        self.stem = linear()
        self.blocks = nn.ModuleList(block() for _ in range(count))
        self.head = linear()

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x)
        for block in self.blocks:
            x = block(x)
        return self.head(x)


class CheckpointedBlock(Block):
    use_reentrant = False

    def forward(self, x: Tensor) -> Tensor:
        return checkpoint(super().forward, x, use_reentrant=self.use_reentrant)


class ReentrantBlock(CheckpointedBlock):
    use_reentrant = True


class FunctionsBetween(Stack):
    def forward(self, x: Tensor) -> Tensor:
        first, second, third, fourth = self.blocks
        x = reversal(first(x))
        x = second(Rounded.apply(x))
        return self.head(fourth(Negated.apply(third(x), 0.5)))


class CheckpointedBetween(Stack):
    use_reentrant = False

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x)
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=self.use_reentrant)
        return x


class ReentrantBetween(CheckpointedBetween):
    use_reentrant = True


class CheckpointedTogether(Stack):
    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x)
        for i in (0, 2):
            one, other = self.blocks[i], self.blocks[i + 1]
            scale = x.mean(-1, keepdim=True)
            x = checkpoint(lambda h, one=one, other=other, s=scale: other(one(h) * s) + h, x, use_reentrant=False)
        return x


class HooksBetween(Stack):
    def forward(self, x: Tensor) -> Tensor:
        first, second, third, fourth = self.blocks
        h = first(x)
        if h.requires_grad:
            h.register_hook(lambda grad: 3 * grad)
        return self.head(fourth(third(second(h) + h) * h))


class AutocastBetween(Stack):
    """Half precision around some of the blocks, none around one of them, and one without a graph."""

    def forward(self, x: Tensor) -> Tensor:
        first, second, third, fourth = self.blocks
        with torch.autocast("cpu", dtype=torch.bfloat16):
            h = first(x) @ first(x).T
            with torch.autocast("cpu", enabled=False):
                y = second(h.to(x.dtype) @ x)
        with torch.no_grad():
            frozen = third(y)
        return self.head(fourth(y + frozen))


class Carries(Stack):
    """A tensor of one forward that the next one reads; and one that it makes once."""

    def __init__(self) -> None:
        super().__init__()
        self.before: Tensor | None = None
        self.scale: Tensor | None = None

    def forward(self, x: Tensor) -> Tensor:
        if self.scale is None:
            self.scale = torch.full((x.shape[-1],), 2.0, dtype=x.dtype)
        y = super().forward(x * self.scale)
        return self.keep(y)

    def keep(self, y: Tensor) -> Tensor:
        if self.before is not None:
            y = y + self.before
        self.before = y.detach().mean()
        return y


class MakesOnce(Carries):
    def keep(self, y: Tensor) -> Tensor:
        self.last = y.detach()
        return y
