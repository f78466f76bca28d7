"""All built-in schedules, by name."""

from __future__ import annotations

import difflib
import inspect
from collections.abc import Callable

from .builders.gpipe import gpipe
from .builders.interleaved import interleaved
from .builders.looped_bfs import looped_bfs
from .builders.one_f_one_b import one_f_one_b
from .builders.pipedream import pipedream, two_bw
from .ir import Schedule

BUILDERS: dict[str, Callable[..., Schedule]] = {
    "gpipe": gpipe,
    "1f1b": one_f_one_b,
    "interleaved": interleaved,
    "looped-bfs": looped_bfs,
    "pipedream": pipedream,
    "2bw": two_bw,
}

ALIASES = {
    "schedulegpipe": "gpipe",
    "schedule1f1b": "1f1b",
    "pipedream-flush": "1f1b",
    "dapple": "1f1b",
    "interleaved1f1b": "interleaved",
    "interleaved-1f1b": "interleaved",
    "scheduleinterleaved1f1b": "interleaved",
    "pipedream-2bw": "2bw",
    "loopedbfs": "looped-bfs",
    "scheduleloopedbfs": "looped-bfs",
}


def canonical_name(name: str) -> str:
    """The registered name behind `name` (any case, torch's class names too); ValueError if there is none.

    >>> canonical_name("ScheduleInterleaved1F1B")
    'interleaved'
    """
    key = name.strip().lower().replace("_", "-")
    key = ALIASES.get(key, key)
    if key not in BUILDERS:
        near = difflib.get_close_matches(key, [*BUILDERS, *ALIASES], n=1, cutoff=0.5)
        hint = f"; did you mean {ALIASES.get(near[0], near[0])!r}?" if near else ""
        raise ValueError(f"unknown schedule {name!r}: expected one of {', '.join(BUILDERS)}{hint}")
    return key


def takes_chunks(name: str) -> bool:
    """Whether the schedule puts several chunks on a rank (has `num_chunks`)."""
    return "num_chunks" in inspect.signature(BUILDERS[canonical_name(name)]).parameters


def build(
    name: str, *, num_ranks: int, num_microbatches: int, num_chunks: int | None = None, **options: object
) -> Schedule:
    """Build a schedule by name.

    Arguments:
        name: a key of `BUILDERS` or an alias, in any case.
        num_ranks: P >= 1.
        num_microbatches: M >= 1.
        num_chunks: V >= 1, chunks a rank; only schedules that interleave take more than 1 (default 2 there).
        options: of the one builder, see its docstring.

    Raises ValueError for an unknown name or option and for sizes that do not fit.

    >>> print(build("1f1b", num_ranks=2, num_microbatches=3).programs[0])
    (0F0, 0F1, 0B0, 0F2, 0B1, 0B2)
    """
    key = canonical_name(name)
    for option, value in (
        ("num_ranks", num_ranks),
        ("num_microbatches", num_microbatches),
        ("num_chunks", num_chunks),
    ):
        if value is None and option == "num_chunks":
            continue
        if not isinstance(value, int) or isinstance(value, bool) or value < 1:
            raise ValueError(f"{option}={value!r} for schedule {key!r}: expected a whole number, at least 1")
    known = inspect.signature(BUILDERS[key]).parameters
    if num_chunks is not None and "num_chunks" in known:
        options["num_chunks"] = num_chunks
    elif num_chunks not in (None, 1):
        looping = ", ".join(n for n in BUILDERS if takes_chunks(n))
        raise ValueError(
            f"num_chunks={num_chunks} for schedule {key!r}: it has one stage a rank; "
            f"expected 1, or a schedule that interleaves ({looping})"
        )
    unknown = sorted(set(options) - set(known))
    if unknown:
        own = sorted(set(known) - {"num_ranks", "num_microbatches"}) or ["none"]
        raise ValueError(f"schedule {key!r} has no option {', '.join(unknown)}: its options are {', '.join(own)}")
    if "replicas" in options and not isinstance(options["replicas"], list | tuple | None):
        raise ValueError(f"replicas={options['replicas']!r}: expected one count a stage, such as (2, 1)")
    return BUILDERS[key](num_ranks=num_ranks, num_microbatches=num_microbatches, **options)
