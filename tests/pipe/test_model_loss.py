"""Models that return their own loss: microbatches are weighted so that they make the loss of the whole batch."""

import copy
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from support.alone import near, same_gradients
from support.inside import MODEL_INPUT, profile_model
from support.keyword_models import (
    IGNORED,
    LABELS,
    MASK,
    POSITIONS,
    TARGET,
    TOKENS,
    WIDTH,
    WORDS,
    Language,
    Tagger,
    gpt2,
    in_float64,
    loss_in,
    loss_of,
    with_twin,
)
from support.parts import Parts
from support.pipeline import assembled
from support.pool import Pool
from support.small import X, Y, make, sgd
from torch import Tensor, nn

pipeline = partial(assembled, num_microbatches=4, mesh={"pipe": 2}, loss_fn="model")


def models(**options: Any) -> tuple[Any, Any]:
    return with_twin(lambda: Language(**options))


@pytest.mark.thorough(but=["False-tuple-6", "False-alone-6"])
@pytest.mark.parametrize("num_microbatches", [4, 6])
@pytest.mark.parametrize("returns", ["dict", "tuple", "alone"])
@pytest.mark.parametrize("shifts", [False, True])
def test_the_loss_and_gradients_are_those_of_the_whole_batch(shifts: bool, returns: str, num_microbatches: int) -> None:
    """M=4 does not divide N=6; under M=6 microbatches without labels have a mean of nan by themselves."""
    model, twin = models(shifts=shifts, returns=returns)
    expected = twin(WORDS, labels=LABELS)
    loss_in(expected).backward()
    weight = "shifted_labels" if shifts else "labels"
    pipe = pipeline(model, loss_weight=weight, num_microbatches=num_microbatches)
    result = pipe.forward_backward(WORDS, labels=LABELS)
    assert result.loss == pytest.approx(loss_in(expected).item(), abs=1e-12)
    same_gradients(model, twin, rtol=1e-12)
    evaluated = pipe.eval_step(tokens=WORDS, labels=LABELS)
    assert evaluated.loss == pytest.approx(loss_in(expected).item(), abs=1e-12)
    assert type(evaluated.output) is type(expected)
    assert loss_in(evaluated.output).item() == evaluated.loss  # not each microbatch's
    if returns != "alone":
        predicted: Any = pipe.predict(WORDS)  # another form: without labels
        plain = twin(WORDS)
        assert type(predicted) is type(plain)
        got, wanted = (out["logits"] if returns == "dict" else out[0] for out in (predicted, plain))
        near(got, wanted.detach())


def test_labels_are_the_last_stages_alone() -> None:
    pipe = pipeline(models()[0], mesh={"pipe": 3}, loss_weight="labels")
    pipe.forward_backward(tokens=WORDS, labels=LABELS)
    stages = pipe._building.built("a test").parts.train.stages
    taken = [{ref.slot for ref in stage.inputs if ref.producer == MODEL_INPUT} for stage in stages]
    assert taken == [{1}, set(), {0}]  # labels, tokens


@pytest.mark.thorough(but=["gpipe-none"])
@pytest.mark.parametrize("recompute", ["none", "full"])
@pytest.mark.parametrize("schedule", ["gpipe", "interleaved"])
def test_a_function_counts(schedule: str, recompute: str) -> None:
    model, twin = models()
    loss_in(twin(WORDS, LABELS)).backward()
    weigh = lambda tokens, labels: (labels != IGNORED).sum()  # noqa: E731
    pipeline(model, loss_weight=weigh, schedule=schedule, recompute=recompute).forward_backward(WORDS, LABELS)
    same_gradients(model, twin, rtol=1e-12)


@pytest.mark.parametrize("schedule", ["2bw", "pipedream"])
def test_a_stream_weighs_its_update_groups(schedule: str) -> None:
    """Under pipedream each microbatch is an update of its own: its own mean."""
    model, twin = models()
    options = {"num_microbatches": 2, "optimizer": lambda parameters: torch.optim.SGD(parameters, lr=0.0)}
    pipe = pipeline(model, schedule=schedule, loss_weight="labels", **options)
    results = [pipe.train_step(WORDS, labels=LABELS), *pipe.flush()]
    halves = [loss_in(twin(t, labels)).item() for t, labels in zip(WORDS.chunk(2), LABELS.chunk(2), strict=True)]
    whole = loss_in(twin(WORDS, LABELS)).item()
    counts = [int((labels != IGNORED).sum()) for labels in LABELS.chunk(2)]
    weighted = sum(h * c for h, c in zip(halves, counts, strict=True)) / sum(counts)
    assert weighted == pytest.approx(whole, abs=1e-12)
    known = {result.loss_step: result.loss for result in results}
    assert known[0] == pytest.approx(whole, abs=1e-12)


