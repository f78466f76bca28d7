"""Slices of the sequence: gradients equal those of one plain process on whole sequences; what would not is refused."""

from collections.abc import Callable
from dataclasses import replace
from functools import cache, partial
from itertools import combinations
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from support.alone import near, train_alone
from support.failing import refusal
from support.inside import GPT, GPTConfig, profile_model
from support.parts import GIVEN, Parts
from support.pool import Pool
from support.records import records
from support.sliced import (
    VOCABULARY,
    T,
    batch,
    chain,
    counted_loss,
    difference,
    gpt,
    mean_loss,
    of_this_rank,
    piped,
    plainly,
)
from support.storages import Storages
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from stagewright import PipelineModule, Slices
from stagewright.partition import Cluster, Profile, plan


def agrees(model: nn.Module, loss_fn: Callable[..., Any], *inputs: Any, **options: Any) -> None:
    """The pipeline's loss and gradients are those of the plain model, below 1e-12; also a second time."""
    expected = plainly(model, loss_fn, *inputs)
    pipe = PipelineModule(model, **records(loss_fn=loss_fn, **{"mesh": {"pipe": 2}, "num_microbatches": 2, **options}))
    for _ in range(2):
        found = piped(pipe, *inputs)
        assert found.loss == pytest.approx(expected.loss, abs=1e-13)
        assert set(found.gradients) == set(expected.gradients)
        assert difference(found, expected) < 1e-12


@pytest.mark.thorough
def test_unequal_everything() -> None:
    """Lengths, microbatches and both kinds of losses: every token weighs the same."""
    for loss_fn in (mean_loss, counted_loss):
        lengths = {"num_slices": 3, "lengths": [6, 4, 2]}
        agrees(chain(layers=1), loss_fn, *batch(samples=3), schedule="terapipe", **lengths)


def test_a_model_that_is_no_chain() -> None:
    """No hook of all modules is left, at which a compiled module would warn."""
    agrees(gpt(layers=1), counted_loss, *batch(), schedule="seq1f1b", num_slices=2)
    assert not torch.nn.modules.module._has_any_global_hook()  # type: ignore[no-untyped-call]


@pytest.mark.thorough(but=["seq1f1b-{'num_slices': 3, 'mesh': {'pipe': 2, 'data': 2}, 'num_microbatches': 1}"])
@pytest.mark.parametrize(
    ("schedule", "sizes"),
    [
        ("seq1f1b", {"num_slices": 3}),
        ("seq1f1b", {"num_slices": 5, "num_microbatches": 1}),  # 12 tokens in slices of 3, 3, 2, 2, 2
        ("seq1f1b", {"num_slices": 2, "num_chunks": 2}),
        ("seq-zb-h1", {"num_slices": 3, "mesh": {"pipe": 3}}),
        ("slimpipe", {"num_slices": 4, "num_microbatches": 4}),
        ("seq1f1b", {"num_slices": 3, "recompute": "full"}),
        ("seq-zb-h1", {"num_slices": 2, "recompute": "full"}),
        ("seq1f1b", {"num_slices": 3, "mesh": {"pipe": 2, "data": 2}, "num_microbatches": 1}),
    ],
    ids=str,
)
def test_gradients_equal_one_process(schedule: str, sizes: dict[str, Any]) -> None:
    agrees(chain(), mean_loss, *batch(), schedule=schedule, **sizes)


def test_verify_and_evaluation_take_whole_sequences() -> None:
    model, (tokens, targets) = chain(), batch()
    pipe = PipelineModule(
        model,
        schedule=Slices("seq1f1b", num_slices=3),
        num_microbatches=2,
        mesh={"pipe": 2},
        loss_fn=mean_loss,
        verify=True,
    )
    expected = model(tokens)
    pipe.forward_backward(tokens, targets)
    assert torch.equal(pipe.predict(tokens), expected)
    assert pipe.eval_step(tokens, targets).loss == pytest.approx(mean_loss(expected, targets).item(), abs=1e-13)
    dropping = chain(dropout=0.1)
    pipe = PipelineModule(dropping, schedule="seq1f1b", num_microbatches=2, loss_fn=mean_loss, verify=True)
    with pytest.raises(ValueError, match=r"verify over parts of the sequence, and 0\.dropout"):
        pipe.forward_backward(tokens, targets)


