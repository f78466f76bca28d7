"""Models that are built without memory, filled on a CUDA device: equal to those that were built there."""

import os
from contextlib import AbstractContextManager, nullcontext

import pytest
import torch
from support.gpu_report import note
from torch import nn
from torch.nn import functional as F

import stagewright as sw

DEVICE = os.environ.get("STAGEWRIGHT_DEVICE", "cpu")
IS_CUDA = DEVICE.startswith("cuda")
WIDTH, LAYERS = (4096, 16) if IS_CUDA else (128, 4)

pytestmark = pytest.mark.gpu


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Sequential(nn.LayerNorm(WIDTH), nn.Linear(WIDTH, WIDTH)) for _ in range(LAYERS))
        self.turned = nn.Parameter(nn.init.trunc_normal_(nn.init.orthogonal_(torch.empty(WIDTH, 64)), std=0.02))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x)
        return x @ self.turned


def sgd(parameters: list[nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=1e-3)


@pytest.mark.parametrize("where", ["cpu", "device"])
def test_filled_on_the_device(where: str) -> None:
    """Drawn by the generator of the device where plain construction draws."""
    weights = []
    for build in (nullcontext, sw.deferred):
        context: AbstractContextManager[object] = build()
        torch.manual_seed(0)
        with context, torch.device(DEVICE if where == "device" else "cpu"):
            model = Net()
        size = sum(parameter.nbytes for parameter in model.parameters())
        if IS_CUDA:
            torch.cuda.empty_cache()
            torch.cuda.reset_peak_memory_stats()
        pipe = sw.PipelineModule(
            model, loss_fn=F.mse_loss, optimizer=sgd, mesh={"pipe": 2}, num_microbatches=4, device=DEVICE, verify=False
        )
        x = torch.randn(8, WIDTH, generator=torch.Generator().manual_seed(1)).to(DEVICE)
        pipe.build(x, x[:, :64])
        if IS_CUDA and build is sw.deferred:
            peak = torch.cuda.max_memory_allocated()
            note(f"deferred-{where}", peak_over_weights=peak / size)
            assert peak <= 1.1 * size
        assert {parameter.device.type for parameter in model.parameters()} == {torch.device(DEVICE).type}
        losses = [pipe.train_step(x, x[:, :64]).loss for _ in range(2)]
        weights.append((losses, pipe.full_state_dict()))
        pipe.close()
        del model, pipe
    (losses, plain), (found, filled) = weights
    assert found == losses
    assert all(torch.equal(filled[name], value) for name, value in plain.items())
