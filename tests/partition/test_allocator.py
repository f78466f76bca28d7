"""Memory that a device certainly holds beside tensors."""

from __future__ import annotations

from typing import Any

import pytest
from support.inside import context_bytes

from stagewright.partition import Cluster, Node, Plan, Profile, plan


@pytest.mark.parametrize(
    ("device", "num_bytes"),
    [("cpu", 0), ("cuda:0", 300e6), ("NVIDIA L4", 300e6), ("A100-80GB", 300e6), ("device", 0), ("tpu", 0)],
)
def test_a_gpu_holds_its_context(device: str, num_bytes: float) -> None:
    assert context_bytes(device) == num_bytes


def planned(device: str, memory: str, **options: Any) -> Plan:
    nodes = [
        Node(name=name, forward_seconds=1, backward_seconds=2, parameter_bytes=1e8, stash_bytes=1e8, activation_bytes=8)
        for name in "ab"
    ]
    profile = Profile(nodes=nodes, device=device)
    cluster = Cluster.parse(f"2:net=1GB/s:{memory}")
    options |= {"pipeline_sizes": (2,), "data_sizes": (1,)}
    return plan(profile, cluster, global_batch=4, **options)


def test_a_plan_leaves_what_is_certain_to_be_kept_beside_tensors() -> None:
    """To the byte: CUDA's context; malloc keeps nothing for certain."""
    only: dict[str, Any] = {"schedules": "1f1b", "recompute": "none"}
    tensors = max(planned("cuda", "10GB", **only).memory_bytes.values())
    for device, beside in (("cuda", 300e6), ("cpu", 0.0), ("device", 0.0)):
        fits = planned(device, f"{(tensors + beside) / 1e9}GB", **only)
        assert fits.memory_limits[0] == pytest.approx(tensors + beside)  # all of the device's
        with pytest.raises(ValueError, match=r"nothing fits the memory: .* bytes") as error:
            planned(device, f"{(tensors + beside - 10) / 1e9}GB", **only)
        assert ("(300,000,000 of them besides tensors, for the device's context)" in str(error.value)) == (beside > 0)
