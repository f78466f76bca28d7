"""A model larger than one process: built without memory, and filled by each process for its own stages.

    torchrun --nproc-per-node 2 examples/large_model.py

`--gib 6` makes it larger; `--plain` builds it whole in every process, for comparison; `--weights model.safetensors`
reads it. Each process prints its peak memory and the memory that it needs: that of Python and torch before the model is
built, the weights of its own stages, their gradients, and the largest layer.
"""

from __future__ import annotations

import argparse
from contextlib import nullcontext

import torch
import torch.nn.functional as F
from torch import nn

import stagewright as sw

MIB = 2**20


class Net(nn.Module):
    """Layers with normalisation, [N, width] -> [N, 1]."""

    def __init__(self, width: int, layers: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList(
            nn.Sequential(nn.LayerNorm(width), nn.Linear(width, width), nn.ReLU()) for _ in range(layers)
        )
        self.head = nn.Linear(width, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x)
        x = self.head(x)
        return x


def memory(kind: str) -> float:
    """This process's memory [MiB]: now ("VmRSS"), or its peak ("VmHWM")."""
    with open("/proc/self/status") as status:
        return next(int(line.split()[1]) / 1024 for line in status if line.startswith(kind))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--gib", type=float, default=0.25, help="of weights")
    parser.add_argument("--layers", type=int, default=32)
    parser.add_argument("--plain", action="store_true", help="build the whole model in every process")
    parser.add_argument("--weights", help="a file of safetensors, or a folder")
    options = parser.parse_args()
    layers, width = options.layers, round((options.gib * 2**30 / 4 / options.layers) ** 0.5)

    torch.manual_seed(0)
    x, y = torch.randn(8, width), torch.randn(8, 1)
    with sw.deferred():  # the first use loads modules that both ways need
        Net(8, 1)
    torch.autograd.backward(F.mse_loss(Net(8, 1)(torch.randn(2, 8)), torch.randn(2, 1)))
    base = memory("VmRSS")

    torch.manual_seed(1)
    with nullcontext() if options.plain else sw.deferred(draw=options.weights is None):
        model = Net(width, layers)
    pipe = sw.PipelineModule(
        model,
        loss_fn=F.mse_loss,
        optimizer=lambda parameters: torch.optim.SGD(parameters, lr=1e-4),
        weights=options.weights,
        num_microbatches=4,
        verify=False,  # the plain copy would take memory in the process of the last stage
    )
    losses = [pipe.train_step(x, y).loss for _ in range(2)]

    own = sum(parameter.nbytes for _, parameter in pipe.named_parameters()) / MIB
    needed = base + 2 * own + 4 * width * width / MIB
    print(
        f"rank {pipe.world.rank}: losses {losses[0]:.6f}, {losses[1]:.6f}; {base:.0f} MiB before the model, "
        f"{own:.0f} of weights; at most {memory('VmHWM'):.0f} MiB, {memory('VmHWM') / needed:.2f} of what it needs",
        flush=True,
    )
    pipe.close()


if __name__ == "__main__":
    main()
