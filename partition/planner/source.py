"""Sources of profiles: one, several measured ones, or formulas for any size."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from itertools import pairwise
from typing import Protocol, runtime_checkable

from ..profile import Profile
from ..strict import count

MAX_MICROBATCH = 64  # samples, where a source can profile any size


@runtime_checkable
class ProfileSource(Protocol):
    """Profiles by microbatch and tensor size; figures are of ONE of the tensor ranks, `activation_bytes` are whole."""

    def profile(self, *, microbatch_size: int, tensor: int) -> Profile:
        """Profile of `tensor` ranks that run a microbatch of so many samples together."""

    def tensor_sizes(self, limit: int) -> Sequence[int]:
        """Numbers of ranks over which a matrix may be split, `limit` at most."""


class MeasuredProfiles:
    """Profiles by microbatch size; tensors are never split.

    Raises ValueError for a size that contradicts its profile, and for profiles of several models, devices or types.
    """

    def __init__(self, profiles: Mapping[int, Profile]) -> None:
        if not profiles:
            raise ValueError("no profile: expected a Profile, or a mapping from microbatch size to Profile")
        for size, profile in profiles.items():
            count("microbatch size", size)
            if profile.microbatch_size not in (None, size):
                raise ValueError(
                    f"a profile of microbatches of {profile.microbatch_size} under microbatch size {size}: expected "
                    f"the size that it was measured at"
                )
        self.profiles = dict(sorted(profiles.items()))
        first = next(iter(self.profiles))
        for size in list(self.profiles)[1:]:
            differs = difference(self.profiles[first], self.profiles[size])
            if differs is not None:
                raise ValueError(
                    f"profiles of microbatches of {first} and of {size}: {differs}: expected profiles of one model, "
                    f"device and type"
                )

    def profile(self, *, microbatch_size: int, tensor: int) -> Profile:
        """The measured one."""
        assert tensor == 1
        return self.profiles[microbatch_size]

    def tensor_sizes(self, limit: int) -> Sequence[int]:
        """1 alone."""
        return (1,)


def difference(one: Profile, other: Profile) -> str | None:
    """Why these two are not of one model on one device in one type; None where they are."""
    for field in ("device", "dtype"):
        a, b = getattr(one, field), getattr(other, field)
        if a != b:
            return f"{field} {a!r} and {b!r}"
    ours, theirs = ({node.name: node.parameter_bytes for node in each.nodes} for each in (one, other))
    for name in (*ours, *theirs):
        if name not in ours or name not in theirs:
            return f"node {name!r} is only in the {'first' if name in ours else 'second'}"
        if ours[name] != theirs[name]:
            return f"node {name!r} has {ours[name]:,.0f} and {theirs[name]:,.0f} bytes of parameters"
    edges, others = (set(_edges(each)) for each in (one, other))
    for src, dst in sorted(edges ^ others):
        return f"edge {src} -> {dst} is only in the {'first' if (src, dst) in edges else 'second'}"
    return None


def _edges(profile: Profile) -> Iterable[tuple[str, str]]:
    return pairwise(node.name for node in profile.nodes) if profile.edges is None else profile.edges


def as_source(source: Profile | Mapping[int, Profile] | ProfileSource) -> ProfileSource:
    """Any of the three as a source. A profile that does not say its microbatch size counts as of one sample."""
    if isinstance(source, Profile):
        return MeasuredProfiles({source.microbatch_size or 1: source})
    if isinstance(source, Mapping):
        return MeasuredProfiles(source)
    if isinstance(source, ProfileSource):
        return source
    raise ValueError(
        f"source of type {type(source).__name__}: expected a Profile, a mapping from microbatch size to Profile, or an "
        f"object with profile() and tensor_sizes()"
    )


def microbatch_sizes(source: ProfileSource, global_batch: int, wanted: Sequence[int] | None) -> tuple[int, ...]:
    """Sizes to try: divisors of the batch that were measured (or, of a formula, up to MAX_MICROBATCH).

    Raises ValueError where there are none.
    """
    known = tuple(source.profiles) if isinstance(source, MeasuredProfiles) else None
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
