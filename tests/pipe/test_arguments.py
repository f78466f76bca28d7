"""Arguments of PipelineModule: records, what may stand for them, what is none, which mistake is reported first."""

import copy
import inspect
import logging
import re
import warnings
from dataclasses import fields
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch
import torch.nn.functional as F
from support import small
from support.failing import told
from support.inside import GivenOptions, Options, device_of, plain, read_options, tell_of_gpus
from support.pool import Pool
from support.small import WIDTH, layers, make, sgd
from torch import nn
from torch.distributed._composable.replicate_with_fsdp import replicate
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

import stagewright as sw
from stagewright.partition import Cluster, Node, Profile
from stagewright.partition import plan as make_plan
from stagewright.pipe import PipelineModule
from stagewright.schedules import build

X, Y = (torch.randn(8, 4, generator=torch.Generator().manual_seed(seed)) for seed in range(2))


def tiny(**options: Any) -> sw.PipelineModule:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 4))
    settings = {"loss_fn": F.mse_loss, "mesh": {"pipe": 2}, "num_microbatches": 4, "optimizer": sgd}
    return sw.PipelineModule(model, **(settings | options))


def read(model: Any = None, **options: Any) -> Options:
    return read_options(GivenOptions(model=nn.Linear(4, 4) if model is None else model, **options), {})


def test_a_name_that_never_was() -> None:
    with pytest.raises(TypeError, match=r"unexpected keyword argument 'scheduler': expected lr_scheduler=$"):
        make(scheduler=None)
    with pytest.raises(TypeError, match=r"unexpected keyword argument 'micro_batches': expected num_microbatches="):
        tiny(micro_batches=4)


def test_a_list_of_modules_is_one_of_stages() -> None:
    stages = [nn.Linear(4, 8), nn.Linear(8, 4)]
    for form in (stages, tuple(stages), nn.ModuleList(stages)):
        assert read(form).stages == stages

    class Routed(nn.ModuleList):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return sum((block(x) for block in self), torch.zeros(()))

    model = Routed(stages)
    assert read(model).model is model


def test_a_plan_and_a_schedule_are_told_apart_by_what_the_file_holds(tmp_path: Path) -> None:
    order = tmp_path / "order.json"
    order.write_text(build("1f1b", num_ranks=2, num_microbatches=4).to_json())
    plan = tmp_path / "plan.json"
    nodes = [Node(name="0", forward_seconds=1.0, backward_seconds=2.0)]
    found = make_plan(Profile(nodes=nodes), Cluster.from_levels([(1, 1e9)]), global_batch=1)
    plan.write_text(found.to_json())
    assert read(schedule=str(plan)).schedule == found
    assert read(schedule=order).schedule == order
    with pytest.raises(ValueError, match=r"missing\.json"):
        tiny(schedule=str(tmp_path / "missing.json"))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"schedule": sw.Synchronous("2bw"), "max_grad_norm": 1.0}, r"Synchronous around the schedule '2bw', which is"),
        ({"schedule": sw.Slices("1f1b", 2)}, r"num_slices=2 for schedule '1f1b'"),
        ({"schedule": sw.Asynchronous("1f1b")}, r"Asynchronous around the schedule '1f1b'"),
        ({"precision": "bf8"}, r"precision='bf8': expected 'bf16' or 'fp16'"),
        ({"mesh": sw.Mesh(order=("pipe",))}, r"order=\('pipe',\): expected the axes"),
        ({"verify": "last"}, r"verify='last': expected 'first'"),
        ({"cut": ["2"], "model": [nn.Linear(4, 4)]}, r"cut= is for a model"),
    ],
)
def test_what_does_not_go_together(options: dict[str, Any], message: str) -> None:
    model = options.pop("model", None)
    with pytest.raises(ValueError, match=message):
        tiny(**options).train_step(X, Y) if model is None else sw.PipelineModule(model, **options)


def test_precision_is_autocast_around_every_call() -> None:
    with torch.autocast("cpu", dtype=torch.bfloat16):
        around = tiny()
        expected = [around.train_step(X, Y).loss for _ in range(3)], around.predict(X)
    inside = tiny(precision="bf16")
    losses = [inside.train_step(X, Y).loss for _ in range(3)]
    assert losses == expected[0]
    assert torch.equal(inside.predict(X), expected[1])  # type: ignore[arg-type]
    plainly = tiny()
    assert [plainly.train_step(X, Y).loss for _ in range(3)] != losses


def test_float16_has_a_loss_scale_of_its_own() -> None:
    assert tiny(precision=torch.float16).train_step(X, Y).skipped is False
    with pytest.raises(ValueError, match=r"precision='fp16'"):
        tiny(precision="fp16", optimizer=None).forward_backward(X, Y)


