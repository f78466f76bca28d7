"""Losses with parameters of their own, which are the last stage's, and those of heads, each on its stage, float64."""

import copy
import warnings
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from support.alone import Alone, near, same_gradients, train_alone, train_piped
from support.inside import Column, read_tensor_parallel
from support.models import token_loss
from support.parts import GIVEN, Parts
from support.pipeline import assembled
from support.plain import linear
from support.pool import Pool
from support.predictions import LATER, LENGTH, VOCABULARY, Block, batch, make_model, plain_loss
from support.predictions import WIDTH as HEADS_WIDTH
from support.small import WIDTH, X, Y, layers, make, sgd, stream
from support.uneven import in_a_row
from torch import Tensor, nn

import stagewright as sw
from stagewright.comm import PipelineError
from stagewright.pipe import PipelineModule


class Scaled(Parts, scale=lambda: nn.Parameter(torch.full((WIDTH,), 0.7)), seen=lambda: torch.zeros(())):
    def forward(self, output: Tensor) -> Tensor:
        if self.training:
            self.seen += len(output)
        return output * self.scale


class ScaledLoss(Scaled):
    def forward(self, output: Tensor, target: Tensor) -> Tensor:  # type: ignore[override]
        return F.mse_loss(super().forward(output), target)


class Net(Parts, one=linear, two=linear):
    def forward(self, x: Tensor) -> Tensor:
        return self.two(self.one(x).relu()) + x


def pair(options: dict[str, Any]) -> tuple[PipelineModule, PipelineModule]:
    """The scale in the loss, and the same scale in front of the loss."""
    torch.manual_seed(0)
    one = layers()
    other = nn.Sequential(*copy.deepcopy(one), Scaled())
    settings = options if options.get("mesh") == {"pipe": 1} else options | {"cut": ["3"]}
    return make(model=one, loss_fn=ScaledLoss(), **settings), make(model=other, loss_fn=F.mse_loss, **settings)


OPTIONS: dict[str, dict[str, Any]] = {
    "1f1b": {"max_grad_norm": 0.05},
    "2bw": {"schedule": "2bw", "max_grad_norm": 0.05},
    "pipedream": {"schedule": "pipedream"},
    "recompute": {"recompute": "full"},
    "2bw, recompute": {"schedule": "2bw", "recompute": "full"},
    "one rank": {"mesh": {"pipe": 1}},
    "replicas": {"mesh": {"pipe": 2, "data": 2}},
}


@pytest.mark.thorough(but=["one rank"])
@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS.keys())
def test_a_loss_learns_as_a_layer_in_front_of_it_would(options: dict[str, Any]) -> None:
    one, other = pair(options)
    for _ in range(4):
        one.train_step(X, Y)
        other.train_step(X, Y)
    one.eval_step(X, Y)
    found, expected = one.full_state_dict(), other.full_state_dict()
    assert not torch.equal(found["loss_fn.scale"], torch.full((WIDTH,), 0.7))
    near({name.replace("loss_fn", "6"): value for name, value in found.items()}, expected, atol=0.0)


def test_the_loss_of_a_traced_model_and_of_given_stages() -> None:
    for options in ({"model": Net()}, {"stages": [nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)]}):
        loss = ScaledLoss()
        pipe = make(loss_fn=loss, **options)
        pipe.train_step(X, Y)
        assert not torch.equal(loss.scale, torch.full((WIDTH,), 0.7))
        assert {name for name, _ in pipe.named_parameters()} >= {"loss_fn.scale"}
        assert float(pipe.state_dict()["loss_fn.seen"]) == len(X)


