"""Functions that an option names: `package.module:function`, or `file.py:function`.

The current folder is searched first, as under `python -m`, so that a module there needs no installation.
"""

from __future__ import annotations

import difflib
import importlib
import importlib.util
import inspect
import os
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

from ..wording import count

FORM = "package.module:function or file.py:function"


def said(option: str, value: str) -> str:
    """An option as it is typed: `--model m.py:small`, or, if its name ends in "=", `schedule='m.py:zigzag'`."""
    return f"{option}{value!r}" if option.endswith("=") else f"--{option} {value}"


class UserCodeError(Exception):
    """The user's own code raised an exception, which is the cause of this one: its traceback says where."""


def load(option: str, value: str) -> Callable[..., Any]:
    """The function that an option names, see `said`.

    Raises ValueError for another form, for a missing module or function (with near matches), and for anything that is
    not callable; UserCodeError where the module's own code fails.
    """
    where, colon, name = value.rpartition(":")
    if not (where and colon and name.isidentifier()):
        raise ValueError(f"{said(option, value)}: expected {FORM}, such as {said(option, 'my_models:small')}")
    module = _file(option, value, Path(where)) if where.endswith(".py") else _module(option, value, where)
    if not hasattr(module, name):
        known = [each for each, what in vars(module).items() if callable(what) and not each.startswith("_")]
        near = difflib.get_close_matches(name, known, n=3, cutoff=0.5)
        hint = f"did you mean {' or '.join(near)}?" if near else f"expected a function of that name in {where}"
        raise ValueError(f"{said(option, value)}: {where} has no {name!r}: {hint}")
    function: Callable[..., Any] = getattr(module, name)
    if not callable(function):
        kind = type(function).__name__
        raise ValueError(
            f"{said(option, value)}: {name} is {'an' if kind[0] in 'AEIOUaeiou' else 'a'} {kind}: expected a function; "
            f"write `def make(): return {name}` next to it, and give {said(option, f'{where}:make')}"
        )
    return function


def call(option: str, value: str, function: Callable[..., Any], *arguments: Any, **options: Any) -> Any:
    """Value of the function; of `options` it gets those that it takes.

    Raises ValueError where it needs more, UserCodeError where it fails.
    """
    check_call(option, value, function, num_arguments=len(arguments), options=tuple(options))
    try:
        return function(*arguments, **{name: its for name, its in options.items() if takes(function, name)})
    except Exception as error:
        raise UserCodeError(f"{said(option, value)} raised {type(error).__name__}") from error


def check_call(
    option: str, value: str, function: Callable[..., Any], *, num_arguments: int, options: tuple[str, ...] = ()
) -> None:
    """Raise ValueError for a function that needs other arguments, or takes fewer."""
    parameters = parameters_of(function)
    if parameters is None:
        return
    positional = [each for each in parameters if each.kind in (each.POSITIONAL_ONLY, each.POSITIONAL_OR_KEYWORD)]
    needed = [
        each.name
        for each in parameters
        if each not in positional[:num_arguments]
        and each.default is each.empty
        and each.kind not in (each.VAR_POSITIONAL, each.VAR_KEYWORD)
        and each.name not in options
    ]
    if needed:
        raise ValueError(
            f"{said(option, value)}: needs {', '.join(needed)}, which are not given: expected "
            f"{'a default' if len(needed) == 1 else 'defaults'}, or another function that calls this one"
        )
    if len(positional) < num_arguments and not any(each.kind is each.VAR_POSITIONAL for each in parameters):
        raise ValueError(
            f"{said(option, value)}: takes {count(len(positional), 'argument')}: expected a function of {num_arguments}"
        )


def takes(function: Callable[..., Any], name: str) -> bool:
    """Whether it has a parameter of this name, or takes any."""
    named = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)
    parameters = parameters_of(function) or ()
    return any(each.kind is each.VAR_KEYWORD or (each.name == name and each.kind in named) for each in parameters)


def parameters_of(function: Callable[..., Any]) -> list[inspect.Parameter] | None:
    """None: it has no signature, such as a function written in C."""
    try:
        return list(inspect.signature(function).parameters.values())
    except (TypeError, ValueError):
        return None


def _module(option: str, value: str, name: str) -> ModuleType:
    if not all(part.isidentifier() for part in name.split(".")):
        raise ValueError(f"{said(option, value)}: {name!r} is no module's name: expected {FORM}")
    here = os.getcwd()
    if here not in sys.path:
        sys.path.insert(0, here)
    try:
        return importlib.import_module(name)
    except Exception as error:
        missing = error.name if isinstance(error, ModuleNotFoundError) else None
        if missing is None or not f"{name}.".startswith(f"{missing}."):  # an import within the module
            raise UserCodeError(f"{said(option, value)}: importing {name} failed") from error
        raise ValueError(
            f"{said(option, value)}: there is no module {missing!r} in {here}, nor an installed one{_near(missing)}: "
            f"expected {FORM}; type it in the folder that holds the module"
        ) from None


def _near(missing: str) -> str:
    *folders, last = missing.split(".")
    folder = Path(*folders)
    known = [each.stem for each in folder.iterdir() if each.is_dir() or each.suffix == ".py"] if folder.is_dir() else []
    near = difflib.get_close_matches(last, known, n=2, cutoff=0.6)
    return f" (did you mean {' or '.join(near)}?)" if near else ""


def _file(option: str, value: str, path: Path) -> ModuleType:
    if not path.is_file():
        raise ValueError(f"{said(option, value)}: there is no file {path}: expected {FORM}")
    name = f"_stagewright_file_{path.stem}"  # an installed module may have the file's own name
    spec = importlib.util.spec_from_file_location(name, path.resolve())
    assert spec is not None
    assert spec.loader is not None
    known = sys.modules.get(name)
    if known is not None and known.__file__ == spec.origin:  # two options name functions of one file
        return known
    folder = str(path.resolve().parent)
    if folder not in sys.path:
        sys.path.insert(0, folder)
    module = sys.modules[name] = importlib.util.module_from_spec(spec)
    try:
        spec.loader.exec_module(module)
    except Exception as error:
        del sys.modules[name]
        raise UserCodeError(f"{said(option, value)}: running {path} failed") from error
    return module
