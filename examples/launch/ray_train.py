"""Ray Train starts the ranks: each worker of a TorchTrainer is one, and the pipeline uses Ray's process group.

    pip install 'stagewright[ray]'
    python examples/launch/ray_train.py --workers 2 --steps 20

On a cluster: ray job submit --working-dir . -- python examples/launch/ray_train.py --folder /a/disk/of/all/nodes. If
a worker fails, Ray restarts all of them, and they resume from the newest checkpoint in --folder.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

import torch
from ray import train
from ray.train.torch import TorchTrainer
from torch import nn

import stagewright as sw


def work(config: dict[str, Any]) -> None:
    """One rank, as under torchrun."""
    torch.manual_seed(0)  # the same model and batches on every rank
    model = nn.Sequential(*[layer for _ in range(4) for layer in (nn.Linear(32, 32), nn.Tanh())])
    generator = torch.Generator().manual_seed(1)
    with sw.PipelineModule(
        model,
        schedule="1f1b",
        num_microbatches=4,
        loss_fn=nn.functional.mse_loss,
        optimizer=lambda parameters: torch.optim.AdamW(parameters, lr=3e-3),
    ) as pipe:
        pipe.build(torch.zeros(16, 32), torch.zeros(16, 32))
        checkpoints = Path(config["folder"]) / "checkpoints"
        if checkpoints.exists():
            pipe.load(checkpoints)
        inputs = torch.randn(config["steps"], 16, 32, generator=generator)
        while pipe.num_steps < config["steps"]:
            batch = inputs[pipe.num_steps]
            result = pipe.train_step(batch, batch.flip(1).tanh())
            if pipe.num_steps % config["every"] == 0 or pipe.num_steps == config["steps"]:
                pipe.save(checkpoints)
                train.report({"step": pipe.num_steps, "loss": result.loss})
                if pipe.rank == 0:
                    print(f"step {pipe.num_steps}: loss {result.loss:.3f}", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--every", type=int, default=10, help="steps from checkpoint to checkpoint")
    parser.add_argument("--folder", type=Path, default=Path("runs/example-ray"))
    options = parser.parse_args()
    folder = options.folder.resolve()
    trainer = TorchTrainer(
        work,
        train_loop_config={"steps": options.steps, "every": options.every, "folder": str(folder)},
        scaling_config=train.ScalingConfig(num_workers=options.workers),
        run_config=train.RunConfig(storage_path=str(folder), name="ray", failure_config=train.FailureConfig(3)),
    )
    trainer.fit()


if __name__ == "__main__":
    main()
