# %% [markdown]
# # A pipeline in a notebook
#
# All ranks run in this one process, so that everything can be inspected: cells for Jupyter, VS Code or Spyder (or
# `python examples/notebook.py`). Ranks take turns on one device here; the numbers and the order are real.

# %%
from pathlib import Path

import torch
from torch import nn

import stagewright as sw
from stagewright.schedules import Costs, build, simulate
from stagewright.viz import render_comparison, render_timeline

out = Path("runs/notebook")
out.mkdir(parents=True, exist_ok=True)

# %% [markdown]
# ## A model: a classifier of points on two spirals

# %%
torch.manual_seed(0)
layers = [layer for _ in range(6) for layer in (nn.Linear(64, 64), nn.ReLU())]
model = nn.Sequential(nn.Linear(2, 64), nn.ReLU(), *layers, nn.Linear(64, 2))

angle = 3 * torch.pi * torch.rand(512) ** 0.5
arm = torch.randint(0, 2, (512,))
points = torch.stack([angle.cos(), angle.sin()], dim=1) * (angle * (1 - 2 * arm) / 9).unsqueeze(1)

# %% [markdown]
# ## Look before you run
#
# Four ranks, two chunks each: the order of actions, and how long each rank waits if all chunks take equally long.

# %%
schedule = build("interleaved", num_ranks=4, num_microbatches=8, num_chunks=2)
simulated = simulate(schedule, Costs(forward=1.0, backward=2.0))
print(f"idle {simulated.makespan_bubble:.1%} of {simulated.makespan:g} units of time")
render_timeline(simulated, out / "simulated.png")

# %% [markdown]
# ## Train, and compare the first batch with the plain model

# %%
pipe = sw.PipelineModule(
    model,
    schedule=schedule,
    mesh={"pipe": 4},
    loss_fn=nn.functional.cross_entropy,
    optimizer=lambda parameters: torch.optim.AdamW(parameters, lr=3e-3),
    verify=True,
)
for step in range(60):
    result = pipe.train_step(points, arm)
    if step % 20 == 19:
        print(f"step {step + 1}: loss {result.loss:.3f}")

# %% [markdown]
# ## What happened, action by action
#
# In one process the ranks take turns: the measured picture shows the order, not a speed-up.

# %%
measured = result.timeline()
render_comparison(simulate(pipe.schedule, pipe.measured_costs()), measured, out / "simulated-measured.png")
print(f"pictures in {out}")

# %% [markdown]
# ## Use it

# %%
scores = pipe.predict(points)
print(f"{(scores.argmax(dim=1) == arm).float().mean():.0%} of the points are told apart")

# %% [markdown]
# The weights are the model's own all the time: plain PyTorch continues from here.

# %%
pipe.close()
torch.save(model.state_dict(), out / "weights.pt")
