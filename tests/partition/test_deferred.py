"""Models built within deferred(): the values that recipes make are those of plain construction, bit by bit."""

import copy
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from support.inside import filled, reading, recording, value_of
from support.zoo import CHECKING, TORCHVISION, TRANSFORMERS
from torch import nn

from stagewright import deferred


@contextmanager
def larger_than(num_elements: int) -> Iterator[None]:
    """Within deferred(), where tensors of so many elements are large."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(recording, "SMALL", num_elements)
        with deferred():
            yield


class Odd(nn.Module):
    """What constructors do: read values, compute weights of weights, tie, view, seed generators, parametrize."""

    def __init__(self, size: int = 20) -> None:
        super().__init__()
        square = (size, size)
        self.bounded = nn.Parameter(torch.Tensor(*square))
        nn.init.trunc_normal_(self.bounded, std=0.5)
        self.turned = nn.Parameter(nn.init.orthogonal_(torch.empty(square)))
        self.computed = nn.Parameter(self.bounded * 2 + self.turned.t())
        self.register_buffer("mask", torch.tril(torch.ones(square)).bool())
        self.register_buffer("frequencies", 1 / 10_000 ** (torch.arange(0, size, 2).float() / size), persistent=False)
        self.rates = [rate.item() for rate in torch.linspace(0, 0.1, 12)]
        self.scaled = nn.Parameter(torch.randn(square) / torch.rand(1).item())
        self.wide = nn.Parameter(torch.rand(size, 2 if float(self.scaled.detach().abs().max()) > 3 else 3))
        self.normed = nn.utils.parametrizations.weight_norm(nn.Linear(*square))
        self.spectral = nn.utils.parametrizations.spectral_norm(nn.Linear(*square))
        self.tied = nn.Linear(*square)
        self.tied.weight = self.bounded
        self.tied.weight.data.normal_(0, 0.02)
        generator = torch.Generator().manual_seed(4)
        self.own = nn.Parameter(torch.randn(square, generator=generator))
        self.own.data.uniform_(generator=generator)
        base = torch.randn(4, *square)
        self.parts = nn.ParameterList([base[index] for index in range(4)])
        self.sparse = nn.Parameter(nn.init.sparse_(torch.empty(square), 0.3))
        self.assigned = nn.Parameter(torch.randn(square))
        self.assigned.data = self.assigned.data * 0.3
        with torch.no_grad():
            self.assigned[self.assigned > 0.2] = 1.0
            self.assigned[3:5] = 0
            self.assigned[torch.tensor([7, 8])] = 2.0
        self.joined = nn.Parameter(torch.cat([self.bounded.detach(), self.turned.detach()]))
        self.device_of = torch.arange(3, device=self.joined.device).tolist()
        self.dropped = nn.Parameter(nn.functional.dropout(torch.ones(square), 0.5))
        self.half().float()


class Odder(nn.Module):
    """Conjugates, modules of the meta device, a trial of layers, memory that is replaced, copies that share some."""

    def __init__(self, size: int = 20) -> None:
        super().__init__()
        turning = torch.polar(torch.ones(size, size), torch.randn(size, size))
        self.register_buffer("conjugate", turning.conj())
        self.product = nn.Parameter(turning.conj() * turning.t())
        self.imaginary = nn.Parameter(turning.conj().imag * 2)
        self.skipped = nn.init.ones_(nn.utils.skip_init(nn.Linear, size, size).weight)
        with torch.device("meta"):
            self.count = nn.Linear(size, size).weight.numel()
        self.layers = nn.Sequential(nn.Linear(size, 4 * size), nn.BatchNorm1d(4 * size))
        self.head = nn.Linear(int(self.layers(torch.rand(9, size)).shape[1]), 3)
        self.norm = nn.BatchNorm1d(120).eval()
        self.normed = nn.Parameter(self.norm(torch.rand(9, 120)).detach())
        self.assigned = nn.Linear(3, 3)
        self.assigned.weight.data = torch.randn(size, size)
        taken = nn.Linear(size, size)
        taken.weight.data = torch.from_numpy(np.arange(float(size * size)).reshape(size, size))
        self.taken = nn.Parameter(taken.weight.detach() * 2)
        self.lazy = nn.LazyLinear(size)
        self.lazy(torch.rand(2, size))
        self.register_buffer("ends", torch.tensor([turning.real.max()]) * turning.new_tensor([2.0]) * turning)
        self.shared = nn.Linear(size, size, bias=False)
        self.shared.weight.data = self.head.weight.data
        self.both = copy.deepcopy(nn.ModuleList([self.shared, self.head]))
        with torch.inference_mode():
            self.register_buffer("inferred", torch.from_numpy(np.ones((size, size))) * torch.rand(size, size))


def memory(tensors: Mapping[str, torch.Tensor]) -> list[list[str]]:
    """Names of tensors that share it."""
    found: dict[int, list[str]] = {}
    for name, x in tensors.items():
        found.setdefault(x.untyped_storage().data_ptr() if x.numel() else id(x), []).append(name)
    return [*found.values()]


BUILT: dict[str, Callable[[], nn.Module]] = {
    "odd": Odd,
    "odder": Odder,
    "encoder": lambda: nn.TransformerEncoder(nn.TransformerEncoderLayer(16, 2, batch_first=True), 2),
    "lstm": lambda: nn.LSTM(8, 8, 2, bidirectional=True),
    "embedding": lambda: nn.Embedding(40, 8, padding_idx=0),
    "attention": lambda: nn.MultiheadAttention(16, 4),
    "convolutions": lambda: nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ConvTranspose2d(8, 3, 3)),
    "applied": lambda: nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8)).apply(
        lambda each: nn.init.xavier_normal_(each.weight) if isinstance(each, nn.Linear) else None
    ),
    "bfloat16": lambda: nn.Linear(16, 16).bfloat16(),
    "clones": lambda: nn.ModuleList(copy.deepcopy(layer) for layer in [nn.Linear(8, 8)] * 3),
    "in float64": lambda: nn.Linear(16, 16, dtype=torch.float64),
} | {name: case.make for name, case in (TRANSFORMERS | TORCHVISION).items()}
BUILT |= {name: case.make for name, (case, _) in CHECKING.items()}


def _hugging(family: str, **sizes: Any) -> Callable[[], nn.Module]:
    def make() -> nn.Module:
        transformers = pytest.importorskip("transformers")
        words = {"vocab_size": 61, "hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2}
        made: nn.Module = transformers.AutoModel.from_config(
            transformers.AutoConfig.for_model(family, **words | {"intermediate_size": 24} | sizes)
        )
        return made

    return make


BUILT |= {name: _hugging(name) for name in ("gpt_neox", "gemma", "mamba", "deberta-v2", "phi", "bloom", "qwen2")}


def tensors(model: nn.Module) -> dict[str, torch.Tensor]:
    both = (model.named_parameters(remove_duplicate=False), model.named_buffers(remove_duplicate=False))
    return {name: x for each in both for name, x in each}


@pytest.mark.thorough(but=["1-odd", "1-embedding", "99-odder"])
@pytest.mark.parametrize("name", BUILT)
@pytest.mark.parametrize("large", [1, 99])
def test_equal_to_plain_construction(name: str, large: int) -> None:
    """All tensors at once, and each alone; what is drawn afterwards is the same, too."""
    torch.manual_seed(7)
    expected, after = tensors(BUILT[name]()), torch.rand(3)
    torch.manual_seed(7)
    with larger_than(large):
        found = tensors(BUILT[name]())
    if name not in TRANSFORMERS | TORCHVISION | CHECKING:  # those seed themselves
        assert torch.equal(torch.rand(3), after)
    assert list(found) == list(expected)
    waiting = {key: x for key, x in found.items() if x.is_meta}
    assert waiting or large > 1
    assert {key for key, x in expected.items() if x.numel() >= max(large, 2)} <= waiting.keys()
    together = dict(zip(waiting, filled([*waiting.values()]), strict=True))
    for key, x in expected.items():
        alone = next(filled([found[key]])) if key in waiting else found[key]
        for values in (alone, together.get(key, alone)):
            assert torch.equal(values, x), key
            assert (values.dtype, values.stride()) == (x.dtype, x.stride()), key
        assert isinstance(found[key], nn.Parameter) == isinstance(x, nn.Parameter), key
    assert memory(found | together) == memory(expected)
    same = {(one, other) for one in expected for other in expected if expected[one] is expected[other]}
    assert same == {(one, other) for one in found for other in found if found[one] is found[other]}


def test_copies_and_what_is_let_go() -> None:
    """A copy has recipes of its own; a Value goes with the last tensor that has it."""
    with larger_than(1):
        model = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4, affine=False)).half().float()
        del model[1].num_batches_tracked
    made = copy.deepcopy(model)
    for one, other in zip(tensors(model).values(), tensors(made).values(), strict=True):
        assert one is not other
        assert type(one) is type(other)
        assert value_of(one) is value_of(other) is not None
    values = tensors(nn.Sequential(nn.Linear(4, 4)))
    with torch.device("meta"):
        assert value_of(nn.Linear(4, 4).weight) is None
    assert not any(x.is_meta for x in values.values())


USES: dict[str, Callable[[nn.Module], object]] = {
    "linear": lambda model: model(torch.randn(2, 40)),
    "half": lambda model: model.half(),
    "data": lambda model: model.weight.data.normal_(),  # type: ignore[union-attr,operator]
    "normal_": lambda model: nn.init.normal_(model.weight),  # type: ignore[arg-type]
    "detach": lambda model: model.state_dict(),
    "norm": lambda model: sum(p.norm() for p in model.parameters()),
    "pickling": lambda model: model.weight.__reduce_ex__(2),  # type: ignore[operator]
}


@pytest.mark.parametrize("name", USES)
def test_uses_outside_are_refused_by_name(name: str) -> None:
    with deferred():
        model = nn.Linear(400, 40)
    with pytest.raises(
        ValueError, match=rf"^{name}\(\.\.\.\) of 'weight' of a Linear at .*no values yet\. Expected Pipel"
    ):
        USES[name](model)
    assert model.weight.shape == (40, 400)
    assert model.weight.requires_grad
    assert "DeferredParameter" in repr(model.weight)


def test_what_needs_memory_is_refused_by_line() -> None:
    with deferred():
        x = torch.randn(100, 100)
        with pytest.raises(ValueError, match=r"^data_ptr at .*test_deferred\.py:\d+, in .* needs the memory"):
            x.data_ptr()
        with pytest.raises(ValueError, match=r"^resize_ at .*test_deferred\.py:\d+"):
            x.resize_(200, 200)
        with pytest.raises(ValueError, match="read-only"):
            x.numpy()[0] = 1.0
        assert x.numpy().shape == (100, 100)
        assert x[:0].clone().normal_().shape == (0, 100)  # which has no memory to draw into
        with pytest.raises(RuntimeError, match="must match"):
            x + torch.randn(3, 7)
        with pytest.raises(ValueError, match=r"within stagewright\.deferred"), deferred():
            pass
    given = torch.zeros(100, 100)
    with deferred():
        taken = given * 2
        read = torch.ones(100, 100) + taken
    assert torch.equal(next(filled([read])), torch.ones(100, 100))
    given.add_(1)
    with pytest.raises(ValueError, match=r"of shape \(100, 100\) from which the constructor .* has changed since"):
        next(filled([read]))


def test_nothing_is_drawn_where_files_have_it() -> None:
    state = torch.get_rng_state()
    with deferred(draw=False):
        model = nn.Linear(100, 100, bias=False)
    assert torch.equal(torch.get_rng_state(), state)
    value = value_of(model.weight)
    assert not value.is_drawn()


def test_checksums_say_nothing_of_addresses() -> None:
    """Processes compare them; what a file has is not compared, what a constructor computes from is."""
    shape, cpu = (100, 100), torch.device("cpu")
    read = [reading(partial(torch.full, shape, number), torch.float32, shape, cpu) for number in (1.0, 2.0)]
    numbers = [np.full(shape, number) for number in (1.0, 2.0, 1.0)]
    with deferred():
        made = [torch.from_numpy(each) * 3 for each in numbers]
        scaled = [torch.ones(shape) * number for number in (1.0, 2.0, 1.0)]
    assert len(set(map(checksum, read))) == 1
    for one, other, same in (map(checksum, made), map(checksum, scaled)):
        assert one == same != other
    numbers[0][:] = 5
    with pytest.raises(ValueError, match=r"has changed since: .* or its clone\(\) in its place"):
        next(filled([made[0]]))


def checksum(x: torch.Tensor) -> float:
    value = value_of(x)
    return value.checksum()


def test_threads_that_overlap_leave_torch_as_it_was() -> None:
    before = nn.Parameter.__new__, nn.init._no_grad_trunc_normal_
    first, second = threading.Event(), threading.Event()
    made: list[nn.Linear] = []

    def build() -> None:
        with deferred():
            first.set()
            second.wait(30)
            made.append(nn.Linear(100, 100))

    thread = threading.Thread(target=build)
    thread.start()
    first.wait(30)
    with deferred():
        second.set()
        made.append(nn.Linear(100, 100))
        thread.join(30)
        made.append(nn.Linear(100, 100))
    assert all(value_of(each.weight) is not None for each in made)
    assert before == (nn.Parameter.__new__, nn.init._no_grad_trunc_normal_)
    assert value_of(nn.Linear(100, 100).weight) is None


def test_a_copy_stays_as_it_was_when_the_original_is_written() -> None:
    with larger_than(1):
        one = nn.Linear(4, 4)
        other = copy.deepcopy(one)
        one.weight.data.mul_(2)
    for order in ([0, 1], [1, 0]):
        made = [*filled([(one.weight, other.weight)[at] for at in order])]
        assert torch.equal(made[order.index(0)], 2 * made[order.index(1)])
