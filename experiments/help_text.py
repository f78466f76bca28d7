"""Help of options that may be left away: the value's form alone, and the default that the text tells.

tyro writes `--chunks {None}|INT` and `(default: None)` of them, beside the default that is really meant.
"""

from __future__ import annotations

import types
import typing
from dataclasses import fields
from pathlib import Path
from typing import Annotated, Any, TypeVar

import tyro

T = TypeVar("T")
_FORMS = {int: "INT", float: "FLOAT", str: "STR", Path: "PATH"}


def plain_help(options: type[T]) -> type[T]:
    """Class decorator for a dataclass of options: None is not spoken of."""
    hints = typing.get_type_hints(options, include_extras=True)
    for field in fields(options):  # type: ignore[arg-type]
        hint = hints[field.name]
        is_own = field.name in options.__annotations__ and typing.get_origin(hint) is not Annotated
        if is_own and field.default in (None, ()):
            shown = tyro.conf.arg(metavar=_form(hint), help_behavior_hint="")
            options.__annotations__[field.name] = Annotated[hint, shown]
    return options


def _form(kind: Any) -> str:
    """Text that a user types for a value of this type."""
    arguments = [each for each in typing.get_args(kind) if each is not type(None)]
    origin = typing.get_origin(kind)
    if origin in (types.UnionType, typing.Union):
        return "|".join(map(_form, arguments))
    if origin is tuple:
        return f"{_form(arguments[0])} [{_form(arguments[0])} ...]"
    return "{" + ",".join(map(str, arguments)) + "}" if origin is typing.Literal else _FORMS[kind]