def count_verifications(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    runs: list[int] = []
    run = plain.PlainModule.run

    def counted(self: Any, *args: Any, **kwargs: Any) -> Any:
        runs.append(1)
        return run(self, *args, **kwargs)

    monkeypatch.setattr(plain.PlainModule, "run", counted)
    return runs


def test_the_first_batch_is_verified_by_default(monkeypatch: pytest.MonkeyPatch) -> None:
    source = inspect.getsource(sw.PipelineModule.__init__)
    assert "verify: bool | int | str = FIRST" in source  # tests are built without (tests/support/pool_worker.py)
    runs = count_verifications(monkeypatch)
    pipe = tiny(verify="first")
    first, second = pipe.train_step(X, Y).loss, pipe.train_step(X, Y).loss
    assert len(runs) == 1
    unverified = tiny(verify=False)
    assert [unverified.train_step(X, Y).loss for _ in range(2)] == [first, second]
    assert len(runs) == 1


def test_a_large_model_is_not_verified_by_default(monkeypatch: pytest.MonkeyPatch) -> None:
    runs = count_verifications(monkeypatch)
    monkeypatch.setattr(plain, "device_memory", lambda device: 8.0)
    tiny(verify="first").train_step(X, Y)
    assert not runs
    tiny(verify=True).train_step(X, Y)
    assert len(runs) == 1


@pytest.mark.parametrize(
    ("name", "instead"), [("to", r"device="), ("forward", r"predict"), ("resume", r"load\(folder\)")]
)
def test_methods_of_a_module_say_what_to_use(name: str, instead: str) -> None:
    pipe = tiny()
    with pytest.raises(AttributeError, match=rf"no '{name}': expected .*{instead}"):
        getattr(pipe, name)
    with pytest.raises(TypeError, match=r"is not called: expected predict"):
        pipe(X)
    assert not hasattr(pipe, "nothing_of_the_kind")


def on_meshes() -> list[Any]:
    """Loss of a step by how the mesh is said, and what is said of meshes that are none."""
    found: list[Any] = []
    meshes: list[Any] = [
        {"pipe": 2, "data": 2},
        sw.Mesh(data=2),
        init_device_mesh("cpu", (2, 2), mesh_dim_names=("pp", "dp")),
        init_device_mesh("cpu", (2, 2), mesh_dim_names=("data", "pipe")),
        init_device_mesh("cpu", (2, 2), mesh_dim_names=("pp", "sp")),
        DeviceMesh("cpu", [[0, 2], [1, 3]], mesh_dim_names=("pp", "dp")),
    ]
    for mesh in meshes:
        try:
            pipe = tiny(mesh=mesh, timeout=60.0)
        except ValueError as error:
            found.append(str(error))
            continue
        replica = pipe._building.replica[0]
        found.append((pipe.train_step(X[replica::2], Y[replica::2]).loss, replica, pipe.num_ranks))
        pipe.close()
    return found


def test_a_mesh_of_torch_is_taken_as_it_is(gloo: Pool) -> None:
    for process, (plain_dict, record, device_mesh, other_order, unknown, odd) in enumerate(
        gloo.run(on_meshes, ranks=4)
    ):
        assert plain_dict == record == device_mesh
        assert plain_dict[1] == process % 2
        assert other_order[0] == pytest.approx(plain_dict[0], rel=1e-6)
        assert other_order[1] == process // 2
        assert "expected dimensions named 'pp', 'dp', 'cp', 'ep', 'tp'" in unknown
        assert "numbered along its last dimension first" in odd


def test_a_model_in_evaluation_mode_is_told_before_it_trains() -> None:
    """As from_pretrained leaves it: trained without dropout, and without a word."""
    options: dict[str, Any] = {"loss_fn": F.mse_loss, "mesh": {"pipe": 2}, "optimizer": sgd}
    model = nn.Sequential(nn.Linear(4, 4), nn.Dropout(0.5), nn.Linear(4, 4)).eval()
    pipe = sw.PipelineModule(model, **options)
    pipe.predict(X)
    with pytest.warns(UserWarning, match=r"the model is in evaluation mode .*: expected model\.train\(\) before"):
        pipe.train_step(X, Y)
    pipe.forward_backward(X, Y)  # once is enough
    model.train()
    model[1].eval()  # some modules alone: meant so
    sw.PipelineModule(model, **options).train_step(X, Y)


def gpus(monkeypatch: pytest.MonkeyPatch, *, number: int, current: int = 0, local_rank: str | None = None) -> None:
    """A host with so many, of which one is this process's current one."""
    monkeypatch.setattr(torch.cuda, "device_count", lambda: number)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: current)
    if local_rank is None:
        monkeypatch.delenv("LOCAL_RANK", raising=False)
    else:
        monkeypatch.setenv("LOCAL_RANK", local_rank)


def test_a_gpu_without_a_number_is_the_processs_own(monkeypatch: pytest.MonkeyPatch) -> None:
    model = nn.Linear(2, 2)
    monkeypatch.setattr(torch, "empty", mock.Mock())  # there is no such device here
    for current, local, index in ((0, None, 0), (0, "1", 1), (0, "5", 1), (3, "1", 3), (3, None, 3)):
        gpus(monkeypatch, number=4, current=current, local_rank=local)
        assert device_of(model, "cuda").index == index
    gpus(monkeypatch, number=4, local_rank="1")
    assert device_of(model, "cuda:2") == torch.device("cuda:2")
    assert device_of(model, "cpu") == device_of(model, "cpu:0") == torch.device("cpu")  # as Trainer's over processes


