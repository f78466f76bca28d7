"""All built-in schedules, by name."""

from __future__ import annotations

import difflib
from collections.abc import Mapping
from importlib import import_module
from pkgutil import iter_modules
from types import MappingProxyType

from .. import families as builders
from ..ir import Schedule
from ..kinds import at_least
from ..wording import count
from .family import Family

_IN_ORDER = (
    "gpipe 1f1b eager-1f1b interleaved looped-bfs pipedream 2bw paci zb-h1 zb-h2 zb-1p zb-2p interleaved-zb gis "
    "terapipe seq1f1b seq-zb-h1 slimpipe chimera dualpipe dualpipe-v hanayo zb-v v-half v-min"
)


def _found() -> dict[str, Family]:
    """The families in the modules of `families`; those not in `_IN_ORDER` come last."""
    modules = (import_module(f".{each.name}", builders.__name__) for each in iter_modules(builders.__path__))
    families = [each for module in modules for each in vars(module).values() if isinstance(each, Family)]
    place = {name: at for at, name in enumerate(_IN_ORDER.split())}
    return {each.name: each for each in sorted(families, key=lambda each: place.get(each.name, len(place)))}


FAMILIES: Mapping[str, Family] = MappingProxyType(_found())

_NAMES = {name: each.name for each in FAMILIES.values() for name in (each.name, *each.aliases)}


def family(name: str) -> Family:
    """The family of this name (any case, torch's class names too); ValueError if there is none.

    >>> family("ScheduleInterleaved1F1B").name
    'interleaved'
    """
    key = name.strip().lower().replace("_", "-") if isinstance(name, str) else ""
    if key not in _NAMES:
        near = difflib.get_close_matches(key, _NAMES, n=1, cutoff=0.5)
        hint = f"; did you mean {_NAMES[near[0]]!r}?" if near else ""
        raise ValueError(f"unknown schedule {name!r}: expected one of {', '.join(FAMILIES)}{hint}")
    return FAMILIES[_NAMES[key]]


def canonical_name(name: str) -> str:
    """The registered name of an alias; ValueError if there is none.

    >>> canonical_name("DAPPLE")
    '1f1b'
    """
    return family(name).name


def build(
    name: str, *, num_ranks: int, num_microbatches: int, num_chunks: int | None = None, **options: object
) -> Schedule:
    """Build a schedule by name.

    Arguments:
        name: of a family (`FAMILIES`) or an alias, in any case.
        num_ranks: P >= 1.
        num_microbatches: M >= 1.
        num_chunks: V >= 1, chunks per rank; only schedules that interleave take any number (default 2 there).
        options: of the builder, see its docstring. Only schedules over slices of the sequence take more than 1 for
            `num_slices` (default 2 there).

    Raises ValueError for an unknown name or option and for sizes that do not fit.

    >>> print(build("1f1b", num_ranks=2, num_microbatches=3).programs[0])
    (0F0, 0F1, 0B0, 0F2, 0B1, 0B2)
    """
    chosen = family(name)
    whole = at_least(1)
    sizes, num_slices = {"num_ranks": num_ranks, "num_microbatches": num_microbatches}, options.pop("num_slices", None)
    for option, value in {**sizes, "num_chunks": num_chunks, "num_slices": num_slices}.items():
        if whole.read(value) is None and (value is not None or option in sizes):
            raise ValueError(f"{option}={value!r} for schedule {chosen.name!r}: expected {whole.expected}")
    sizes = {option: int(value) for option, value in sizes.items()}  # numpy's, too
    if num_chunks is not None and chosen.takes_chunks:
        options["num_chunks"] = int(num_chunks)
    elif num_chunks not in (None, chosen.num_chunks):
        looping = ", ".join(each.name for each in FAMILIES.values() if each.takes_chunks)
        stages = "one stage" if chosen.num_chunks == 1 else count(chosen.num_chunks, "stage")
        raise ValueError(
            f"num_chunks={num_chunks} for schedule {chosen.name!r}: it has {stages} per rank; "
            f"expected {chosen.num_chunks}, or a schedule that interleaves ({looping})"
        )
    if num_slices is not None and chosen.takes_slices:
        options["num_slices"] = whole.read(num_slices)
    elif num_slices not in (None, 1):
        slicing = ", ".join(each.name for each in FAMILIES.values() if each.takes_slices)
        raise ValueError(
            f"num_slices={num_slices} for schedule {chosen.name!r}: it takes microbatches whole; "
            f"expected 1, or a schedule over slices of the sequence ({slicing})"
        )
    unknown = sorted(set(options) - set(chosen.options))
    if unknown:
        raise ValueError(
            f"schedule {chosen.name!r} has no option {', '.join(unknown)}: "
            f"its options are {', '.join(chosen.options) or 'none'}"
        )
    if "replicas" in options and not isinstance(options["replicas"], list | tuple | None):
        raise ValueError(f"replicas={options['replicas']!r}: expected one count per stage, such as (2, 1)")
    return chosen.build(**sizes, **options)