@pytest.mark.thorough
@pytest.mark.parametrize("schedule", ["seq1f1b", "seq-zb-h1"])
def test_over_processes(gloo: Pool, schedule: str) -> None:
    options = {"schedule": schedule, "num_slices": 3, "lengths": [5, 4, 3], "mesh": {"pipe": 2}}
    by_rank = gloo.run(of_this_rank, ranks=2, args=(options,))
    names = set()
    for loss, gradients, own in by_rank:
        assert loss < 1e-13
        assert gradients < 1e-12
        names |= own
    assert names == {name for name, _ in chain().named_parameters()}


def trained_after_a_bad_batch() -> tuple[str, float | None]:
    tokens, targets = batch()
    pipe = PipelineModule(chain(), schedule=Slices("seq1f1b", 3), loss_fn=mean_loss, optimizer=torch.optim.SGD)
    return refusal(lambda: pipe.train_step(tokens[:, 0], targets)), pipe.train_step(tokens, targets).loss


@pytest.mark.thorough
def test_a_first_batch_that_has_no_slices_ends_no_run(gloo: Pool) -> None:
    """It ended it, so that the next batch was a PipelineError."""
    for said, loss in gloo.run(trained_after_a_bad_batch, ranks=2):
        assert "which dimension is the sequence is not clear" in said
        assert loss is not None


@cache
def profiled() -> Profile:
    """A profile of the chain, of nodes that are made alike and whose attention takes most of the time."""
    tokens, targets = batch(samples=1)
    measure = {"loss_fn": mean_loss, "target": targets, "sequence_dim": 1, "repetitions": 1, "seconds": 0.1}
    profile = profile_model(chain(), (tokens,), **measure)
    assert profile.sequence_tokens == T
    assert 0 < profile.kv_share < 0.5
    nodes = tuple(replace(node, forward_seconds=1.0, backward_seconds=2.0) for node in profile.nodes)
    return replace(profile, nodes=nodes, step_seconds=None, pair_share=0.75, slice_share=0.01)


@pytest.mark.thorough(but=["{'pipeline_sizes': (2,), 'data_sizes': (2,)}"])
@pytest.mark.parametrize("options", [{"pipeline_sizes": (2,)}, {"pipeline_sizes": (2,), "data_sizes": (2,)}], ids=str)
def test_a_plan_says_how_long_slices_are(options: dict[str, Any], tmp_path: Path) -> None:
    cluster = Cluster.from_levels([(4, 1e9)])
    found = plan(profiled(), cluster, global_batch=4, schedules=("seq1f1b", "terapipe"), **options)
    lengths = set(found.slice_lengths)
    assert len(lengths) > 1
    path = tmp_path / "plan.json"
    path.write_text(found.to_json())
    expected = plainly(chain(), mean_loss, *batch())
    seen: list[int] = []
    for schedule in (found, str(path), Slices(found, dims={0: 1, "target": 1})):
        model = chain()
        model[1].register_forward_hook(lambda module, given, output: seen.append(output.shape[1]))
        made = piped(PipelineModule(model, schedule=schedule, loss_fn=mean_loss), *batch())
        assert made.loss == pytest.approx(expected.loss, abs=1e-13)
        assert difference(made, expected) < 1e-12
    assert lengths <= {*seen}
    with pytest.raises(ValueError, match="a plan fixes both: expected dims= alone"):
        PipelineModule(chain(), schedule=Slices(found, num_slices=2), loss_fn=mean_loss)


class Peak(Storages):
    peak = 0

    def __torch_dispatch__(self, *given: Any, **named: Any) -> Any:
        out = super().__torch_dispatch__(*given, **named)
        self.peak = max(self.peak, self.bytes)
        return out