def test_a_loss_without_labels_is_a_mean_over_samples() -> None:
    class Compares(Parts, a=lambda: nn.Linear(WIDTH, WIDTH), b=lambda: nn.Linear(WIDTH, WIDTH)):
        def forward(self, x: Tensor, y: Tensor) -> Tensor:
            return F.mse_loss(self.b(torch.tanh(self.a(x))), y)

    model = Compares()
    twin = copy.deepcopy(model)
    twin(X, Y).backward()
    pipeline(model, num_microbatches=3).forward_backward(X, Y)
    same_gradients(model, twin, atol=1e-5, rtol=1e-5)


WRONG: dict[str, tuple[Callable[[], object], str]] = {
    "a word": (lambda: make(loss_fn="modle"), r"loss_fn='modle': expected a function of \(output, .*, or 'model'"),
    "a weight of another loss": (lambda: make(loss_weight="labels"), r"loss_weight='labels' without loss_fn='model'"),
    "a wrong weight": (lambda: pipeline(models()[0], loss_weight="tokens"), r"loss_weight='tokens': expected one of"),
    "nobody knows": (
        lambda: pipeline(models()[0]).forward_backward(WORDS, LABELS),
        r"labels have 2 dimensions, and it is not known over which .*loss_weight='labels'\).*'shifted_labels'",
    ),
    "no loss in the output": (
        lambda: pipeline(models()[0]).forward_backward(WORDS),
        r'loss_fn="model", and the model returned dict without a loss|returned NoneType',
    ),
    "no scalar": (
        lambda: make(loss_fn="model", optimizer=None).forward_backward(X),
        r"in the place of its loss the model returned a tensor of shape \(2, 6\): expected a scalar",
    ),
    "a count of words": (
        lambda: pipeline(models()[0], loss_weight=lambda *args: "many").forward_backward(WORDS, LABELS),
        r"loss_weight returned 'many': expected a number",
    ),
    "no labels to count": (
        lambda: pipeline(models()[0], loss_weight="labels").forward_backward(WORDS),
        r"loss_weight='labels' and no labels= of integers among the arguments input 0",
    ),
    "no items": (
        lambda: pipeline(models()[0], loss_weight="labels").forward_backward(WORDS, LABELS * 0 + IGNORED),
        r"counts of step 0 add up to 0",
    ),
    "built without labels": (
        lambda: pipeline(models()[0], example_inputs=(WORDS,)).forward_backward(WORDS, labels=LABELS),
        r"the model returns .* expected the same form for every batch, or to build with example_inputs= of the batches",
    ),
}


