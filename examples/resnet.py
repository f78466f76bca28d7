"""A ResNet with batch normalisation: pictures of circles, squares and triangles, loaded by worker processes.

    torchrun --nproc-per-node 2 examples/resnet.py --steps 30

cuts the network where its two parts have equal numbers of parameters; `--cut` says where instead. A plan
(`--schedule auto`) measures first. Needs `pip install transformers`; torchvision's ResNets are trained in the same way.
"""

from __future__ import annotations

import argparse
import os

import torch
from torch import nn
from torch.utils.data import Dataset
from transformers import ResNetConfig, ResNetForImageClassification

import stagewright as sw

SIZE = 24


class Shapes(Dataset[tuple[torch.Tensor, torch.Tensor]]):
    """Pictures [3, 24, 24] of one shape each, with noise: (picture, 0 circle | 1 square | 2 triangle)."""

    def __init__(self, count: int, seed: int) -> None:
        self.count, self.seed = count, seed

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        draw = torch.Generator().manual_seed(self.seed * self.count + index)
        kind = index % 3
        radius = 5 + 4 * torch.rand((), generator=draw)
        x, y = (torch.arange(SIZE) - SIZE / 2 - 4 * torch.rand((), generator=draw) + 2 for _ in range(2))
        x, y = x.expand(SIZE, SIZE), y.unsqueeze(1).expand(SIZE, SIZE)
        if kind == 0:
            inside = x**2 + y**2 < radius**2
        elif kind == 1:
            inside = torch.maximum(x.abs(), y.abs()) < 0.85 * radius
        else:
            inside = (y < 0.7 * radius) & (y > 2 * x.abs() - 1.2 * radius)
        picture = inside.float() * torch.rand(3, 1, 1, generator=draw)
        return picture + 0.1 * torch.randn(3, SIZE, SIZE, generator=draw), torch.tensor(kind)


class Classifier(nn.Module):
    """The package's ResNet; its scores alone."""

    def __init__(self) -> None:
        super().__init__()
        self.net = ResNetForImageClassification(
            ResNetConfig(
                embedding_size=16, hidden_sizes=[16, 32, 64], depths=[1, 1, 1], layer_type="basic", num_labels=3
            )
        )

    def forward(self, pictures: torch.Tensor) -> torch.Tensor:
        scores: torch.Tensor = self.net(pictures).logits
        return scores


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--schedule", default="1f1b")
    parser.add_argument("--cut", action="append", help="name of a module that begins a stage")
    options = parser.parse_args()

    torch.manual_seed(0)  # the same weights in each process
    with sw.PipelineModule(
        Classifier(),
        schedule=options.schedule,
        cut=options.cut,
        mesh={"pipe": max(2, int(os.environ.get("WORLD_SIZE", "1")))},
        num_microbatches=4,
        loss_fn=nn.functional.cross_entropy,
        optimizer=lambda parameters: torch.optim.SGD(parameters, lr=0.05, momentum=0.9, weight_decay=1e-4),
        lr_scheduler=lambda optimizer: torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, options.steps),
    ) as pipe:
        loader = pipe.loader(Shapes(1536, seed=1), batch_size=48, num_workers=1)
        while pipe.num_steps < options.steps:
            for pictures, kinds in loader:
                result = pipe.train_step(pictures, kinds)
                if pipe.rank == 0 and pipe.num_steps % 10 == 0:
                    print(f"step {pipe.num_steps}: loss {result.loss:.3f}", flush=True)
                if pipe.num_steps == options.steps:
                    break

        right = total = 0
        for pictures, kinds in torch.utils.data.DataLoader(Shapes(192, seed=2), batch_size=48):
            scores = pipe.predict(pictures)
            if scores is not None:  # in the process of the last stage
                right += int((scores.argmax(dim=1) == kinds).sum())
                total += len(kinds)
        if total:
            print(f"{right / total:.0%} of {total} new pictures are told apart", flush=True)


if __name__ == "__main__":
    main()
