"""Get started (docs/start.md) as one script: own data, training, logging, evaluation, checkpoints, resuming.

    torchrun --nproc-per-node 2 examples/get_started.py

trains a small classifier as a pipeline of two processes. `python examples/get_started.py` runs both ranks in one
process. Run again after an interruption, it resumes after its newest checkpoint.
"""

import os
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.optim.lr_scheduler import CosineAnnealingLR
from torch.utils.data import Dataset

import stagewright as sw


class Points(Dataset[dict[str, torch.Tensor]]):
    def __init__(self, count: int, seed: int) -> None:
        generator = torch.Generator().manual_seed(seed)
        self.points = torch.randn(count, 20, generator=generator)
        self.labels = self.points[:, :10].argmax(dim=1)

    def __len__(self) -> int:
        return len(self.points)

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        return {"x": self.points[index], "target": self.labels[index]}


class Classifier(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Linear(20, 64)
        blocks = [nn.Sequential(nn.Linear(64, 64), nn.ReLU()) for _ in range(4)]
        self.blocks = nn.ModuleList(blocks)
        self.head = nn.Linear(64, 10)

    def forward(self, x: torch.Tensor) -> torch.Tensor:  # [N, 20] -> [N, 10]
        x = self.embed(x)
        for block in self.blocks:
            x = x + block(x)
        x = self.head(x)
        return x


STEPS = 120


def log(record: "sw.StepRecord") -> None:  # called in every process, after each step
    if record.rank == 0 and record.step % 20 == 0:
        rate = record.learning_rates[0]
        print(f"step {record.step}: loss {record.loss:.3f}, rate {rate:.1e}", flush=True)


num_ranks = int(os.environ.get("WORLD_SIZE", "2"))  # without torchrun: two, in this process
torch.manual_seed(0)  # the same initial weights in every process
pipe = sw.PipelineModule(
    Classifier(),
    schedule="1f1b",
    num_microbatches=4,
    mesh={"pipe": num_ranks},
    device="cuda" if torch.cuda.is_available() else "cpu",
    loss_fn=nn.functional.cross_entropy,
    optimizer=lambda parameters: torch.optim.AdamW(parameters, lr=1e-2),
    lr_scheduler=lambda optimizer: CosineAnnealingLR(optimizer, STEPS),
    max_grad_norm=1.0,  # clips by the norm over all stages
    precision="bf16",  # mixed precision; leave it out for float32
    on_step=log,
)
loader = pipe.loader(Points(1024, seed=1), batch_size=32)  # takes options of DataLoader
test_data = Points(256, seed=2)
test_loader = pipe.loader(test_data, batch_size=32, shuffle=False, remainder="keep")


def accuracy() -> float:
    counts = torch.zeros(2, device=pipe.device)  # correct, all
    for batch in test_loader:
        result = pipe.eval_step(batch)  # every process makes this call
        if result.output is not None:  # only in the processes of the last stage
            correct = result.output.argmax(dim=1).cpu() == batch["target"]
            counts += torch.tensor([correct.sum(), len(correct)]).to(pipe.device)
    if dist.is_initialized():  # more than one process
        dist.all_reduce(counts)
    return float(counts[0] / counts[1])


checkpoints = Path("runs/get_started")
if checkpoints.exists():
    pipe.load(checkpoints, loader=loader)
while pipe.num_steps < STEPS:
    for batch in loader:  # one epoch
        pipe.train_step(batch)
        if pipe.num_steps % 40 == 0:
            pipe.save(checkpoints, loader=loader)
        if pipe.num_steps == STEPS:
            break
share = accuracy()
weights = pipe.full_state_dict()  # of a plain Classifier, in every process
if pipe.rank == 0:
    print(f"{share:.0%} of 256 new points are correct", flush=True)
    torch.save(weights, checkpoints / "model.pt")
pipe.close()
