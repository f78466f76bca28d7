"""data_parallel="zero1" and "fsdp", and plans with optimizer_shards, against one plain process in float64."""

import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.nn.functional as F
from support.alone import near, train_alone
from support.failing import refusal
from support.grids import one_in
from support.models import token_loss
from support.parts import Parts
from support.pool import Pool
from support.records import records
from support.sharded import X, Y, even, halved, sgd
from torch import Tensor, nn

from stagewright import named
from stagewright.comm import Collectives
from stagewright.pipe import Mesh, PipelineModule

WIDTH, VOCABULARY, STEPS = 6, 7, 4


class Model(nn.Module):
    """Embedding tied to the head over the stages, odd sizes, a frozen layer, a parameter without rows."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, WIDTH)
        self.blocks = nn.Sequential(
            *[nn.Sequential(nn.Linear(WIDTH, 5), nn.Tanh(), nn.Linear(5, WIDTH)) for _ in range(4)]
        )
        self.norm = nn.LayerNorm(WIDTH)
        self.scale = nn.Parameter(torch.tensor(1.1))
        self.head = nn.Linear(WIDTH, VOCABULARY, bias=False)
        self.head.weight = self.embedding.weight
        self.blocks[1][0].weight.requires_grad_(False)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embedding(tokens)
        for block in self.blocks:
            x = x + block(x)
        return self.head(self.norm(x) * self.scale)


def make_model() -> nn.Module:
    torch.manual_seed(3)
    return Model().double()


def batch_of(step: int, replica: int, sizes: list[list[int]]) -> tuple[Tensor, Tensor]:
    shape, generator = (sizes[step % len(sizes)][replica], 4), torch.Generator().manual_seed(10 * step + replica)
    x, y = (torch.randint(VOCABULARY, shape, generator=generator) for _ in range(2))
    return x, y


@named
def adamw(parameters: list[tuple[str, nn.Parameter]]) -> torch.optim.Optimizer:
    """Groups by shape and by name, as people make them."""
    tied = [p for name, p in parameters if name.startswith("embedding")]
    matrices = [p for name, p in parameters if p.dim() > 1 and not name.startswith("embedding")]
    vectors = [p for _, p in parameters if p.dim() <= 1]
    groups = [{"params": matrices, "weight_decay": 0.1}, {"params": vectors, "weight_decay": 0.0}]
    groups.append({"params": tied, "lr": 3e-3})
    return torch.optim.AdamW([group for group in groups if group["params"]], lr=1e-2)


def two(parameters: list[nn.Parameter]) -> list[torch.optim.Optimizer | None]:
    matrices, others = [[p for p in parameters if (p.dim() == 2) is is_matrix] for is_matrix in (True, False)]
    return [
        torch.optim.Adafactor(matrices, lr=0.05) if matrices else None,
        torch.optim.AdamW(others, lr=1e-2) if others else None,
    ]


OPTIMIZERS = {"adamw": adamw, "sgd": sgd, "two": two}


def state_bytes(pipe: PipelineModule) -> int:
    states = [state for optimizer in pipe.optimizers for state in optimizer.state.values()]
    return sum(x.untyped_storage().nbytes() for state in states for x in state.values() if x.dim())


def trained(data: int, optimizer: str, sizes: list[list[int]], options: dict[str, Any]) -> dict[str, Any]:
    """A rank: a few steps, one of them of two accumulated batches."""
    replica = torch.distributed.get_rank() % data
    pipe = PipelineModule(
        make_model(),
        **records(loss_fn=token_loss, optimizer=OPTIMIZERS[optimizer], lr_scheduler=halved, timeout=120.0, **options),
    )
    losses = []
    for step in range(STEPS):
        batch = batch_of(step, replica, sizes)
        pipe.build(*batch)
        is_flush = not pipe.schedule.is_asynchronous
        losses.append((pipe.forward_backward if step == 1 and is_flush else pipe.train_step)(*batch))
        if step == 1:
            gradients = {name: p.grad.clone() for name, p in pipe.named_parameters() if p.grad is not None}
    losses += pipe.flush()
    found = {
        "losses": {r.loss_step: r.loss for r in losses if r.loss is not None},
        "gradients": gradients,
        "norms": [r.grad_norm for r in losses],
        "state": pipe.full_state_dict(),
        "state_bytes": state_bytes(pipe),
        "held": pipe.held_bytes(),
        "eval": pipe.eval_step(*batch).loss,
    }
    pipe.close()
    return found


def alone(data: int, optimizer: str, sizes: list[list[int]], max_norm: float | None) -> dict[str, Any]:
    """The same in one process, each batch whole; a stage's optimizer changes nothing, since none looks at others."""
    model = make_model()
    trainable = [(name, p) for name, p in model.named_parameters() if p.requires_grad]
    make = OPTIMIZERS[optimizer]
    made: Any = make(trainable) if optimizer == "adamw" else make([p for _, p in trainable])
    optimizers = [one for one in (made if isinstance(made, list) else [made]) if one is not None]
    schedulers = [halved(one) for one in optimizers]
    losses, norms, gradients = [], [], {}
    for step in range(STEPS):
        x, y = (torch.cat(column) for column in zip(*(batch_of(step, q, sizes) for q in range(data)), strict=True))
        loss = token_loss(model(x), y)
        loss.backward()
        losses.append(float(loss.detach()))
        if step == 1:
            gradients = {name: p.grad.clone() for name, p in trainable}
            norms.append(None)
            continue
        norms.append(None)
        if max_norm is not None:
            norms[-1] = float(torch.nn.utils.clip_grad_norm_([p for _, p in trainable], max_norm))
        for one in [*optimizers, *schedulers]:
            one.step()
        for one in optimizers:
            one.zero_grad()
    return {"losses": losses, "norms": norms, "gradients": gradients, "state": model.state_dict()}


