"""Slices of the sequence: gradients equal those of one plain process on whole sequences; what would not is refused."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import cache
from itertools import combinations
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from support.inside import GPT, GPTConfig, profile_model
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

from stagewright import PipelineModule, Slices, first_position
from stagewright.partition import Cluster, Plan, Profile, plan


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
    agrees(gpt(layers=1), counted_loss, *batch(), schedule="seq1f1b", num_slices=2)


@pytest.mark.thorough(but=["seq-zb-h1-{'num_slices': 2, 'recompute': 'full'}"])
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
    with pytest.raises(ValueError, match=r"verify over slices of the sequence, and 0\.dropout"):
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
    try:
        pipe.train_step(tokens[:, 0], targets)
        said = "taken"
    except ValueError as error:
        said = str(error)
    return said, pipe.train_step(tokens, targets).loss


@pytest.mark.gloo
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


def planned(**options: Any) -> Plan:
    cluster = Cluster.from_levels([(4, 1e9)])
    return plan(profiled(), cluster, global_batch=4, schedules=("seq1f1b", "terapipe"), **options)


@pytest.mark.thorough(but=["{'pipeline_sizes': (2,)}"])
@pytest.mark.parametrize("options", [{"pipeline_sizes": (2,)}, {"pipeline_sizes": (2,), "data_sizes": (2,)}], ids=str)
def test_a_plan_says_how_long_slices_are(options: dict[str, Any], tmp_path: Path) -> None:
    found = planned(**options)
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
    """The most bytes that are alive at once."""

    peak = 0

    def __torch_dispatch__(self, *given: Any, **named: Any) -> Any:
        out = super().__torch_dispatch__(*given, **named)
        self.peak = max(self.peak, self.bytes)
        return out


@pytest.mark.thorough
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


# --- other models that are right ---


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
        logits: Tensor = self.head(x)
        return logits


def test_attention_of_other_modules_and_positions_as_an_input() -> None:
    torch.manual_seed(0)
    tokens, targets = batch()
    positions = torch.arange(T).expand(4, T)
    agrees(Heads().double(), mean_loss, tokens, positions, targets, schedule="seq1f1b", num_slices=2, mesh={"pipe": 1})


class Shared(nn.Module):
    """The same attention twice in a forward; checkpointed, if asked for."""

    def __init__(self, block: nn.Module, *, reentrant: bool | None = None) -> None:
        super().__init__()
        self.block, self.reentrant = block, reentrant

    def forward(self, x: Tensor) -> Tensor:
        for _ in range(2):
            x = self.block(x) if self.reentrant is None else checkpoint(self.block, x, use_reentrant=self.reentrant)
        return x


@pytest.mark.thorough
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

    pipe = PipelineModule(
        model, **records(loss_fn=loss_fn, optimizer=lambda p: torch.optim.AdamW(p, lr=1e-2), **options)
    )
    optimizer = torch.optim.AdamW(plain.parameters(), lr=1e-2)
    for length in (12, 7, 12, 9):
        tokens, targets = batch(length=length)
        if length == 12:  # keys and values of another length are kept then
            fails += ["x", ""]
            with pytest.raises(RuntimeError, match="once"):
                pipe.train_step(*batch(length=8))
        optimizer.zero_grad()
        loss = mean_loss(plain(tokens), targets)
        loss.backward()
        optimizer.step()
        assert pipe.train_step(tokens, targets).loss == pytest.approx(loss.item(), abs=1e-10)
    for one, other in zip(pipe.parameters(), plain.parameters(), strict=True):
        assert torch.allclose(one, other, rtol=0, atol=1e-10)


# --- what cannot be right is refused, in words ---


class Mixer(nn.Module):
    """One layer between embedding and head, over [B, T, 8]."""

    def __init__(self, mix: Callable[[Tensor], Tensor], *modules: nn.Module) -> None:
        super().__init__()
        self.mix, self.own = mix, nn.ModuleList(modules)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.mix(x)


def heads(x: Tensor) -> Tensor:
    return x.unflatten(-1, (2, 4)).transpose(1, 2)


def attention(x: Tensor, **options: Any) -> Tensor:
    return F.scaled_dot_product_attention(heads(x), heads(x), heads(x), **options).transpose(1, 2).flatten(2)


def silent_convolution() -> nn.Module:
    """Sees the token before, with weights that are zero when the pipeline is built."""
    layer = nn.Conv1d(8, 8, 2)
    nn.init.zeros_(layer.weight)
    nn.init.zeros_(layer.bias)
    return Mixer(lambda x: layer(F.pad(x.transpose(1, 2), (1, 0))).transpose(1, 2), layer)


class OwnPositions(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.places = nn.Embedding(T, 8)

    def forward(self, x: Tensor) -> Tensor:
        positions: Tensor = self.places(torch.arange(x.shape[1]))
        return x + positions


def by_hand(x: Tensor) -> Tensor:
    scores = (x @ x.transpose(1, 2)).masked_fill(
        ~torch.ones(x.shape[1], x.shape[1], dtype=torch.bool).tril(), -torch.inf
    )
    return scores.softmax(-1) @ x


@pytest.mark.thorough(but=["bidirectional", "reversed", "batchnorm", "windows"])
@pytest.mark.parametrize(
    ("layer", "message"),
    [
        (lambda: Mixer(attention), "attention with is_causal=False in Mixer, over slices of the sequence: expected"),
        (
            lambda: Mixer(
                lambda x: attention(x, attn_mask=torch.ones(x.shape[1], x.shape[1], dtype=torch.bool).tril())
            ),
            "attention with a mask in Mixer",
        ),
        (
            lambda: Mixer(by_hand),
            r"output 0 of stage 0 .* differs over slices of the sequence: for tokens 4 to 8",
        ),
        (silent_convolution, "for tokens 4 to 8 of 12 by .* from that of the whole"),
        (lambda: Mixer(lambda x: x.cumsum(1)), "of tokens 4 to 8 of 12"),
        (lambda: Mixer(lambda x: x.flip(1)), "of tokens 0 to 4 of 12"),
        (lambda: nn.BatchNorm1d(T), "stage 0 .* fails|differs over slices|running_mean"),
        (OwnPositions, "of tokens 4 to 8 .* stagewright.first_position"),
        (
            lambda: Mixer(lambda x: attention(x.unflatten(1, (2, -1)).flatten(0, 1), is_causal=True).view_as(x)),
            "attention over 6 queries and 6 keys in Mixer, of a slice of 12 tokens",
        ),
    ],
    ids=["bidirectional", "mask", "by-hand", "convolution", "sum", "reversed", "batchnorm", "positions", "windows"],
)
def test_models_whose_tokens_meet_elsewhere(layer: Callable[[], nn.Module], message: str) -> None:
    torch.manual_seed(0)
    tokens, targets = batch()
    model = nn.Sequential(nn.Embedding(VOCABULARY, 8), layer(), nn.Linear(8, VOCABULARY)).double()
    pipe = PipelineModule(model, schedule=Slices("seq1f1b", num_slices=3), num_microbatches=2, loss_fn=mean_loss)
    with pytest.raises(ValueError, match=message):
        pipe.forward_backward(tokens, targets)


def shifting_loss(logits: Tensor, tokens: Tensor) -> Tensor:
    return mean_loss(logits[:, :-1], tokens[:, 1:])


def mean_of_some(logits: Tensor, targets: Tensor) -> Tensor:
    return F.cross_entropy(logits.flatten(0, 1), targets.flatten(), ignore_index=0)


def last_token(logits: Tensor, targets: Tensor) -> Tensor:
    return mean_loss(logits[:, -1:], targets[:, -1:])


@pytest.mark.thorough(but=["shifting_loss"])
@pytest.mark.parametrize("loss_fn", [shifting_loss, mean_of_some, last_token])
def test_losses_that_do_not_add_up(loss_fn: Callable[[Tensor, Tensor], Tensor]) -> None:
    pipe = PipelineModule(
        chain(layers=1), schedule=Slices("seq1f1b", num_slices=3), num_microbatches=2, loss_fn=loss_fn
    )
    with pytest.raises(
        ValueError, match=r"loss_fn makes .* of whole sequences and .* of their 3 slices: expected a mean"
    ):
        pipe.forward_backward(*batch())


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"num_slices": 13}, "a sequence of 12 tokens for num_slices=13"),
        ({"num_slices": 2, "lengths": [6, 5]}, r"lengths=\[6, 5\] make 11 tokens, .* have 12"),
        ({"num_slices": 2, "lengths": [4, 4, 4]}, r"lengths=\[4, 4, 4\] for 2 slices: expected 2 numbers"),
        ({"lengths": [6, 6.0]}, r"lengths=\[6, 6.0\]: expected a list of tokens"),
        ({"dims": {0: 0}}, r"dims\[0\]=0 and input 0 has shape \(2, 12\): .* other than that of the batch"),
        ({"dims": {0: "1"}}, r"dims\[0\]='1': expected the number of a dimension"),
        ({"schedule": "1f1b", "num_slices": 2}, "num_slices=2 for schedule '1f1b': it takes microbatches whole"),
        ({"schedule": "1f1b", "lengths": [12]}, "Slices around the schedule '1f1b', which is not sliced"),
        ({"loss_fn": "model"}, 'loss_fn="model" under schedule'),
    ],
    ids=str,
)
def test_options_that_do_not_fit(options: dict[str, Any], message: str) -> None:
    options = {"schedule": "seq1f1b", "num_microbatches": 2, "loss_fn": mean_loss, **options}

    def build_and_run() -> None:
        PipelineModule(chain(layers=1), **records(**options)).forward_backward(*batch())

    with pytest.raises(ValueError, match=message):
        build_and_run()


@pytest.mark.parametrize(
    ("inputs", "target", "name"),
    [
        ((torch.zeros(4, T, dtype=torch.long), torch.zeros(4)), None, "input 1 has shape"),  # one number a sequence
        ((torch.zeros(4, T, dtype=torch.long), torch.zeros(4, 3)), None, "input 1 has shape"),
        ((torch.zeros(4, T, dtype=torch.long), torch.zeros(4, T, T)), None, "input 1 has shape"),  # a mask: two of them
        ((torch.zeros(4, T, dtype=torch.long),), torch.zeros(4, dtype=torch.long), "the target has shape"),
    ],
    ids=["a-number", "another-size", "twice", "target"],
)
def test_where_the_sequence_stands_must_be_clear(inputs: tuple[Tensor, ...], target: Tensor | None, name: str) -> None:
    target = torch.zeros(4, T, dtype=torch.long) if target is None else target

    class Two(nn.Module):
        def forward(self, tokens: Tensor, other: Tensor) -> Tensor:
            return tokens.double().unsqueeze(-1) + other.sum()

    model = gpt(layers=1) if len(inputs) == 1 else Two()
    pipe = PipelineModule(model, schedule="seq1f1b", num_microbatches=2, loss_fn=mean_loss)
    with pytest.raises(ValueError, match=rf"{name} .* and which dimension is the sequence .*is not clear"):
        pipe.forward_backward(*inputs, target)


class Dropped(nn.Module):
    """A layer that is left out at random."""

    def __init__(self, block: nn.Module) -> None:
        super().__init__()
        self.block = block

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.block(x) if not self.training or torch.rand(()) < 0.5 else x
        return y


def test_layers_that_are_left_out_of_some_slices() -> None:
    model = chain(layers=4)
    for number in range(1, 5):
        model[number] = Dropped(model[number])
    pipe = PipelineModule(model, schedule=Slices("seq1f1b", num_slices=3), num_microbatches=2, loss_fn=mean_loss)
    with pytest.raises(ValueError, match="runs for the slice that begins at token 4, and did not for"):
        pipe.forward_backward(*batch())


def test_positions_without_slices() -> None:
    assert first_position() == 0