@pytest.mark.thorough(but=["a wrong weight", "nobody knows", "no scalar", "no labels to count"])
@pytest.mark.parametrize(("call", "message"), WRONG.values(), ids=WRONG.keys())
def test_mistakes(call: Callable[[], object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        call()


def test_verify_weighs_alike() -> None:
    pipe = pipeline(models(shifts=True)[0], loss_weight="shifted_labels", verify=True)
    pipe.forward_backward(WORDS, labels=LABELS)
    assert pipe.verify(WORDS, labels=LABELS).num_gradients == 7


@pytest.mark.thorough(but=["False"])
@pytest.mark.parametrize("own_loss", [True, False])
def test_gpt2_as_it_comes(own_loss: bool) -> None:
    """The whole batch in one process; with the model's own loss as far as its float32 goes."""
    model = gpt2()
    if not own_loss:
        model.loss_function = in_float64
    twin = copy.deepcopy(model)
    labels = LABELS.flip(0)
    labels[:, 0] = WORDS[:, 0]  # the first label counts for nobody
    batch = {"input_ids": WORDS, "attention_mask": torch.ones_like(WORDS), "labels": labels}
    expected = twin(**batch)
    expected.loss.backward()
    pipe = pipeline(model)
    allowed = 1e-6 if own_loss else 1e-12
    assert pipe.forward_backward(**batch).loss == pytest.approx(expected.loss.item(), abs=allowed)
    same_gradients(model, twin, atol=allowed)
    evaluated: Any = pipe.eval_step(batch).output
    assert type(evaluated) is type(expected)
    assert evaluated.past_key_values is None
    near(evaluated.logits, expected.logits.detach())
    near(pipe.predict(input_ids=WORDS).logits, twin(input_ids=WORDS).logits.detach())
    with pytest.raises(ValueError, match=r"'label' looks like 'labels'"):
        pipe.forward_backward(input_ids=WORDS, label=labels)
    with pytest.raises(ValueError, match=r"num_items_in_batch= would divide the loss of every microbatch"):
        pipeline(gpt2()).forward_backward(**batch, num_items_in_batch=7)


@pytest.mark.thorough
def test_auto_plans_for_keywords_and_for_a_models_own_loss() -> None:
    model, twin = models()
    loss_in(twin(WORDS, labels=LABELS)).backward()
    pipe = pipeline(model, schedule="auto", trials=0, num_microbatches=3, loss_weight="labels")
    pipe.forward_backward(tokens=WORDS, labels=LABELS)
    same_gradients(model, twin, rtol=1e-12)


def test_the_profiler_takes_keywords_and_a_models_own_loss() -> None:
    model, _ = models()
    profile = profile_model(model, {"tokens": WORDS, "labels": LABELS}, loss_fn="model", repetitions=1, seconds=0.1)
    assert profile.microbatch_size == 6
    assert "with the loss" in profile.nodes[-1].description
    flipped = profile_model(model, (WORDS.T, LABELS.T), batch_dims={"tokens": 1, 1: 1}, repetitions=1, seconds=0.1)
    assert flipped.microbatch_size == 6
    with pytest.raises(ValueError, match=r"loss_fn='model' with target=: expected"):
        profile_model(model, {"tokens": WORDS}, loss_fn="model", target=LABELS)
    with pytest.raises(ValueError, match=r"have batch sizes \[3, 6\]: .*batch_dims="):
        profile_model(model, {"tokens": WORDS, "labels": LABELS[:3]})


class MaskedMean(Parts, first=lambda: nn.Linear(4, 4), last=lambda: nn.Linear(4, 1)):
    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        y = self.last(torch.tanh(self.first(x))).squeeze(-1)
        return (y.square() * mask).sum() / mask.sum()


@pytest.mark.thorough(but=["gpipe-none", "2bw-none"])
@pytest.mark.parametrize("recompute", ["none", "full"])
@pytest.mark.parametrize("schedule", ["gpipe", "zb-h1", "2bw"])
def test_a_microbatch_without_items_has_no_gradients(schedule: str, recompute: str) -> None:
    """Its own mean is 0/0: 0 times the infinity in its gradient made all weights nan, and the loss was finite."""
    model, twin = with_twin(MaskedMean)
    x, mask = torch.randn(8, 4).double(), torch.tensor([1.0, 1, 0, 0, 1, 0, 1, 1]).double()
    options = {"schedule": schedule, "recompute": recompute, "optimizer": sgd}
    pipe = pipeline(model, loss_weight=lambda x, mask: mask.sum(), **options)
    loss = twin(x, mask)
    loss.backward()
    results = [pipe.train_step(x, mask), *(pipe.flush() if schedule == "2bw" else ())]
    assert results[0].loss == pytest.approx(loss.item(), abs=1e-15)
    torch.optim.SGD(twin.parameters(), lr=0.1).step()
    near(pipe.full_state_dict(), twin.state_dict(), rtol=1e-12)


def train_by_keyword() -> tuple[float, ...]:
    """Errors of loss, a prediction and gradients, against the whole batch in one process."""
    model, twin = with_twin(Tagger)
    options = {"batch_dims": {"positions": None}, "mesh": None, "num_microbatches": 3, "timeout": 120.0}
    pipe = pipeline(model, loss_fn=loss_of, **options)
    batch: dict[str, Any] = {"tokens": TOKENS, "mask": MASK, "positions": POSITIONS}
    expected = loss_of(twin(**batch), TARGET)
    expected.backward()
    result = pipe.forward_backward(**batch, target=TARGET)
    assert result.loss is not None
    loss_of(twin(TOKENS, scale=0.5), TARGET).backward()
    pipe.forward_backward(TOKENS, target=TARGET, scale=0.5)  # other arguments to train with
    other: Any = pipe.predict(TOKENS)  # neither mask nor positions: weights of other ranks are gone by now
    off = 0.0 if other is None else float((other.logits - twin(TOKENS).logits).detach().abs().max())
    plain = dict(twin.named_parameters())
    gradients = [float((p.grad - plain[name].grad).abs().max()) for name, p in pipe.named_parameters()]
    pipe.close()
    return abs(result.loss - expected.item()), off, *gradients


@pytest.mark.thorough
def test_keywords(gloo: Pool) -> None:
    for errors in gloo.run(train_by_keyword, ranks=2):
        assert max(errors) < 1e-12
