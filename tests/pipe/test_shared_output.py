"""An output that several stages of one rank take: its gradient is the sum of theirs."""

from __future__ import annotations

import copy

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from stagewright.pipe import PipelineModule


class TakenTwice(nn.Module):
    """What `first` makes goes to `second` and to `fourth`, which are on the other rank under two chunks."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.third = (nn.Linear(3, 3, dtype=torch.float64) for _ in range(3))
        self.fourth = nn.Bilinear(3, 3, 3, dtype=torch.float64)

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.first(x)
        return self.fourth(self.third(self.second(hidden)), hidden)


def test_gradients_of_several_consumers_on_one_rank_add_up() -> None:
    torch.manual_seed(0)
    model, (x, target) = TakenTwice(), torch.randn(2, 4, 3, dtype=torch.float64)
    plain = copy.deepcopy(model)
    F.mse_loss(plain(x), target).backward()
    pipe = PipelineModule(
        model,
        schedule="interleaved",
        num_chunks=2,
        num_microbatches=2,
        mesh={"pipe": 2},
        cut=["second", "third", "fourth"],
        loss_fn=F.mse_loss,
        verify=False,
    )
    pipe.forward_backward(x, target)
    for (name, one), other in zip(pipe.named_parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(one.grad, other.grad, msg=name)
