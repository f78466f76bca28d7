"""Options that commands share: reading and help, the user's functions, files. No torch.

`plain_help`: for optional values tyro would show `--chunks {None}|INT` and `(default: None)` although the help text
names the effective default; this shows only the form of the value.
"""

from __future__ import annotations

import difflib
import inspect
import json
import os
import re
import types
import typing
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, fields
from itertools import zip_longest
from pathlib import Path
from typing import Annotated, Any, TypeVar

import tyro

from ..schedules import Schedule
from ..schedules.custom.user_code import check_call, load
from ..schedules.custom.user_schedules import find_user_schedule, sizes_of
from ..schedules.wording import wrapped

AUTO = "auto"
T = TypeVar("T")
_NUMBERS: dict[Any, tuple[str, str]] = {int: ("a whole number", "4"), float: ("a number", "0.5")}
_FORMS = {int: "INT", float: "FLOAT", str: "STR", Path: "PATH"}
_CALLS = {"model": (0, ()), "data": (0, ("batch_size",)), "loss": (2, ()), "optimizer": (1, ("lr",))}  # how each is


def read(options: type[T], argv: Sequence[str], command: str, **others: Any) -> T:
    _check_numbers(options, argv)
    text = others.pop("description", None) or re.sub(r"(?<!\n)\n(?!\n)", " ", inspect.getdoc(options) or "")
    typed: T = tyro.cli(options, args=argv, prog=f"stagewright {command}", description=wrapped(text), **others)
    return typed


def _check_numbers(options: type, argv: Sequence[str]) -> None:
    """ValueError for a word where an option takes one number: tyro would list the types that it tried."""
    hints = typing.get_type_hints(options)
    for word, following in zip_longest(argv, argv[1:], fillvalue=""):
        option, equals, value = word.partition("=")
        hint = hints.get(option.removeprefix("--").replace("-", "_")) if option.startswith("--") else None
        kinds = set(typing.get_args(hint) or (hint,)) - {type(None)}
        value = value if equals else following
        if len(kinds) == 1 and (kind := kinds.pop()) in _NUMBERS and value != "None":
            try:
                kind(value)
            except ValueError:
                what, such = _NUMBERS[kind]
                given = f"{option} {value}".rstrip()
                raise ValueError(f"{given}: expected {what}, such as {option} {such}") from None


def plain_help(options: type[T]) -> type[T]:
    """Class decorator for a dataclass of options: help without None."""
    hints = typing.get_type_hints(options, include_extras=True)
    for field in fields(options):  # type: ignore[arg-type]
        hint = hints[field.name]
        is_own = field.name in options.__annotations__ and typing.get_origin(hint) is not Annotated
        if is_own and field.default in (None, ()):
            shown = tyro.conf.arg(metavar=_form(hint), help_behavior_hint="")
            options.__annotations__[field.name] = Annotated[hint, shown]
    return options


def _form(kind: Any) -> str:
    arguments = [each for each in typing.get_args(kind) if each is not type(None)]
    origin = typing.get_origin(kind)
    if origin in (types.UnionType, typing.Union):
        return "|".join(map(_form, arguments))
    if origin is tuple:
        return f"{_form(arguments[0])} [{_form(arguments[0])} ...]"
    return "{" + ",".join(map(str, arguments)) + "}" if origin is typing.Literal else _FORMS[kind]


def check_known(what: str, name: str, known: Collection[str], *, listed: str) -> None:
    """Raise ValueError unless `name` is in `known`.

    >>> check_known("unknown back end", "netsn", ["local", "netns"], listed="back ends")
    Traceback (most recent call last):
    ValueError: unknown back end 'netsn'; did you mean netns?
    back ends: local, netns
    """
    if name not in known:
        near = difflib.get_close_matches(name, known, n=2, cutoff=0.4)
        hint = f"; did you mean {' or '.join(near)}?" if near else ""
        raise ValueError(f"{what} {name!r}{hint}\n{listed}: {', '.join(known)}")


@plain_help
@dataclass(frozen=True, slots=True, kw_only=True)
class OwnOptions:
    """The user's functions, each as package.module:function or file.py:function."""

    # Your own model, package.module:function or file.py:function: called without arguments, returns the nn.Module
    # (default: the example GPT).
    model: str | None = None
    # Its data, a function that returns a Dataset, or an iterable of batches: (inputs..., target), or a dict of
    # keywords.
    data: str | None = None
    # Its loss(output, target), or an nn.Module class; model: the model returns it (default: cross-entropy of
    # whole-number targets, mean squared error of others, the model's own for keywords without a target).
    loss: str | None = None
    optimizer: str | None = None  # Its optimizer(parameters) (default: AdamW).

    def check_own(self, others: Mapping[str, object], *, optimizers: Sequence[str] = ()) -> None:
        """Raise ValueError for missing functions and for options that exclude each other.

        Arguments:
            others: given options of the example GPT by name.
            optimizers: names for --optimizer of the example GPT.
        """
        if self.model is None:
            for name in ("data", "loss", "optimizer"):
                value = getattr(self, name)
                if value is None or (name == "optimizer" and value in optimizers):
                    continue
                known = f", or {' or '.join(optimizers)}" if name == "optimizer" and optimizers else ""
                raise ValueError(f"--{name} {value} without --model: expected --model with it{known}")
            return
        if self.optimizer in optimizers:
            others = {**others, "optimizer": self.optimizer}
        if self.data is None:
            raise ValueError(
                f"--model {self.model} without --data: expected --data package.module:function, which gives batches, "
                f"such as `def batches(): return DataLoader(...)` of (inputs..., target)"
            )
        for name, value in others.items():
            raise ValueError(f"--{name} {value} with --model: leave it away, it is for the example GPT")
        for name, (num_arguments, options) in _CALLS.items():
            value = getattr(self, name)
            if value is None or (name == "loss" and value == "model"):
                continue
            function = load(name, value)
            made_first = name == "loss" and isinstance(function, type)
            check_call(name, value, function, num_arguments=0 if made_first else num_arguments, options=options)