EQUAL, UNEVEN = [[6, 6]], [[6, 6], [7, 4], [4, 9]]


@pytest.mark.thorough(but=["fsdp-split"])
@pytest.mark.parametrize(
    ("kind", "case"),
    one_in(
        2,
        ("zero1", "fsdp"),
        {
            "1x2": ("adamw", UNEVEN, {"schedule": "1f1b", "mesh": {"pipe": 1, "data": 2}, "num_microbatches": 2}),
            "2x2": ("two", UNEVEN, {"schedule": "1f1b", "mesh": {"pipe": 2, "data": 2}, "num_microbatches": 3}),
            "interleaved": (
                "adamw",
                EQUAL,
                {"schedule": "interleaved", "mesh": {"pipe": 2, "data": 2}, "max_grad_norm": 0.1},
            ),
            "split": ("adamw", EQUAL, {"schedule": "zb-h1", "mesh": {"pipe": 2, "data": 2}, "max_grad_norm": 0.1}),
        },
    ),
)
def test_flush(gloo: Pool, kind: str, case: tuple[str, list[list[int]], dict[str, Any]]) -> None:
    optimizer, sizes, options = case
    ranks = options["mesh"]["pipe"] * 2
    answers = gloo.run(trained, ranks=ranks, args=(2, optimizer, sizes, {**options, "data_parallel": kind}))
    wanted = alone(2, optimizer, sizes, options.get("max_grad_norm"))
    for found in answers:
        near([found["losses"][step] for step in range(STEPS)], wanted["losses"])
        near(found["norms"], wanted["norms"])
        near(found["gradients"], {name: wanted["gradients"][name] for name in found["gradients"]})
        near(found["state"], wanted["state"], atol=1e-10)


def ringed(*args: Any) -> dict[str, Any]:
    """`trained` by the backend's own collectives over equal parts, as under NCCL."""
    at_once = mock.patch("stagewright.comm.collectives._tell", lambda _, done: done and done())  # gloo has no future
    with mock.patch.object(Collectives, "_has_rings", return_value=True), at_once:
        return trained(*args)


@pytest.mark.thorough(but=["fsdp"])
@pytest.mark.parametrize("kind", ["zero1", "fsdp"])
def test_rings_of_the_backend(gloo: Pool, kind: str) -> None:
    options = {"schedule": "1f1b", "mesh": {"pipe": 1, "data": 2}, "num_microbatches": 2, "data_parallel": kind}
    wanted = alone(2, "adamw", UNEVEN, None)
    for found in gloo.run(ringed, ranks=2, args=(2, "adamw", UNEVEN, options)):
        near(found["gradients"], wanted["gradients"])
        near(found["state"], wanted["state"], atol=1e-10)


