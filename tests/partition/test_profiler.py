"""The profiler: against modules that sleep, against bytes counted by hand; and what it must leave alone."""

import copy
import re
import time
from collections import Counter
from contextlib import nullcontext
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from support.inside import GPT, TINY_WIDTH, AttentionCalls, GPTConfig, SleepingStage, profile_model
from torch import Tensor, nn

from stagewright import deferred
from stagewright.partition import Profile

FLOAT = 4


def quick(model: nn.Module, *inputs: Tensor, **options: Any) -> Profile:
    return profile_model(model, inputs, **{"repetitions": 2, **options})


def small_gpt(**sizes: Any) -> GPT:
    return GPT(GPTConfig(**{"layers": 3, "width": 16, "heads": 2, "length": 8, **sizes}))


def cross_entropy(logits: Tensor, target: Tensor) -> Tensor:
    return F.cross_entropy(logits.flatten(0, 1), target.flatten())


@pytest.fixture
def ticking(monkeypatch: pytest.MonkeyPatch) -> None:
    """A clock that runs while somebody sleeps, and by 10 us whenever it is read: nothing else takes time."""
    now = 0.0

    def read() -> float:
        nonlocal now
        now += 10e-6
        return now

    def sleep(seconds: float) -> None:
        nonlocal now
        now += seconds

    monkeypatch.setattr(time, "perf_counter", read)
    monkeypatch.setattr(time, "sleep", sleep)


@pytest.mark.usefixtures("ticking")
def test_sleeping_modules_take_what_they_sleep() -> None:
    """Sleeps of 20 ms and more, between which the clock is read a few times: below a hundredth."""
    durations = [(0.02, 0.03), (0.021, 0.04), (0.02, 0.03)]
    model = nn.Sequential(*(SleepingStage(f, b) for f, b in durations))
    profile = quick(model, torch.randn(2, TINY_WIDTH), repetitions=4)
    for node, (forward, backward) in zip(profile.nodes, durations, strict=True):
        assert forward <= node.forward_seconds < 1.01 * forward
        assert backward <= node.backward_seconds < 1.01 * backward
    assert 0.161 <= profile.step_seconds < 1.01 * 0.161
    assert profile.parts_over_step == pytest.approx(0, abs=0.01)
    first, second, third = profile.nodes
    assert second.forward_seconds != first.forward_seconds
    assert third.input_grad_seconds >= 0.03  # an autograd.Function computes both at once: nothing is left for W
    assert third.weight_grad_seconds < 0.03
    assert first.input_grad_seconds == 0.0 < first.weight_grad_seconds  # its input wants no gradient


class SlowToSplit(SleepingStage):
    """Takes 10 ms more where somebody looks at its operations."""

    def forward(self, x: Tensor) -> Tensor:
        time.sleep(0.01 if torch._C._len_torch_function_stack() else 0)
        return super().forward(x)


@pytest.mark.usefixtures("ticking")
def test_what_a_forward_takes_longer_for_a_split_backward_counts_to_i() -> None:
    model = nn.Sequential(*(SlowToSplit(0.02, 0.03) for _ in range(2)))
    first, second = quick(model, torch.randn(2, TINY_WIDTH), repetitions=4).nodes
    assert first.forward_seconds == pytest.approx(0.02, rel=0.01)
    assert (first.input_grad_seconds, first.weight_grad_seconds) == (0.0, pytest.approx(0.04, rel=0.01))
    assert second.input_grad_seconds == pytest.approx(0.04, rel=0.01)


class Counted(nn.Linear):
    def __deepcopy__(self, memo: object) -> nn.Module:
        return self

    def forward(self, x: Tensor) -> Tensor:
        _CALLS[id(self)] += 1
        return super().forward(x)


_CALLS: Counter[int] = Counter()  # what a plain dict holds is put back


