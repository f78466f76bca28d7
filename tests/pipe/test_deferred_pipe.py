"""Pipelines of models that are built without memory, or on the meta device: equal to those of plain models."""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from support.deferred_net import BUILDS, TOKENS, WIDTH, Net, compare, deferred, loss, make, net, trained
from support.inside import profile_model
from support.parts import Parts
from support.pool import Pool
from torch import nn

import stagewright as sw


@pytest.mark.thorough(but=["2bw-False"])
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"schedule": "interleaved", "verify": False},
        {"schedule": "2bw", "verify": False},
        {"recompute": "full", "verify": False},
        {"mesh": {"pipe": 2, "data": 2}, "verify": False},
    ],
    ids=lambda options: "-".join(map(str, options.values())) or "verified",
)
def test_trains_as_the_plain_model(options: dict[str, Any]) -> None:
    compare(trained(deferred, **options), trained(nullcontext, **options))


@pytest.mark.thorough
@pytest.mark.parametrize(
    "mesh",
    [
        {"pipe": 2, "data": 2},
        {"pipe": 2, "data": 2, "data_parallel": "fsdp"},
        {"pipe": 2, "tensor": 2, "tensor_parallel": {"blocks.*.up": "column", "blocks.*.down": "row"}},
    ],
    ids=lambda mesh: "-".join(map(str, mesh.values()))[:11],
)
def test_trains_as_the_plain_model_over_processes(gloo: Pool, mesh: dict[str, Any]) -> None:
    expected = gloo.run(trained, ranks=4, args=(nullcontext,), kwargs={"mesh": sw.Mesh(**mesh)})
    for found, plain in zip(
        gloo.run(trained, ranks=4, args=(deferred,), kwargs={"mesh": sw.Mesh(**mesh)}), expected, strict=True
    ):
        compare(found, plain)


