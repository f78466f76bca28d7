"""What travels: codecs as properties (what they lose and keep for the next tensor), and of a view its own elements."""

import math
import pickle
from math import prod

import pytest
import torch
import torch.distributed as dist
from hypothesis import given, settings
from hypothesis import strategies as st
from support.inside import compact, num_bytes, pack, read_codec, unpack, wire_specs
from support.pool import Pool

from stagewright.comm import Codec, Collectives, LinkCodecs, MeshPlace, TensorSpec, World, read_compress
from stagewright.schedules import Message, MessageKind

SIZES = st.tuples(st.integers(1, 3), st.integers(1, 6), st.integers(2, 24))
DTYPES = st.sampled_from([torch.float64, torch.float32, torch.bfloat16, torch.float16])


def drawn(shape: tuple[int, ...], seed: int, dtype: torch.dtype = torch.float64, scale: float = 1.0) -> torch.Tensor:
    x = torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    return (scale * x).to(dtype)


def spec_of(x: torch.Tensor) -> TensorSpec:
    return TensorSpec.of(x)._replace(requires_grad=True)


def through(codec: Codec, x: torch.Tensor, memory: torch.Tensor | None = None) -> tuple[torch.Tensor, ...]:
    """A tensor as it arrives, and what its sender keeps; layouts on the wire are those that were announced."""
    spec = spec_of(x)
    packed, kept = pack(codec, x, memory)
    wire = wire_specs(codec, spec)
    if len(wire) > 1:
        assert [(tuple(each.shape), each.dtype) for each in packed] == [(each.shape, each.dtype) for each in wire]
        assert num_bytes(wire) < num_bytes([spec])
    found = unpack(codec, packed, spec)
    assert (found.shape, found.dtype, found.stride()) == (x.shape, x.dtype, x.stride())
    return found, kept


@given(SIZES, st.integers(0, 99), DTYPES, st.sampled_from([0.0, 1e-30, 1.0, 1e4]))
@settings(max_examples=60, deadline=None)
def test_int8_is_off_by_half_a_step_of_its_row(
    shape: tuple[int, ...], seed: int, dtype: torch.dtype, scale: float
) -> None:
    x = drawn(shape, seed, dtype, scale)
    found, kept = through(Codec("int8"), x)
    rounding = 4 * torch.finfo(dtype).eps * x.abs().double()
    bound = x.abs().amax(-1, keepdim=True).double() / 254 + rounding + torch.finfo(dtype).tiny
    assert ((found - x).abs().double() <= bound * (1 + 1e-6)).all()
    assert kept is None


@given(SIZES, st.integers(0, 99), st.sampled_from([0.01, 0.2, 0.9]))
@settings(max_examples=60, deadline=None)
def test_topk_keeps_the_largest_and_owes_the_rest(shape: tuple[int, ...], seed: int, share: float) -> None:
    """Over several tensors: what was sent, and what is still owed, is all that was given."""
    codec, memory = Codec("topk", share), None
    total, sent = torch.zeros(shape, dtype=torch.float64), torch.zeros(shape, dtype=torch.float64)
    for step in range(4):
        x = drawn(shape, seed + step)
        owed = x if memory is None else x + memory.view(shape)
        found, memory = through(codec, x, memory)
        largest = owed.abs().flatten().sort(descending=True).values[: max(1, round(share * prod(shape)))]
        assert torch.equal(found[found != 0].abs().sort(descending=True).values, largest[largest != 0])
        total, sent = total + x, sent + found
        torch.testing.assert_close(sent + memory.view(shape), total, rtol=0, atol=1e-14)


@given(SIZES, st.integers(0, 99), st.integers(1, 3))
@settings(max_examples=60, deadline=None)
def test_lowrank_is_exact_for_matrices_of_its_rank(shape: tuple[int, ...], seed: int, rank: int) -> None:
    rows, width = prod(shape[:-1]), shape[-1]
    x = (drawn((rows, rank), seed) @ drawn((rank, width), seed + 1)).view(shape)
    memory = None
    for _ in range(2):
        found, memory = through(Codec("lowrank", rank), x, memory)
        torch.testing.assert_close(found, x, rtol=1e-9, atol=1e-9)


def test_lowrank_comes_near_and_forgets_no_direction() -> None:
    """The same matrix again and again: as near as any of this rank; zeros in between leave it able to begin again."""
    x, memory = drawn((40, 12), 0), None
    for _ in range(30):
        found, memory = through(Codec("lowrank", 4), x, memory)
    best = torch.linalg.svdvals(x)[4:].square().sum().sqrt()
    assert float((found - x).norm()) == pytest.approx(float(best), rel=1e-2)
    for other in (torch.zeros_like(x), torch.full_like(x, math.nan), x):
        found, memory = through(Codec("lowrank", 4), other, memory)
    assert float((found - x).norm()) < 0.95 * float(x.norm())


