"""Records of forwards, refusals and their words."""

import copy
import cProfile
import random
import sys
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from support import eager_models as models
from support.inside import Arguments, RecordedUnits, RecordingError
from torch import Tensor, nn
from torch.distributions import Normal
from torch.nn.utils.rnn import PackedSequence, pack_padded_sequence, pad_packed_sequence

from stagewright.pipe import PipelineModule

X = torch.zeros(2, models.WIDTH)


def recorded(model: nn.Module, *inputs: Tensor, **options: Any) -> RecordedUnits:
    example = Arguments.of(inputs or (X,))
    return RecordedUnits(model, example, device=torch.device("cpu"), enter_unit=None, **options)


def stack(forward: Callable[[Any, Tensor], Tensor]) -> nn.Module:
    return type("Given", (models.Stack,), {"forward": forward})()


def left_aside(model: Any, x: Tensor) -> Tensor:
    model.blocks[0].register_forward_hook(lambda block, given, output: setattr(block, "left", output * 2))
    return model.blocks[0](x) + model.blocks[0].left


def by_attribute(model: Any, x: Tensor) -> Tensor:
    model.blocks[0].norm.given = x * 2
    model.blocks[0].norm.register_forward_hook(lambda norm, given, output: output + norm.given)
    return model.blocks[0](x)


def counted(model: Any, x: Tensor) -> Tensor:
    model.calls = getattr(model, "calls", 0) + 1
    model.__dict__["number"] = model.__dict__.get("number", 0) + 1
    return model.blocks[0](x)


def doubled(x: Tensor, times: int) -> Tensor:
    for _ in range(times):
        x = x * 2
    return x


with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # it is deprecated
    SCRIPTED = torch.jit.script(doubled)

REFUSED: dict[str, tuple[Callable[[Any, Tensor], Tensor], str]] = {
    "a value is read": (
        lambda m, x: m.blocks[0](x) if m.stem(x).sum() > 0 else x,
        r"reads a tensor's value(?=.* move it into a module of its own, which runs as it is)",
    ),
    "a sequence is packed": (
        lambda m, x: pack_padded_sequence(m.blocks[0](x)[None], x[0, :1].long()).data,
        r"packs sequences by their lengths, which are values(?=.* move it into a module of its own)",
    ),
    "a packed sequence goes on": (
        lambda m, x: m.blocks[0](PackedSequence(m.stem(x), torch.tensor([2]))),
        r"module 'blocks.0' takes a PackedSequence, whose sizes are values(?=.* move it into a module of its own)",
    ),
    "a nested tensor": (
        lambda m, x: m.blocks[0](torch.nested.nested_tensor_from_jagged(m.stem(x), torch.tensor([0, 2]))).values(),
        r"reads a tensor's value(?=.* move it into a module of its own)",
    ),
    "a scripted function": (
        lambda m, x: m.blocks[1](SCRIPTED(m.blocks[0](x), 2)),
        r"failed in the TorchScript interpreter(?=.* move it into a module of its own)",
    ),
    "Python's random numbers": (
        lambda m, x: m.blocks[0](x) * random.random() + m.blocks[1](x),
        "draws from Python's or numpy's random generator",
    ),
    "a decision that is drawn": (
        lambda m, x: x if torch.rand(()) < 0.5 else m.blocks[0](x),
        "decides on a random number",
    ),
    "what the model left in a unit": (by_attribute, "blocks.0 takes a tensor of shape .* and that is none of its"),
    "a backward": (lambda m, x: m.blocks[0](x).sum().backward() or x, "the forward runs a backward"),
    "gradients by the input": (
        lambda m, x: torch.autograd.grad(m.blocks[1](m.blocks[0](x)).sum(), x, create_graph=True)[0],
        r"the forward runs a backward \(grad\)",
    ),
}


@pytest.mark.parametrize(("forward", "message"), REFUSED.values(), ids=REFUSED)
def test_what_is_refused_is_named_with_its_line(forward: Callable[[Any, Tensor], Tensor], message: str) -> None:
    with pytest.raises(RecordingError, match=rf"{message}.* at .*test_recorded.py:\d+, in "):
        recorded(stack(forward))


