"""Sources of profiles: one, several measured ones, or formulas for any size."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from copy import copy
from dataclasses import replace
from functools import partial
from itertools import pairwise, product
from typing import Protocol, runtime_checkable

from ...schedules.wording import duration
from ..cluster import Cluster
from ..profile import Node, Profile
from ..strict import count
from ..topology import Topology, TransferTime
from .by_layer import by_layer

MAX_MICROBATCH = 64  # samples, where a source can profile any size


@runtime_checkable
class ProfileSource(Protocol):
    """Profiles by microbatch and tensor size; figures are of ONE of the tensor ranks, `activation_bytes` are whole."""

    def profile(self, *, microbatch_size: int, tensor: int) -> Profile:
        """Profile of `tensor` ranks that run a microbatch of so many samples together."""

    def tensor_sizes(self, limit: int) -> Sequence[int]:
        """Numbers of ranks over which a matrix may be split, `limit` at most."""


class MeasuredProfiles:
    """Profiles by microbatch size and by the ranks over which matrices were cut.

    Sums over those ranks are added to the seconds of F and B: by the bytes that the profiler counted and the links
    between neighbours of the cluster, those of the slowest group. Nodes have the ways that `by_layer` finds; not those
    of "any" way where `chooses` is False; None: nobody said, and it matters.

    Arguments:
        profiles: by microbatch size, or as they come.
        cluster: needed where there are cut ones.

    Raises ValueError for a size that contradicts its profile, for profiles of several models, devices or types, for
    two of the same sizes, and for a size that is missing beside others.
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
        self._ways = tuple(dict.fromkeys(tensor for _, tensor in self._profiles))
        for size, tensor in product(self.sizes, self._ways):
            if (size, tensor) not in self._profiles:
                raise ValueError(
                    f"no profile of microbatches of {size} over {tensor} tensor ranks, beside those of others: "
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
        for way in self._ways:
            _refuse_seconds("microbatches of", {size: took[size, way] for size in self.sizes})
        for size in self.sizes:
            _refuse_seconds("tensor ranks", {way: took[size, way] for way in self._ways})
        self._cluster = cluster
        is_open = any(node.way == "any" for each in self._profiles.values() for node in each.nodes)
        self.chooses: bool | None = None if is_open and len(self._ways) > 1 else False

    def decided(self, *, chooses: bool) -> MeasuredProfiles:
        found = copy(self)
        found.chooses = chooses
        return found

    def profile(self, *, microbatch_size: int, tensor: int) -> Profile:
        """The measured one, with the sums over the tensor ranks."""
        found = self._profiles[microbatch_size, tensor]
        if tensor == 1:
            return found
        assert self._cluster is not None
        rings = Topology(self._cluster).rings_of_groups(tensor)
        whole = self._profiles.get((microbatch_size, 1), found)
        part = None if microbatch_size % tensor else self._profiles.get((microbatch_size // tensor, 1))
        three = (whole.typical(), found.typical(), part and part.typical())
        nodes = by_layer(*three, partial(_with_sums, rings=rings), chooses=self.chooses is not False)
        return replace(found, nodes=nodes, step_seconds=None, slowdown=1.0)  # the whole was measured without the sums

    def tensor_sizes(self, limit: int) -> Sequence[int]:
        """Those that were measured, of groups within an innermost group of devices."""
        most = min(limit, self._cluster.levels[0].size if self._cluster is not None else 1)
        return tuple(tensor for tensor in self._ways if tensor == 1 or tensor <= most)


def _refuse_seconds(what: str, took: Mapping[int, float]) -> None:
    """ValueError where nothing takes any time, and where more work takes less than a tenth as long: noise alone, of
    tiny models on a busy machine, makes it look quicker by half. Seconds are of F + B of all ranks, by count,
    ascending."""
    for fewer, more in pairwise([next(iter(took)), *took]):
        if not took[more] or 10 * took[more] < took[fewer]:
            raise ValueError(
                f"profiles of {what} {fewer} and {more}, which take {duration(took[fewer])} and {duration(took[more])} "
                f"of F + B over all ranks: expected more than 0, and no less than a tenth for more; measure them on "
                f"one device, with nothing beside"
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


def difference(one: Profile, other: Profile) -> str | None:
    """Why these two are not of one model on one device in one type; None where they are."""
    for field in ("device", "dtype", "max_grad_norm"):
        a, b = getattr(one, field), getattr(other, field)
        if a != b:
            return f"{field} {a!r} and {b!r}"
    ours, theirs = ({node.name: node.parameter_bytes for node in each.nodes} for each in (one, other))
    for name in (*ours, *theirs):
        if name not in ours or name not in theirs:
            return f"node {name!r} is only in the {'first' if name in ours else 'second'}"
        if ours[name] != theirs[name] and one.tensor == other.tensor:
            return f"node {name!r} has {ours[name]:,.0f} and {theirs[name]:,.0f} bytes of parameters"
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


def microbatch_sizes(source: ProfileSource, global_batch: int, wanted: Sequence[int] | None) -> tuple[int, ...]:
    """Sizes to try: divisors of the batch that were measured (or, of a formula, up to MAX_MICROBATCH).

    Raises ValueError where there are none.
    """
    known = source.sizes if isinstance(source, MeasuredProfiles) else None
    if wanted is not None:
        sizes = tuple(dict.fromkeys(count("microbatch_sizes", size) for size in wanted))
        missing = [size for size in sizes if known is not None and size not in known]
        if missing:
            raise ValueError(
                f"microbatch_sizes: no profile of {missing[0]} samples: expected some of "
                f"{', '.join(map(str, known or ()))}, or one more profile"
            )
    else:
        sizes = known if known is not None else tuple(range(1, min(global_batch, MAX_MICROBATCH) + 1))
    fitting = tuple(sorted(size for size in sizes if global_batch % size == 0))
    if not fitting:
        least = min(sizes, default=1)
        raise ValueError(
            f"global_batch={global_batch} is no multiple of any microbatch size ({', '.join(map(str, sizes))}): "
            f"expected one such as {max(1, round(global_batch / least)) * least}, or a profile of another size"
        )
    return fitting
