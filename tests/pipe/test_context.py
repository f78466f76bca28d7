"""Context groups: a pipeline whose members have parts of the tokens makes what one plain process makes of them all."""

from __future__ import annotations

import math
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from support.alone import train_alone
from support.inside import Seen, TokenBlocks
from support.parts import GIVEN, Does, Parts
from support.pool import Pool
from support.sliced import VOCABULARY, T, batch, chain, counted_loss, mean_loss
from torch import Tensor, nn
from torch.utils.flop_counter import FlopCounterMode

from stagewright import Inputs, Mesh, PipelineModule, attend, positions, read_checkpoint


@given(st.integers(1, 5), st.integers(1, 6), st.booleans())
def test_parts_are_all_tokens_once_and_as_much_causal_work_each(count: int, size: int, is_even: bool) -> None:
    total = count * size * (2 if is_even else 1)
    parts = [TokenBlocks.of(total, index=index, count=count) for index in range(count)]
    every = torch.arange(total)[:, None] * torch.tensor([1, 10])
    assert torch.equal(parts[0].in_order(torch.cat([part.part(every, 0) for part in parts]), 0), every)
    assert {part.length for part in parts} == {total // count}
    if total % (2 * count) == 0:
        assert len({int(part.part(every, 0).sum()) for part in parts}) == 1  # keys that a causal query sees


@settings(max_examples=40, deadline=None)
@given(st.data())
def test_attention_of_parts_is_that_of_the_whole_under_every_mask(data: st.DataObject) -> None:
    """Against softmax with a mask that is written out, token by token."""
    count, blocks = data.draw(st.integers(1, 3)), data.draw(st.integers(1, 3))
    total, generator = 2 * count * blocks, torch.Generator().manual_seed(data.draw(st.integers(0, 99)))
    query, key, value = (torch.randn(2, 2, total, 4, generator=generator, dtype=torch.float64) for _ in range(3))
    is_causal, window = data.draw(st.booleans()), data.draw(st.none() | st.integers(1, total))
    begins = [0, *sorted(data.draw(st.sets(st.integers(1, total - 1), max_size=2)) if total > 1 else [])]
    lengths = [end - start for start, end in zip(begins, [*begins[1:], total], strict=True)]
    places = torch.cat([torch.arange(length) for length in lengths])[None].expand(2, total)
    padding = torch.ones(2, total, dtype=torch.bool)
    padding[1, data.draw(st.integers(1, total)) :] = False
    use = data.draw(st.sampled_from(["nothing", "places", "padding"]))
    seen = Seen(
        is_causal=is_causal,
        window=window,
        positions=places if use == "places" else None,
        keys=padding[:, None, None] if use == "padding" else None,
    )
    found = torch.cat(
        [
            seen.attention(part.part(query, -2), key, value, part.blocks)
            for part in (TokenBlocks.of(total, index=index, count=count) for index in range(count))
        ],
        -2,
    )
    found = TokenBlocks.of(total, index=0, count=count).in_order(found, -2)
    scores = query @ key.transpose(-2, -1) / math.sqrt(query.shape[-1])
    documents = [sum(start <= at for start in begins) for at in range(total)]
    for b in range(2):
        for q in range(total):
            for k in range(total):
                hidden = is_causal and k > q
                hidden |= window is not None and k <= q - window
                hidden |= use == "places" and documents[q] != documents[k]
                hidden |= use == "padding" and not padding[b, k]
                if hidden:
                    scores[b, :, q, k] = -math.inf
    expected = scores.softmax(-1).nan_to_num() @ value
    sees = scores.isfinite().any(-1)[..., None]
    assert torch.allclose(found * sees, expected * sees, atol=1e-12)


@pytest.mark.parametrize("count", [2, 4])
def test_members_multiply_as_much_in_paired_blocks_and_not_in_single_ones(count: int) -> None:
    """Pairs of query and key that attention computes, by torch's count of its products: the figures of the page. In the
    count's mode, as in that of a traced step, torch's causal_lower_right cannot be made."""

    def pairs(total: int) -> list[int]:
        query, key, value = torch.empty(3, 1, 1, total, 8, device="meta").unbind()
        found = []
        for index in range(count):
            part = TokenBlocks.of(total, index=index, count=count)
            with FlopCounterMode(display=False) as counter:
                Seen(is_causal=True).attention(part.part(query, -2), key, value, part.blocks)
            found.append(counter.get_total_flops() // (2 * 2 * 8))
        return found

    paired, single = pairs(16 * count), pairs(15 * count)  # of 15 C tokens no member has two blocks alike
    assert paired == [8 * 8 * (2 * count + 1)] * count
    assert single == [15 * 15 * (index + 1) for index in range(count)]


@pytest.mark.parametrize(("window", "kind"), [(None, torch.float64), (5, torch.float32), (None, torch.bfloat16)])
def test_attention_on_the_cpu_keeps_no_mask_but_a_row(window: int | None, kind: torch.dtype) -> None:
    """A mask of queries x keys was kept until the backward by each layer; autocast leaves float64 alone."""
    query, key, value = torch.randn(3, 1, 2, 64, 8).unbind()
    autocasts, bytes_of = kind is torch.bfloat16, dict[int, int]()
    casts = torch.autocast("cpu", torch.bfloat16, enabled=kind is not torch.float32)
    query, key, value = (x.to(torch.float32 if autocasts else kind).requires_grad_() for x in (query, key, value))

    def keep(x: Tensor) -> Tensor:
        if x.shape[-2:] == (16, 64):
            bytes_of[x.untyped_storage().data_ptr()] = x.untyped_storage().nbytes()
        return x

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda x: x), casts:
        found = Seen(is_causal=True, window=window).attention(query[..., 48:, :], key, value, [(48, 64)])
    assert [*bytes_of.values()] == [kind.itemsize * (16 + 64 - 1)]
    seen = torch.ones(64, 64, dtype=torch.bool).tril().triu(-63 if window is None else 1 - window)
    expected = F.scaled_dot_product_attention(query, key, value, attn_mask=seen)[..., 48:, :]
    assert torch.allclose(found.to(kind), expected.to(kind), atol=0.02 if autocasts else 1e-5)
    assert torch.isfinite(torch.autograd.grad(found.sum(), key)[0]).all()


def test_attend_on_whole_sequences_is_torchs_attention() -> None:
    query, key, value = torch.randn(3, 2, 2, 6, 4).unbind()
    assert torch.equal(attend(query, key, value), F.scaled_dot_product_attention(query, key, value, is_causal=True))
    assert torch.equal(positions(4), torch.arange(4))


def _trained(name: str, folder: str) -> tuple[list[float], float]:
    """Of three steps: the losses less those of one plain process, and the largest difference of a weight, relative."""
    (options, mesh), counted = MESHES[name], name == "counted"
    loss_fn = counted_loss if counted else mean_loss
    plain, (tokens, targets) = chain(), batch()
    delay = int(options["schedule"] == "2bw")
    alone: dict[str, Any] = {"optimizer": partial(torch.optim.SGD, lr=0.1, momentum=0.9), "loss_fn": loss_fn}
    losses = train_alone(plain, [batch()] * 3, clip=1.0, delay=delay, **alone).losses
    settings: dict[str, Any] = alone | {"num_microbatches": 2, "max_grad_norm": 1.0}
    with PipelineModule(chain(), mesh=Mesh(**mesh), verify=True, **settings | options) as pipe:
        number, count = pipe.replica
        own = slice(number * 4 // count, (number + 1) * 4 // count)
        results = [pipe.train_step(tokens[own], targets[own]) for _ in losses]
        assert any(trace.exchanges for trace in results[-1].timeline().ranks)  # keys and values that are gathered
        results = [result for result in (*results, *pipe.flush()) if result.loss is not None]
        pipe.save(folder)
        states = pipe.full_state_dict(), read_checkpoint(folder)
        pairs = [(state[name], x) for name, x in plain.state_dict().items() for state in states]
        worst = max(float((x - wanted).abs().max() / wanted.abs().max()) for x, wanted in pairs)
        loss = loss_fn(plain(tokens), targets)
        losses.append((loss[0] / loss[1] if isinstance(loss, tuple) else loss).item())
        results.append(pipe.eval_step(tokens[own], targets[own]))
        differences = [abs((one.loss or math.nan) - loss) for one, loss in zip(results, losses, strict=True)]
        output: Any = pipe.predict(tokens[own])
        if output is not None:
            differences.append((output - plain(tokens[own])).abs().max().item())
    four, schedule = train_alone(chain(), [batch()] * 4, clip=1.0, delay=delay, **alone), "2bw" if delay else "1f1b"
    with PipelineModule(chain(), mesh={"pipe": 2, "data": 2}, schedule=schedule, **settings) as pipe:
        pipe.load(folder)  # the optimizers' state, too
        pipe.train_step(*(x.chunk(2)[pipe.replica[0]] for x in batch()))
        differences += [float((x - four.state[name]).abs().max()) for name, x in pipe.full_state_dict().items()]
    return differences, worst


MESHES: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {  # options, axes of the mesh
    "counted": ({"schedule": "1f1b"}, {"pipe": 2, "context": 2}),
    "chunks": ({"schedule": "interleaved", "num_chunks": 2}, {"pipe": 2, "context": 2}),
    "split": (
        {"schedule": "zb-h1", "recompute": "full"},
        {"pipe": 2, "context": 2, "order": ("context", "pipe", "data", "tensor")},
    ),
    "stream": ({"schedule": "2bw"}, {"pipe": 2, "context": 2}),
    "zero1": ({"schedule": "1f1b"}, {"pipe": 1, "context": 2, "data": 2, "data_parallel": "zero1"}),
    "fsdp": ({"schedule": "gpipe"}, {"pipe": 1, "context": 4, "data_parallel": "fsdp"}),
    "tensor": ({"schedule": "1f1b"}, {"pipe": 1, "context": 2, "tensor": 2, "tensor_parallel": "auto"}),
}


@pytest.mark.thorough
@pytest.mark.parametrize("name", MESHES)
def test_a_context_group_trains_evaluates_and_predicts_as_one_process(gloo: Pool, name: str, tmp_path: Path) -> None:
    for differences, worst in gloo.run(_trained, ranks=4, args=(name, str(tmp_path))):
        assert max(differences) < 1e-12
        assert worst < 1e-11


class _Across(Parts, conv=lambda: nn.Conv1d(8, 8, 3, padding=1)):
    def forward(self, x: Tensor) -> Tensor:
        return self.conv(x.transpose(1, 2)).transpose(1, 2)


class _Scan(Parts, first=lambda: nn.Linear(8, 8)):
    """A state that passes from token to token, in what its own module was given."""

    def forward(self, x: Tensor) -> Tensor:
        return x + torch.tanh(self.first(x.cumsum(1)))  # type: ignore[no-any-return]


class _Masked(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        mask = torch.ones(x.shape[1], x.shape[1], dtype=torch.bool).tril()
        return F.scaled_dot_product_attention(x[:, None], x[:, None], x[:, None], attn_mask=mask)[:, 0]


class _Skips(Parts, inner=GIVEN, number=GIVEN):
    """Leaves its attention out where its tokens say so: other layers on each member, as many calls."""

    def forward(self, x: Tensor) -> Tensor:
        skips = self.training and torch.is_grad_enabled() and torch.distributed.get_rank() == self.number
        return x if skips else self.inner(x)


class _LooksInEvaluation(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x if self.training else x.cumsum(1)


_LAYERS = {"conv": _Across, "scan": _Scan, "mask": _Masked, "across tokens in evaluation": _LooksInEvaluation}
_OPTIONS: dict[str, dict[str, Any]] = {
    "dims": {"example_inputs": Inputs(sequence_dims={0: 0})},
    "sliced": {"schedule": "seq1f1b"},
}
_REFUSED = {  # what options exclude is in test_expert_mistakes.py
    "conv": r"(?s)over parts of the sequence from '1.conv' \(Conv1d\) on: .*Expected a model whose tokens depend",
    "scan": r"from '1' \(_Scan\) on: for tokens",
    "own loss": r"from '4' \(Does\) on: .*; losses that modules make are of each token",
    "mask": r"a mask of shape \(12, 12\) in _Masked.* or stagewright.attend",
    "odd": r"sequences of 11 tokens over a context group of 2: expected a multiple of 2, such as 12",
    "dims": r"sequence_dims\[0\]=0 and .*: expected a dimension below 2 other than that of the batch",
    "sliced": r"under 'seq1f1b', whose slices are parts of the sequence, too",
    "other batches": "passed other inputs to step 1 than rank 0. The members of a context group pass the same batch",
    "shifted loss": "loss_fn makes .* of whole sequences and .* of their 2 parts: expected a mean over all tokens",
    "uneven counts": "loss_fn makes .* of whole sequences and .* of their 2 parts: expected a mean over all tokens",
    "other calls": "before step 1, rank 0 and rank 1 have called attention in different modules",
    "across tokens in evaluation": "differs over parts of the sequence",
}
_AT_SECOND = ("other batches", "other calls", "across tokens in evaluation")


def _refused(kind: str) -> None:
    model, loss_fn, (tokens, targets) = chain(layers=2), mean_loss, batch(length=T - 1 if kind == "odd" else T)
    if kind in _LAYERS:
        model = nn.Sequential(model[0], _LAYERS[kind]().double(), *model[1:])
    if kind == "own loss":
        model.append(Does(lambda x: x.logsumexp(-1).mean()))
    if kind == "shifted loss":
        loss_fn = lambda output, target: mean_loss(output[:, :-1], target[:, 1:])  # noqa: E731
    if kind == "uneven counts":
        targets = targets.clone()
        targets[:, : T // 4] = -100
    if kind == "other calls":
        model = nn.Sequential(model[0], _Skips(model[1], 0), _Skips(model[2], 1), model[3])
    options = {"num_microbatches": 2, "verify": False, "timeout": 60.0} | _OPTIONS.get(kind, {})
    others = (tokens + torch.distributed.get_rank() * (kind == "other batches")) % VOCABULARY

    def run() -> None:
        with PipelineModule(model, mesh={"pipe": 1, "context": 2}, loss_fn=loss_fn, **options) as pipe:
            if kind in _AT_SECOND:
                pipe.forward_backward(tokens, targets)
            pipe.predict(others) if "evaluation" in kind else pipe.forward_backward(others, targets)

    with pytest.raises(ValueError, match=_REFUSED[kind]):
        run()


def _of_lengths(context: int) -> float:
    generator, found = torch.Generator().manual_seed(1), []
    for length in (4, T):
        tokens = torch.randint(VOCABULARY, (2, length), generator=generator)
        found.append((tokens, tokens.flip(1)))
    mesh = {"pipe": 2 // context, "context": context}
    with PipelineModule(chain(), mesh=mesh, loss_fn=mean_loss, num_microbatches=2, verify=True) as pipe:
        return pipe.forward_backward(microbatches=found).loss or math.nan


@pytest.mark.thorough
def test_microbatches_of_other_lengths_weigh_as_without_a_context_group(gloo: Pool) -> None:
    assert gloo.run(_of_lengths, ranks=2, args=(2,)) == pytest.approx(gloo.run(_of_lengths, ranks=2, args=(1,)), 1e-12)


@pytest.mark.thorough(but=["own loss", "odd", "other batches", "other calls"])
@pytest.mark.parametrize("kind", _REFUSED)
def test_what_a_context_group_does_not_divide_is_refused(gloo: Pool, kind: str) -> None:
    gloo.run(_refused, ranks=2, args=(kind,))
