"""What travels, or is kept, of a tensor that is a view: its own elements."""

from __future__ import annotations

import pickle

import torch
import torch.distributed as dist
from support.inside import compact
from support.pool import Pool

from stagewright.comm import Collectives, MeshPlace, World


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


def test_what_is_gathered_is_a_view_alone(gloo: Pool) -> None:
    assert gloo.run(gathered, ranks=2) == [32, 32]