def test_a_loss_stands_in_checkpoints_and_state_dicts(tmp_path: Path) -> None:
    one = make(loss_fn=ScaledLoss(), optimizer=torch.optim.AdamW)
    one.train_step(X, Y)
    one.save(tmp_path)
    again = make(loss_fn=ScaledLoss(), optimizer=torch.optim.AdamW, mesh={"pipe": 3})
    again.load(tmp_path)
    third = make(loss_fn=ScaledLoss())
    third.load_state_dict(one.full_state_dict())
    assert torch.equal(third.full_state_dict()["loss_fn.scale"], one.full_state_dict()["loss_fn.scale"])
    for pipe in (one, again):
        pipe.train_step(X, Y)
    assert all(torch.equal(a, b) for a, b in zip(one.parameters(), again.parameters(), strict=True))
    with pytest.raises(ValueError, match=r"missing \['loss_fn.scale', 'loss_fn.seen'\]"):
        third.load_state_dict({k: v for k, v in one.full_state_dict().items() if not k.startswith("loss_fn")})


@pytest.mark.parametrize("schedule", ["1f1b", "2bw"])
def test_verify_runs_a_loss_of_its_own(schedule: str) -> None:
    loss = ScaledLoss()
    assert make(schedule=schedule, loss_fn=loss).verify(X, Y).num_gradients == 13
    assert loss.scale.grad is None
    assert float(loss.seen) == 0


def test_a_loss_that_the_model_has_keeps_its_name() -> None:
    model = Net()
    model.loss_fn = ScaledLoss()
    pipe = make(model=model, loss_fn=model.loss_fn)
    pipe.train_step(X, Y)
    assert pipe.full_state_dict().keys() == model.state_dict().keys()
    assert not torch.equal(model.loss_fn.scale, torch.full((WIDTH,), 0.7))
    with pytest.raises(ValueError, match=r"the model has 'loss_fn.scale', .* or loss_fn=model.loss_fn"):
        make(model=model, loss_fn=ScaledLoss())


@pytest.mark.parametrize("begin", [make, stream])
def test_a_parameter_that_no_optimizer_holds_is_refused(begin: Any) -> None:
    loss = ScaledLoss()
    pipe = begin(loss_fn=lambda output, target: 2 * loss(output, target))
    message = r"loss_fn computes with a tensor of shape \(6,\) .*module that owns it as loss"
    with pytest.raises(ValueError, match=message):
        pipe.train_step(X, Y)
    loss.requires_grad_(False)
    begin(loss_fn=lambda output, target: 2 * loss(output, target)).train_step(X, Y)


@pytest.mark.parametrize("make_model", [layers, Net])
def test_other_stages_parameters_in_a_stream_are_refused(make_model: Any) -> None:
    model = make_model()
    squares = lambda output, _: sum((p.square().sum() for p in model.parameters()), output.mean())  # noqa: E731
    pipe = stream(model=model, loss_fn=squares)
    with pytest.raises(ValueError, match="asynchronous schedule: any but the last stage's own"):
        pipe.train_step(X, Y)


def test_a_parameter_of_the_users_own_optimizer_is_not_refused() -> None:
    scale = nn.Parameter(torch.ones(()))
    scaled = lambda output, target: scale * F.mse_loss(output, target)  # noqa: E731
    make(loss_fn=scaled, optimizer=None).forward_backward(X, Y)
    assert scale.grad is not None
    make(loss_fn=scaled, optimizer=lambda parameters: sgd([*parameters, scale])).train_step(X, Y)


class WithWeights(Parts, held=GIVEN):
    def forward(self, output: Tensor, target: Tensor) -> Tensor:
        return F.mse_loss(output, target) + sum(p.square().mean() for p in self.held.parameters())


def train_with_weights() -> tuple[list[float | None], list[float]]:
    """Losses beside those of one process; a function that reads the weights is refused where they are elsewhere."""
    torch.manual_seed(0)
    twin = layers()
    model = copy.deepcopy(twin)
    function = WithWeights(model[0]).forward
    message = r"requires a gradient, and that no optimizer|as a child of the loss module"
    with pytest.raises((ValueError, PipelineError), match=message):
        make(model=model, optimizer=sgd, loss_fn=function).train_step(X, Y)
    model = copy.deepcopy(twin)
    found = train_piped(make(model=model, optimizer=sgd, loss_fn=WithWeights(model[0])), [(X, Y)] * 2)
    return found.losses, train_alone(twin, [(X, Y)] * 2, sgd, loss_fn=WithWeights(twin[0])).losses


