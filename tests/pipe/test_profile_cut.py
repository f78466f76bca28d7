"""Profiles of models that are cut for a tensor group, and plans that choose over how many ranks."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from support.inside import GPT, GPTConfig, profile_cut
from torch import Tensor

from stagewright.partition import Cluster, Node, Profile, plan

B, T, D, V = 2, 8, 16, 32


def cross_entropy(logits: Tensor, target: Tensor) -> Tensor:
    return F.cross_entropy(logits.flatten(0, 1), target.flatten())


def test_one_member_of_a_group() -> None:
    """Bytes and sums against a count by hand; the model itself, and which units are equal, stay as they were."""
    model = GPT(GPTConfig(vocabulary=V, layers=3, width=D, heads=4, length=T))
    tokens = torch.zeros(B, T, dtype=torch.int64)
    before = {name: (id(p), p.shape) for name, p in model.named_parameters()}
    one, half = (
        profile_cut(model, (tokens,), tensor=tensor, target=tokens, loss_fn=cross_entropy, repetitions=1)
        for tensor in (1, 2)
    )
    assert {name: (id(p), p.shape) for name, p in model.named_parameters()} == before
    assert [node.name for node in half.nodes] == [node.name for node in one.nodes]
    assert "timed as blocks.0" in half.nodes[2].description
    assert (one.tensor, half.tensor) == (1, 2)
    divided, whole = 4 * D * D + 3 * D + 8 * D * D + 4 * D, 6 * D  # two biases, two norms: each member has them
    embedding, block, *_, head = half.nodes
    assert one.nodes[1].parameter_bytes == 4 * (divided + whole)
    assert block.parameter_bytes == 4 * (divided / 2 + whole)
    assert (embedding.parameter_bytes, head.parameter_bytes) == tuple(one.nodes[i].parameter_bytes for i in (0, -1))
    hidden = 4 * B * T * D
    for node in half.nodes:
        sums = (2, 2 * hidden, 2, 2 * hidden) if node.name.startswith("blocks") else (0, 0, 0, 0)
        assert (node.forward_sums, node.forward_sum_bytes, node.backward_sums, node.backward_sum_bytes) == sums
    assert block.stash_bytes < one.nodes[1].stash_bytes
    assert block.activation_bytes == one.nodes[1].activation_bytes
    assert Profile.from_json(half.to_json()) == half


def measured(tensor: int, *, sums: float = 2.0, num_bytes: float = 1e6, size: int = 1) -> Profile:
    """Four nodes of 1 ms forward and 2 ms backward, divided over the tensor ranks."""
    nodes = [
        Node(
            name=name,
            forward_seconds=1e-3 / tensor,
            backward_seconds=2e-3 / tensor,
            input_grad_seconds=1e-3 / tensor,
            weight_grad_seconds=1e-3 / tensor,
            parameter_bytes=8e6 / tensor,
            **({"forward_sums": sums, "forward_sum_bytes": num_bytes} if tensor > 1 else {}),
            **({"backward_sums": sums, "backward_sum_bytes": num_bytes} if tensor > 1 else {}),
        )
        for name in "abcd"
    ]
    return Profile(nodes=nodes, tensor=tensor, microbatch_size=size)


def test_refused_by_name() -> None:
    cluster = Cluster.parse("4:link=10GB/s")
    with pytest.raises(ValueError, match=r"no profile of microbatches of 2 over 2 tensor ranks, .* --tensor 2"):
        plan([measured(1), measured(1, size=2), measured(2)], cluster, global_batch=2)
    with pytest.raises(ValueError, match="a second profile of microbatches of 1 over 2 tensor ranks"):
        plan([measured(2), measured(2)], cluster, global_batch=2)
    with pytest.raises(ValueError, match="tensor_sizes=3: expected some of 1, 2"):
        plan([measured(1), measured(2)], cluster, global_batch=2, tensor_sizes=[3])
    with pytest.raises(ValueError, match="tensor: 0: expected a whole number"):
        Profile(nodes=measured(1).nodes, tensor=0)
