"""Which way each node takes over a tensor group, as in SplitBrain (Lai et al. 2021): convolutions by samples, say.

way          comes in   goes out                         weights   on top of F and B
divided      as the profile of T ranks has it                      its sums
whole        whole      whole                            whole
samples      whole      whole                            whole     results and gradients of inputs put together,
                                                                   gradients of weights summed
samples on   whole      1/T of the samples, to the next  whole     the last two
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from itertools import pairwise, product

from ..profile import ON, SAMPLES, Node, Profile

Priced = Callable[[Node], Node]


def by_layer(
    whole: Profile, divided: Profile, part: Profile | None, priced: Priced, *, chooses: bool = True
) -> tuple[Node, ...]:
    """The nodes over T ranks, each in the way with which all of them together take least, F and B of a microbatch.

    A dynamic program along the nodes' order. Parts of samples go on between neighbours in it alone, of which the first
    has no other taker and the second takes nothing else. Nodes that hand parts of their features on, as a column does,
    are divided together with those that take them; nodes with tied weights stay divided.

    Arguments:
        whole, part: of one rank, a microbatch and its T-th part; None: none runs by samples.
        divided: of one of T ranks.
        priced: adds the seconds of a node's sums to its F and B.
        chooses: or "any" way is "divided".

    Raises ValueError for ways that a profile asks for and that do not go together.
    """
    ones, cut, parts = ({x.name: x for x in each.nodes} if each else {} for each in (whole, divided, part))
    order, links = [divided.nodes[at].name for at in divided.order()], divided.edges or ()
    makers, takers = Counter(b for _, b in links), Counter(a for a, _ in links)
    lines = {(a, b) for a, b in {*pairwise(order)} & {*links} if takers[a] == makers[b] == 1}
    features = {(a, b) for a, b in links if 1.5 * cut[a].activation_bytes < ones[a].activation_bytes}
    stay = {name for names, _ in whole.tied for name in names} | {name for pair in features - lines for name in pair}
    best: dict[str, tuple[float, tuple[Node, ...]]] = {"": (0.0, ())}
    for before, name in pairwise(["", *order]):
        one = ones[name]
        is_cut = cut[name].parameter_bytes != one.parameter_bytes or any(name in pair for pair in features)
        known = ("divided", *("whole",) * is_cut, *SAMPLES * (name in parts)) if name not in stay else ("divided",)
        asked = {"any": known if chooses else ("divided",), "samples": SAMPLES}.get(one.way, (one.way,))
        num_bytes = sum(ones[maker].activation_bytes for maker, taker in links if taker == name)
        found: dict[str, tuple[float, tuple[Node, ...]]] = {}
        for (last, (seconds, nodes)), way in product(best.items(), (way for way in known if way in asked)):
            goes_on = (before, name) in lines and way in SAMPLES
            is_apart = (before, name) in features and (last == "divided") != (way == "divided")
            if is_apart or (last == ON and not goes_on) or (way == ON and name == order[-1]):
                continue
            node = cut[name] if way == "divided" else one
            if way in SAMPLES:
                node = _of_samples(parts[name], node, way, priced, num_bytes=0.0 if last == ON else num_bytes)
            node = priced(replace(node, way=way))
            if (total := seconds + node.seconds) < found.get(way, (math.inf,))[0]:
                found[way] = total, (*nodes, node)
        if not found:
            raise ValueError(
                f"node {name!r}: way={one.way!r} over T={divided.tensor} ranks: expected 'any', or what goes with its "
                f"neighbours and tied weights; and by samples a profile of 1/T of the microbatch on one rank"
            )
        best = found
    chosen = {node.name: node for node in min(best.values(), key=lambda each: each[0])[1]}
    return tuple(chosen[node.name] for node in divided.nodes)


def _of_samples(part: Node, whole: Node, way: str, priced: Priced, *, num_bytes: float) -> Node:
    """A node by samples, with so many bytes of whole inputs; gradients of its weights are summed one by one, of which
    there are at least as many as if all were as large as the largest."""
    joined = replace(part, forward_sums=0.5, forward_sum_bytes=whole.activation_bytes / 2)
    joining = priced(joined).forward_seconds - part.forward_seconds
    weights, largest = part.parameter_bytes, part.largest_parameter_bytes
    return replace(
        part if way == ON else joined,
        activation_bytes=whole.activation_bytes,
        joining_seconds=joining if way == ON else 0.0,
        backward_sums=(math.ceil(weights / largest) if largest else float(weights > 0)) + 0.5 * (num_bytes > 0),
        backward_sum_bytes=weights + num_bytes / 2,
    )
