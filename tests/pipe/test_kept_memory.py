"""What is freed in a step stays with the process for the next one."""

import resource

import torch
import torch.nn.functional as F
from support.small import make
from torch import nn


def test_steps_take_no_fresh_pages() -> None:
    model = nn.Sequential(*(nn.Tanh() for _ in range(12)), nn.Linear(256, 1))
    x, y = torch.randn(16384, 256), torch.randn(16384, 1)  # 16 MiB between two layers
    pipe = make(model=model, loss_fn=F.mse_loss, example_inputs=(x,), schedule="gpipe", num_microbatches=2)

    def faults() -> int:
        before = resource.getrusage(resource.RUSAGE_THREAD).ru_minflt
        pipe.train_step(x, y)
        return resource.getrusage(resource.RUSAGE_THREAD).ru_minflt - before

    assert min(faults() for _ in range(4)) < 2000  # of 4 KiB; a step writes some 50,000
