"""Sources of profiles: one, several measured ones, or formulas for any size."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from copy import copy
from dataclasses import replace
from functools import partial
from itertools import pairwise, product
from typing import Protocol, runtime_checkable

from ...schedules.wording import duration
from ..cluster import Cluster
from ..profile import ON, SAMPLES, Node, Profile
from ..stage_cost import Rounds
from ..strict import count, fail
from ..topology import Topology, TransferTime

Priced = Callable[[Node], Node]


@runtime_checkable
class ProfileSource(Protocol):
    """Profiles by microbatch and tensor size; figures are of ONE of the tensor ranks, `activation_bytes` are whole."""

    def profile(self, *, microbatch_size: int, tensor: int) -> Profile:
        """Profile of `tensor` ranks that run a microbatch of so many samples together."""

    def tensor_sizes(self, limit: int) -> Sequence[int]:
        """Numbers of ranks over which a matrix may be split, `limit` at most."""


@runtime_checkable
class SourceWithAlternatives(ProfileSource, Protocol):
    """A source that leaves something open, which a plan decides."""

    def alternatives(self) -> Iterable[tuple[str, ProfileSource]]:
        """The source with each of the choices, and the choice's name; "" where notes do not mention it."""


class MeasuredProfiles:
    """Profiles by microbatch size and by the ranks over which matrices were cut.

    Sums over those ranks are added to the seconds of F and B: by the bytes that the profiler counted and the links
    between neighbours of the cluster, those of the slowest group. Nodes have the splits that `choose_splits` finds; not
    those of "any" split where `chooses` is False; None: not said, and it matters.

    Arguments:
        profiles: by microbatch size, or as they come.
        cluster: needed where there are cut ones.

    Raises ValueError for a size that contradicts its profile, for profiles of several models, devices or types, for
    two of the same sizes, and for a size that is missing among others.
    """

    def __init__(self, profiles: Mapping[int, Profile] | Iterable[Profile], cluster: Cluster | None = None) -> None:
        pairs = list(profiles.items() if isinstance(profiles, Mapping) else _sized(list(profiles)))
        if not pairs:
            raise ValueError("no profile: expected a Profile, or a mapping from microbatch size to Profile")
        self._profiles: dict[tuple[int, int], Profile] = {}
        for size, profile in sorted(pairs, key=lambda pair: (pair[1].tensor, pair[0])):
            count("microbatch size", size)
            if profile.microbatch_size not in (None, size):
                raise ValueError(
                    f"a profile of microbatches of {profile.microbatch_size} under microbatch size {size}: expected "
                    f"the size that it was measured at"
                )
            if (size, profile.tensor) in self._profiles:
                raise ValueError(f"a second profile of microbatches of {size}{_over(profile)}: expected one a size")
            self._profiles[size, profile.tensor] = profile
        self.sizes = tuple(dict.fromkeys(size for size, _ in self._profiles))
        self._tensor_sizes = tuple(dict.fromkeys(tensor for _, tensor in self._profiles))
        for size, tensor in product(self.sizes, self._tensor_sizes):
            if (size, tensor) not in self._profiles:
                raise ValueError(
                    f"no profile of microbatches of {size} over {tensor} tensor ranks, among those of others: "
                    f"expected one (stagewright profile --microbatch {size} --tensor {tensor})"
                )
        first = next(iter(self._profiles.values()))
        for (size, _), profile in list(self._profiles.items())[1:]:
            differs = difference(first, profile)
            if differs is not None:
                raise ValueError(
                    f"profiles of microbatches of {self.sizes[0]}{_over(first)} and of {size}{_over(profile)}: "
                    f"{differs}: expected profiles of one model, device and type"
                )
        took = {sizes: sizes[1] * profile.parts_seconds for sizes, profile in self._profiles.items()}
        for tensor in self._tensor_sizes:
            _refuse_seconds("microbatches of", {size: took[size, tensor] for size in self.sizes})
        for size in self.sizes:
            _refuse_seconds("tensor ranks", {tensor: took[size, tensor] for tensor in self._tensor_sizes})
        self._cluster = cluster
        self._groups: Sequence[Sequence[int]] | None = None
        is_open = any(node.split == "any" for each in self._profiles.values() for node in each.nodes)
        self.chooses: bool | None = None if is_open and len(self._tensor_sizes) > 1 else False

    def alternatives(self) -> Iterator[tuple[str, ProfileSource]]:
        """Where splits of nodes are to be chosen, with and without: one with whole weights takes more memory, and
        longer to sum over replicas."""
        for chooses in (True, False) if self.chooses is None else (self.chooses,):
            yield "", self.decided(chooses=chooses)

    def decided(self, *, chooses: bool, groups: Sequence[Sequence[int]] | None = None) -> MeasuredProfiles:
        """A copy in which `chooses` is decided, with sums over these tensor groups; None: over all groups of
        neighbours, at the pace of the slowest."""
        found = copy(self)
        found.chooses, found._groups = chooses, groups
        return found

    def profile(self, *, microbatch_size: int, tensor: int) -> Profile:
        """The measured profile, with the seconds of its sums over the tensor ranks."""
        if tensor not in self._tensor_sizes:
            known = ", ".join(map(str, self._tensor_sizes))
            fail("tensor", tensor, f"one of the profiles', {known}, or one more profile")
        found = self._profiles[microbatch_size, tensor]
        if tensor == 1:
            return found
        assert self._cluster is not None
        topology = Topology(self._cluster)
        rings = [topology.ring(group) for group in self._groups or topology.groups(tensor)]
        whole = self._profiles.get((microbatch_size, 1), found)
        part = None if microbatch_size % tensor else self._profiles.get((microbatch_size // tensor, 1))
        three = (whole.typical(), found.typical(), part and part.typical())
        nodes = choose_splits(*three, partial(_with_sums, rings=rings), chooses=self.chooses is not False)
        return replace(found, nodes=nodes, step_seconds=None, slowdown=1.0)  # the whole was measured without the sums

    def tensor_sizes(self, limit: int) -> Sequence[int]:
        """Measured tensor sizes, at most `limit`, whose tensor groups fit into an innermost group of devices."""
        most = min(limit, self._cluster.levels[0].size if self._cluster is not None else 1)
        return tuple(tensor for tensor in self._tensor_sizes if tensor == 1 or tensor <= most)


def _refuse_seconds(what: str, took: Mapping[int, float]) -> None:
    """ValueError where nothing takes any time, and where more work takes less than a tenth as long: noise alone, of
    tiny models on a busy machine, makes it look quicker by half. Seconds are of F + B of all ranks, by count,
    ascending."""
    for fewer, more in pairwise([next(iter(took)), *took]):
        if not took[more] or 10 * took[more] < took[fewer]:
            raise ValueError(
                f"profiles of {what} {fewer} and {more}, which take {duration(took[fewer])} and {duration(took[more])} "
                f"of F + B over all ranks: expected more than 0, and no less than a tenth for more; measure them on "
                f"one device, with nothing else"
            )


def _sized(profiles: Sequence[Profile]) -> Iterable[tuple[int, Profile]]:
    for profile in profiles:
        if profile.microbatch_size is None and len(profiles) > 1:
            raise ValueError("microbatch_size: missing: expected it where there are several profiles")
        yield profile.microbatch_size or 1, profile


def _over(profile: Profile) -> str:
    return f" over {profile.tensor} tensor ranks" if profile.tensor > 1 else ""


def _with_sums(node: Node, rings: Sequence[TransferTime]) -> Node:
    forward, backward = (
        max(number * ring.seconds(num_bytes / number) if number else num_bytes * ring.seconds_a_byte for ring in rings)
        for number, num_bytes in (
            (node.forward_sums, node.forward_sum_bytes),
            (node.backward_sums, node.backward_sum_bytes),
        )
    )
    return replace(
        node,
        forward_seconds=node.forward_seconds + forward,
        backward_seconds=node.backward_seconds + backward,
        input_grad_seconds=node.input_grad_seconds + (backward if node.input_grad_seconds else 0.0),
    )


def choose_splits(
    whole: Profile, divided: Profile, part: Profile | None, priced: Priced, *, chooses: bool = True
) -> tuple[Node, ...]:
    """The nodes over T ranks, each with the split with which all of them together take least, F and B of a microbatch.

        split        comes in   goes out                         weights   on top of F and B
        divided      as the profile of T ranks has it                      its sums
        whole        whole      whole                            whole
        samples      whole      whole                            whole     results and gradients of inputs put together,
                                                                           gradients of weights summed
        samples on   whole      1/T of the samples, to the next  whole     the last two

    Convolutions run by samples next to divided linear layers, say, as in SplitBrain (Lai et al. 2021).
    A dynamic program along the nodes' order. Parts of samples go on between neighbours in it alone, of which the first
    has no other taker and the second takes nothing else. Nodes that hand parts of their features on, as a column does,
    are divided together with those that take them; nodes with tied weights stay divided.

    Arguments:
        whole, part: of one rank, a microbatch and its T-th part; None: none runs by samples.
        divided: of one of T ranks.
        priced: adds the seconds of a node's sums to its F and B.
        chooses: or "any" split is "divided".

    Raises ValueError for splits that a profile asks for and that do not go together.
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
        asked = {"any": known if chooses else ("divided",), "samples": SAMPLES}.get(one.split, (one.split,))
        num_bytes = sum(ones[maker].activation_bytes for maker, taker in links if taker == name)
        found: dict[str, tuple[float, tuple[Node, ...]]] = {}
        for (last, (seconds, nodes)), split in product(best.items(), (split for split in known if split in asked)):
            goes_on = (before, name) in lines and split in SAMPLES
            is_apart = (before, name) in features and (last == "divided") != (split == "divided")
            if is_apart or (last == ON and not goes_on) or (split == ON and name == order[-1]):
                continue
            node = cut[name] if split == "divided" else one
            if split in SAMPLES:
                node = _of_samples(parts[name], node, split, priced, num_bytes=0.0 if last == ON else num_bytes)
            node = priced(replace(node, split=split))
            if (total := seconds + node.seconds) < found.get(split, (math.inf,))[0]:
                found[split] = total, (*nodes, node)
        if not found:
            raise ValueError(
                f"node {name!r}: split={one.split!r} over T={divided.tensor} ranks: expected 'any', or what goes with "
                f"its neighbours and tied weights; and by samples a profile of 1/T of the microbatch on one rank"
            )
        best = found
    chosen = {node.name: node for node in min(best.values(), key=lambda each: each[0])[1]}
    return tuple(chosen[node.name] for node in divided.nodes)


def _of_samples(part: Node, whole: Node, split: str, priced: Priced, *, num_bytes: float) -> Node:
    """A node by samples, with so many bytes of whole inputs; gradients of its weights are summed one by one, of which
    there are at least as many as if all were as large as the largest."""
    joined = replace(part, forward_sums=0.5, forward_sum_bytes=whole.activation_bytes / 2)
    joining = priced(joined).forward_seconds - part.forward_seconds
    weights, largest = part.parameter_bytes, part.largest_parameter_bytes
    return replace(
        part if split == ON else joined,
        activation_bytes=whole.activation_bytes,
        joining_seconds=joining if split == ON else 0.0,
        backward_sums=(math.ceil(weights / largest) if largest else float(weights > 0)) + 0.5 * (num_bytes > 0),
        backward_sum_bytes=weights + num_bytes / 2,
    )


def difference(one: Profile, other: Profile) -> str | None:
    """Why these two are not of one model on one device in one type; None where they are."""
    for field in ("device", "dtype", "max_grad_norm", *Rounds._fields):
        a, b = getattr(one, field), getattr(other, field)
        if a != b:
            return f"{field} {a!r} and {b!r}"
    ours, theirs = ({node.name: (node.parameter_bytes, node.split) for node in each.nodes} for each in (one, other))
    for name in (*ours, *theirs):
        if name not in ours or name not in theirs:
            return f"node {name!r} is only in the {'first' if name in ours else 'second'}"
        (a, split), (b, other_split) = ours[name], theirs[name]
        if a != b and split == other_split and one.tensor == other.tensor:
            return f"node {name!r} has {a:,.0f} and {b:,.0f} bytes of parameters"
    edges, others = (set(_edges(each)) for each in (one, other))
    for src, dst in sorted(edges ^ others):
        return f"edge {src} -> {dst} is only in the {'first' if (src, dst) in edges else 'second'}"
    return None


def _edges(profile: Profile) -> Iterable[tuple[str, str]]:
    return pairwise(node.name for node in profile.nodes) if profile.edges is None else profile.edges


def as_source(
    source: Profile | Mapping[int, Profile] | Sequence[Profile] | ProfileSource, cluster: Cluster | None = None
) -> ProfileSource:
    """Any of these as a source. A profile that does not say its microbatch size counts as of one sample."""
    if isinstance(source, Profile):
        return MeasuredProfiles([source], cluster)
    if isinstance(source, Mapping | list | tuple):
        return MeasuredProfiles(source, cluster)
    if isinstance(source, ProfileSource):
        return source
    raise ValueError(
        f"source of type {type(source).__name__}: expected a Profile, several, a mapping from microbatch size to "
        f"Profile, or an object with profile() and tensor_sizes()"
    )
