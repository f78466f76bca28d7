"""Demands of a case on ranks on the back end, by keys with a meaning of their own."""

from __future__ import annotations

from dataclasses import replace

from ...partition.strict import fail
from ..backends.records import Nodes, Shape
from .case import Case

NODE_KEYS = ("ranks", "nodes", "bandwidth", "latency", "sites", "site_bandwidth", "site_latency", "cpu_share")


def wanted(case: Case) -> Nodes:
    """Nodes of a case: `ranks` in all (1) on `nodes` (1), and the shape of links between them.

    Of the shape: `bandwidth` and `site_bandwidth` ("1gbit"), `latency` and `site_latency` ("1ms"), `sites` (the site of
    each node, [[0, 0, 1, 1]]), `cpu_share`.

    Raises ValueError for a value that is none of these, or ranks that cannot be spread evenly over the nodes.

    >>> wanted(Case.of({"ranks": 4, "nodes": 2, "bandwidth": "1gbit"})).ranks_per_node
    2
    """
    ranks, nodes = case.count("ranks", 1), case.count("nodes", 1)
    if ranks % nodes:
        fail(f"case {case}: ranks", ranks, f"a multiple of its {nodes} nodes")
    sites = case.get("sites", ())
    if not isinstance(sites, tuple) or (sites and len(sites) != nodes):
        fail(
            f"case {case}: sites", sites, f"the site of each of its {nodes} nodes, in a list of its own: [[0, 0, 1, 1]]"
        )
    shape = Shape(
        bandwidth=case.bandwidth("bandwidth") if "bandwidth" in case else None,
        latency=case.seconds("latency") if "latency" in case else 0.0,
        sites=sites,
        site_latency=case.seconds("site_latency") if "site_latency" in case else 0.0,
        site_bandwidth=case.bandwidth("site_bandwidth") if "site_bandwidth" in case else None,
    )
    if "cpu_share" in case:
        shape = replace(shape, cpu_share=case.number("cpu_share"))
    return Nodes(num_nodes=nodes, ranks_per_node=ranks // nodes, shape=shape)