def test_units_are_opened_where_a_hook_leaves_their_tensors_aside() -> None:
    """As transformers collects the logits of routers: losses and gradients are those of one process, by microbatch."""
    torch.manual_seed(0)
    plain = stack(left_aside).double()
    model = copy.deepcopy(plain)
    x, target = torch.randn(2, 6, models.WIDTH, dtype=torch.float64)
    expected = sum(F.mse_loss(plain(each), goal) / 3 for each, goal in zip(x.chunk(3), target.chunk(3), strict=True))
    expected.backward()
    pipe = PipelineModule(
        model, mesh={"pipe": 2}, schedule="1f1b", num_microbatches=3, loss_fn=F.mse_loss, optimizer=torch.optim.SGD
    )
    assert pipe.forward_backward(x, target).loss == pytest.approx(expected.item(), rel=1e-13)
    for mine, other in zip(model.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(mine.grad, other.grad, rtol=0, atol=1e-14)


def test_a_unit_that_reads_values_leaves_no_made_up_tensor_behind() -> None:
    """A bug: what a hook saw of its run on made-up values became a constant of the stages, without a word."""

    class Reading(nn.LayerNorm):
        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x) if x.sum().item() < 1e9 else x

    def aside(model: Any, x: Tensor) -> Tensor:
        seen: list[Tensor] = []
        model.blocks[0].up.register_forward_hook(lambda module, args, out: seen.append(out))
        return model.blocks[0](x) + seen[0].detach().sum()

    model: Any = stack(aside).double()
    model.blocks[0].norm = Reading(models.WIDTH).double()
    x, target = torch.randn(2, 6, models.WIDTH, dtype=torch.float64)
    expected = F.mse_loss(copy.deepcopy(model)(x), target)
    pipe = PipelineModule(model, mesh={"pipe": 2}, schedule="1f1b", num_microbatches=1, loss_fn=F.mse_loss)
    assert pipe.forward_backward(x, target).loss == pytest.approx(expected.item(), rel=1e-13)


