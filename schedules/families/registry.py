"""Schedules by name: the built-in families, and those that users and other packages add."""

from __future__ import annotations

import difflib
import inspect
import re
from collections.abc import Callable, Collection, Mapping
from contextlib import suppress
from dataclasses import replace
from functools import cache, wraps
from importlib import import_module
from pkgutil import iter_modules
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

from .. import families as builders
from ..custom.user_code import UserCodeError, parameters_of
from ..custom.user_schedules import UserSchedule, is_own, sizes_of
from ..ir import Schedule, ScheduleError
from ..kinds import at_least
from ..placement import FAMILY_PLACEMENTS
from ..wording import count
from .family import Family

if TYPE_CHECKING:
    from importlib import metadata

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
_ADDED: dict[str, Family] = {}  # by `register` and entry points: named when asked for, tried by no search
_GROUP = "stagewright.schedules"
_TRIED = ((2, 4), (4, 8), (3, 6), (2, 2), (1, 1), (8, 16))  # P, M


def register(name: str, function: Callable[..., Any]) -> None:
    """Add a schedule by name: for `build`, PipelineModule(schedule=name), the commands, and plans that ask for it.

    A package adds one without a call, by an entry point of the group "stagewright.schedules" in its pyproject.toml:
    `zigzag = "package.module:function"`.

    Arguments:
        name: in any case; one that no other schedule has.
        function: called with num_ranks, num_microbatches and its other parameters by name (num_chunks, num_slices,
            options of its own); returns a Schedule, Constraints, or a function of an action. It is called once now, for
            a few ranks. Plans rely on what it makes then: the stages of ranks, split backwards, the weight rule; a size
            for which it makes another kind is a ScheduleError.

    Raises ValueError for a name that is taken and for what makes no schedule.
    """
    key, known = _key(name), _ADDED.get(_key(name))
    if not re.fullmatch(r"[a-z0-9][a-z0-9.-]*", key) or is_own(key) or key == "auto":
        raise ValueError(f"register({name!r}): expected a name of letters, digits and hyphens, such as 'zigzag'")
    if key in _NAMES or key in _offered() or (known is not None and not _is_again(known.build, function)):
        raise ValueError(
            f"register({name!r}): there is a schedule of this name: expected another one, such as 'my-{key}'"
        )
    _ADDED[key] = _outside(key, function)


def _is_again(one: Any, other: Any) -> bool:
    """Whether a cell of a notebook, or a module, was run again."""
    names = [(getattr(each, "__module__", None), getattr(each, "__qualname__", "<lambda>")) for each in (one, other)]
    return getattr(one, "__wrapped__", None) is other or (names[0] == names[1] and "<" not in names[0][1])


def _outside(name: str, function: Callable[..., Any]) -> Family:
    parameters = parameters_of(function) if callable(function) else None
    named = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)
    takes = [each.name for each in parameters or () if each.kind in named]
    if parameters is None or len(takes) < len(parameters) or takes[:1] == ["action"]:
        raise ValueError(
            f"schedule {name!r}: {function!r:.60}: expected a function such as `def zigzag(num_ranks, "
            f"num_microbatches)`, with options by name, that returns a Schedule or Constraints"
        )
    own = UserSchedule(words=name, option="schedule=", what=function)
    made = _tried(own, {option: 2 for option in ("num_chunks", "num_slices") if option in takes})
    num_chunks = max(map(len, made.placement))
    kind = next((kind for kind in FAMILY_PLACEMENTS if _stands(made, kind)), "of its own")

    @wraps(function)
    def build(**asked: Any) -> Schedule:
        try:
            schedule = replace(own.build(asked), name=name)
        except UserCodeError as error:
            if isinstance(error.__cause__, ValueError):  # sizes that do not fit, of which searches try others
                raise ValueError(f"schedule {name!r} for {asked}: {error.__cause__}") from error.__cause__
            raise
        sizes = sizes_of(schedule)
        wrong = [
            f"{size}={sizes[size]}, not {asked[size]}" for size in sizes if asked.get(size, sizes[size]) != sizes[size]
        ]
        if "num_chunks" not in takes and sizes["num_chunks"] != num_chunks:
            wrong.append(f"num_chunks={sizes['num_chunks']}, not {num_chunks}")
        if kind in FAMILY_PLACEMENTS and not _stands(schedule, kind):
            wrong.append(f"the stages {schedule.placement!r:.60} on its ranks, not {kind}")
        if schedule.weight_rule != made.weight_rule or (schedule.split_stages and not made.split_stages):
            wrong.append("another weight rule, or split backwards")
        if wrong:
            raise ScheduleError(
                f"schedule {name!r} for {asked} has {'; '.join(wrong)}: expected what was asked for, and for all sizes "
                f"the same kind as for the first that was tried"
            )
        return schedule

    return Family(
        name=name,
        build=build,
        weight_rules=(made.weight_rule,),
        num_chunks=num_chunks,
        placement=kind,
        splits_backward=bool(made.split_stages),
        weight_copies=len(made.owners[0]),
    )


