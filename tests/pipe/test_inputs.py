"""Batches as users bring them: keywords, dicts, batch dimensions, and what they get back; against one plain process."""

import copy
import warnings
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from support.alone import near, same_gradients
from support.inside import CallReader
from support.keyword_models import (
    MASK,
    POSITIONS,
    TARGET,
    TOKENS,
    WIDTH,
    N,
    Output,
    Pair,
    Tagger,
    draw,
    loss_of,
    with_twin,
)
from support.parts import GIVEN, Parts
from support.pipeline import assembled
from support.small import X, Y, make
from torch import Tensor, nn
from torch.nn.attention.flex_attention import create_block_mask, flex_attention
from torch.nn.utils.rnn import pack_sequence
from torch.utils.checkpoint import checkpoint

from stagewright.pipe import PipelineModule

pipeline = partial(assembled, num_microbatches=3, mesh={"pipe": 2}, loss_fn=loss_of)
CALLS: dict[str, tuple[tuple[Any, ...], dict[str, Any], dict[str | int, int | None]]] = {
    "by position": ((TOKENS, MASK, TARGET), {}, {}),
    "by keyword": ((), {"target": TARGET, "mask": MASK, "tokens": TOKENS}, {}),
    "both": ((TOKENS, TARGET), {"mask": MASK, "scale": 0.5}, {}),
    "a dict": (({"target": TARGET, "tokens": TOKENS, "mask": MASK},), {}, {}),
    "a dict, then the target": (({"tokens": TOKENS, "mask": None}, TARGET), {}, {}),
    "shared": ((TOKENS, TARGET), {"positions": POSITIONS}, {"positions": None}),
    "batch in another dimension": ((TOKENS.T, TARGET), {"flipped": True}, {"tokens": 1}),
    "by number": ((TOKENS.T, TARGET), {"flipped": True}, {0: -1}),
    "nested": ((TOKENS, TARGET), {"pair": Pair(MASK, POSITIONS[:, 0])}, {"pair.right": None}),
    "the target's": ((TOKENS, TARGET.T), {}, {"target": 1}),
}


@pytest.mark.thorough(but=["batch in another dimension", "nested", "the target's"])
@pytest.mark.parametrize(("args", "kwargs", "dims"), CALLS.values(), ids=CALLS.keys())
def test_a_batch_gives_the_numbers_of_one_process(args: tuple[Any, ...], kwargs: dict[str, Any], dims: Any) -> None:
    """M=3 does not divide N=7. The loss is a mean, so that the whole batch is the reference."""
    model, twin = with_twin(Tagger)
    given = dict(args[0]) if args and isinstance(args[0], Mapping) else {}
    plain = {**dict(zip(("tokens", "mask"), args[:-1], strict=False)), **kwargs}
    plain = {**given, **kwargs} if given else plain
    plain.pop("target", None)
    target = TARGET if "target" not in dims else TARGET.T
    rows = (lambda output, t: loss_of(output, t.T)) if "target" in dims else loss_of
    expected = twin(**plain)
    rows(expected, target).backward()
    pipe = pipeline(model, batch_dims=dims, loss_fn=rows)
    assert pipe.forward_backward(*args, **kwargs).loss == pytest.approx(rows(expected, target).item(), abs=1e-12)
    same_gradients(model, twin, rtol=1e-12)
    result = pipe.eval_step(*args, **kwargs)
    assert result.loss == pytest.approx(rows(expected, target).item(), abs=1e-12)
    assert isinstance(result.output, Output)
    logits, rows_of = expected.logits.detach(), expected.extra["tokens"].detach()
    near([result.output.logits, result.output.extra["tokens"], pipe.predict(**plain).logits], [logits, rows_of, logits])
    assert (result.output.extra["text"], result.output.extra["none"]) == ("kept", None)


