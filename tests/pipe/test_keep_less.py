"""Activations that are made again instead of kept: gradients, and the bytes that a backward holds, to the byte."""

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from support.inside import edit_memory as inside_memory
from support.parts import GIVEN, Parts
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.utils.checkpoint import checkpoint

from stagewright.pipe import edit

B, S, H = 2, 6, 16
T4 = 4  # bytes of a float32; a norm also keeps its mean


class Block(nn.Module):
    def __init__(self, act: nn.Module | None = None) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(H)
        self.mlp = nn.Sequential(nn.Linear(H, 4 * H), act or nn.GELU(), nn.Linear(4 * H, H))

    def forward(self, x: Tensor) -> Tensor:
        return x + self.mlp(self.norm(x))


def kept_bytes(model: nn.Module, *inputs: Tensor, **options: Any) -> int:
    """Bytes of the storages that a backward of one forward holds, parameters apart."""
    own = {p.untyped_storage().data_ptr() for p in model.parameters()}
    held: dict[int, Tensor] = {}

    def note(x: Tensor) -> Tensor:
        held[x.untyped_storage().data_ptr()] = x
        return x

    with saved_tensors_hooks(note, lambda x: x):
        assert model(*inputs, **options) is not None
        return sum(x.untyped_storage().nbytes() for at, x in held.items() if at not in own)


def gradients(model: nn.Module, x: Tensor) -> list[Tensor]:
    leaf = x.clone().requires_grad_()
    model.zero_grad()
    model(leaf).square().sum().backward()
    return [leaf.grad, *(p.grad for p in model.parameters() if p.grad is not None)]


@pytest.mark.parametrize(
    ("what", "saved", "tolerance"), [("gelu", 16 * B * S * H, 0.0), ("layernorm", T4 * B * S * (H + 1), 1e-4)]
)
def test_what_is_not_kept_is_made_again(what: str, saved: int, tolerance: float) -> None:
    torch.manual_seed(0)
    plain, x = Block(), torch.randn(B, S, H)
    edits = edit(copy.deepcopy(plain))
    edits["mlp" if what == "gelu" else "norm"].keep_less(what)
    assert edits.verify((x,)) == []
    edited = edits.build()
    # A block alone keeps its input anyway, as the input of its own norm; in a model the sum in front of it would go.
    assert kept_bytes(plain, x) - kept_bytes(edited, x) == saved
    for theirs, ours in zip(gradients(plain, x), gradients(edited, x), strict=True):
        assert float((theirs - ours).abs().max()) <= tolerance
    with torch.no_grad():
        assert torch.equal(edited(x), plain(x))
    assert torch.equal(copy.deepcopy(edited)(x), plain(x))


class CopyingGELU(nn.GELU):
    """Keeps a copy of its input, so that autograd sees no change of the input itself."""

    def forward(self, input: Tensor) -> Tensor:
        return super().forward(input.clone())


class DoublingGELU(CopyingGELU):
    def forward(self, input: Tensor) -> Tensor:
        made = super().forward(input)
        with torch.no_grad():
            input.mul_(2.0)
        return made


class ChangesBehind(Parts, up=lambda: nn.Linear(H, H), act=CopyingGELU, down=lambda: nn.Linear(H, H)):
    def forward(self, x: Tensor) -> Tensor:
        h = self.up(x)
        made: Tensor = self.down(self.act(h))
        with torch.no_grad():
            h.mul_(2.0)
        return made


def test_inputs_that_change_are_not_taken_for_what_they_were() -> None:
    """Behind the activation they are named; one that an activation changes itself is kept as ever."""
    edits = edit(nn.Sequential(ChangesBehind()))
    edits["0"].keep_less("gelu")
    loss = edits.build()(torch.randn(B, S, H)).sum()
    with pytest.raises(RuntimeError, match=r"changed in place after it: expected inplace=False, or no keep_less"):
        loss.backward()
    doubling = edit(Block(DoublingGELU()))
    doubling["mlp"].keep_less("gelu")
    assert doubling.verify((torch.randn(B, S, H),)) == []


def _write(alias: Tensor) -> None:
    alias.mul_(2.0)