def streamed(sizes: list[list[int]], options: dict[str, Any]) -> dict[str, Any]:
    """A rank under an asynchronous schedule: five steps with a flush in the middle."""
    replica = torch.distributed.get_rank() % 2 if torch.distributed.is_initialized() else 0
    pipe = PipelineModule(
        make_model() if options["schedule"] == "2bw" else untied(),
        **records(loss_fn=token_loss, optimizer=adamw, lr_scheduler=halved, timeout=120.0, **options),
    )
    results = []
    for step in range(5):
        if torch.distributed.is_initialized():
            batch = batch_of(step, replica, sizes)
        else:  # microbatch j of replica q is number 2j + q
            cut = [[x.tensor_split(3) for x in batch_of(step, q, sizes)] for q in range(2)]
            batch = tuple(torch.cat([cut[q][i][j] for j in range(3) for q in range(2)]) for i in range(2))
        results.append(pipe.train_step(*batch))
        if step == 2:
            results += pipe.flush()
    results += pipe.flush()
    found = {
        "losses": {r.loss_step: r.loss for r in results if r.loss is not None},
        "norms": {r.loss_step: r.grad_norm for r in results if r.loss is not None},
        "state": pipe.full_state_dict(),
        "state_bytes": state_bytes(pipe),
    }
    pipe.close()
    return found


def untied() -> nn.Module:
    model = make_model()
    model.head.weight = nn.Parameter(model.embedding.weight.detach().clone())
    return model


@pytest.mark.thorough
@pytest.mark.parametrize(
    "options", [{"schedule": "2bw", "max_grad_norm": 0.1}, {"schedule": "pipedream"}], ids=["2bw", "pipedream"]
)
def test_streams_are_those_of_replicas_with_whole_optimizers(gloo: Pool, options: dict[str, Any]) -> None:
    """In one process nothing is divided; there the test of asynchronous schedules compares with a plain loop."""
    options = {**options, "mesh": {"pipe": 2, "data": 2}, "data_parallel": "zero1", "num_microbatches": 3}
    answers, wanted = gloo.run(streamed, ranks=4, args=(EQUAL, options)), streamed(EQUAL, options)
    for found in answers:
        near([found["losses"], found["norms"]], [wanted["losses"], wanted["norms"]])
        near(found["state"], wanted["state"], atol=1e-10)


class Scale(Parts, weight=lambda: nn.Parameter(torch.ones(1, dtype=torch.float64))):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * self.weight


def verified() -> int:
    model, options = nn.Sequential(even(), Scale()), {"mesh": {"pipe": 1, "data": 2}, "num_microbatches": 2}
    with PipelineModule(
        model, **records(data_parallel="fsdp", loss_fn=F.mse_loss, optimizer=sgd, verify=True, **options)
    ) as pipe:
        return pipe.verify(X, Y).num_gradients


@pytest.mark.thorough
def test_verify_with_a_parameter_of_one_element(gloo: Pool) -> None:
    """Its gradient may have any stride."""
    assert gloo.run(verified, ranks=2) == [9, 9]


EVEN_BYTES = 8 * 4 * (64 + 8)


def kept(kind: str) -> dict[str, Any]:
    """State of a rank of two replicas behind two steps, and its own words about it."""
    model = even()
    pipe = PipelineModule(
        model,
        mesh=Mesh(pipe=1, data=2, data_parallel=kind),
        num_microbatches=2,
        loss_fn=F.mse_loss,
        optimizer=lambda parameters: torch.optim.AdamW(parameters, lr=0.1),
        verify=True,
        timeout=120.0,
    )
    results = [pipe.train_step(X, Y) for _ in range(2)]
    counters = 4 * sum(len(optimizer.state) for optimizer in pipe.optimizers)
    found = {
        "held": pipe.held_bytes() - counters,
        "state_bytes": state_bytes(pipe),
        "is_nan": bool(pipe.parameters()[0].isnan().all()),
        "collectives": [str(span.what) for span in results[-1].timeline().ranks[0].collectives],
        "state": {name: value.detach().clone() for name, value in pipe.state_dict().items()},
        "output": pipe.predict(X),
        "verified": pipe.verify(X, Y).num_gradients,
    }
    pipe.load_state_dict(even().state_dict())
    found["output of the first weights"] = pipe.predict(X)
    found["loss"] = pipe.train_step(X, Y).loss
    found["of its own"] = reached_around(model, pipe)
    return found