WRONG: dict[str, tuple[tuple[Any, ...], dict[str, Any], str]] = {
    "a wrong name": ((), {"token": TOKENS, "target": TARGET}, r"does not take 'token' .*'token' looks like 'tokens'"),
    "a dict with a wrong key": (
        ({"tokens": TOKENS, "maks": MASK, "target": TARGET},), {},
        r"does not take 'tokens', 'maks' .*'maks' looks like 'mask'",
    ),
    "something missing": ((), {"mask": MASK, "target": TARGET}, r"missing a required argument: 'tokens'"),
    "no target": ((), {"tokens": TOKENS}, r"no target among 'tokens': expected it as target=.*loss_fn=\"model\""),
    "the input taken for the target": (
        (TOKENS,), {"mask": MASK}, r"missing a required argument: 'tokens'.*the last positional argument is the target",
    ),
    "a keyword that is new": (
        (TOKENS, TARGET), {"mask": MASK, "positions": POSITIONS},
        r"inputs have batch sizes \[7, 5, 7\]: .* of mask, positions, tokens; .*batch_dims=\{'positions': its dim",
    ),
    "an object": ((TOKENS, TARGET), {"mask": object()}, r"^mask is object: expected tensors, numbers, strings"),
    "a packed sequence": (
        (), {"tokens": pack_sequence([TOKENS[0]]), "target": TARGET},
        r"tokens is a PackedSequence, .* packed in a module's forward",
    ),
    "a nested target": (
        (TOKENS, torch.nested.nested_tensor([*TARGET.double()], layout=torch.jagged)), {"mask": MASK},
        r"a nested tensor in the target: expected a list of one tensor for each sample",
    ),
    "a short mask": ((TOKENS, TARGET), {"mask": MASK[:5]}, r"batch sizes \[5, 7\].* of mask, tokens; .*batch_dims="),
}  # fmt: skip


@pytest.fixture(scope="module")
def built() -> PipelineModule:
    return pipeline(with_twin(Tagger)[0], example_inputs={"tokens": TOKENS, "mask": MASK})


