"""`stagewright profile --links` under torchrun on two hosts, in namespaces with a link of a known shape. Needs root."""

import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest
from support.inside import Network, Nodes, Shape, network, what_is_missing, why_no_wire

from stagewright.partition import Cluster

WHY_NOT = what_is_missing() or why_no_wire()
pytestmark = [pytest.mark.nightly, pytest.mark.skipif(bool(WHY_NOT), reason=WHY_NOT)]

GIGABIT = 1e9 / 8


def on_all(net: Network, ranks: Sequence[int], *words: str) -> list[tuple[int, str]]:
    """By host exit status and what torchrun and so many ranks said that ran `stagewright profile --links`."""
    started = []
    for node, (host, count) in enumerate(zip(net.hosts, ranks, strict=True)):
        torchrun = (sys.executable, "-P", "-m", "torch.distributed.run", "--nnodes", str(len(ranks)))
        here = ("--nproc-per-node", str(count), "--node-rank", str(node), "--master-addr", net.addresses[0])
        line = (*torchrun, *here, "-m", "stagewright", "profile", "--links", *words)
        started.append(host.start(line, output=subprocess.PIPE, environment={"OMP_NUM_THREADS": "1"}))
    said = [each.communicate(timeout=400)[0].decode(errors="replace") for each in started]
    return [(each.returncode, text) for each, text in zip(started, said, strict=True)]


def test_two_levels_are_found_as_they_were_made(tmp_path: Path) -> None:
    """A link so slow and long that what this machine does meanwhile is small beside it."""
    out, rate, latency = tmp_path / "cluster.json", GIGABIT / 4, 10e-3
    with network(Nodes(num_nodes=2, shape=Shape(bandwidth=rate, latency=latency)), has_netem=False) as net:
        ends = on_all(net, (2, 2), "--timeout", "150", "--out", str(out))
    assert [status for status, _ in ends] == [0, 0], ends
    found = Cluster.load(out)
    host, wire = found.levels
    assert found.rings == "flat"
    # A rank's part leaves when it has heard that the next rank waits: there and back in each step.
    assert 2 * latency <= wire.reduce_latency <= 4 * latency  # type: ignore[operator]
    assert (host.name, host.size, wire.name, wire.size) == ("host", 2, "network", 2)
    assert wire.bandwidth == pytest.approx(rate, rel=0.15)
    assert latency <= wire.latency + 2 * wire.message_seconds <= 2 * latency
    assert host.bandwidth > 2 * wire.bandwidth
    assert host.latency < latency / 2
    assert rate / 2 < wire.reduce_bandwidth <= rate  # type: ignore[operator]
