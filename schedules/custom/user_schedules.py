"""A user's own schedules: a table, rules, or a function; each becomes a checked `Schedule` here.

FILE.csv, FILE.json          a table, or a whole schedule
FILE.py:function             def mine(num_ranks, num_microbatches): returns a Schedule, Constraints, or one of
                             def key(action): the least runs first of those that may
                             def may(action, so_far): whether it may run next; see `custom.only_if`
any of these objects
"""

from __future__ import annotations

import inspect
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias, TypeGuard

from ..checks import check
from ..ir import Action, Op, Schedule, ScheduleError
from .user_code import call, load, parameters_of, said, takes

if TYPE_CHECKING:
    from . import Constraints

_SIZES = ("num_ranks", "num_microbatches", "num_chunks", "num_slices")

FORMS = "FILE.csv, FILE.json or FILE.py:function"
EXPECTED = (
    "expected a Schedule (such as Schedule.from_csv(text) or build(...) returns), Constraints, or a function of an "
    "action: key(action), or may(action, so_far)"
)

UserScheduleLike: TypeAlias = "str | os.PathLike[str] | Schedule | Constraints | Callable[..., Any]"


@dataclass(frozen=True, slots=True, kw_only=True)
class UserSchedule:
    """A user's schedule, before its sizes are known. `words`, and the `option` that gave it, are for messages."""

    words: str
    option: str
    what: Schedule | Constraints | Callable[..., Any]

    @property
    def takes_ranks(self) -> bool:
        """Whether it is built for a given number of ranks."""
        what: Any = self.what
        return not _is_ready(what) and (_is_of_actions(what) or takes(what, "num_ranks"))

    @property
    def needs_ranks(self) -> bool:
        """Whether it has no default number of ranks."""
        what: Any = self.what
        if not self.takes_ranks:
            return False
        parameter = inspect.signature(what).parameters.get("num_ranks")
        return parameter is None or parameter.default is parameter.empty

    def build(self, sizes: Mapping[str, int | None]) -> Schedule:
        """The checked schedule.

        Arguments:
            sizes: num_ranks, num_microbatches, num_chunks, num_slices as requested; a function gets those that it
                takes, and a schedule with sizes of its own keeps them.

        Raises ValueError for an invalid result, ScheduleError for a faulty schedule; both name its source.
        """
        asked = {name: number for name, number in sizes.items() if number is not None}
        made: Any = self.what
        if not _is_ready(made) and not _is_of_actions(made):
            self._check_sizes(made, asked)
            function, made = made, call(self.option, self.words, made, **asked)
            if getattr(made, "name", None) == "constraints":
                made = replace(made, name=getattr(function, "__name__", made.name))
            if not _is_ready(made) and not _is_of_actions(made):
                raise ValueError(f"{said(self.option, self.words)} returned {type(made).__name__}: {EXPECTED}")
        try:
            schedule = self._schedule(made, asked)
            check(schedule)
        except ScheduleError as error:
            raise ScheduleError(f"{self.words}: {error}") from None
        except ValueError as error:
            raise ValueError(f"{self.words}: {error}") from error.__cause__
        return schedule

    def _check_sizes(self, function: Callable[..., Any], sizes: Mapping[str, int]) -> None:
        parameters = parameters_of(function) or ()
        lacking = [p.name for p in parameters if p.name in _SIZES and p.default is p.empty and p.name not in sizes]
        if lacking:
            options = " ".join(f"--{name.removeprefix('num_')}" for name in lacking)
            raise ValueError(
                f"{said(self.option, self.words)} needs {', '.join(lacking)}: expected {options} "
                f"({'=, '.join(lacking)}=), or defaults in the function"
            )

    def _schedule(self, made: Any, sizes: Mapping[str, int]) -> Schedule:
        if isinstance(made, Schedule):
            return made
        from . import Constraints, only_if

        if isinstance(made, Constraints):
            return made.solve()
        if {"num_ranks", "num_microbatches"} - set(sizes):
            raise ValueError(
                "a function of an action says nothing of sizes: expected --ranks and --microbatches (num_ranks= and "
                "num_microbatches=), or a function that returns Constraints"
            )
        chunks = sizes.get("num_chunks", 1)
        placement: dict[str, Any] = {"placement": "cyclic", "num_chunks": chunks} if chunks > 1 else {}
        rules = [only_if(made)] if len(inspect.signature(made).parameters) == 2 else []
        if not rules:
            _refuse_filter_without_state(made)
        return Constraints(
            name=getattr(made, "__name__", "mine"),
            num_ranks=sizes["num_ranks"],
            num_microbatches=sizes["num_microbatches"],
            num_slices=sizes.get("num_slices", 1),
            rules=rules,
            prefer=None if rules else made,
            **placement,
        ).solve()


