"""Which way each node takes over a tensor group: divided, whole on each rank, or by samples (`Node.way`).

    way          what comes in      what goes out       weights      on top of F and B
    divided      as the profile of T ranks has it       1/T          its sums
    whole        whole              whole               whole
    samples      whole              whole               whole        its result put together; in B the gradient of its
                                                                     inputs, and that of its weights summed
    samples on   whole              1/T of the samples  whole        in B the last two

Behind "samples on" a node by samples takes its part as it is, and puts no gradient of inputs together. Convolutions
have few weights beside their activations, and linear layers many: the former run by samples, the latter divided
(Krizhevsky 2014, arXiv 1404.5997; SplitBrain, Lai et al. 2021, arXiv 2112.15317).
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Collection
from dataclasses import replace
from itertools import pairwise, product

from ..profile import ON, SAMPLES, Node, Profile

Priced = Callable[[Node], Node]


def by_layer(whole: Profile, divided: Profile, part: Profile | None, priced: Priced) -> tuple[Node, ...]:
    """The nodes over T ranks, each in the way with which all of them together take least, F and B of a microbatch.

    A dynamic program along the nodes' order. Parts of samples go on between neighbours in it alone, of which the first
    has no other taker and the second takes nothing else. Nodes that hand parts of their features on, as a column does,
    are divided together with those that take them; nodes with tied weights stay divided.

    Arguments:
        whole, part: of one rank, a microbatch and its T-th part; no part where nobody measured it, or T does not divide
            the microbatch: then none runs by samples.
        divided: of one of T ranks.
        priced: adds the seconds of a node's sums to its F and B.

    Raises ValueError for ways that a profile asks for and that do not go together.
    """
    ones, cut, parts = ({x.name: x for x in each.nodes} if each else {} for each in (whole, divided, part))
    order = [divided.nodes[at].name for at in divided.order()]
    makers, takers = defaultdict[str, list[str]](list), defaultdict[str, list[str]](list)
    for maker, taker in divided.edges or ():
        takers[maker].append(taker)
        makers[taker].append(maker)
    lines = {(a, b) for a, b in pairwise(order) if takers[a] == [b] and makers[b] == [a]}
    features = {(a, b) for a in order for b in takers[a] if 1.5 * cut[a].activation_bytes < ones[a].activation_bytes}
    stay = {name for names, _ in whole.tied for name in names} | {name for pair in features - lines for name in pair}
    best: dict[str, tuple[float, tuple[Node, ...]]] = {"": (0.0, ())}
    before = ""
    for name in order:
        is_cut = cut[name].parameter_bytes != ones[name].parameter_bytes or any(name in pair for pair in features)
        ways = _ways(ones[name].way, is_cut=is_cut, is_measured=name in parts, stays=name in stay)
        num_bytes = sum(ones[maker].activation_bytes for maker in makers[name])
        found: dict[str, tuple[float, tuple[Node, ...]]] = {}
        for (last, (seconds, nodes)), way in product(best.items(), ways):
            if last == ON and ((before, name) not in lines or way not in SAMPLES):
                continue
            if (before, name) in features and (last == "divided") != (way == "divided"):
                continue
            node = cut[name] if way == "divided" else ones[name]
            if way in SAMPLES:
                node = _of_samples(parts[name], node, way, priced, num_bytes=0.0 if last == ON else num_bytes)
            node = priced(replace(node, way=way))
            if (total := seconds + node.seconds) < found.get(way, (math.inf,))[0]:
                found[way] = total, (*nodes, node)
        best, before = found, name
        if not (found if name != order[-1] else found.keys() - {ON}):
            raise ValueError(
                f"node {name!r}: way={ones[name].way!r} over {divided.tensor} tensor ranks: expected 'any', or a way "
                f"that goes with those of its neighbours and tied weights; and by samples a multiple of "
                f"{divided.tensor} in a microbatch, and a profile of the {divided.tensor}-th part of it on one rank"
            )
    best.pop(ON, None)
    chosen = {node.name: node for node in min(best.values(), key=lambda each: each[0])[1]}
    return tuple(chosen[node.name] for node in divided.nodes)


def _ways(asked: str, *, is_cut: bool, is_measured: bool, stays: bool) -> Collection[str]:
    """Those that a node may take; of equally fast ones the first is taken."""
    whole, samples = ("whole",) * is_cut, SAMPLES * is_measured
    known = ("divided",) if stays else ("divided", *whole, *samples)
    wanted = {"any": known, "samples": SAMPLES}.get(
        asked, ("divided",) if asked == "whole" and not is_cut else (asked,)
    )
    return [way for way in known if way in wanted]


def _of_samples(part: Node, whole: Node, way: str, priced: Priced, *, num_bytes: float) -> Node:
    """A node by samples, with so many bytes of whole inputs whose gradients are put together; its weights' are summed
    one by one, at least as many as if all were as large as the largest."""
    weights, largest = part.parameter_bytes, part.largest_parameter_bytes
    number = math.ceil(weights / largest) if largest else float(weights > 0)
    joined = replace(part, forward_sums=0.5, forward_sum_bytes=whole.activation_bytes / 2)
    joining = priced(joined).forward_seconds - part.forward_seconds
    node = part if way == ON else joined
    return replace(
        node,
        activation_bytes=whole.activation_bytes,
        joining_seconds=joining if way == ON else 0.0,
        backward_sums=number + (0.5 if num_bytes else 0.0),
        backward_sum_bytes=weights + num_bytes / 2,
    )