@pytest.mark.thorough(
    but=[
        "a dict with a wrong key",
        "no target",
        "the input taken for the target",
        "a packed sequence",
        "a nested target",
    ]
)
@pytest.mark.parametrize(("args", "kwargs", "message"), WRONG.values(), ids=WRONG.keys())
def test_mistakes(built: PipelineModule, args: tuple[Any, ...], kwargs: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        built.forward_backward(*args, **kwargs)
    assert built.forward_backward(TOKENS, MASK, TARGET).loss is not None


@pytest.mark.thorough
def test_other_flags_and_tensors_that_come_and_go_are_recorded_again() -> None:
    """They were refused: arguments unlike those that the stages were built for."""
    model, twin = with_twin(Tagger)
    pipe = pipeline(model, batch_dims={"positions": None}, verify=2)
    for kwargs in [{"mask": MASK}, {}, {"scale": 0.5, "positions": POSITIONS}, {"mask": MASK}]:
        expected = loss_of(twin(TOKENS, **kwargs), TARGET)
        expected.backward()
        assert pipe.forward_backward(TOKENS, TARGET, **kwargs).loss == pytest.approx(expected.item(), abs=1e-12)
    others: list[dict[str, Any]] = [{}, {"scale": 0.5}, {"flipped": True}]
    parts = [{"tokens": TOKENS[k : k + 1], **kwargs} for k, kwargs in enumerate(others)]
    for part in parts:  # of one batch
        (loss_of(twin(**part), TARGET[:1]) / 3).backward()
    pipe.forward_backward(microbatches=[{**part, "target": TARGET[:1]} for part in parts])
    same_gradients(model, twin, rtol=1e-12)


def test_a_flag_that_changes_with_each_batch_is_told_once() -> None:
    pipe = pipeline(with_twin(Tagger)[0])
    for step in range(4):
        pipe.forward_backward(TOKENS, TARGET, scale=1 / (step + 1))
    with pytest.warns(UserWarning, match=r"a non-tensor argument has changed before each of 5 .* as a tensor"):
        pipe.forward_backward(TOKENS, TARGET, scale=0.1)
    pipe.forward_backward(TOKENS, TARGET, scale=0.01)


def test_arguments_of_a_chain_stay_as_they_are() -> None:
    pipe = PipelineModule(
        [TakesTwo(lambda x, by: x * by).double()], loss_fn=F.mse_loss, mesh={"pipe": 1}, num_microbatches=2
    )
    x = torch.ones(2, 4, dtype=torch.float64)
    pipe.forward_backward(x, 1.0, x)
    with pytest.raises(ValueError, match=r"input 1 is 2\.0 and was 1\.0 \(_: a tensor\)"):
        pipe.forward_backward(x, 2.0, x)


DIMS: dict[str, tuple[Any, str]] = {
    "a wrong name": ({"token": 1}, r"batch_dims names 'token', .*'tokens'.*did you mean 'tokens'\?"),
    "no dict": (1, r"batch_dims=1: expected a dict"),
    "no dimension": ({"mask": "first"}, r"batch_dims\['mask'\]='first': expected the number of a dimension, or None"),
    "a wrong key": ({1.5: 0}, r"batch_dims has the key 1\.5"),
    "a third dimension": ({"mask": 2}, r"batch_dims\['mask'\]=2 and mask has shape \(7, 5\): expected a dimension"),
    "one of the target": ({"target": 2}, r"a target of no samples for inputs of 7: .* in dimension 2"),
    "nothing to cut": ({"tokens": None, "mask": None}, r"inputs? 0.* shared by all microbatches \(batch_dims\)"),
}


@pytest.mark.parametrize(("dims", "message"), DIMS.values(), ids=DIMS.keys())
def test_wrong_batch_dims(dims: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        pipeline(with_twin(Tagger)[0], batch_dims=dims).forward_backward(TOKENS, TARGET, mask=MASK)


class TakesTwo(Parts, layers=lambda: nn.ModuleList(nn.Linear(4, 4) for _ in range(2)), then=GIVEN):
    def forward(self, x: Tensor, other: Tensor) -> Tensor:
        for layer in self.layers:
            x = self.then(layer(x), other)
        return x


def attends(x: Tensor, mask: Tensor) -> Tensor:
    return (x @ x.mT + mask[: x.shape[1], : x.shape[1]]).softmax(-1) @ x


# By what is not where the batch seems to be: forward(x, other), shapes for 4 samples, and the advice.
CHANCE: dict[str, tuple[Callable[[Tensor, Tensor], Tensor], tuple[int, ...], tuple[int, ...], int | None]] = {
    "a mask": (attends, (4, 4, 4), (4, 4), None),
    "the second axis": (lambda x, p: x + p.sum(0), (4, 6, 4), (4, 4, 6, 1), 1),
    "as wide as a weight": (lambda x, w: x * w, (4, 4), (4,), None),
}


@pytest.mark.thorough(but=["as wide as a weight-2"])
@pytest.mark.parametrize("num_microbatches", [2, 4])
@pytest.mark.parametrize(("forward", "shape", "other", "dim"), CHANCE.values(), ids=CHANCE.keys())
def test_an_axis_as_long_as_the_batch(forward: Any, shape: Any, other: Any, dim: Any, num_microbatches: int) -> None:
    """Microbatches of one sample were broadcast: other numbers, without a word."""
    model, twin = with_twin(lambda: TakesTwo(forward))
    x, given = torch.randn(shape, dtype=torch.float64), torch.randn(other, dtype=torch.float64)
    settings: dict[str, Any] = {"num_microbatches": num_microbatches, "loss_fn": F.mse_loss}
    with pytest.raises(ValueError, match=r"4 samples, and another axis of that size") as caught:
        pipeline(model, **settings).forward_backward(x, given, x)
    assert f"it runs with batch_dims={{1: {dim}}}" in str(caught.value)
    found = pipeline(model, batch_dims={1: dim}, **settings).forward_backward(x, given, x)
    assert found.loss == pytest.approx(F.mse_loss(twin(x, given), x).item(), abs=1e-12)


def test_axes_as_long_as_the_batch_that_the_model_takes() -> None:
    """Nobody is asked where the model takes any number of samples there; of the target nothing can be tried."""
    model, twin = with_twin(lambda: TakesTwo(lambda x, other: x + other))
    x, settings = torch.randn(4, 4, 4, dtype=torch.float64), {"num_microbatches": 4, "loss_fn": F.mse_loss}
    assert pipeline(model, **settings).forward_backward(x, x, x).loss == pytest.approx(F.mse_loss(twin(x, x), x).item())
    with pytest.raises(ValueError, match=r"expected batch_dims={'target': 1} along with theirs, or 'target': 0"):
        pipeline(model, batch_dims={"x": 1, "other": 1}, **settings).forward_backward(x, x, x)


def boxes_loss(output: Tensor, targets: list[dict[str, Any]]) -> Tensor:
    pairs = zip(output, targets, strict=True)
    return torch.stack([(row.sum() - each["boxes"].sum()).square() * len(each["name"]) for row, each in pairs]).mean()


def test_a_list_of_targets_with_one_for_each_sample() -> None:
    """As detectors take them; tensors of other sizes than the batch were refused, and others cut."""
    twin, x = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)).double(), draw(4, 4)
    settings: dict[str, Any] = {"loss_fn": boxes_loss, "num_microbatches": 3}

    def targets(*counts: int) -> list[dict[str, Any]]:
        return [{"boxes": draw(count, 4), "name": "x" * count} for count in counts]

    message = r"a list of 4 targets for 4 samples, with tensors of that size .*microbatches="
    with pytest.raises(ValueError, match=message):
        pipeline(copy.deepcopy(twin), **settings).forward_backward(x, targets(1, 4, 2, 3))
    pipe = pipeline(copy.deepcopy(twin), **settings)
    for given in (targets(1, 2, 0, 3), targets(4, 4, 4, 4)):  # the latter is read as the former was
        assert pipe.forward_backward(x, given).loss == pytest.approx(boxes_loss(twin(x), given).item(), abs=1e-12)
    heads = [draw(4, 4), draw(4, 4)]
    pipe = pipeline(copy.deepcopy(twin), num_microbatches=2, loss_fn=lambda y, t: F.mse_loss(y, t[0] * t[1]))
    assert pipe.forward_backward(x, heads).loss == pytest.approx(F.mse_loss(twin(x), heads[0] * heads[1]).item())
    assert pipe.forward_backward(x[:2], [each[:2] for each in heads]).loss is not None