@pytest.mark.parametrize("codec", [Codec("int8"), Codec("topk", 0.5), Codec("lowrank", 1)])
@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_what_is_not_finite_is_not_hidden_and_not_kept_and_strides_stay(codec: Codec, bad: float) -> None:
    x = drawn((4, 6, 8), 0).transpose(0, 1)
    x[1, 2] = bad
    found, kept = through(codec, x)
    assert not found.isfinite().all()
    assert kept is None or kept.isfinite().all()


def test_what_would_not_become_smaller_or_has_no_gradient_goes_as_it_is() -> None:
    spec = spec_of(drawn((4, 8), 0))
    for codec, other in [
        (Codec("int8"), spec._replace(requires_grad=False)),
        (Codec("int8"), spec._replace(dtype=torch.int64)),
        (Codec("int8"), spec_of(drawn((8, 1), 0))),
        (Codec("topk", 0.9), spec),
        (Codec("lowrank", 3), spec),
        (Codec("topk", 0.1), spec_of(drawn((0, 4), 0))),
        (Codec("topk", 0.1), spec_of(drawn((), 0))),
    ]:
        assert list(wire_specs(codec, other)) == [other]


def test_each_tensor_of_a_message_owes_its_own() -> None:
    message, tensors = Message(MessageKind.ACT, 0, 1, 0), [drawn((4, 8), seed) for seed in range(2)]
    together, *apart = (LinkCodecs() for _ in range(3))
    for codecs in (together, *apart):
        codecs.boundaries[message[:3]] = Codec("topk", 0.1)

    def sent(codecs: LinkCodecs, *given: torch.Tensor) -> list[torch.Tensor]:
        specs = [spec_of(x) for x in given]
        return list(codecs.unpacked(message, codecs.packed(message, given, specs, rank=0), specs))

    for _ in range(3):
        found, wanted = sent(together, *tensors), [sent(each, x)[0] for each, x in zip(apart, tensors, strict=True)]
        assert all(map(torch.equal, found, wanted))


def test_names_of_codecs() -> None:
    assert read_codec("lowrank") == read_codec({"lowrank": 4}) == ("lowrank", 4)
    assert read_compress({"topk": 0.05}) == {"pipe": ("topk", 0.05)}
    assert read_compress({(0, 1): "int8", "data": {"lowrank": 2}}) == {(0, 1): ("int8", 0), "data": ("lowrank", 2)}
    assert read_compress(None) is None
    assert read_compress("auto") == "auto"
    for wrong in (
        "zip",
        {"topk": 1.0},
        {"topk": 0},
        {"topk": True},
        {"lowrank": 0},
        {"lowrank": 1.5},
        {"int8": 2},
        {(0, 1): "auto"},
        {(0, 1, 2): "int8"},
        {"tensor": "int8"},
        {},
        8,
    ):
        with pytest.raises(ValueError, match=r"compress=.*expected 'int8', 'topk' or \{'topk': 0.01\}"):
            read_compress(wrong)


def test_a_view_is_as_long_as_its_elements() -> None:
    """A slice of a data set took the data set along."""
    whole = torch.randn(100_000, 6, dtype=torch.float64)
    for view in (whole[3:5], whole.T[2:4, :9], whole[::50_000].requires_grad_(), whole[7, 0]):
        packed = compact({"of": [(view, view)]})
        one, other = pickle.loads(packed)["of"][0]
        assert len(packed) < 1_000 + view.nbytes
        assert torch.equal(one, view)
        assert one is other
        assert one.requires_grad == view.requires_grad
    assert pickle.loads(compact(whole.T)).stride() == whole.T.stride()
    assert pickle.loads(compact(torch.ones(1).expand(1_000_000))).stride() == (0,)


def gathered() -> int:
    world = World(rank=dist.get_rank(), size=2)
    collectives = Collectives(MeshPlace.line(world), device=torch.device("cpu"), timeout=60.0)
    found = collectives.gather(torch.zeros(100_000)[:8], what="a slice")
    collectives.close()
    return max(each.untyped_storage().nbytes() for each in found)


@pytest.mark.thorough
def test_what_is_gathered_is_a_view_alone(gloo: Pool) -> None:
    assert gloo.run(gathered, ranks=2) == [32, 32]