def test_a_loss_that_reads_weights_of_another_stage_has_their_module(gloo: Pool) -> None:
    for losses, expected in gloo.run(train_with_weights, ranks=2):
        assert losses == pytest.approx(expected, rel=1e-6)


SCHEDULES = ("gpipe", "1f1b", "interleaved", "zb-h1", "2bw")
STEPS = 3
pipeline = partial(assembled, loss_fn="model", num_microbatches=4, loss_weight="samples", optimizer=sgd)


def alone(model: nn.Module, loss_of: Any, options: dict[str, Any]) -> Alone:
    delay = int(options.get("schedule") == "2bw")
    return train_alone(model, map(batch, range(STEPS)), sgd, loss_of=loss_of, delay=delay)


def trained(pipe: PipelineModule) -> list[Any]:
    results = [pipe.train_step(*batch(step)[:1], labels=batch(step)[1]) for step in range(STEPS)] + pipe.flush()
    return [[each.loss for each in results if each.loss is not None], pipe.full_state_dict()]


def check_two_losses(found: dict[str, Any], heads: str, schedule: str) -> None:
    model = make_model(heads)
    wanted = alone(model, plain_loss, {"schedule": schedule})
    near([found["trained"], found["eval"]], [[wanted.losses, wanted.state], plain_loss(model, *batch(9)).item()])
    if found["predicted"] is not None:
        near(found["predicted"], model(batch(9)[0]).detach())


def two_losses(heads: str, schedule: str, cut: list[str]) -> dict[str, Any]:
    warnings.filterwarnings("ignore", message="the schedule splits the backward")
    pipe_ranks = 2 if schedule == "interleaved" else 4
    with pipeline(make_model(heads), mesh={"pipe": pipe_ranks}, schedule=schedule, cut=cut) as pipe:
        return {
            "trained": trained(pipe),
            "eval": pipe.eval_step(batch(9)[0], labels=batch(9)[1]).loss,
            "predicted": pipe.predict(batch(9)[0]),
            "sent": pipe._building.built("links").message_bytes()[0],
        }


CUT = ["blocks.1", "head", "later_head"]
HIDDEN = 2 * (LENGTH) * HEADS_WIDTH * 8  # bytes of a microbatch of two samples in float64


@pytest.mark.thorough
@pytest.mark.parametrize("heads", ["one", "tied", "two"])
@pytest.mark.parametrize("schedule", SCHEDULES)
def test_each_loss_is_made_on_its_stage(schedule: str, heads: str) -> None:
    """Of two heads, or of one that two stages run."""
    cut = ["blocks.1", "head", "later"] if heads == "one" else CUT
    check_two_losses(two_losses(heads, schedule, cut), heads, schedule)


@pytest.mark.thorough
def test_only_a_number_of_a_loss_is_sent() -> None:
    """From the stage of the first head the last one gets 8 bytes, and hidden from that of the later block."""
    assert two_losses("two", "1f1b", CUT)["sent"] == [HIDDEN, HIDDEN, HIDDEN + 8]


@pytest.mark.thorough
@pytest.mark.parametrize("schedule", SCHEDULES)
def test_losses_of_two_stages_over_gloo(gloo: Pool, schedule: str) -> None:
    for found in gloo.run(two_losses, ranks=2 if schedule == "interleaved" else 4, args=("two", schedule, CUT)):
        check_two_losses(found, "two", schedule)


EMBED, BLOCKS = (lambda: nn.Embedding(VOCABULARY, HEADS_WIDTH)), (lambda: nn.ModuleList(Block() for _ in range(2)))