def told_of_seeds(tensor: int, builds: tuple[str, str]) -> str:
    torch.manual_seed(torch.distributed.get_rank())
    with BUILDS[builds[torch.distributed.get_rank()]]():
        model = Net()
    styles = {"blocks.*.up": "column", "blocks.*.down": "row"} if tensor > 1 else None
    try:
        make(model, mesh=sw.Mesh(pipe=2 // tensor, tensor=tensor, tensor_parallel=styles)).train_step(TOKENS, TOKENS)
    except ValueError as error:
        return str(error)
    return "trained"


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("tensor", "builds"),
    [
        (1, ("deferred", "deferred")),
        (2, ("deferred", "deferred")),
        (2, ("plain", "deferred")),
        (1, ("plain", "meta")),  # of which FSDP sends the first process's weights
    ],
)
def test_other_weights_in_other_processes_are_told(gloo: Pool, tensor: int, builds: tuple[str, str]) -> None:
    """Members of a tensor group make their parts alone: they would be parts of different tensors."""
    for told in gloo.run(told_of_seeds, ranks=2, args=(tensor, builds)):
        assert "has made other weights than process 0, first 'embed.weight'" in told or (
            tensor == 2 and builds[0] == "plain" and "has divided 'blocks.0.up.weight' unlike" in told
        )


def test_objects_stay_the_same() -> None:
    """An optimizer made before, hooks, attributes, references of the user's own."""
    seen: list[int] = []
    model = net("deferred")
    weight = model.blocks[0].up.weight
    weight.no_decay = True
    weight.register_hook(lambda gradient: seen.append(gradient.numel()))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    pipe = make(model, optimizer=None, verify=False)
    pipe.forward_backward(TOKENS, TOKENS)
    assert model.blocks[0].up.weight is weight
    assert type(weight) is nn.Parameter
    assert weight.no_decay
    assert sum(seen) == 4 * weight.numel()
    before = weight.detach().clone()
    optimizer.step()
    assert not torch.equal(weight, before)


def test_what_is_freed_goes_back_to_the_system(monkeypatch: pytest.MonkeyPatch) -> None:
    """malloc would keep tensors as large as weights: 17% more for a model of 6 GiB on four processes."""
    asked: list[int] = []
    monkeypatch.setattr("stagewright.pipe.run.ranks.keep_freed_memory", lambda: asked.append(1))
    counts: list[int] = []
    for build in (deferred, nullcontext):
        with build():
            model = Net()
        make(model, verify=False).build(TOKENS, TOKENS)
        counts.append(len(asked))
    assert counts[0] == 0 < counts[1]


@pytest.mark.thorough
def test_a_model_of_the_meta_device_fills_itself() -> None:
    """By reset_parameters, each module with random numbers of its own, whatever the cut; else it is named."""

    def states(ranks: int) -> dict[str, torch.Tensor]:
        model = net("meta")
        pipe = make(model, mesh={"pipe": ranks}, seed=5)
        pipe.build(TOKENS, TOKENS)
        state = {name: x.clone() for name, x in pipe.full_state_dict().items()}
        assert pipe.train_step(TOKENS, TOKENS).loss is not None
        return state

    compare(([], states(1)), ([], states(2)))
    with torch.device("meta"):
        model = Net()
    message = r"^'positions' is on the meta device, and nothing fills it: Net has no reset_p"
    with pytest.raises(ValueError, match=message):
        make(model).train_step(TOKENS, TOKENS)
    assert all(x.is_meta for x in (*model.parameters(), *model.buffers()))  # nothing half filled


class Part(Parts, up=lambda: nn.Linear(WIDTH, WIDTH), down=lambda: nn.Linear(WIDTH, WIDTH)):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(self.up(x))

    def reset_parameters(self) -> None:
        nn.init.constant_(self.down.weight, 3.0)


def test_a_module_fills_its_parts_after_them_and_leaves_what_has_values() -> None:
    with torch.device("meta"):
        model = nn.Sequential(Part(), Part())
    model[0].up.bias = nn.Parameter(torch.full((WIDTH,), 5.0))
    x = torch.randn(8, WIDTH)
    pipe = make(model, loss_fn=F.mse_loss)
    pipe.build(x, x)
    state = pipe.full_state_dict()
    assert (state["0.down.weight"] == 3).all()
    assert (state["1.down.weight"] == 3).all()
    assert (state["0.up.bias"] == 5).all()
    assert (state["1.up.bias"] != 5).all()


class Scaled(Parts, layer=lambda: nn.utils.weight_norm(nn.Linear(WIDTH, WIDTH)), scale=lambda: [torch.rand(WIDTH)]):
    """A layer with a tensor that nobody registered, and a loss with one."""

    def forward(self, x: torch.Tensor, target: torch.Tensor | None = None) -> torch.Tensor:
        x = self.layer(x) * self.scale[0]
        return x if target is None else F.mse_loss(x, target)


@pytest.mark.filterwarnings("ignore:.*weight_norm.*")
def test_attributes_and_a_loss_with_weights() -> None:
    losses, x = [], torch.randn(8, WIDTH)
    for build in (nullcontext, deferred):
        torch.manual_seed(3)
        with build():
            model, loss_fn = nn.Sequential(Scaled(), Scaled()), Scaled()
        pipe = make(model, loss_fn=loss_fn)
        losses.append([pipe.train_step(x, x).loss for _ in range(2)])
    assert losses[0] == losses[1]


def test_what_was_not_drawn_is_named() -> None:
    with deferred(draw=False):
        model = Net()
    message = r"drawn at random in the constructor, which .*draw=False\) leaves out: expected w"
    with pytest.raises(ValueError, match=message):
        make(model).train_step(TOKENS, TOKENS)
    assert all(x.is_meta for x in model.parameters())


def test_edits_of_it() -> None:
    """Also where one fails, and all is put back."""
    model = net("deferred")
    edits = sw.edit(model)
    edits["blocks.1"].replace(lambda old: old.up)
    with pytest.raises(ValueError, match="would lose its"):
        make(edits)
    states = []
    for build in (deferred, nullcontext):
        torch.manual_seed(3)
        with build():
            model = Net()
        edits = sw.edit(model)
        edits["blocks.*"].checkpoint()
        edits["blocks.2"].dtype(torch.bfloat16)
        pipe = make(edits, verify=False)
        loss = pipe.train_step(TOKENS, TOKENS.flip(0)).loss
        states.append(([loss], pipe.full_state_dict()))
    compare(*states)


def test_a_kind_of_layer_is_measured_once() -> None:
    model = net("deferred")
    found = profile_model(model, (TOKENS[:2],), target=TOKENS[:2], loss_fn=loss, seconds=0.1, repetitions=3)
    assert {node.parameter_bytes for node in found.nodes} == {
        node.parameter_bytes
        for node in profile_model(
            Net(), (TOKENS[:2],), target=TOKENS[:2], loss_fn=loss, seconds=0.1, repetitions=3
        ).nodes
    }
    assert all(x.is_meta and x.grad is None for x in model.parameters())