# What a user's code may write past autograd, (h, a) of h ---GELU---> a: before the Linear, and behind it. Plain numbers
# are those of the Linear's input as it was used.
WRITES: dict[str, tuple[Callable[[Tensor, Tensor], object], Callable[[Tensor, Tensor], object]]] = {
    "output data": (lambda h, a: _write(a.data), lambda h, a: None),
    "output numpy": (lambda h, a: a.detach().numpy().fill(0.5), lambda h, a: None),
    "output dlpack": (lambda h, a: _write(torch.from_dlpack(a.detach())), lambda h, a: None),
    "output chunk": (lambda h, a: _write(a.unsafe_chunk(2)[0]), lambda h, a: None),
    "output view": (lambda h, a: _write(a[:, 1:].data), lambda h, a: None),
    "output replaced": (lambda h, a: setattr(a, "data", 2 * a.data), lambda h, a: None),
    "output in place": (lambda h, a: _write(a.detach()), lambda h, a: None),
    "input data": (lambda h, a: _write(h.data), lambda h, a: None),
    "input behind": (lambda h, a: None, lambda h, a: _write(h.data)),
    "input view behind": (lambda h, a: None, lambda h, a: h.detach().T.numpy()[0].fill(2.0)),
    "input kept": (lambda h, a: None, lambda h, a: _write(h.alias)),  # type: ignore[attr-defined]
    "read alone": (lambda h, a: a.data.sum(), lambda h, a: h.data.sum()),
}


class Writes(nn.Module):
    def __init__(self, name: str, act: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.up, self.down, self.act = nn.Linear(H, H), nn.Linear(H, H), act
        (self.before, self.behind), self.is_alias = WRITES[name], name == "input kept"

    def forward(self, x: Tensor) -> Tensor:
        h = self.up(x)
        if self.is_alias:
            h.alias = h.data
        a = self.act(h)
        self.before(h, a)
        made: Tensor = self.down(a)
        self.behind(h, a)
        return made


ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "module": nn.GELU(),
    "tanh": nn.GELU(approximate="tanh"),
    "function": nn.functional.gelu,
    "with others": nn.Sequential(nn.GELU(), nn.Hardtanh(inplace=True)),
}


@pytest.mark.thorough(but=["output numpy-module", "input behind-function"])
@pytest.mark.parametrize("act", ACTIVATIONS)
@pytest.mark.parametrize("name", WRITES)
def test_what_is_written_past_autograd_is_not_taken_for_what_it_was(name: str, act: str) -> None:
    """All numbers are the plain model's, to the last bit, as wrong as these may be themselves."""
    torch.manual_seed(0)
    plain, x = nn.Sequential(Writes(name, ACTIVATIONS[act])), torch.randn(B, H)
    edits = edit(copy.deepcopy(plain))
    edits["0"].keep_less("gelu")
    for theirs, ours in zip(gradients(plain, x), gradients(edits.build(), x), strict=True):
        assert torch.equal(theirs, ours)


def test_reading_past_autograd_behind_the_output_costs_nothing() -> None:
    torch.manual_seed(0)
    model, x = nn.Sequential(nn.Sequential(nn.Linear(H, H), nn.GELU(), nn.Linear(H, H))), torch.randn(B, H)
    edits = edit(copy.deepcopy(model))
    model[0][2].register_forward_hook(lambda module, args, out: out.data.sum())
    edits["0"].keep_less("gelu")
    assert kept_bytes(model, x) - kept_bytes(edits.build(), x) == T4 * B * H


@pytest.mark.parametrize(
    "change", [lambda y: y.mul_(2), lambda y: y.neg_(), lambda y: y.zero_(), lambda y: y[0].fill_(0)]
)
def test_a_norm_whose_output_is_written_past_autograd_says_so(change: Callable[[Tensor], object]) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(H, H), nn.LayerNorm(H), nn.Linear(H, H))
    model[1].register_forward_hook(lambda module, args, out: (change(out.data), out)[1])
    edits = edit(model)
    edits["1"].keep_less("layernorm")
    loss = edits.build()(torch.randn(B, H)).sum()
    with pytest.raises(RuntimeError, match=r"output of a norm was changed after it, past autograd: expected no keep"):
        loss.backward()


class ComposedGELU(nn.Module):
    """As transformers write it: under autocast its power is computed in float32, and so is the rest."""

    def forward(self, x: Tensor) -> Tensor:
        return 0.5 * x * (1.0 + torch.tanh(0.8 * (x + 0.04 * torch.pow(x, 3.0))))


@pytest.mark.parametrize("dtype", [torch.bfloat16, None])
def test_it_runs_again_as_it_ran(dtype: torch.dtype | None) -> None:
    """Under autocast, and within an activation checkpoint or hooks of saved tensors of another's."""
    torch.manual_seed(0)
    plain, x = Block(ComposedGELU()), torch.randn(B, S, H)
    edits = edit(copy.deepcopy(plain))
    edits["mlp"].keep_less("gelu")
    edited = edits.build()
    packed: list[Tensor] = []

    def loss(model: nn.Module) -> list[Tensor]:
        model.zero_grad()
        with torch.autocast("cpu", torch.bfloat16, enabled=dtype is not None):
            y = checkpoint(model, x, use_reentrant=False)
            with saved_tensors_hooks(lambda t: packed.append(t) or t.clone(), lambda t: t):  # type: ignore[func-returns-value]
                y = model(y)
        y.float().square().sum().backward()
        return [p.grad for p in model.parameters() if p.grad is not None]

    for theirs, ours in zip(loss(plain), loss(edited), strict=True):
        assert torch.equal(theirs, ours)
    assert packed