def reached_around(model: nn.Sequential, pipe: PipelineModule) -> list[str]:
    """Errors of a user who reaches around the pipeline; the last one ends it."""

    def edit(change: Callable[[], object]) -> None:
        change()
        with torch.no_grad():
            pipe.train_step(X, Y)

    bias = model[0].bias
    reaches = (model.state_dict, lambda: pickle.dumps(model), lambda: edit(lambda: nn.init.zeros_(bias)))
    told = [refusal(reach) for reach in reaches]
    pipe.close()
    return told


def test_what_a_rank_keeps(gloo: Pool) -> None:
    weights, sums = EVEN_BYTES, ["0REDUCE_GRAD0"]
    first = even()
    for kind, held, state, collectives in (
        ("zero1", weights + weights, weights, sums),
        ("fsdp", weights // 2 + weights + 8 * 8, weights, ["0UNSHARD0", *sums, "0RESHARD0"]),  # an element for each
    ):
        for found in gloo.run(kept, ranks=2, args=(kind,)):
            assert (found["held"], found["state_bytes"]) == (held, state)
            assert found["is_nan"] is (kind == "fsdp")
            assert sorted(found["collectives"]) == sorted(collectives)
            model = even()
            model.load_state_dict(found["state"])
            assert found["verified"] == 8
            near([found["output"], found["output of the first weights"]], [model(X).detach(), first(X).detach()])
            near(found["loss"], F.mse_loss(first(X), Y).item())
            read, pickled, edited = found["of its own"]
            if kind == "fsdp":
                assert "state_dict() of Linear '0', whose weights fsdp divides between two batches" in read
                assert "pickling a module, whose weights fsdp divides" in pickled
                assert "parameter '0.bias' was changed between two batches" in edited
            else:
                assert [read, pickled, edited] == ["", "", ""]


def test_an_unknown_word_is_refused_and_one_process_divides_nothing() -> None:
    with pytest.raises(ValueError, match=r"data_parallel='zero3': expected one of 'replicate', 'zero1', 'fsdp'"):
        PipelineModule(even(), mesh=Mesh(data_parallel="zero3"))
    for kind in ("zero1", "fsdp"):
        mesh = Mesh(pipe=2, data=2, data_parallel=kind)
        pipe = PipelineModule(even(), mesh=mesh, num_microbatches=2, loss_fn=F.mse_loss, optimizer=torch.optim.AdamW)
        pipe.train_step(X, Y)
        assert state_bytes(pipe) == 2 * EVEN_BYTES


def resumed(folder: str, before: dict[str, Any], after: dict[str, Any]) -> tuple[float, dict[str, Tensor]]:
    loss = 0.0
    for begins, options in ((True, before), (False, after)):
        pipe = PipelineModule(
            even(),
            **records(loss_fn=F.mse_loss, optimizer=OPTIMIZERS["two"], num_microbatches=2, timeout=120.0, **options),
        )
        pipe.build(X, Y)
        if not begins:
            pipe.load(folder)
        for _ in range(2):
            loss = pipe.train_step(X, Y).loss or 0.0
        if begins:
            pipe.save(folder)
        state = pipe.full_state_dict()
        pipe.close()
    return loss, state


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("before", "after"),
    [
        ({"mesh": {"pipe": 1, "data": 2}, "data_parallel": "fsdp"}, {"mesh": {"pipe": 2}}),
        ({"mesh": {"pipe": 2}}, {"mesh": {"pipe": 1, "data": 2}, "data_parallel": "fsdp"}),
        (
            {"mesh": {"pipe": 1, "data": 2}, "data_parallel": "zero1"},
            {"mesh": {"pipe": 1, "data": 2}, "data_parallel": "replicate"},
        ),
    ],
    ids=["from-fsdp", "to-fsdp", "from-zero1"],
)
def test_a_checkpoint_of_parts_is_one_of_wholes(
    gloo: Pool, tmp_path: Path, before: dict[str, Any], after: dict[str, Any]
) -> None:
    answers = gloo.run(resumed, ranks=2, args=(str(tmp_path), before, after))
    losses, _, wanted = train_alone(even(), [(X, Y)] * 4, two)
    for loss, state in answers:
        near([loss, state], [losses[-1], wanted], atol=1e-10)
