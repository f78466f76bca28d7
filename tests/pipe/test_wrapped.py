"""Modules that the user has wrapped for data parallelism already, or made another form of: what to type instead."""

from __future__ import annotations

import copy
import warnings
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from support.failing import told
from support.pool import Pool
from support.small import WIDTH, X, Y, layers, make
from torch import nn
from torch.distributed._composable.replicate_with_fsdp import replicate
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel


def wrapped_by_the_user() -> list[tuple[str, str]]:
    mesh = init_device_mesh("cpu", (2,))
    sharded, inner, stage = layers(2), layers(2), layers(2)
    fully_shard(sharded, mesh=mesh)
    fully_shard(inner[1], mesh=mesh)
    fully_shard(stage, mesh=mesh)
    wraps: list[dict[str, Any]] = [
        {"model": sharded},
        {"model": inner},
        {"stages": [stage, layers(2)]},
        {"model": DistributedDataParallel(layers(2))},
        {"stages": [layers(2), DistributedDataParallel(layers(2))]},
        {"model": nn.Sequential(replicate(nn.Linear(6, 6), mesh=mesh), nn.Linear(6, 6))},
    ]
    found = [told(lambda options=options: make(mesh=None, **options)) for options in wraps]
    pipe = make(mesh=None)
    pipe.train_step(X, Y)
    pipe.close()
    return [(one.kind, one.text) for one in found]


def test_a_users_own_wrappers_are_pointed_to_the_mesh(gloo: Pool) -> None:
    fsdp = 'expected plain modules, and mesh=stagewright.Mesh(data=D, data_parallel="fsdp"), which does the same'
    ddp = 'expected plain modules, and mesh={"pipe": P, "data": D}, which does the same for each stage'
    expected = [
        f"the model is a FSDPModule already: {fsdp}",
        f"module '1' is a FSDPModule already: {fsdp}",
        f"the model is a FSDPModule already: {fsdp}",
        f"the model is a DistributedDataParallel already: {ddp}",
        f"the model is a DistributedDataParallel already: {ddp}",
        f"module '0' is a ReplicateModule already: {ddp}",
    ]
    for found in gloo.run(wrapped_by_the_user, ranks=2):
        for (kind, text), beginning in zip(found, expected, strict=True):
            assert kind == "ValueError"
            assert text.startswith(beginning)


def test_torchscript_is_told_by_name() -> None:
    """Its tables are no dicts: AttributeError."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # it is deprecated
        scripted = torch.jit.script(nn.Linear(WIDTH, WIDTH))
    with pytest.raises(ValueError, match=r"module '1' is TorchScript: expected the nn.Module that it was made of"):
        make(model=nn.Sequential(nn.Linear(WIDTH, WIDTH), scripted))


@pytest.mark.filterwarnings("ignore::FutureWarning")  # torch.export's own
def test_exported_modules_are_units_and_no_models() -> None:
    whole = torch.export.export(layers(2), (X[:2],), dynamic_shapes=({0: torch.export.Dim("batch", min=1, max=64)},))
    unit: Any = whole.module()
    twin = nn.Sequential(copy.deepcopy(unit), nn.Linear(WIDTH, WIDTH))
    pipe = make(model=copy.deepcopy(twin))
    assert pipe.forward_backward(X, Y).loss == pytest.approx(F.mse_loss(twin(X), Y).item(), rel=1e-6)
    with pytest.raises(ValueError, match=r"the model has hooks .*; of an exported program the model itself"):
        make(model=unit).build(X, Y)