class Trunk(Parts, embed=EMBED, blocks=BLOCKS):
    """Hidden states, for a head that is the loss."""

    def forward(self, tokens: Tensor) -> Tensor:
        h: Tensor = self.embed(tokens)
        for block in self.blocks:
            h = block(h)
        return h


def test_a_head_that_is_the_loss_counts_its_tokens() -> None:
    """Microbatches with more ignored tokens weigh less."""
    torch.manual_seed(0)
    trunk, head = Trunk().double(), sw.LinearCrossEntropy(HEADS_WIDTH, VOCABULARY, reduction="pair").double()
    plain = copy.deepcopy(trunk)
    weight = head.weight.detach().clone().requires_grad_()
    tokens, labels = batch(0)
    labels = labels.clone()
    labels[:3, 2:] = -100
    result = pipeline(trunk, mesh={"pipe": 2}, loss_fn=head, loss_weight=None).forward_backward(tokens, labels)
    wanted = F.cross_entropy(F.linear(plain(tokens), weight).flatten(0, 1), labels.flatten())
    wanted.backward()
    assert result.loss == pytest.approx(wanted.item(), abs=1e-12)
    same_gradients(trunk, plain)
    near(head.weight.grad, weight.grad)


class Weighed(Parts, model=lambda: make_model("two", reduction="none")):
    """Two losses over different numbers of tokens: each label has its share of its own mean."""

    def forward(self, tokens: Tensor, labels: Tensor, shares: Tensor) -> Tensor:
        model, h = self.model, self.model.embed(tokens[:, :-1])
        for block in model.blocks:
            h = block(h)
        first = (model.head(h, labels[:, :-1]) * shares[..., 0]).sum()
        h = model.later(model.join(torch.cat([h, model.embed(tokens[:, 1:])], -1)))
        return first + LATER * (model.later_head(h, labels[:, 1:]) * shares[..., 1]).sum()


def summed(output: Tensor, _: Tensor, *, reduction: str) -> Tensor:
    return output


def test_losses_with_counts_of_their_own_are_sums_of_shares() -> None:
    """Padding that leaves the losses 10, 8, 0, 0 and 11, 6, 0, 0 labels in the microbatches."""
    tokens, labels = batch(0)
    labels = labels.clone()
    labels[0, :1], labels[2:4, 4:], labels[4:] = -100, -100, -100
    labels[1, 3] = -100
    both = torch.stack([labels[:, :-1], labels[:, 1:]], -1) != -100
    shares = both.double() / both.sum((0, 1))
    model = Weighed()
    plain = make_model("two")
    cut, loss_fn = [f"model.{name}" for name in CUT], partial(summed, reduction="sum")
    pipe = pipeline(model, mesh={"pipe": 4}, cut=cut, loss_fn=loss_fn, loss_weight=None)
    loss = pipe.forward_backward(tokens, labels, shares, target=labels).loss
    wanted = plain_loss(plain, tokens, labels)
    wanted.backward()
    assert loss == pytest.approx(wanted.item(), abs=1e-12)
    same_gradients(model, plain)


class Between(Trunk, embed=EMBED, blocks=BLOCKS, head=lambda: nn.Linear(HEADS_WIDTH, VOCABULARY)):
    def forward(self, tokens: Tensor, labels: Tensor) -> Tensor:  # type: ignore[override]
        return sw.linear_cross_entropy(super().forward(tokens), self.head.weight, labels, self.head.bias)


@pytest.mark.parametrize("schedule", ["1f1b", "zb-h1"])
def test_the_function_runs_between_modules(schedule: str) -> None:
    def made() -> Between:
        torch.manual_seed(0)
        return Between().double()

    def loss_of(model: Any, tokens: Tensor, labels: Tensor) -> Tensor:
        return token_loss(model.head(Trunk.forward(model, tokens)), labels)

    wanted = alone(made(), loss_of, {})
    near(trained(pipeline(made(), mesh={"pipe": 2}, schedule=schedule)), [wanted.losses, wanted.state])