class Packing(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.lstm = nn.LSTM(models.WIDTH, models.WIDTH, batch_first=True, dtype=torch.float64)

    def forward(self, x: Tensor, lengths: Tensor) -> tuple[Tensor, Tensor]:
        packed = pack_padded_sequence(x, lengths.cpu(), batch_first=True, enforce_sorted=False)
        return pad_packed_sequence(self.lstm(packed)[0], batch_first=True, total_length=x.shape[1])[0], lengths


def packs(model: Any, x: Tensor, lengths: Tensor) -> Tensor:
    for block in model.blocks:
        x, _ = block(x, lengths)
    return x


@pytest.mark.parametrize("is_given", [False, True])
def test_a_module_may_pack_its_sequences(is_given: bool) -> None:
    """They were told of lengths that were made up as 0."""
    model: Any = stack(packs)  # type: ignore[arg-type]
    model.blocks = nn.ModuleList(Packing() for _ in range(2))
    x, lengths = torch.randn(4, 3, models.WIDTH, dtype=torch.float64), torch.tensor([3, 1, 2, 3])
    expected = packs(model, x, lengths).sum() / 2
    pipe = PipelineModule(
        model=[*model.blocks] if is_given else model,
        mesh={"pipe": 2},
        num_microbatches=2,
        loss_fn=lambda output, target: (output[0] if is_given else output).sum(),
    )
    assert pipe.forward_backward(x, lengths, x).loss == pytest.approx(expected.item(), rel=1e-13)


def raises(model: Any, x: Tensor) -> Tensor:
    if (x > 3).any():
        raise ValueError("too large")
    return model.blocks[1](model.blocks[0](x))


def asserts(model: Any, x: Tensor) -> Tensor:
    torch._assert((x < 3).all(), "too large")
    return model.blocks[1](model.blocks[0](x))


@pytest.mark.parametrize("checked", [raises, asserts])
def test_a_check_of_values_is_made_in_its_stage(checked: Callable[[Any, Tensor], Tensor]) -> None:
    model = stack(checked)
    pipe = PipelineModule(
        model, mesh={"pipe": 2}, schedule="1f1b", num_microbatches=1, loss_fn=F.mse_loss, optimizer=torch.optim.SGD
    )
    pipe.train_step(X, X)
    with pytest.raises(
        ValueError, match=r"the check at .*test_recorded.py:\d+, in .* fails: expected .* is (False|True)"
    ):
        pipe.train_step(X + 4, X)


def test_a_size_that_follows_from_values_stays_in_its_stage() -> None:
    units = recorded(stack(lambda m, x: m.blocks[0](x) + m.head(m.stem(x)[x[:, 0] > 0]).sum()))
    whole = units.flow.crossing_bytes
    names = [units.flow.name_of(call) for call in units.flow.order]
    picked = names.index("__getitem__")
    assert whole[picked + 1] == whole[names.index("head")] == float("inf") > whole[picked]
    with pytest.raises(RecordingError, match=r"reads a size that follows from values of tensors at .*test_recorded.py"):
        recorded(stack(lambda m, x: m.blocks[0](x) * m.stem(x)[x[:, 0] > 0].shape[0]))


@pytest.mark.parametrize("returns", [lambda y: Normal(y, 1.0), lambda y: {"y": y, "d": Normal(y, 1.0)}])
def test_a_distribution_is_made_in_the_loss(returns: Callable[[Tensor], Any]) -> None:
    """It came as None, and the loss told of that, or of nothing to train."""
    message = r"the model returns a Normal, .* as tensors, and the distribution made in loss_fn"
    with pytest.raises(RecordingError, match=message):
        recorded(stack(lambda m, x: returns(m.blocks[0](x))))
    recorded(stack(lambda m, x: (m.blocks[0](x).sum(), returns(x))))  # type: ignore[arg-type, return-value]


def rescaled(model: Any, x: Tensor) -> Tensor:
    if not model.training:
        model.stem.weight.data.div_(2)
    return model.blocks[1](model.blocks[0](model.stem(x)))


def test_a_forward_that_is_refused_in_evaluation_alone_says_so() -> None:
    """As RWKV divides weights there: the words spoke of other shapes and of hooks."""
    message = r"test_recorded.py:\d+, in rescaled.* so it cannot be recorded in evaluation mode, .*that module to do it"
    with pytest.raises(ValueError, match=message):
        PipelineModule(
            stack(rescaled), mesh={"pipe": 2}, num_microbatches=1, loss_fn=F.mse_loss, optimizer=torch.optim.SGD
        ).train_step(X, X)


def test_a_model_with_hooks_of_its_own_is_refused() -> None:
    model = models.Stack()
    model.register_full_backward_hook(lambda *_: None)
    with pytest.raises(RecordingError, match=r"the model has hooks \(backward hooks\)"):
        recorded(model)


def test_recording_leaves_no_trace() -> None:
    model = stack(lambda m, x: m.blocks[1](m.blocks[0](x)))
    before = {name: dict(vars(module)) for name, module in model.named_modules()}
    calls = [type(module).__call__ for module in model.modules()]
    apply, state = torch.autograd.Function.apply.__func__.__code__, torch.get_rng_state()  # type: ignore[attr-defined]
    recorded(model)
    assert {name: dict(vars(module)) for name, module in model.named_modules()} == before
    assert [type(module).__call__ for module in model.modules()] == calls
    assert "__call__" not in vars(models.Block)
    assert torch.autograd.Function.apply.__func__.__code__ is apply  # type: ignore[attr-defined]
    assert torch.equal(torch.get_rng_state(), state)


def test_a_profiler_goes_on_behind_the_recording() -> None:
    model = stack(lambda m, x: m.blocks[1](m.blocks[0](x)))
    calls: list[str] = []
    with cProfile.Profile() as profiler:
        recorded(model)
        assert sys.getprofile() is profiler
        str.upper("heard")
    assert any("upper" in str(entry.code) for entry in profiler.getstats())
    sys.setprofile(lambda frame, *_: calls.append(frame.f_code.co_name))
    try:
        recorded(model)
        _ = stack(lambda m, x: x)
    finally:
        sys.setprofile(None)
    assert "stack" in calls
    message = "a profiler \\(TraceContext\\) follows .* Expected pipe.build"
    with torch.profiler.profile(with_stack=True), pytest.raises(RecordingError, match=message):
        recorded(model)


def test_a_decision_that_always_comes_out_alike_is_taken() -> None:
    """As in transformers' models, whose layers are left out at random with a probability of 0 by default."""

    def forward(model: Any, x: Tensor) -> Tensor:
        for block in model.blocks:
            if model.rate < torch.rand([]):
                x = block(x)
        return x

    model = stack(forward)
    model.rate = 0.0  # type: ignore[assignment]
    assert [unit.name for unit in recorded(model).units] == [f"blocks.{i}" for i in range(4)]


class Deep(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = models.Block()
        self.inner = models.Stack()
        self.again = nn.Sequential(models.Block(), nn.Sequential(models.linear(), nn.ReLU()))

    def forward(self, x: Tensor) -> Tensor:
        return self.first(self.again(self.inner(self.first(x))))


def test_units_are_modules_and_run_again_under_a_number() -> None:
    names = [unit.name for unit in recorded(Deep()).units]
    blocks = [f"inner.blocks.{i}" for i in range(4)]
    assert names == ["first", "inner.stem", *blocks, "inner.head", "again.0", "again.1", "first#2"]


class One(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.block = models.Block()

    def forward(self, x: Tensor) -> Tensor:
        return self.block(x)


def test_units_are_opened_where_there_are_too_few_or_a_split_point_is_inside() -> None:
    model = One()
    assert [piece.name for piece in recorded(model).evenly(1).pieces] == ["block"]
    names = [piece.name for piece in recorded(model).evenly(2).pieces]
    assert names == ["block.norm .. block.up", "block.down"]
    assert len(recorded(model).evenly(4).pieces) == 4
    with pytest.raises(ValueError, match=r"num_stages=9 for a model of \d units that can be cut apart: expected 1 to"):
        recorded(model).evenly(9)
    first, second = recorded(Deep()).at(["inner.blocks.2.down"]).pieces
    assert first.name.endswith("inner.blocks.2.up") or "tanh" in first.name
    assert second.name == "inner.blocks.2.down .. first#2"
    with pytest.raises(
        ValueError, match=r"'inner.blocks.9' is no module that the model runs: .* such as 'inner.blocks"
    ):
        recorded(Deep()).at(["inner.blocks.9"])


class Whole(nn.Module):
    """Around a part whose code reads a value, so that it cannot be opened, or whose call is compiled."""

    def __init__(self, reads: bool) -> None:
        super().__init__()
        self.front, self.part, self.back = models.linear(), models.Block(), models.linear()
        if reads:
            self.part.forward = lambda x: self.part.down(self.part.up(x)) if x.sum() > 9 else x  # type: ignore[method-assign]
        else:
            self.part.compile(backend="eager")

    def forward(self, x: Tensor) -> Tensor:
        return self.back(self.part(self.front(x)))


@pytest.mark.parametrize(("reads", "why"), [(True, "reads a tensor's value"), (False, "is compiled as a whole")])
def test_a_unit_that_cannot_be_opened_is_not_opened_again_and_again(
    reads: bool, why: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    opened: list[object] = []
    with_open = RecordedUnits._with_open
    monkeypatch.setattr(RecordedUnits, "_with_open", lambda self, paths: opened.append(paths) or with_open(self, paths))
    units = recorded(Whole(reads))
    with pytest.raises(
        ValueError, match=rf"cut='part.down' is in 'part', which stays whole: .*{why}.* Expected 'part'"
    ):
        units.at(["part.down"])
    with pytest.raises(ValueError, match=rf"num_stages=4 for a model of 3 units .* 'part' stays whole: .*{why}"):
        units.evenly(4)
    assert opened == [{"part"}, {"part"}]


def test_a_list_that_is_compiled_is_one_unit() -> None:
    model = Deep()
    model.inner.compile(backend="eager")
    assert [unit.name for unit in recorded(model).units if "inner" in unit.name] == ["inner"]
    assert "inner.blocks.1" in [unit.name for unit in recorded(Deep()).units]


def test_masks_are_made_where_they_are_needed_and_nothing_that_nobody_needs() -> None:
    def forward(model: Any, x: Tensor) -> Tensor:
        mask = torch.ones(x.shape[0], 1, device=x.device).cumsum(0)
        unused = model.blocks[0](x) * 3
        unused.mean()
        return model.blocks[2](model.blocks[1](x * mask) * mask)

    flow = recorded(stack(forward)).flow
    names = [flow.name_of(call).strip("_") for call in flow.order]
    assert names == ["blocks.0", "blocks.1", "mul", "blocks.2"]
    assert len(flow.everywhere) == 3


def test_a_unit_that_is_opened_keeps_its_number_for_random_numbers() -> None:
    """Then masks do not depend on how many stages there are, as long as no cut parts two calls that draw."""

    class Draws(models.Block):
        def forward(self, x: Tensor) -> Tensor:
            return torch.dropout(self.down(torch.dropout(self.up(self.norm(x)), 0.1, True)), 0.1, True)

    model = models.Stack(Draws, count=2)
    opened = recorded(model, also_open=["blocks.1"]).flow
    names = [opened.name_of(call) for call in opened.order]
    block = range(names.index("blocks.1.norm"), names.index("head"))
    calls = [opened.record.calls[opened.order[i]] for i in (0, 1, names.index("head"))]
    assert [call.enters for call in calls] == [0, 1, 3]
    for cut, expected in ((block[0], [2]), (block[2], [2, 2]), (block[-1], [2, 2 + (1 << 32)])):
        stage_of = {call: int(i >= cut) for i, call in enumerate(opened.order)}
        numbers = opened.numbers(stage_of)
        assert [n for i in block if (n := numbers.get(opened.order[i])) is not None] == expected
