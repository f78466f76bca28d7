"""The example GPT: shapes, causality, tracing, and the stages cut by hand."""

from __future__ import annotations

import math

import pytest
import torch
from support.inside import GPT, GPTConfig, gpt_stages, sample
from torch import nn

SMALL = GPTConfig(vocabulary=256, length=12, layers=3, width=16, heads=2)


def make(config: GPTConfig) -> GPT:
    with torch.random.fork_rng():
        torch.manual_seed(1)
        return GPT(config)


def tokens(batch: int, length: int = 12) -> torch.Tensor:
    return torch.randint(0, 256, (batch, length), generator=torch.Generator().manual_seed(2))


def test_the_default_has_about_five_million_parameters_and_starts_at_chance() -> None:
    model = make(GPTConfig())
    assert 4.5e6 < sum(p.numel() for p in model.parameters()) < 5.5e6
    x = tokens(2, 128)
    loss = nn.functional.cross_entropy(model(x).flatten(0, 1), x.flatten())
    assert loss.item() == pytest.approx(math.log(256), abs=0.3)


@pytest.mark.parametrize(("width", "heads"), [(320, 5), (256, 4), (64, 1), (10, 1), (200, 2), (1024, 16)])
def test_heads_follow_the_width(width: int, heads: int) -> None:
    assert GPTConfig(width=width).num_heads == heads


def test_a_logit_depends_on_no_later_token() -> None:
    model = make(SMALL)
    x = tokens(1)
    changed = x.clone()
    changed[0, 7] = (changed[0, 7] + 1) % 256
    before, after = model(x), model(changed)
    assert before.shape == (1, 12, 256)
    torch.testing.assert_close(after[:, :7], before[:, :7], rtol=0, atol=0)
    assert (after[:, 7:] != before[:, 7:]).any(dim=-1).all()


@pytest.mark.parametrize(("num_stages", "blocks"), [(1, [3]), (2, [2, 1]), (3, [1, 1, 1])])
def test_stages_cut_by_hand_compute_what_the_whole_computes(num_stages: int, blocks: list[int]) -> None:
    whole = make(SMALL)
    with torch.random.fork_rng():
        torch.manual_seed(1)
        stages = gpt_stages(SMALL, num_stages)
    assert [sum(type(m).__name__ == "Block" for m in stage) for stage in stages] == blocks
    torch.testing.assert_close(nn.Sequential(*stages)(tokens(2)), whole(tokens(2)), rtol=0, atol=0)


def test_sampling_repeats_itself_and_leaves_torch_and_the_model_as_they_were() -> None:
    model = make(SMALL)
    state = torch.get_rng_state()
    first = sample(model, b"def ", num_bytes=20, length=12, seed=3)
    assert first == sample(model, b"def ", num_bytes=20, length=12, seed=3)
    assert first != sample(model, b"def ", num_bytes=20, length=12, seed=4)
    assert len(first) == 20
    assert model.training
    assert torch.equal(torch.get_rng_state(), state)


@pytest.mark.parametrize(
    ("make_it", "message"),
    [
        (lambda: GPTConfig(layers=0), "layers=0: expected at least 1"),
        (lambda: GPTConfig(width=10, heads=4), "expected a width that the heads divide, such as 12"),
        (lambda: GPTConfig(dropout=1.0), "dropout=1.0: expected a probability"),
        (lambda: gpt_stages(SMALL, 4), "num_stages=4 for 3 layers: expected 1 to 3"),
        (lambda: gpt_stages(GPTConfig(layers=2, tied=True), 2), "expected tied=False"),
        (lambda: sample(nn.Identity(), b"", num_bytes=1, length=1), "prompt is empty"),
        (lambda: sample(nn.Identity(), b"a", num_bytes=1, length=1, temperature=0), "above 0"),
    ],
)
def test_mistakes_are_named(make_it: object, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        make_it()  # type: ignore[operator]
