"""Clusters: levels, the short form, JSON, and what is refused."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest

from stagewright.partition import Cluster, DeviceKind, Level


def test_short_form() -> None:
    cluster = Cluster.parse("4x8:nvlink=300GB/s@2us,net=100Gbit/s@1.5ms:80GiB")
    assert cluster.levels == (
        Level(name="nvlink", size=8, bandwidth=300e9, latency=2e-6),
        Level(name="net", size=4, bandwidth=12.5e9, latency=1.5e-3),
    )
    assert cluster.num_devices == 32
    assert cluster.used_kinds[0].memory_bytes == 80 * 2**30
    assert Cluster.parse("2:net=1e3MB/s").levels[0].bandwidth == 1e9


def test_the_way_over_a_level_leads_over_those_below() -> None:
    cluster = Cluster.from_levels([(2, 4.0), (2, 8.0), (2, 1.0)])
    assert cluster.path_bandwidths == (4.0, 4.0, 1.0)  # the way over the second level leads over the first


def test_json_there_and_back() -> None:
    cluster = Cluster(
        levels=(Level(name="a", size=2, bandwidth=1.0), Level(name="b", size=2, bandwidth=0.5, latency=0.1)),
        kinds=(DeviceKind(name="new", speed=2.0, memory_bytes=5.0), DeviceKind(name="old")),
        nodes=("new", "old"),
    )
    assert Cluster.from_json(cluster.to_json()) == cluster
    assert [kind.name for kind in cluster.used_kinds] == ["new", "old"]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("4x8", r"cluster '4x8': 0 links for 2 sizes: expected one a size"),
        ("4x8:net=12GB/s", r"1 links for 2 sizes"),
        ("4x0:a=1GB/s,b=1GB/s", r"sizes '4x0': expected 4x8:nvlink"),
        ("x:net=1GB/s", r"sizes 'x': expected 4x8:nvlink"),
        ("4:net=12", r"link 'net': bandwidth: '12': expected a number and a unit, such as 12GB/s"),
        ("4:net=12GB", r"'12GB': expected a number and a unit, such as 12GB/s"),
        ("4:net=12Gb/s", r"'12Gb/s': expected a number and a unit"),
        ("4:net=12XB/s", r"'12XB/s': expected a number and a unit"),
        ("4:net=0GB/s", r"bandwidth: 0.0: expected a finite number above 0"),
        ("4:net", r"link 'net': bandwidth: '': expected"),
        ("4:net=1GB/s@5", r"latency: '5': expected a number and a unit, such as 5us"),
        ("4:net=1GB/s:80", r"memory: '80': expected a number and a unit, such as 12GB,"),
    ],
)
def test_bad_short_form(text: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Cluster.parse(text)


GOOD = json.loads(Cluster.from_levels([(2, 1.0), (2, 0.5)]).to_json())


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"levels": []}, r"c\.json: cluster with levels=\(\)"),
        ({"levels": [{"name": "a", "size": 2}]}, r"c\.json: levels\[0\]: bandwidth: missing"),
        ({"levels": [{"name": "a", "size": 2, "bandwidth": 0}]}, r"levels\[0\]: bandwidth: 0: expected .* above 0"),
        ({"levels": [{"name": "a", "size": 1.5, "bandwidth": 1}]}, r"levels\[0\]: size: 1.5: expected a whole number"),
        ({"levels": [{"name": "a", "size": 2, "bandwidth": 1, "b": 1}]}, r"levels\[0\]: unknown field b"),
        ({"kinds": [{"name": "a"}, {"name": "a"}]}, r"device kinds a, a: expected unique names"),
        ({"kinds": [{"name": "a", "memory_bytes": -1}]}, r"kinds\[0\]: memory_bytes: -1: expected"),
        ({"nodes": ["device", "tpu"]}, r"c\.json: node 1: unknown device kind 'tpu': expected one of device"),
        ({"nodes": ["device"]}, r"1 kinds of nodes for 2 nodes"),
        ({"nodes": "device"}, r"nodes: 'device': expected the name of a kind for each node"),
        ({"rings": "tree"}, r"c\.json: rings: 'tree': expected one of levels, flat"),
        ({"version": 0}, r"c\.json: version: 0: expected 1"),
    ],
)
def test_bad_json(fields: dict, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Cluster.from_json(json.dumps({**GOOD, **fields}), source="c.json")


def test_bad_levels() -> None:
    with pytest.raises(ValueError, match=r"level 'link': bandwidth: 0\.0: expected a finite number above 0"):
        Cluster.from_levels([(4, 0.0)])
    with pytest.raises(ValueError, match="level 'link': size: 0: expected a whole number of at least 1"):
        Cluster.from_levels([(0, 1.0)])


def test_sums_may_be_slower_than_messages() -> None:
    levels = (Level(name="in", size=2, bandwidth=8.0, reduce_bandwidth=2.0), Level(name="out", size=2, bandwidth=4.0))
    cluster = Cluster(levels=levels)
    assert (cluster.path_bandwidths, cluster.ring_bandwidths) == ((8.0, 4.0), (2.0, 2.0))
    assert Cluster.from_json(cluster.to_json()) == cluster
    with pytest.raises(ValueError, match="level 'in': reduce_bandwidth: -1: expected a finite number above 0"):
        Level(name="in", size=2, bandwidth=8.0, reduce_bandwidth=-1)
    steps = replace(
        cluster, levels=(replace(levels[0], latency=1.0, reduce_latency=0.5), replace(levels[1], latency=0.2))
    )
    assert steps.ring_latencies == (0.5, 0.5)
    assert Cluster.from_json(steps.to_json()) == steps
    with pytest.raises(ValueError, match="level 'in': reduce_latency: -1: expected a finite number of at least 0"):
        Level(name="in", size=2, bandwidth=8.0, reduce_latency=-1)


def test_sums_in_one_ring() -> None:
    for text in ("2x2:in=1GB/s,out=1MB/s:flat", "2x2:in=1GB/s,out=1MB/s:4GB:flat"):
        flat = Cluster.parse(text)
        assert flat == replace(Cluster.parse(text.removesuffix(":flat")), rings="flat")
        assert Cluster.from_json(flat.to_json()) == flat
        assert flat.reordered((1, 0)).rings == "flat"
    assert Cluster.from_levels([(2, 1.0)]).rings == "levels"
    old = {name: value for name, value in GOOD.items() if name != "rings"}  # written before there was a choice
    assert Cluster.from_json(json.dumps(old)).rings == "levels"
    with pytest.raises(ValueError, match="rings='tree': expected one of levels, flat"):
        replace(flat, rings="tree")
    shared = replace(flat.levels[-1], partial_reduce=0.5)
    with pytest.raises(ValueError, match=r"partial_reduce=0\.5 with rings='flat': expected 1, since one ring comes"):
        replace(flat, levels=(*flat.levels[:-1], shared))