def given(options: object, names: tuple[str, ...]) -> dict[str, object]:
    """The options among `names` that differ from their defaults, by name."""
    defaults = {each.name: each.default for each in fields(options)}  # type: ignore[arg-type]
    return {name: getattr(options, name) for name in names if getattr(options, name) != defaults[name]}


@plain_help
@dataclass(frozen=True, slots=True, kw_only=True)
class GptOptions(OwnOptions):
    """A model of the user's, or the sizes of the example GPT."""

    layers: int = 4  # Transformer blocks of the GPT.
    width: int = 320  # Size of the hidden vectors.
    heads: int | None = None  # Attention heads per block (default: one for each 64 of the width).
    length: int = 128  # Bytes of one sequence.


def read_tensor_parallel(given: str) -> str | dict[str, str]:
    """Value for PipelineModule's tensor_parallel=. Raises ValueError for a file that cannot be read."""
    if given == AUTO:
        return AUTO
    path = Path(given)
    such = 'expected auto, or a .json file such as {"blocks.*.up": "column", "blocks.*.down": "row"}'
    if path.suffix != ".json":
        raise ValueError(f"--tensor-parallel {given}: {such}")
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ValueError(f"--tensor-parallel {given}: {error.strerror or error}: {such}") from None
    except ValueError as error:
        raise ValueError(f"--tensor-parallel {given}: no JSON ({error}): {such}") from None
    if not isinstance(found, dict) or not all(isinstance(word, str) for word in found.values()):
        raise ValueError(f"--tensor-parallel {given}: {found!r:.60}: {such}")
    return found


def read_file(path: Path, read: Callable[[Path], T]) -> T:
    try:
        return read(path)
    except OSError as error:
        raise ValueError(f"{path}: {error.strerror or error}: expected a file") from None
    except UnicodeDecodeError as error:
        raise ValueError(f"{path}: no UTF-8 text at byte {error.start}: expected a text file") from None


def write_out(path: Path, text: str) -> None:
    try:
        path.write_text(text + "\n", encoding="utf-8")
    except OSError as error:
        raise ValueError(
            f"--out {path}: cannot write: {error.strerror or error}: expected a file in a folder that exists and may "
            f"be written to"
        ) from None


def check_out(option: str, path: Path, *, sources: Iterable[str | Path | None] = ()) -> None:
    """Raise ValueError, before any work, for a file that cannot be written, or that is read: one of `sources`."""
    if not path.parent.is_dir():
        raise ValueError(f"{option} {path}: cannot write: expected a file in a folder that exists")
    if path.is_dir():
        raise ValueError(f"{option} {path}: cannot write: a folder: expected a file")
    if not os.access(path if path.exists() else path.parent, os.W_OK):
        raise ValueError(f"{option} {path}: cannot write: no permission: expected a file that may be written")
    if path.exists() and any(each is not None and Path(each).exists() and path.samefile(each) for each in sources):
        raise ValueError(f"{option} {path}: expected another file than the one that is read")


def is_function(name: str) -> bool:
    """Whether it names a function (which may take sizes), not a file."""
    return ":" in name or name.endswith(".py")


def read_schedule(
    name: str, sizes: Mapping[str, int | None], *, otherwise: Mapping[str, int] | None = None
) -> Schedule:
    """The checked schedule of a file, or of `FILE.py:function` (`package.module:function`).

    Arguments:
        sizes: the user's num_ranks, num_microbatches, num_chunks; None: not given. A function gets those that it
            takes; the schedule must agree with them.
        otherwise: sizes for a function whose arguments the user did not give.

    Raises ValueError for an unreadable file or other sizes, ScheduleError for a faulty schedule; both name it.
    """
    own = find_user_schedule(name if is_function(name) else Path(name), option="schedule")
    assert own is not None
    asked = {size: number for size, number in sizes.items() if number is not None}
    schedule = own.build({**(otherwise or {}), **asked})
    has = sizes_of(schedule)
    for size, number in asked.items():
        if number != has[size]:
            option = size.removeprefix("num_")
            raise ValueError(f"--{option} {number} but {name} has {has[size]}: expected --{option} {has[size]}")
    return schedule
