"""Forms of arguments, and code that reads values on fake tensors."""

import enum
from collections import OrderedDict, namedtuple
from collections.abc import Callable
from dataclasses import InitVar, dataclass, field
from typing import Any

import pytest
import torch
from support.inside import (
    Arguments,
    Form,
    FormError,
    call_for_shapes,
    first_run,
    given_stages,
    model_units,
    stand_ins,
    strict_fake_mode,
)
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode

A, B, C = torch.zeros(1), torch.ones(2), torch.full((3,), 2.0)
Point = namedtuple("Point", "x y")


class Mode(enum.Enum):
    FAST = 1


@dataclass
class Plain:
    logits: Any
    extra: Any = None
    scale: InitVar[float] = 1.0
    number: int = field(init=False, default=7)


@dataclass(frozen=True)
class Frozen:
    inner: Any


class Cache:
    """Neither tensor nor constant."""


@pytest.mark.parametrize(
    "value",
    [
        A,
        (A, [B, {"c": C, "none": None}]),
        OrderedDict(b=A, a=(1, 2.5, True, "text", Mode.FAST, torch.float64, B)),
        Point(A, [B, Point(C, None)]),
        [Plain(A, Frozen((B, {"k": Plain(C)})))],
        (),
        {"only": 3},
    ],
)
def test_values_are_put_together_as_they_were(value: object) -> None:
    form, flat = Form.of(value)
    assert all(isinstance(x, Tensor) for x in flat)
    assert len(flat) == form.num_tensors == len(form.paths)
    assert repr(form.assemble(flat)) == repr(value)
    again, same = Form.of(form.assemble(flat))
    assert again == form
    assert hash(again) == hash(form)
    assert all(one is other for one, other in zip(flat, same, strict=True))


def test_a_dataclass_keeps_what_its_init_does_not_take() -> None:
    made = Plain(A, scale=3.0)
    made.number = 9
    form, flat = Form.of({"out": made})
    back = form.assemble(flat)["out"]
    assert (type(back), back.number, back.logits) == (Plain, 9, A)


@pytest.mark.parametrize(
    ("one", "other"),
    [
        ((A, 1), (A, True)),
        ((A, 1), (A, 1.0)),
        ((A, 0.0), (A, -0.0)),
        ((A, None), (A, B)),
        ((A, B), [A, B]),
        ({"x": A}, {"y": A}),
        (Plain(A), Frozen(A)),
        (Plain(A), Plain(A, 1)),
    ],
)
def test_forms_tell_values_apart(one: object, other: object) -> None:
    assert Form.of(one)[0] != Form.of(other)[0]


def test_forms_are_equal_where_tensors_alone_differ() -> None:
    nan = float("nan")
    assert Form.of((A, nan, {"x": B}))[0] == Form.of((C, float("nan"), {"x": A}))[0]


def test_what_is_neither_is_refused_by_name_or_pruned() -> None:
    value = {"logits": A, "cache": Plain((B, Cache()))}
    with pytest.raises(FormError, match=r"\['cache'\].logits\[1\] is Cache: expected tensors, numbers"):
        Form.of(value)
    form, flat = Form.of_output(value)
    assert repr(form.assemble(flat)) == repr({"logits": A, "cache": Plain((B, None))})


def test_arguments_have_names() -> None:
    arguments = Arguments.of((A, (B, 3)), {"z": {"k": C}, "flag": True, "a": Plain(A)})
    assert arguments.names == ("input 0", "input 1[0]", "a.logits", "z['k']")
    assert arguments == Arguments.of((A, (B, 3)), {"a": Plain(A), "flag": True, "z": {"k": C}})
    assert arguments.call(lambda *args, **kwargs: (len(args), sorted(kwargs))) == (2, ["a", "flag", "z"])
    with pytest.raises(ValueError, match=r"^past\[0\] is Cache: expected tensors"):
        Arguments.of((A,), {"past": [Cache()]})
    with pytest.raises(ValueError, match=r"^input 1 is Cache: expected tensors"):
        Arguments.of((A, Cache()))