def test_who_trains_on_the_cpu_beside_gpus_is_told_once(monkeypatch: pytest.MonkeyPatch, capsys: Any) -> None:
    monkeypatch.setattr(logging.getLogger(), "handlers", [])
    gpus(monkeypatch, number=2)
    for device in ("cpu", None, None):
        tell_of_gpus.cache_clear() if device else None
        device_of(nn.Linear(2, 2), device)
    assert capsys.readouterr().err == (
        "the model is on the CPU, and so is the run; torch sees 2 GPUs here: to train there write "
        'PipelineModule(..., device="cuda"); device="cpu" leaves this line out\n'
    )
    tell_of_gpus.cache_clear()
    monkeypatch.setenv("RANK", "1")
    device_of(nn.Linear(2, 2))
    tell_of_gpus.cache_clear()
    gpus(monkeypatch, number=0)
    monkeypatch.setenv("RANK", "0")
    device_of(nn.Linear(2, 2))
    assert capsys.readouterr().err == ""


# Mistakes that are told by the first of them: each stands in front of all below it.
MISTAKES: list[tuple[str, dict[str, Any]]] = [
    ("expected a model, or a list of modules, one per stage: PipelineModule(model, ", {"model": None}),
    ("cut='3': expected a list of names, such as ['3']", {"cut": "3"}),
    ("loss_fn='mine'", {"loss_fn": "mine"}),
    ("loss_weight='labels' without loss_fn", {"loss_weight": "labels"}),
    ("batch_dims=3", {"batch_dims": 3}),
    ("correction='none'", {"correction": "none"}),
    ("grad_scaler=", {"grad_scaler": 3}),
    ("device='none'", {"device": "none"}),
    ("dims=3", {"dims": 3}),
    ("lengths=3", {"lengths": 3}),
    ("compile=3", {"compile": 3}),
    ("timeout=0", {"timeout": 0}),
    ("max_grad_norm=True: expected a number above 0, or None", {"max_grad_norm": True}),
    ("flush_first=-1", {"flush_first": -1}),
    ("seed=None", {"seed": None}),
    ("optimizer=3", {"optimizer": 3}),
    ("lr_scheduler=3", {"lr_scheduler": 3}),
    ("on_step=3: expected a callable; on_step=lambda record", {"on_step": 3}),
    ("trials=-1: expected a number of plans, 0 to try none", {"trials": -1}),
    ("trials=True: expected a number of plans", {"trials": True}),
    ("verify=0", {"verify": 0}),
    ("example_inputs= is int", {"example_inputs": 3}),
    ("sends='none'", {"sends": "none"}),
    ("replan='epoch': expected \"batch\", a schedule for each batch; or None", {"replan": "epoch"}),
    ("data_parallel='zero9'", {"data_parallel": "zero9"}),
    ("unknown schedule '1f2b'", {"schedule": "1f2b"}),
    ("mesh axis 'dp'", {"mesh": {"dp": 2}}),
    ("recompute='half'", {"recompute": "half"}),
]


@pytest.mark.parametrize("pair", list(pairwise(MISTAKES)), ids=lambda pair: pair[0][0])
def test_of_two_mistakes_the_first_one_is_told(pair: tuple[tuple[str, dict[str, Any]], ...]) -> None:
    (first, one), (second, other) = pair
    told = [first] if set(one) & set(other) else [first, second]
    for text, options in zip(told, [other | one, other], strict=False):
        with pytest.raises(ValueError, match=f"^{re.escape(text)}"):
            make(**({"model": layers()} | options))


def test_no_argument_of_the_constructor_is_forgotten() -> None:
    signature = inspect.signature(PipelineModule).parameters
    defaults = {name: parameter.default for name, parameter in signature.items() if name != "unknown"}
    assert [*defaults] == [field.name for field in fields(GivenOptions)]
    assert len(defaults) <= 19
    given = SimpleNamespace(**defaults | {"model": layers()})
    asked = set[str]()

    class Asked:
        def __getattr__(self, name: str) -> Any:
            asked.add(name)
            return getattr(given, name)

    read_options(Asked(), {})  # type: ignore[arg-type]
    assert asked == {*defaults}


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
    pipe.train_step(small.X, small.Y)
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


@pytest.mark.thorough
@pytest.mark.filterwarnings("ignore::FutureWarning")  # torch.export's own
def test_exported_modules_are_units_and_no_models() -> None:
    whole = torch.export.export(
        layers(2), (small.X[:2],), dynamic_shapes=({0: torch.export.Dim("batch", min=1, max=64)},)
    )
    unit: Any = whole.module()
    twin = nn.Sequential(copy.deepcopy(unit), nn.Linear(WIDTH, WIDTH))
    assert make(model=copy.deepcopy(twin)).forward_backward(small.X, small.Y).loss == pytest.approx(
        F.mse_loss(twin(small.X), small.Y).item(), rel=1e-6
    )
    with pytest.raises(ValueError, match=r"the model has hooks .*; of an exported program the model itself"):
        make(model=unit).build(small.X, small.Y)
