"""What is added to a pipeline stays outside: without the room of a feature, everything but the feature runs.

Each case is a process in which the modules of one feature cannot be imported.
"""

from __future__ import annotations

from pathlib import Path

import pytest
from support.commands import run_forked

FEATURES = {  # rooms, and what asks for the feature
    "reroute": (("pipe.reroute",), "pipe(mesh=sw.Mesh(pipe=2, data=2, on_failure='reroute'))"),
    "compression": (
        ("pipe.compression", "pipe.compression.added"),
        "pipe(mesh=sw.Mesh(pipe=2, compress='int8')).train_step(x, x)",
    ),
    "trials": (("pipe.auto.trial",), "pipe(schedule=sw.Auto(trials=2)).train_step(x, x)"),
    "shared loader": (("pipe.batch.shared",), "run.loader(data, batch_size=4, shared='host')"),
    "trace": (("pipe.figures.tracer",), "run.tracer('traces')"),
}

_SCRIPT = """
import sys

GONE = {gone!r}


class Gone:
    def find_spec(self, name, path=None, target=None):
        if name in GONE:
            raise ModuleNotFoundError(f"{{name}} is blocked", name=name)


for name in GONE:
    sys.modules.pop(name, None)
sys.meta_path.insert(0, Gone())

import torch
from torch import nn
from torch.utils.data import TensorDataset

import stagewright as sw


def pipe(**options):
    model = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 4), nn.Tanh())
    told = {{"schedule": "1f1b", "mesh": {{"pipe": 2}}, "num_microbatches": 4, **options}}
    if isinstance(options.get("schedule"), sw.Auto):
        told |= {{"mesh": None, "num_microbatches": None}}
    return sw.PipelineModule(model, loss_fn=nn.MSELoss(), optimizer=torch.optim.SGD, **told)


x = torch.randn(8, 4)
data = TensorDataset(x, x)
for schedule in ("1f1b", "2bw"):
    run = pipe(schedule=schedule)
    for batch in run.loader(data, batch_size=8):
        run.train_step(*batch)
    run.eval_step(x, x)
    run.full_state_dict()
try:
    {asks}
except ModuleNotFoundError as error:
    print("asked for", error.name)
"""


@pytest.mark.thorough(but=["reroute"])
@pytest.mark.parametrize("feature", FEATURES)
def test_without_its_room_all_but_the_feature_runs(feature: str, tmp_path: Path) -> None:
    rooms, asks = FEATURES[feature]
    gone = [f"stagewright.{room}" for room in rooms]
    (tmp_path / "without.py").write_text(_SCRIPT.format(gone=gone, asks=asks))
    (done,) = run_forked([str(tmp_path / "without.py")], num_ranks=None)
    assert done.status == 0, done.stderr
    assert done.stdout.strip().splitlines()[-1].removeprefix("asked for ") in gone
