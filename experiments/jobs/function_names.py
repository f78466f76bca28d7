"""Names of functions in a declaration."""

from __future__ import annotations

from pathlib import Path

from ...partition.strict import fail

_WORKS = "stagewright.experiments.works"


def function_name(where: str, text: str, folder: Path) -> str:
    """The function that a field's text names, as `user_code.load` takes it.

    A leading dot: in stagewright.experiments.works; a file: seen from `folder`, that of the declaration. ValueError
    begins with `where`, the field, for text of no such form.
    """
    module, colon, function = text.rpartition(":")
    if not (module and colon and function.isidentifier()):
        fail(where, text, "package.module:function, .module:function or file.py:function")
    if module.endswith(".py"):
        return f"{(folder / module).resolve()}:{function}"
    return f"{_WORKS}{text}" if module.startswith(".") else text