class Structured(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(3, 4), nn.Linear(4, 3)

    def forward(self, batch: Any, *, double: bool = False, shift: Any = None) -> Any:
        h = self.a(batch["x"]) * (2 if double else 1)
        out = self.b(h) + (0 if shift is None else shift.x)
        return Plain({"out": out, "cache": Cache()}, extra=(3, None, h))


def run(model: nn.Module, arguments: Arguments) -> Any:
    cut = model_units(model, arguments, enter_unit=None).evenly(1)
    linked = cut.pieces[0].link(None, index=0, inputs=arguments.form)
    stage, flat, _ = first_run(cut.pieces[0], linked, arguments.tensors)
    return cut.form_of_output(stage).assemble(flat)


@pytest.mark.parametrize("kwargs", [{}, {"double": True}, {"shift": Point(torch.ones(2, 3), "text")}])
def test_a_recorded_model_takes_and_returns_structured_values(kwargs: dict[str, Any]) -> None:
    model = Structured()
    arguments = Arguments.of(({"x": torch.randn(2, 3), "unused": None},), kwargs)
    found, expected = run(model, arguments), arguments.call(model)
    assert isinstance(found, Plain)
    assert torch.equal(found.logits["out"], expected.logits["out"])
    assert found.logits["cache"] is None
    assert found.extra[:2] == (3, None)
    assert torch.equal(found.extra[2], expected.extra[2])


def test_transformers_outputs() -> None:
    pytest.importorskip("transformers")
    from transformers.cache_utils import DynamicCache
    from transformers.modeling_outputs import CausalLMOutputWithPast

    made = CausalLMOutputWithPast(logits=A, past_key_values=DynamicCache(), hidden_states=(B, C))
    form, flat = Form.of_output(made)
    back = form.assemble(flat)
    assert isinstance(back, CausalLMOutputWithPast)
    assert (back.logits, back.past_key_values, back.hidden_states) == (A, None, (B, C))


@pytest.mark.parametrize("given", [False, True])
def test_a_chain_refuses_keywords(given: bool) -> None:
    arguments = Arguments.of((), {"x": torch.randn(2, 3)})
    modules = [nn.Linear(3, 3), nn.Linear(3, 3)]
    cut = given_stages(modules, arguments, device=torch.device("cpu"), enter_unit=None) if given else None
    cut = cut or model_units(nn.Sequential(*modules), arguments, enter_unit=None).evenly(2)
    with pytest.raises(ValueError, match=r"x by keyword for .*: expected positional arguments, in the order of Linear"):
        cut.pieces[0].link(None, index=0, inputs=arguments.form)


CPU = torch.device("cpu")


class Reads(nn.Module):
    def __init__(self, beside: Callable[[Any, Tensor], Any]) -> None:
        super().__init__()
        self.beside = beside
        self.norm, self.lstm, self.weight = nn.BatchNorm1d(4), nn.LSTM(4, 4, batch_first=True), nn.Linear(4, 4)
        self.register_buffer("mean", torch.zeros(4))
        self.register_buffer("mask", torch.ones(4))
        self.tries = 0

    def forward(self, x: Tensor) -> Any:
        self.tries += 1
        assert self.tries == 1, "the first try left a trace"
        float(x.detach().sum())
        return self.beside(self, x)


def infer(beside: Callable[[Any, Tensor], Any]) -> tuple[FakeTensor, Any, set[str], bool]:
    """(argument, value, names of written buffers, whether the argument was changed) of a run on fakes."""
    module = Reads(beside)
    before = {name: x.clone() for name, x in module.state_dict().items()}
    with FakeTensorMode(allow_non_fake_inputs=True), stand_ins(module, CPU) as written:
        x = torch.empty(3, 4, requires_grad=True) * 1
        version = x._version
        value = call_for_shapes(module, (x,))
        assert all(isinstance(leaf, FakeTensor) for leaf in torch.utils._pytree.tree_leaves(value))
        changed = x._version != version
    assert all(torch.equal(tensor, before[name]) for name, tensor in module.state_dict().items())
    assert isinstance(x, FakeTensor)
    names = {name for name, buffer in module.named_buffers() if id(buffer) in written}
    return x, value, names, changed


def test_what_stands_in_is_laid_out_as_the_original_and_wants_a_gradient_where_it_does() -> None:
    module = nn.Linear(4, 3)
    module.weight.data = module.weight.data.t().contiguous().t()
    module.bias.requires_grad_(False)
    module.again, module.steps = module.weight, nn.Parameter(torch.zeros(2, dtype=torch.int64), requires_grad=False)
    module.register_buffer("mean", torch.zeros(5, dtype=torch.float64))
    own = {**dict(module.named_parameters()), **dict(module.named_buffers())}
    with FakeTensorMode(allow_non_fake_inputs=True), stand_ins(module, CPU):
        fakes = {**dict(module.named_parameters()), **dict(module.named_buffers())}
        assert module.again is module.weight
    assert list(fakes) == list(own) == ["weight", "bias", "steps", "mean"]
    for fake, real in zip(fakes.values(), own.values(), strict=True):
        assert isinstance(fake, FakeTensor)
        assert isinstance(fake, nn.Parameter) == isinstance(real, nn.Parameter)
        assert (fake.shape, fake.stride(), fake.dtype, fake.device) == (real.shape, real.stride(), real.dtype, CPU)
        assert (fake.requires_grad, fake.is_leaf) == (real.requires_grad, True)
    assert all(each is own[name] for name, each in (*module.named_parameters(), *module.named_buffers()))


def test_what_comes_out_has_the_shapes_strides_graphs_and_memory_of_values() -> None:
    x, value, written, changed = infer(lambda m, x: {"y": m.weight(x).t(), "n": x.detach().nonzero(), "same": x})
    assert (value["y"].shape, value["y"].stride(), value["y"].requires_grad) == ((4, 3), (1, 4), True)
    assert (value["n"].dtype, value["n"].requires_grad) == (torch.int64, False)
    assert value["same"] is x
    assert not written
    assert not changed
    x, value, _, _ = infer(lambda m, x: (x[1:], m.mask[1:]))
    assert value[0].untyped_storage()._cdata == x.untyped_storage()._cdata
    assert value[0].requires_grad
    assert value[1].shape == (3,)


@pytest.mark.parametrize(
    ("beside", "names"),
    [
        (lambda m, x: m.norm(x), {"norm.running_mean", "norm.running_var", "norm.num_batches_tracked"}),
        (lambda m, x: m.mean.add_(x.detach().sum(0)) + x, {"mean"}),
        (lambda m, x: setattr(m, "mean", x.detach().sum(0)) or x, {"mean"}),
        (lambda m, x: m.lstm(x[:, None])[0], set()),
    ],
    ids=["batch norm", "in place", "assigned", "lstm"],
)
def test_buffers_that_are_written_are_known(beside: Callable[[Any, Tensor], Any], names: set[str]) -> None:
    _, _, written, changed = infer(beside)
    assert written == names
    assert not changed


def test_changed_arguments_count_that_and_errors_of_values_are_told() -> None:
    assert infer(lambda m, x: x.mul_(2))[3]
    with pytest.raises(RuntimeError, match="cannot be multiplied"):
        infer(lambda m, x: x @ x)
    sizes = []
    infer(lambda m, x: sizes.append(m.weight.weight.untyped_storage().nbytes()) or m.weight(x))
    assert sizes[-1] == 4


def test_integers_are_ones_where_zeros_are_an_error_and_each_try_begins_anew() -> None:
    class Counts(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.seen: list[int] = []

        def forward(self, x: Tensor, step: Tensor) -> Tensor:
            self.seen.append(int(step.item()))
            return x[:, :: self.seen[-1]]  # a step of 0 is an error

    counts = Counts()
    with FakeTensorMode():
        value = call_for_shapes(counts, (torch.empty(3, 4), torch.empty((), dtype=torch.int64)))
    assert (value.shape, counts.seen) == ((3, 4), [1])


def test_outside_of_a_fake_mode_it_is_a_call() -> None:
    assert call_for_shapes(nn.Identity(), (3,)) == 3


F = nn.functional
REMEMBERED: dict[str, Callable[[Tensor, Tensor], Any]] = {
    "views": lambda x, n: (x[1:], x.t()[:, 1], x.view(2, 12)[:, ::3], x.expand(2, 4, 6), *x.split(2), x.detach()),
    "copies": lambda x, n: (x.t().reshape(24), x.reshape(24), x.t().contiguous(), x.contiguous(), x.clone()),
    "strides": lambda x, n: (x.clone(), x.t().clone(), x * 2, x.t() * 2, x + n, x.t() + n.t()),
    "in place": lambda x, n: (x.clone().mul_(2), x.clone().t().add_(n.t()), x.clone().t_(), (x + n).squeeze_()),
    "on what was given": lambda x, n: (n.add_(1), n.t_() if n.shape == (4, 6) else n, n.mul(2)),
    "sizes": lambda x, n: (n.clone().resize_(2, 2), x.new_empty(3), x.new_zeros(2, 5), torch.zeros_like(x.t())),
    "numbers": lambda x, n: (n.long() * 1.5, n.long() * 2, n > 1, torch.arange(4), torch.full((2,), 1), n.long() / 2),
    "the default type": lambda x, n: torch.set_default_dtype(torch.float64) or (n.long() * 1.5, torch.ones(2)),
    "constants": lambda x, n: (torch.tensor(3), torch.tensor([1.0, 2.0]) * x[:, :2], torch.tensor(3).item()),
    "reads values": lambda x, n: n.nonzero(),
    "one value": lambda x, n: x.sum().item(),
    "picked": lambda x, n: (x[torch.zeros(3, dtype=torch.int64)], x.index_select(1, torch.zeros(2, dtype=torch.int64))),
    "masked": lambda x, n: x[x > 0],
    "of two types": lambda x, n: F.linear(x, n.double()),
    "of other sizes": lambda x, n: x @ n,
    "complex": lambda x, n: (torch.complex(x, n).conj(), torch.complex(x, n).conj().imag, torch.view_as_real(x + 0j)),
    "layers": lambda x, n: (F.layer_norm(x, (6,)), F.dropout(x, 0.5), F.softmax(x, -1), F.gelu(x), x.std(), x.max(1)),
    "a convolution": lambda x, n: F.conv2d(
        x.view(1, 2, 3, 4).contiguous(memory_format=torch.channels_last), n[:3, :2, None, None]
    ),
    "attention": lambda x, n: F.scaled_dot_product_attention(*[x.view(1, 2, 3, 4)] * 3, is_causal=True),
    "batch norm": lambda x, n: F.batch_norm(x, n[0].clone(), n[1].clone().abs(), training=True),
    "viewed": lambda x, n: (x.view(-1), x.t().view(x.t().shape), x[:, ::2].view(-1, 1), torch.tensor(3).view(1).item()),
    "wanting a gradient or not": lambda x, n: [
        (y * 2, y.view(24), y.t(), F.pad(y, (1, 1)), y.split(2), F.layer_norm(y, y.shape)) for y in (n, x, n)
    ],
    "without a graph": lambda x, n: torch.no_grad()(lambda: (x * 2, x[0], x.relu()))(),
}


@pytest.mark.thorough(but=["on what was given"])
@pytest.mark.parametrize("code", REMEMBERED.values(), ids=REMEMBERED)
def test_what_operations_gave_before_they_give_again(code: Callable[[Tensor, Tensor], Any]) -> None:
    """The second and third time in our mode as in torch's own without any memory: facts of results and arguments."""

    def facts(mode: FakeTensorMode, shape: tuple[int, int]) -> object:
        default = torch.get_default_dtype()
        with mode:
            given = torch.empty(shape, requires_grad=True) * 1, torch.empty(shape)
            try:
                leaves = torch.utils._pytree.tree_leaves(code(*given))
            except Exception as error:
                return type(error), str(error)
            finally:
                torch.set_default_dtype(default)
            found = [x for x in (*given, *leaves) if isinstance(x, Tensor)]
            memory = [x.untyped_storage()._cdata for x in found]
            return [
                (
                    (x.shape, x.stride(), x.storage_offset(), x.dtype, x.device, type(x), x.is_conj(), x.is_neg()),
                    (x._version, x._is_view(), x.is_leaf, x.requires_grad, type(x.grad_fn)),
                    [one == place for one in memory],
                )
                for x, place in zip(found, memory, strict=True)
            ], [x for x in leaves if not isinstance(x, Tensor)]

    for shape in [(4, 6), (6, 4), (4, 6)]:
        plain = FakeTensorMode(allow_non_fake_inputs=True)
        plain.cache_enabled = False
        expected = facts(plain, shape)
        if code is REMEMBERED["of two types"]:
            expected = (RuntimeError, "mm of torch.float32 and torch.float64, which takes one type")
        assert [facts(strict_fake_mode(), shape) for _ in range(2)] == [expected] * 2