def test_chains_take_positionals_alone() -> None:
    with pytest.raises(ValueError, match=r"'input' by keyword for an nn.Sequential or a list of stages, whose mod"):
        make().train_step(input=X, target=Y)
    assert make().train_step(X, target=Y).loss_step == 0
    with pytest.raises(ValueError, match=r"batch_dims names 'x', .*: expected positions"):
        make(batch_dims={"x": 1})


class TakesADict(Parts, a=lambda: nn.Linear(WIDTH, WIDTH), b=lambda: nn.Linear(WIDTH, WIDTH)):
    def forward(self, batch: dict[str, Tensor]) -> Tensor:
        return self.b(torch.tanh(self.a(batch["x"]))) + batch["y"]


def test_a_model_that_takes_a_dict_gets_it_whole() -> None:
    model, twin = with_twin(TakesADict)
    batch = {"x": draw(N, WIDTH), "y": draw(N, WIDTH, seed=4)}
    pipe = pipeline(model, loss_fn=F.mse_loss)
    assert pipe.forward_backward(batch, batch["y"]).loss == pytest.approx(F.mse_loss(twin(batch), batch["y"]).item())
    assert torch.allclose(pipe.predict(batch), twin(batch))  # type: ignore[arg-type]


class Views(Parts, a=lambda: nn.Linear(1, WIDTH), b=lambda: nn.Linear(WIDTH, 1)):
    """Views its input [4, N] as one column, which slices of a batch along dimension 1 would not allow."""

    def forward(self, x: Tensor) -> Tensor:
        return self.b(torch.tanh(self.a(x.view(-1, 1)))).view(x.shape[0], x.shape[1]).mean(0)  # [N]


def test_microbatches_along_another_dimension_are_contiguous() -> None:
    model, twin = with_twin(Views)
    x, y = draw(4, N), draw(N, seed=4)
    pipe = pipeline(model, loss_fn=F.mse_loss, batch_dims={"x": 1})
    assert pipe.forward_backward(x, y).loss == pytest.approx(F.mse_loss(twin(x), y).item(), abs=1e-12)


