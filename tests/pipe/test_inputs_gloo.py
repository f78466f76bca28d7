"""Keywords, models that return their own loss and predictions with other arguments, over real processes."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from support.keyword_models import LABELS, MASK, POSITIONS, TARGET, TOKENS, WORDS, Language, Tagger, loss_of
from support.pool import Pool
from support.records import records

from stagewright.comm import PipelineError
from stagewright.pipe import PipelineModule


def build(make_model: Any, **options: Any) -> tuple[PipelineModule, Any]:
    torch.manual_seed(0)
    model = make_model().double()
    twin = copy.deepcopy(model)
    settings: dict[str, Any] = {"num_microbatches": 3, "timeout": 120.0}
    return PipelineModule(model, **records(**(settings | options))), twin


def differences(pipe: PipelineModule, twin: Any) -> float:
    """The largest difference of this process's gradients."""
    plain = dict(twin.named_parameters())
    return max(float((p.grad - plain[name].grad).abs().max()) for name, p in pipe.named_parameters())


def train_by_keyword() -> tuple[float, float, float]:
    """Errors of loss, gradients and a prediction, against the whole batch in one process."""
    pipe, twin = build(Tagger, loss_fn=loss_of, batch_dims={"positions": None})
    batch: dict[str, Any] = {"tokens": TOKENS, "mask": MASK, "positions": POSITIONS}
    expected = loss_of(twin(**batch), TARGET)
    expected.backward()
    result = pipe.forward_backward(**batch, target=TARGET)
    assert result.loss is not None
    loss_of(twin(TOKENS, scale=0.5), TARGET).backward()
    pipe.forward_backward(TOKENS, target=TARGET, scale=0.5)  # other arguments to train with
    other: Any = pipe.predict(TOKENS)  # neither mask nor positions: weights of other ranks are gone by now
    off = 0.0 if other is None else float((other.logits - twin(TOKENS).logits).detach().abs().max())
    pipe.close()
    return abs(result.loss - expected.item()), differences(pipe, twin), off


def test_keywords(gloo: Pool) -> None:
    for errors in gloo.run(train_by_keyword, ranks=2):
        assert max(errors) < 1e-12


def ask_for_a_weight() -> str:
    """The error of a rank where nobody knows over what the loss is a mean."""
    pipe, _ = build(Language, loss_fn="model")
    try:
        pipe.forward_backward(tokens=WORDS, labels=LABELS)
    except (ValueError, PipelineError) as error:
        return str(error)
    return "nothing"


@pytest.mark.thorough
def test_all_ranks_are_told_what_the_last_one_alone_finds_out(gloo: Pool) -> None:
    for told in gloo.run(ask_for_a_weight, ranks=2):
        assert "it is not known over which ones this model's loss is a mean" in told