class Divided(Between):
    def __init__(self, vocabulary: int) -> None:
        super().__init__()
        self.head = sw.LinearCrossEntropy(HEADS_WIDTH, vocabulary, bias=True, label_smoothing=0.1, z_loss=0.01)

    def forward(self, tokens: Tensor, labels: Tensor | None = None) -> Tensor:  # type: ignore[override]
        return self.head(Trunk.forward(self, tokens), labels)


def divided_loss(model: Any, tokens: Tensor, labels: Tensor) -> Tensor:
    logits = F.linear(Trunk.forward(model, tokens), model.head.weight, model.head.bias).flatten(0, 1)
    return F.cross_entropy(logits, labels.flatten(), label_smoothing=0.1) + 0.01 * logits.logsumexp(1).square().mean()


def divided(vocabulary: int = VOCABULARY) -> Divided:
    torch.manual_seed(0)
    return Divided(vocabulary).double()


def train_divided(options: dict[str, Any]) -> tuple[Any, Any, int]:
    warnings.filterwarnings("ignore", message="the schedule splits the backward")
    with pipeline(divided(), **options) as pipe:
        found = trained(pipe)
        logits = pipe.predict(batch(9)[0])
        held = dict(pipe.named_parameters())
        return found, logits, len(held["head.weight"]) if "head.weight" in held else 0


DIVIDED: dict[str, tuple[int, dict[str, Any]]] = {
    "auto": (4, {"mesh": {"pipe": 2, "tensor": 2}, "tensor_parallel": "auto", "schedule": "1f1b"}),
    "named": (4, {"mesh": {"pipe": 2, "tensor": 2}, "tensor_parallel": {"head": "column"}, "schedule": "2bw"}),
    "halves": (4, {"mesh": {"pipe": 2, "tensor": 2}, "tensor_parallel": {"head": "column"}, "schedule": "zb-h1"}),
    "again": (2, {"mesh": {"pipe": 1, "tensor": 2}, "tensor_parallel": {"head": "column"}, "recompute": "full"}),
    "last stage": (3, {"plan": in_a_row(1, 2, nodes=("embed blocks.0 blocks.1", "head")), "num_microbatches": None}),
}


@pytest.mark.thorough(but=["again"])
@pytest.mark.parametrize("case", DIVIDED)
def test_a_divided_vocabulary_has_the_same_loss(gloo: Pool, case: str) -> None:
    ranks, options = DIVIDED[case]
    model = divided()
    wanted = alone(model, divided_loss, options)
    rows = []
    for found, logits, held in gloo.run(train_divided, ranks=ranks, args=(options,)):
        near(found, [wanted.losses, wanted.state])
        if logits is not None:
            near(logits, model(batch(9)[0]).detach())
        rows.append(held)
    assert rows == [0] * (ranks - 2) + [VOCABULARY // 2] * 2


def test_a_head_is_divided_by_columns_or_stays_whole() -> None:
    for option in ("auto", {"head": "column"}):
        assert str(read_tensor_parallel(option, divided(), count=2).styles["head"]) == "<column, gathered>"
    tied = divided()
    tied.head.weight = tied.embed.weight
    for model, count in ((tied, 2), (divided(vocabulary=49), 2)):
        found = read_tensor_parallel("auto", model, count=count)
        assert "head" not in found.styles
        assert found.whole["head"] == f"whole: {count} do not divide it, or its weight is another module's too"


@pytest.mark.parametrize(
    ("style", "match"),
    [
        ("row", "module 'head' .* has its own forward"),
        (Column(blocks=2, gather_output=True), "module 'head' is a LinearCrossEntropy: expected 'column'"),
        (Column(), "module 'head' is a LinearCrossEntropy: expected 'column'"),
    ],
    ids=str,
)
def test_other_styles_of_a_head_are_refused(style: Any, match: str) -> None:
    with pytest.raises(ValueError, match=match):
        read_tensor_parallel({"head": style}, divided(), count=2)