def test_keywords_that_forward_swallows_are_refused_only_where_they_surely_mean_another() -> None:
    class Swallows(nn.Module):
        def forward(self, words: Tensor, decoder_position_ids: Tensor | None = None, **others: object) -> Tensor:
            return words

    reader = CallReader(Swallows(), has_target=False, batch_dims={}, more=dict)
    assert reader.inputs((X,), {"position_ids": X}).arguments.names == ("input 0", "position_ids")
    with pytest.raises(ValueError, match=r"'decoder_position_id' looks like 'decoder_position_ids'"):
        reader.inputs((X,), {"decoder_position_id": X})


class Code(str):
    """A name whose text is another one, which would leave a file."""

    def __repr__(self) -> str:
        return "__import__('pathlib').Path('ran').touch()"

    __str__ = __repr__


class Number(int):
    __repr__ = __str__ = Code.__repr__


class Named(Parts, linear=lambda: nn.Linear(WIDTH, WIDTH)):
    """Adds up what it is given by any keyword, and in a dict or an object under any name."""

    def forward(self, x: Tensor, a_dict: Any, an_object: Any, number: int, **named: Tensor) -> Tensor:
        added = [*a_dict.values(), *vars(an_object).values(), *named.values()]
        return torch.tanh(self.linear(x) + sum(added) / (1 + number % 7))


class Names(nn.Module):
    """Names of a batch, a buffer, a dict and an object, in the code between its units."""

    def __init__(self, name: str) -> None:
        super().__init__()
        self.name, self.a, self.b = name, Named(), Named()
        self._buffers[name] = torch.full((WIDTH,), 2.0).double()

    def forward(self, x: Tensor, **named: Tensor) -> Tensor:
        made = SimpleNamespace()
        vars(made)[self.name] = torch.relu(x)
        h = self.a(x, {self.name: x}, made, Number(3), **named) + self._buffers[self.name]
        return checkpoint(lambda h: torch.tanh(self.b(h, {}, made, 10**5000, **named)), h, use_reentrant=False)


NAMES = ["attention-mask", "class", "v0", "", "\ud800", "z=__import__('pathlib').Path('ran').touch(), y", Code("mask")]


@pytest.mark.thorough(but=["3"])
@pytest.mark.parametrize("name", NAMES, ids=range(len(NAMES)))
def test_no_name_is_run_as_code(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The calls of a stage are Python that is written here. Keywords stood in it as they came: what they said was run,
    and those that are no identifiers were a SyntaxError."""
    monkeypatch.chdir(tmp_path)
    model, twin = with_twin(lambda: Names(name))
    x = draw(N, WIDTH)
    expected = F.mse_loss(twin(x, **{name: x}), x)
    expected.backward()
    result = pipeline(model, loss_fn=F.mse_loss).forward_backward(x=x, target=x, **{name: x})
    assert result.loss == pytest.approx(expected.item(), abs=1e-12)
    same_gradients(model, twin, rtol=1e-12)
    assert not list(tmp_path.iterdir())


class Attends(Parts, mask=GIVEN, scale=lambda: nn.Parameter(torch.ones(1), requires_grad=False)):
    """Flex attention, with a mask that all samples share; it has no backward on the CPU."""

    def forward(self, x: Tensor) -> Tensor:
        heads = self.scale * x[:, None]
        return x + flex_attention(heads, heads, heads, block_mask=self.mask)[:, 0]


def test_block_masks_are_attributes_of_modules() -> None:
    mask = create_block_mask(lambda b, h, q, k: q >= k, None, None, 16, 16, device="cpu")
    x = torch.randn(4, 16, 4)
    model = nn.Sequential(Attends(mask), Attends(mask))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of attention that nobody compiled
        pipe = pipeline(model, num_microbatches=2, loss_fn=None)
        torch.testing.assert_close(pipe.predict(x), model(x))
    message = r"input 1 is BlockMask: expected tensors, .*of flex attention, .* an attribute of the module that uses it"
    with pytest.raises(ValueError, match=message):
        pipe.predict(x, mask)