@pytest.mark.thorough(but=["terapipe"])
@pytest.mark.parametrize("schedule", ["seq1f1b", "terapipe"])
def test_a_plan_over_slices_knows_what_they_keep(schedule: str) -> None:
    """Live bytes of one rank: little less than predicted, with keys and values, their gradients, and masks."""
    torch.manual_seed(0)
    config = GPTConfig(vocabulary=VOCABULARY, length=128, layers=3, width=32, heads=2, dropout=0.0)
    model = nn.Sequential(*GPT(config).blocks)
    x = torch.randn(8, 128, 32)
    measure: dict[str, Any] = {"loss_fn": F.mse_loss, "target": x[:2], "sequence_dim": 1}
    profile = profile_model(model, (x[:2],), **measure, repetitions=1, seconds=0.1)
    profile = replace(profile, pair_share=0.5, slice_share=0.02)
    cluster = Cluster.from_levels([(1, 1e9)])
    found = plan(profile, cluster, global_batch=8, schedules=schedule, recompute=("none",))
    pipe = PipelineModule(model, schedule=found, loss_fn=F.mse_loss)
    for _ in range(2):
        model.zero_grad()
        with Peak() as meter:
            pipe.forward_backward(x, x)
    (memory,) = found.memory.values()
    predicted = memory.total - memory.parameters - memory.optimizer
    assert 0.85 * predicted < meter.peak < 1.02 * predicted


@pytest.mark.thorough
def test_dropout_does_not_depend_on_the_cut_or_on_recomputation() -> None:
    """Masks are drawn by slice: two stages, three, and a stage that runs again make the same to the last bit."""
    made = [
        piped(
            PipelineModule(
                chain(dropout=0.3),
                **records(schedule=schedule, num_slices=3, num_microbatches=2, loss_fn=mean_loss, **options),
            ),
            *batch(),
        )
        for schedule, options in (
            ("seq1f1b", {"mesh": {"pipe": 2}}),
            ("terapipe", {"mesh": {"pipe": 3}}),
            ("seq1f1b", {"mesh": {"pipe": 2}, "recompute": "full"}),
        )
    ]
    assert made[0].loss != plainly(chain(), mean_loss, *batch()).loss
    for other in made[1:]:
        assert other.loss == made[0].loss
        assert all(torch.equal(other.gradients[name], made[0].gradients[name]) for name in made[0].gradients)


def test_slices_draw_masks_of_their_own() -> None:
    masks: list[Tensor] = []
    model = chain(layers=1, dropout=0.5)
    model[0].dropout.register_forward_hook(lambda module, given, output: masks.append(output == 0))
    pipe = PipelineModule(model, schedule=Slices("seq1f1b", num_slices=3), num_microbatches=1, loss_fn=mean_loss)
    piped(pipe, *batch())
    drawn = [mask for mask in masks if mask.any()]  # none when slices are tried
    assert len(drawn) == 3
    assert not any(torch.equal(one, other) for one, other in combinations(drawn, 2))