def test_a_norm_with_a_weight_near_zero_is_refused() -> None:
    model = Block()
    edits = edit(model)
    edits["norm"].keep_less("layernorm")
    edits.build()
    with torch.no_grad():
        model.norm.weight[3] = 1e-4
    with pytest.raises(ValueError, match=r"a weight of 1\.0e-04, by which the backward would divide: expected"):
        model(torch.randn(B, S, H))


@pytest.mark.parametrize(
    ("dtype", "bias"), [(torch.float32, 2e3), (torch.bfloat16, 20.0), (torch.float16, 200.0)], ids=str
)
def test_a_norm_whose_bias_drowns_the_rest_is_refused(dtype: torch.dtype, bias: float) -> None:
    """A weight above the least one is not enough: what the output rounds away, no backward can make again."""
    model = nn.Sequential(nn.Linear(H, H), nn.LayerNorm(H)).to(dtype)
    edits = edit(model)
    edits["1"].keep_less("layernorm")
    edits.build()
    x = torch.randn(B, H, dtype=dtype)
    with torch.no_grad():
        model[1].bias[3] = bias / 8
    assert model(x).shape == x.shape
    with torch.no_grad():
        model[1].bias[3] = bias
    with pytest.raises(ValueError, match=r"a bias of .* times its weight: next to it torch\..*: expected at most"):
        model(x)


def test_a_norm_without_its_input_refuses_a_second_derivative() -> None:
    edits = edit(nn.Sequential(nn.Linear(H, H), nn.LayerNorm(H), nn.Tanh()))
    edits["1"].keep_less("layernorm")
    x = torch.randn(B, H, requires_grad=True)
    (grad,) = torch.autograd.grad(edits.build()(x).sum(), x, create_graph=True)
    with pytest.raises(RuntimeError, match="differentiate twice"):
        grad.square().sum().backward()