def _tried(own: UserSchedule, options: Mapping[str, int]) -> Schedule:
    """One of the first sizes that it takes; the error of the last where it takes none."""
    for num_ranks, num_microbatches in _TRIED[:-1]:
        with suppress(ValueError, UserCodeError):
            return own.build({"num_ranks": num_ranks, "num_microbatches": num_microbatches, **options})
    num_ranks, num_microbatches = _TRIED[-1]
    return own.build({"num_ranks": num_ranks, "num_microbatches": num_microbatches, **options})


def _stands(schedule: Schedule, kind: str) -> bool:
    sizes = sizes_of(schedule)
    return FAMILY_PLACEMENTS[kind](num_ranks=sizes["num_ranks"], num_chunks=sizes["num_chunks"]) == schedule.placement


def _key(name: object) -> str:
    return name.strip().lower().replace("_", "-") if isinstance(name, str) else ""


@cache
def _offered() -> Mapping[str, list[metadata.EntryPoint]]:
    """Schedules of installed packages, by name; looked for when a name is not known without them."""
    from importlib import metadata

    offered: dict[str, list[metadata.EntryPoint]] = {}
    for each in metadata.entry_points(group=_GROUP):
        offered.setdefault(_key(each.name), []).append(each)
    return offered


@cache
def _of_package(key: str) -> Family:
    """The schedule that an installed package offers under this name; ValueError where several do, UserCodeError where
    its module cannot be imported."""
    offers = _offered()[key]
    packages = [each.dist.name if each.dist else "a package" for each in offers]
    whose = ", ".join(f"{each.value} of {package}" for each, package in zip(offers, packages, strict=True))
    if len(offers) > 1:
        raise ValueError(
            f"schedule {key!r}: the entry point {whose} has the name of another schedule: expected another name in the "
            f'group "{_GROUP}" of its pyproject.toml'
        )
    try:
        function = offers[0].load()
    except Exception as error:
        raise UserCodeError(
            f"schedule {key!r}: the entry point {whose} cannot be loaded ({type(error).__name__}: {error}): expected a "
            f"function that can be imported; install what it needs, or uninstall {packages[0]}"
        ) from error
    return _outside(key, function)


def family(name: str, *, listed: Collection[str] = ()) -> Family:
    """The family of this name (any case, torch's class names too); ValueError if there is none. `listed`: those of
    `FAMILIES` that its message offers; empty: all.

    >>> family("ScheduleInterleaved1F1B").name
    'interleaved'
    """
    if isinstance(name, str) and name in FAMILIES:
        return FAMILIES[name]
    key = _key(name)
    known = FAMILIES.get(_NAMES.get(key, ""), _ADDED.get(key))
    if known is None and key in _offered():
        return _of_package(key)
    if known is None:
        expected = (*(listed or FAMILIES), *_ADDED, *_offered())
        names = {key: name for key, name in (_NAMES | {added: added for added in expected}).items() if name in expected}
        near = difflib.get_close_matches(key, names, n=1, cutoff=0.5)
        hint = f"; did you mean {names[near[0]]!r}?" if near else ""
        raise ValueError(f"unknown schedule {name!r}: expected one of {', '.join(expected)}{hint}")
    return known


def canonical_name(name: str) -> str:
    """The registered name of an alias; ValueError if there is none.

    >>> canonical_name("DAPPLE")
    '1f1b'
    """
    return family(name).name


def build(
    name: str | Callable[..., Any],
    *,
    num_ranks: int,
    num_microbatches: int,
    num_chunks: int | None = None,
    **options: object,
) -> Schedule:
    """Build a schedule by name.

    Arguments:
        name: of a family (`FAMILIES`) or an alias, in any case, or one of `register`; or a function
            as `register` takes it.
        num_ranks: P >= 1.
        num_microbatches: M >= 1.
        num_chunks: V >= 1, chunks per rank; only schedules that interleave take any number (default 2 there).
        options: of the builder, see its docstring. Only schedules over slices of the sequence take more than 1 for
            `num_slices` (default 2 there).

    Raises ValueError for an unknown name or option and for sizes that do not fit.

    >>> print(build("1f1b", num_ranks=2, num_microbatches=3).programs[0])
    (0F0, 0F1, 0B0, 0F2, 0B1, 0B2)
    """
    chosen = family(name) if isinstance(name, str) else _outside(getattr(name, "__name__", "function"), name)
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
