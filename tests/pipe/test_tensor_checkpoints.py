"""Dropout in tensor groups under a checkpoint of the user's: gradients are those of the mask that the loss has."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from support.pool import Pool
from torch import nn
from torch.utils.checkpoint import checkpoint

from stagewright import Mesh, PipelineModule


class _Block(nn.Module):
    """`part`: the code under the checkpoint: all of it, or what begins or ends within the divided region."""

    def __init__(self, part: str, *, reentrant: bool) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(4, 8), nn.Linear(8, 4)
        self.part, self.reentrant = part, reentrant
        self.masks: list[torch.Tensor] = []

    def _dropped(self, x: torch.Tensor) -> torch.Tensor:
        out = F.dropout(x, 0.5, self.training)
        self.masks.append(out.detach() == 0)
        return out

    def _first(self, x: torch.Tensor) -> torch.Tensor:
        return self._dropped(self.up(x))

    def _last(self, x: torch.Tensor) -> torch.Tensor:
        return self._dropped(self.down(self._dropped(x)))

    def _all(self, x: torch.Tensor) -> torch.Tensor:
        return self._last(self._first(x))

    def _again(self, part: str, x: torch.Tensor) -> torch.Tensor:
        run = getattr(self, f"_{part}")
        found: torch.Tensor = checkpoint(run, x, use_reentrant=self.reentrant) if self.part == part else run(x)
        return found

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + (self._again("all", x) if self.part == "all" else self._again("last", self._again("first", x)))


def _masks(part: str, reentrant: bool) -> list[int]:
    """Numbers of equal masks, of each mask of a batch in two blocks, whose order is that of time."""
    torch.manual_seed(0)
    blocks = [_Block(part, reentrant=reentrant) for _ in range(2)]
    styles = {f"{i}.{key}": style for i in (1, 2) for key, style in (("up", "column"), ("down", "row"))}
    mesh = Mesh(pipe=1, tensor=2, tensor_parallel=styles)
    model = nn.Sequential(nn.Linear(4, 4), *blocks).double()
    with PipelineModule(model, mesh=mesh, num_microbatches=2, loss_fn=F.mse_loss) as pipe:
        x, y = torch.randn(2, 32, 4, dtype=torch.float64)
        pipe.build(x, y)
        for block in blocks:
            block.masks.clear()
        pipe.forward_backward(x, y)
    masks = [mask for block in blocks for mask in block.masks]
    return [sum(torch.equal(one, other) for other in masks) for one in masks]


@pytest.mark.gloo
@pytest.mark.thorough
@pytest.mark.parametrize(("part", "reentrant"), [("all", False), ("all", True), ("last", False)])
def test_a_checkpoint_draws_the_same_masks(gloo: Pool, part: str, reentrant: bool) -> None:
    for found in gloo.run(_masks, ranks=2, args=(part, reentrant)):
        again = len(found) - 12  # 3 masks, 2 blocks, 2 microbatches; a checkpoint stops at what it needs last
        assert again > 0
        assert found.count(2) == 2 * again
        assert found.count(1) == 12 - again