def find_user_schedule(what: UserScheduleLike, *, option: str) -> UserSchedule | None:
    """A user's schedule; None: it is the name of a family.

    Raises ValueError for a missing file or function, and for other forms.
    """
    if isinstance(what, str) and what.endswith(".py"):
        raise ValueError(f"{said(option, what)}: expected the function in it, as in {said(option, f'{what}:function')}")
    if isinstance(what, str) and not is_own(what):
        return None
    if isinstance(what, str) and ":" in what and not Path(what).is_file():
        return UserSchedule(words=what, option=option, what=load(option, what))
    if isinstance(what, str | os.PathLike):
        return UserSchedule(words=str(what), option=option, what=read_schedule(Path(what)))
    if _is_ready(what):
        return UserSchedule(words=f"schedule {what.name!r}", option=option, what=what)
    if callable(what):
        return UserSchedule(words=getattr(what, "__name__", repr(what)), option=option, what=what)
    raise ValueError(f"{option}{what!r:.60}: expected a name, a Schedule, Constraints, a function, or {FORMS}")


def is_own(name: str) -> bool:
    """Whether a word names a file or a function, rather than a family of schedules."""
    return name.endswith((".csv", ".json", ".py")) or ":" in name


def sizes_of(schedule: Schedule) -> dict[str, int]:
    """The sizes of an existing schedule, for `UserSchedule.build`."""
    return {
        "num_ranks": schedule.num_ranks,
        "num_microbatches": schedule.num_microbatches,
        "num_chunks": max(map(len, schedule.placement)),
        "num_slices": schedule.num_slices,
    }


def _is_ready(what: object) -> TypeGuard[Schedule | Constraints]:
    if isinstance(what, Schedule):
        return True
    from . import Constraints

    return isinstance(what, Constraints)


def _is_of_actions(function: Any) -> bool:
    return callable(function) and [each.name for each in parameters_of(function) or ()][:1] == ["action"]


def _refuse_filter_without_state(key: Callable[[Action], Any]) -> None:
    answers = [key(Action(stage, op, index)) for stage in (0, 1) for op in (Op.F, Op.B) for index in (0, 1)]
    if all(isinstance(answer, bool) for answer in answers):
        raise ValueError(
            f"{getattr(key, '__name__', 'the function')}(action) returns True or False: expected a key, a number or a "
            f"tuple of numbers of which the least goes first, or a filter may(action, so_far)"
        )


def read_schedule(path: Path) -> Schedule:
    """The checked schedule of a file: JSON if the text begins with a brace, else CSV.

    Raises ValueError for a file that cannot be read, ScheduleError for a faulty schedule; both name the file.
    """
    try:
        text = path.read_text(encoding="utf-8-sig")  # with a byte order mark, as spreadsheets write it, or not
    except (OSError, UnicodeDecodeError) as error:
        raise ValueError(f"schedule file {str(path)!r} cannot be read: {error}") from None
    try:
        is_json = text.lstrip().startswith("{")
        schedule = Schedule.from_json(text) if is_json else Schedule.from_csv(text, name=repr(path.stem)[1:-1])
        check(schedule)
    except ScheduleError as error:
        raise ScheduleError(f"{path}: {error}") from None
    return schedule