class RandomGELU(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return nn.functional.dropout(nn.functional.gelu(x))


class CountingGELU(Parts, calls=lambda: torch.zeros(())):
    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1.0
        return torch.tanh(x)


class KeywordGELU(nn.Module):
    def forward(self, x: Tensor, *, shift: Tensor | float = 0.0) -> Tensor:
        return nn.functional.gelu(x + shift)


class Keyword(Parts, up=lambda: nn.Linear(H, H), act=KeywordGELU, scale=lambda: nn.Parameter(torch.randn(S, 1))):
    """Calls its activation as it likes, with a tensor that lies across."""

    def forward(self, x: Tensor) -> Tensor:
        made = self.act(self.up(x).transpose(1, 2)) * self.scale.T
        return self.act(x=made, shift=self.scale.T) * self.scale.T


@pytest.mark.parametrize("mlp", [Block(RandomGELU()).mlp, Keyword()], ids=["random", "keyword"])
def test_what_cannot_run_again_alone_is_kept(mlp: nn.Module) -> None:
    """One that draws or takes more; and where others keep values alone, strides are as they were."""
    torch.manual_seed(0)
    plain = nn.Sequential(nn.Linear(H, H), mlp)
    edits = edit(copy.deepcopy(plain))
    edits["1"].keep_less("gelu")
    found = []
    for model in (plain, edits.build()):
        torch.manual_seed(1)
        with saved_tensors_hooks(lambda t: t.clone(memory_format=torch.contiguous_format), lambda t: t):
            y = model(torch.ones(B, S, H))
        model.zero_grad()
        y.square().sum().backward()
        found.append([p.grad for p in model.parameters()])
    assert all(map(torch.equal, *found))


def test_an_edit_of_the_whole_lets_go_as_early_as_those_of_its_parts() -> None:
    def peak(pattern: str) -> int:
        edits = edit(nn.Sequential(*(Block() for _ in range(6))))
        edits[pattern].keep_less("gelu")
        _, most = inside_memory.measure(edits.build(), (torch.randn(B, S, H),))
        return most

    assert peak("") == peak("*") == peak("*.mlp")


class Sparse(Parts, mlp=lambda: Block().mlp, mix=lambda: torch.eye(B).to_sparse()):
    """Saves what has no memory of its own."""

    def forward(self, x: Tensor) -> Tensor:
        return torch.sparse.mm(self.mix, self.mlp(x))


def test_sparse_tensors_are_kept_as_ever_and_an_activation_with_state_is_none() -> None:
    with pytest.raises(ValueError, match=r"keep_less of 'mlp', a Sequential: expected a module with a GELU"):
        edit(Block(CountingGELU()))["mlp"].keep_less("gelu")
    edits = edit(nn.Sequential(Sparse()))
    edits["0"].keep_less("gelu")
    assert edits.verify((torch.randn(B, H),)) == []


def test_an_activation_that_is_a_function_in_an_attribute_is_known() -> None:
    layer = nn.TransformerEncoderLayer(H, 2, 4 * H, dropout=0.0, activation="gelu", batch_first=True)
    plain, x = nn.Sequential(layer), torch.randn(B, S, H)
    edits = edit(copy.deepcopy(plain))
    edits["0"].keep_less("gelu")
    assert kept_bytes(plain, x) - kept_bytes(edits.build(), x) == 16 * B * S * H


class GrowingGELU(Parts, scale=1.0, by_itself=GIVEN):
    def forward(self, x: Tensor) -> Tensor:
        self.scale += self.by_itself
        return nn.functional.gelu(x) * self.scale


@pytest.mark.parametrize("by_itself", [True, False])
def test_a_gelu_is_made_again_with_the_attributes_that_it_had(by_itself: bool) -> None:
    torch.manual_seed(0)
    plain: Any = Block(GrowingGELU(by_itself))
    edits = edit(copy.deepcopy(plain))
    edits["mlp"].keep_less("gelu")
    x, found = torch.randn(B, S, H), []
    for model in (plain, edits.build()):
        act: Any = model.mlp[1]
        outputs = []
        for _ in range(2):  # as two microbatches in flight
            outputs.append(model(x))
            act.scale += 1
        torch.stack(outputs).square().sum().backward()
        found.append([p.grad for p in model.parameters()])
    assert all(map(torch.equal, *found))


@pytest.mark.thorough(but=["vit-vit.layers.*.attention-vit.layers.*.mlp-vit.layers.*.layernorm_*"])
@pytest.mark.parametrize(
    ("name", "again", "mlps", "norms"),
    [
        ("gpt2", "transformer.h.*.attn", "transformer.h.*.mlp", "transformer.h.*.ln_*"),
        ("bert", "bert.embeddings", "bert.encoder.layer.*", "bert.encoder.layer.*.output.LayerNorm"),
        ("vit", "vit.layers.*.attention", "vit.layers.*.mlp", "vit.layers.*.layernorm_*"),
    ],
)
def test_models_of_transformers_take_the_same_list(name: str, again: str, mlps: str, norms: str) -> None:
    pytest.importorskip("transformers", reason="needs transformers: make extras")
    from support.zoo import TRANSFORMERS

    case = TRANSFORMERS[name]
    model: Any = case.make()
    model.config.use_cache = False  # torch's checkpoint would fill it twice
    edits = edit(model)
    edits[mlps].keep_less("gelu")
    edits[norms].keep_less("layernorm")
    edits[again].checkpoint()
    assert edits.verify(case.batch()) == []


def test_the_largest_microbatch_fits_and_the_next_does_not() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.ReLU(inplace=True), *(Block() for _ in range(3)))
    edits, x = edit(model), torch.randn(32, S, H)
    before = x.clone()
    edits["*.mlp"].keep_less("gelu")
    edits["*.norm"].keep_less("layernorm")
    edits["1"].cut()
    limit, in_flight = 2_000_000, 3
    lines = edits.memory((x,), limit="2MB", in_flight=in_flight).splitlines()
    assert torch.equal(x, before)
    assert lines[0].split("  ")[-1].strip() == "largest microbatch in 2MB"
    assert [line.split("  ")[0] for line in lines[1:]] == ["no edit", *map(str, list(edits)[:2])]
    found = [int(line.split()[-1]) for line in lines[1:]]
    weights = sum(p.numel() for p in model.parameters()) * 4
    for number, most in enumerate(found):
        other = edit(copy.deepcopy(model))
        for what, pattern in [("gelu", "*.mlp"), ("layernorm", "*.norm")][:number]:
            other[pattern].keep_less(what)
        other.build()
        for samples in (most, most + 1):
            kept, peak = inside_memory.measure(other.model, (torch.randn(samples, S, H),))
            assert (3 * weights + (in_flight - 1) * kept + peak <= limit) is (samples == most)
    assert found[0] < found[1] < found[2]
    assert "none: 1 takes " in edits.memory((torch.randn(4, S, H),), limit="1KB")
    with pytest.raises(ValueError, match=r"memory: an example of 1 samples: expected at least 2"):
        edits.memory((torch.randn(1, S, H),), limit="2MB")
    with pytest.raises(ValueError, match=r"limit: '6 GB': expected a number and a unit"):
        edits.memory((torch.randn(4, S, H),), limit="6 GB")
