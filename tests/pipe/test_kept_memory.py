"""What is freed in a step stays with the process for the next one."""

import os
import platform
from pathlib import Path

import pytest
from support.commands import run_forked

# Prints how often each later step took a page from the system. Its process is fresh: what else lies on a heap may keep
# malloc from giving anything back.
_STEPS = """
import resource

import torch
import torch.nn.functional as F
from support.small import make
from torch import nn

torch.set_num_threads(1)
x, y = torch.randn(32768, 256), torch.randn(32768, 1)  # 16 MiB between two layers
model = nn.Sequential(*(nn.Tanh() for _ in range(12)), nn.Linear(256, 1))
pipe = make(model=model, loss_fn=F.mse_loss, example_inputs=(x,), schedule="gpipe", num_microbatches=2)
for step in range(8):
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    pipe.train_step(x, y)
    if step > 3:
        print(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
"""


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="mallopt is glibc's")
@pytest.mark.skipif(
    any(name.startswith(("MALLOC_", "GLIBC_TUNABLES", "LD_PRELOAD")) for name in os.environ),
    reason="the environment tells malloc what to do",
)
def test_steps_take_no_fresh_pages(tmp_path: Path) -> None:
    (tmp_path / "steps.py").write_text(_STEPS)
    (done,) = run_forked([str(tmp_path / "steps.py")], num_ranks=None)
    assert done.status == 0, done.stderr
    taken = [int(line) for line in done.stdout.split()]
    # Of 4 KiB. Each step would take 100,000 if nothing stayed; a heap that has holes may still grow by a few blocks.
    assert sum(taken) < 50_000, done.stdout