class Heads(nn.Module):
    """Attention of nn.MultiheadAttention, with positions that the model is given; keys of fewer heads beside."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens, self.places = nn.Embedding(VOCABULARY, 8), nn.Embedding(T, 8)
        self.heads = nn.MultiheadAttention(8, 2, dropout=0.0, batch_first=True)
        self.query, self.key = nn.Linear(8, 8), nn.Linear(8, 4)
        self.head = nn.Linear(8, VOCABULARY)

    def forward(self, tokens: Tensor, positions: Tensor) -> Tensor:
        x = self.tokens(tokens) + self.places(positions)
        mask = nn.Transformer.generate_square_subsequent_mask(x.shape[1], dtype=x.dtype)
        x = x + self.heads(x, x, x, attn_mask=mask, is_causal=True, need_weights=False)[0]
        query = self.query(x).unflatten(-1, (4, 2)).transpose(1, 2)
        key = self.key(x).unflatten(-1, (2, 2)).transpose(1, 2)
        x = x + F.scaled_dot_product_attention(query, key, key, is_causal=True, enable_gqa=True).transpose(
            1, 2
        ).flatten(2)
        return self.head(x)


def test_attention_of_other_modules_and_positions_as_an_input() -> None:
    torch.manual_seed(0)
    tokens, targets = batch()
    positions = torch.arange(T).expand(4, T)
    agrees(Heads().double(), mean_loss, tokens, positions, targets, schedule="seq1f1b", num_slices=2, mesh={"pipe": 1})


class Shared(Parts, block=GIVEN, reentrant=None):
    """The same attention twice in a forward; checkpointed, if asked for."""

    def forward(self, x: Tensor) -> Tensor:
        for _ in range(2):
            x = self.block(x) if self.reentrant is None else checkpoint(self.block, x, use_reentrant=self.reentrant)
        return x


@pytest.mark.thorough(but=["none"])
@pytest.mark.parametrize("recompute", ["none", "full", "layer", "selective"])
def test_attention_that_is_called_twice(recompute: str) -> None:
    model = chain()
    model[1] = Shared(model[1])
    agrees(model, mean_loss, *batch(), schedule="seq1f1b", num_slices=3, recompute=recompute)


class OwnNames(nn.Module):
    """No local is called `self` where attention is called, and a function calls it that has no module at all."""

    def __init__(this, block: nn.Module, *, checkpoints: bool) -> None:  # noqa: N805
        super().__init__()
        this.block, this.checkpoints = block, checkpoints

    def forward(this, x: Tensor) -> Tensor:  # noqa: N805
        heads = x.unflatten(-1, (2, -1)).transpose(1, 2)
        attend = lambda h: F.scaled_dot_product_attention(h.sin(), h, h, is_causal=True).transpose(1, 2).flatten(2)  # noqa: E731
        mixed = checkpoint(attend, heads, use_reentrant=False) if this.checkpoints else attend(heads)
        return this.block(x + mixed)  # type: ignore[no-any-return]


@pytest.mark.thorough(but=["seq-zb-h1-2-{'*': 'full'}"])
@pytest.mark.parametrize("recompute", ["layer", "selective", {"*": "full"}, {"*.block": "selective"}], ids=str)
@pytest.mark.parametrize(("schedule", "num_slices"), [("seq1f1b", 3), ("seq-zb-h1", 2)])
def test_units_that_attend_run_again(schedule: str, num_slices: int, recompute: Any) -> None:
    """Several on a stage, also in the backward in halves."""
    plain = chain(layers=4)
    blocks = [OwnNames(block, checkpoints=i % 2 == 1) for i, block in enumerate(plain[1:-1])]
    model = nn.Sequential(plain[0], *blocks, plain[-1])
    agrees(model, mean_loss, *batch(), schedule=schedule, num_slices=num_slices, recompute=recompute)


@pytest.mark.thorough(but=["True"])
@pytest.mark.parametrize("reentrant", [True, False])
def test_a_checkpointed_block_and_frozen_attention(reentrant: bool) -> None:
    """Code that runs again in the backward sees the slices before it; keys without gradients leave none."""
    model = chain(layers=3)
    model[1] = Shared(model[1], reentrant=reentrant)
    model[2].requires_grad_(False)
    agrees(model, mean_loss, *batch(), schedule="seq1f1b", num_slices=3)


@pytest.mark.thorough
def test_training_on_sequences_of_several_lengths() -> None:
    """As many steps of AdamW as one process makes; an error in between leaves nothing behind."""
    model, plain = chain(), chain()
    options: dict[str, Any] = {"schedule": "seq1f1b", "num_slices": 3, "num_microbatches": 2, "mesh": {"pipe": 2}}
    fails: list[str] = []

    def loss_fn(logits: Tensor, targets: Tensor) -> Tensor:
        if fails and len(fails.pop()):
            raise RuntimeError("once")
        return mean_loss(logits, targets)

    adamw = partial(torch.optim.AdamW, lr=1e-2)
    pipe = PipelineModule(model, **records(loss_fn=loss_fn, optimizer=adamw, **options))
    lengths, losses = (12, 7, 12, 9), []
    for length in lengths:
        if length == 12:  # keys and values of another length are kept then
            fails += ["x", ""]
            with pytest.raises(RuntimeError, match="once"):
                pipe.train_step(*batch(length=8))
        losses.append(pipe.train_step(*batch(length=length)).loss)
    wanted = train_alone(plain, [batch(length=n) for n in lengths], adamw, loss_fn=mean_loss)
    near([losses, pipe.full_state_dict()], [wanted.losses, wanted.state], atol=1e-10)