def test_equal_layers_are_timed_once() -> None:
    layers = [Counted(4, 4) for _ in range(4)]
    profile = quick(nn.Sequential(*layers), torch.randn(2, 4), repetitions=5)
    first, second, third, fourth = (_CALLS[id(layer)] for layer in layers)
    # The first has an input without a gradient; the last two are like the second, and run in whole steps alone.
    assert first == second > third == fourth
    nodes = profile.nodes
    assert nodes[1].forward_seconds == nodes[2].forward_seconds == nodes[3].forward_seconds
    assert nodes[3].description == "Counted, timed as 1, its equal"
    assert "timed as" not in nodes[1].description


@pytest.mark.parametrize(
    "other",
    [
        lambda: nn.Linear(4, 4, bias=False),
        lambda: nn.Linear(4, 4).requires_grad_(False),
        lambda: nn.Sequential(nn.Linear(4, 4)),
        lambda: nn.LayerNorm(4),
        lambda: nn.Linear(4, 4).eval(),
        lambda: nn.Dropout(0.2),
    ],
)
def test_layers_that_differ_are_timed_by_themselves(other: Any) -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.Dropout(0.1), nn.Linear(4, 4), other())
    assert "timed as" not in quick(model, torch.randn(2, 4)).nodes[-1].description


def test_the_blocks_of_a_model_are_equal_but_the_last_part_has_the_loss() -> None:
    tokens = torch.randint(256, (2, 8))
    profile = quick(small_gpt(), tokens, target=tokens, loss_fn=cross_entropy)
    nodes = {node.name: node for node in profile.nodes}
    assert nodes["blocks.1"].description.endswith("timed as blocks.0, its equal")
    assert nodes["blocks.2"].forward_seconds == nodes["blocks.0"].forward_seconds
    assert profile.nodes[-1].description.endswith("with the loss")
    assert profile.order() == tuple(range(len(profile.nodes)))
    assert (profile.microbatch_size, profile.device, profile.dtype) == (2, "cpu", "float32")
    assert all(node.seconds > 0 for node in profile.nodes)


@pytest.mark.parametrize("build", [nullcontext, deferred])
def test_memory_is_freed_as_in_a_run(monkeypatch: pytest.MonkeyPatch, build: Any) -> None:
    asked: list[int] = []
    monkeypatch.setattr("stagewright.partition.profiler.measure.keep_freed_memory", lambda: asked.append(1))
    with build():
        model = nn.Sequential(nn.Linear(512, 512))
    quick(model, torch.randn(2, 512))
    assert bool(asked) == (build is nullcontext)


def test_parts_with_one_kind_of_gradient_have_all_of_b_in_it() -> None:
    nodes = quick(nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 4)), torch.randn(2, 4)).nodes
    assert nodes[0].input_grad_seconds == nodes[1].weight_grad_seconds == 0.0
    assert nodes[0].weight_grad_seconds >= nodes[0].backward_seconds
    assert nodes[1].input_grad_seconds >= nodes[1].backward_seconds
    assert nodes[2].input_grad_seconds > 0
    assert nodes[2].weight_grad_seconds > 0
    unsplit = quick(nn.Sequential(nn.Linear(4, 4)), torch.randn(2, 4), split_backward=False).nodes
    assert (unsplit[0].input_grad_seconds, unsplit[0].weight_grad_seconds) == (0.0, 0.0)


def test_bytes_of_a_chain_counted_by_hand() -> None:
    model = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 4), nn.BatchNorm1d(4))
    profile = quick(model, torch.randn(32, 8))
    first, relu, second, norm = profile.nodes
    # The first Linear saves the model's input, which is there in any case; ReLU saves its output, which the
    # second Linear saves again; BatchNorm its input, and mean and deviation of the batch.
    assert first.stash_bytes == 0
    assert relu.stash_bytes == 32 * 16 * FLOAT
    assert second.stash_bytes == 0
    assert norm.stash_bytes == 32 * 4 * FLOAT + 2 * 4 * FLOAT
    assert [node.activation_bytes for node in profile.nodes] == [32 * n * FLOAT for n in (16, 16, 4, 4)]
    assert [node.parameter_bytes for node in profile.nodes] == [9 * 16 * FLOAT, 0, 17 * 4 * FLOAT, 8 * FLOAT]
    assert [node.buffer_bytes for node in profile.nodes] == [0, 0, 0, 2 * 4 * FLOAT + 8]


class Exponential(torch.autograd.Function):
    """Keeps its output, and forgets a copy of its input, eight times as large, on the way."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        y = x.repeat(8, 1).exp()[: len(x)].clone()
        ctx.save_for_backward(y)
        return y

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        (y,) = ctx.saved_tensors
        return gradient * y


class Exp(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return Exponential.apply(x)


def test_workspace_is_what_is_neither_kept_nor_passed_on() -> None:
    rows = 512
    model = nn.Sequential(nn.Linear(64, 64), Exp(), nn.ReLU())
    linear, exp, relu = quick(model, torch.randn(rows, 64)).nodes
    size = rows * 64 * FLOAT
    # At the peak the repeated input and its exponential, 16 sizes; the output, which is kept, comes later.
    assert exp.workspace_bytes == pytest.approx(15 * size, rel=0.01)
    assert exp.stash_bytes == size
    assert relu.workspace_bytes < 0.01 * size
    # The weight's gradient before it is added: nothing else.
    assert linear.workspace_bytes == pytest.approx(64 * 64 * FLOAT, rel=0.1)


def test_shared_parameters_and_untrained_ones_count_once() -> None:
    tokens = torch.randint(256, (2, 8))
    tied = small_gpt(tied=True)
    profile = quick(tied, tokens)
    every, shared = (sum(p.numel() * FLOAT for p in module.parameters()) for module in (tied, tied.head.linear))
    assert sum(n.parameter_bytes for n in profile.nodes) == every + shared
    assert profile.nodes[-1].parameter_bytes == sum(p.numel() * FLOAT for p in tied.head.parameters())
    assert "some parameters are those of a unit before" in profile.nodes[-1].description
    assert profile.tied == (((profile.nodes[0].name, profile.nodes[-1].name), shared),)
    assert profile.holdings().parameters == every
    assert Profile.from_json(profile.to_json()) == profile
    model = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 4), nn.Linear(4, 4, bias=False))
    model[3].weight = model[2].weight = model[0].weight
    assert quick(model, torch.randn(2, 4)).tied == ((("0", "2", "3"), 16 * FLOAT),)
    model[0].weight.requires_grad_(False)
    frozen = quick(model, torch.randn(2, 4))
    assert frozen.tied == ()
    assert [n.parameter_bytes for n in frozen.nodes] == [20 * FLOAT, 0, 4 * FLOAT, 0]


def test_edges_follow_the_tensors_also_in_tuples() -> None:
    class Skip(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b, self.c = (nn.Linear(4, 4) for _ in range(3))

        def forward(self, x: Tensor) -> Tensor:
            h = self.a(x)
            return self.c(self.b(h)) + h

    profile = quick(Skip(), torch.randn(2, 4))
    assert set(profile.edges or ()) == {("a", "b"), ("b", "c"), ("a", "c")}

    class Last(nn.Module):
        def forward(self, value: tuple[Tensor, tuple[Tensor, Tensor]]) -> Tensor:
            return value[0]

    model = nn.Sequential(nn.LSTM(4, 8, batch_first=True), Last(), nn.Linear(8, 2))
    profile = quick(model, torch.randn(2, 3, 4))
    assert profile.nodes[0].activation_bytes == (2 * 3 * 8 + 2 * 2 * 8) * FLOAT
    assert profile.edges == (("0", "1"), ("1", "2"))


def test_a_change_in_place_at_the_entry_of_a_part() -> None:
    inputs = torch.randn(4, 4)
    before = inputs.clone()
    model = nn.Sequential(nn.ReLU(inplace=True), nn.Linear(4, 4), nn.ReLU(inplace=True), nn.Linear(4, 4))
    profile = quick(model, inputs)
    assert torch.equal(inputs, before)
    assert len(profile.nodes) == 4


@pytest.mark.parametrize(
    ("make", "ratio"),
    [
        (torch.optim.AdamW, 2.0),
        (lambda p: torch.optim.SGD(p, lr=0.1), 0.0),
        (lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9), 1.0),
    ],
)
def test_state_a_byte_of_parameters(make: Any, ratio: float) -> None:
    model = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 64))
    profile = quick(model, torch.randn(2, 64), optimizer=make)
    assert profile.optimizer_ratio == pytest.approx(ratio, abs=0.01)
    assert profile.nodes[0].update_seconds > 0
    assert profile.nodes[1].update_seconds == 0
    assert quick(model, torch.randn(2, 64)).optimizer_ratio is None


def test_an_update_is_timed_with_gradients_as_backwards_make_them() -> None:
    """Half of them are 0 behind this ReLU, of whose squares AdamW's square root took 15 times as long on a CPU; plans
    had an update of a convolutional network at 0.4 of what it took."""
    found: list[Tensor] = []

    class Seen(torch.optim.AdamW):
        def step(self, closure: Any = None) -> None:  # type: ignore[override]
            found.append(self.param_groups[0]["params"][0].grad.clone())

    model = nn.Sequential(nn.Linear(4, 4, bias=False), nn.ReLU())
    with torch.no_grad():
        model[0].weight[::2] = -1.0
        model[0].weight[1::2] = 1.0
    quick(model, torch.rand(2, 4), optimizer=Seen)
    for gradient in found:
        assert gradient[::2].count_nonzero() == 0
        assert gradient[1::2].count_nonzero() == 8
    assert len(found) > 1


class Noisy(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(4, 4)
        self.norm = nn.BatchNorm1d(4)
        self.dropout = nn.Dropout(0.5)

    def forward(self, x: Tensor) -> Tensor:
        return self.dropout(self.norm(self.inner(x)))


@pytest.mark.parametrize("make", [Noisy, lambda: nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Dropout(0.5))])
def test_the_model_stays_as_it_is(make: Any) -> None:
    torch.manual_seed(0)
    model = make()
    parameters = list(model.parameters())
    parameters[0].grad = torch.ones_like(parameters[0])
    parameters[1].requires_grad_(False)
    stepped: list[Tensor] = []
    parameters[0].register_post_accumulate_grad_hook(stepped.append)
    next(iter(model.children())).eval()
    before = copy.deepcopy(model)
    state, gradient = torch.get_rng_state(), parameters[0].grad
    buffers = [id(buffer) for buffer in model.buffers()]
    inputs, target = torch.randn(6, 4), torch.randn(6, 4)
    after_inputs = torch.get_rng_state()
    quick(model, inputs, target=target, loss_fn=F.mse_loss, optimizer=torch.optim.AdamW)
    assert torch.equal(torch.get_rng_state(), after_inputs)
    assert not torch.equal(state, after_inputs)
    assert stepped == []  # as an optimizer that steps in a hook
    assert parameters[0].grad is gradient
    assert torch.equal(gradient, torch.ones_like(gradient))
    assert all(p.grad is None for p in parameters[1:])
    assert [p.requires_grad for p in model.parameters()] == [p.requires_grad for p in before.parameters()]
    assert [id(buffer) for buffer in model.buffers()] == buffers
    assert [m.training for m in model.modules()] == [m.training for m in before.modules()]
    for one, other in zip(model.state_dict().values(), before.state_dict().values(), strict=True):
        assert torch.equal(one, other)


def test_it_stays_as_it_is_when_something_fails() -> None:
    model = nn.Sequential(nn.BatchNorm1d(4), nn.Linear(5, 4))
    before = copy.deepcopy(model.state_dict())
    with pytest.raises(ValueError, match=re.escape("1 (Linear) cannot take ((3, 4) torch.float32)")):
        quick(model, torch.randn(3, 4))
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    assert all(p.grad is None for p in model.parameters())


def test_autocast_and_bfloat16() -> None:
    """And with a loss that is a pair, of a sum and its count."""

    def total(output: Tensor, target: Tensor) -> tuple[Tensor, Tensor]:
        return (output - target).square().sum(), torch.tensor(target.numel())

    model, x = nn.Sequential(nn.Linear(16, 16), nn.Linear(16, 16)), torch.randn(8, 16)
    under = quick(model, x, autocast=torch.bfloat16, target=x, loss_fn=total)
    assert under.dtype == "autocast bfloat16"
    assert under.nodes[0].activation_bytes == 8 * 16 * 2
    assert under.nodes[1].backward_seconds > 0
    assert quick(model.to(torch.bfloat16), x.to(torch.bfloat16)).dtype == "bfloat16"


@pytest.mark.usefixtures("ticking")
def test_without_anything_to_train_there_is_no_backward() -> None:
    profile = quick(nn.Sequential(nn.Linear(4, 4)).requires_grad_(False), torch.randn(2, 4))
    assert profile.nodes[0].backward_seconds < 1e-3
    assert profile.nodes[0].stash_bytes == 0


class Untraceable(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x + 1 if x.sum() > 0 else x


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: quick(nn.Linear(2, 2)), "example_inputs=() has no tensor: expected the arguments of one microbatch"),
        (lambda: profile_model(nn.Linear(2, 2), (3,)), "example_inputs=(3) has no tensor: expected"),
        (lambda: quick(nn.Linear(2, 2), torch.tensor(1.0)), "example_inputs: input 0 is a scalar: expected"),
        (lambda: quick(nn.Linear(2, 2), torch.ones(1, 2), loss_fn=F.mse_loss), "loss_fn= without target="),
        (lambda: quick(nn.Linear(2, 2), torch.ones(1, 2), target=torch.ones(1)), "target= without loss_fn="),
        (lambda: quick(nn.Linear(2, 2), torch.ones(1, 2), repetitions=0), "repetitions=0, seconds=10.0: expected"),
        (lambda: quick(nn.Linear(2, 2), torch.ones(1, 2), seconds=0), "repetitions=2, seconds=0: expected"),
        (lambda: quick(nn.Linear(2, 2), torch.ones(1, 2), optimizer=torch.optim.LBFGS), "LBFGS evaluates the model ag"),
        (lambda: quick(Untraceable(), torch.ones(2, 2)), "Untraceable cannot be recorded: "),
        (lambda: quick(nn.Sequential(), torch.ones(2, 2)), "an nn.Sequential without children"),
        (
            lambda: quick(nn.Linear(2, 2), torch.ones(2, 2), target=torch.ones(2), loss_fn=lambda o, t: o),
            "loss_fn returned Tensor: expected a scalar tensor",
        ),
        (
            lambda: quick(
                nn.Linear(2, 2), torch.ones(2, 2), target=torch.ones(3, 3), loss_fn=lambda o, t: (o - t).sum()
            ),
            "loss_fn cannot take the output (2, 2) torch.float32 and the target (3, 3) torch.float32",
        ),
    ],
)
def test_mistakes(call: Any, message: str) -> None:
    with pytest.raises(ValueError, match=re.escape(message)):
        call()


def test_keys_and_values_are_counted_whoever_calls_attention() -> None:
    """Twice keys and values of 2 x 8 tokens of width 4, and half a mask, of 4 bytes each."""
    x = torch.randn(2, 8, 4)
    mask = nn.Transformer.generate_square_subsequent_mask(8)
    for call in (
        lambda: F.scaled_dot_product_attention(x, x, x, is_causal=True),
        lambda: nn.MultiheadAttention(4, 2, batch_first=True)(x, x, x, need_weights=False, attn_mask=mask),
    ):
        with AttentionCalls() as calls:
            call()
        assert calls.kept_bytes == 4 * (2 * 2 * 64 + 32)
