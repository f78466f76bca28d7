"""The build backend: setuptools', whose editable installs type checkers can read as well.

The repository root is the package, so an editable install of setuptools is an import hook, which no type checker runs.
This backend adds a path to build/types, whose folder stagewright-stubs links to the source: type checkers look there
first. Python never imports that folder, so files keep their own paths in tracebacks.
"""

from __future__ import annotations

import base64
import hashlib
import os
import zipfile
from pathlib import Path
from typing import Any

from setuptools import build_meta
from setuptools.build_meta import *  # noqa: F403  the other hooks

_ROOT = Path(__file__).resolve().parent.parent
_LEADS = "stagewright_types.pth"


def build_editable(wheel_directory: str, config_settings: Any = None, metadata_directory: str | None = None) -> str:
    name = build_meta.build_editable(wheel_directory, config_settings, metadata_directory)
    path = Path(wheel_directory, name)
    with zipfile.ZipFile(path) as wheel:
        files = {file.filename: wheel.read(file) for file in wheel.infolist()}
    files[_LEADS] = text = f"{_linked().parent}\n".encode()
    digest = base64.urlsafe_b64encode(hashlib.sha256(text).digest()).rstrip(b"=").decode()
    record = next(file for file in files if file.endswith(".dist-info/RECORD"))
    files[record] += f"{_LEADS},sha256={digest},{len(text)}\n".encode()
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as wheel:
        for file, content in files.items():
            wheel.writestr(file, content)
    return name


def _linked() -> Path:
    """The folder of links; mypy takes it for stubs only where its __init__ is a .pyi."""
    stubs = _ROOT / "build" / "types" / "stagewright-stubs"
    stubs.mkdir(parents=True, exist_ok=True)
    sources = {"__init__.pyi": "__init__.py", "py.typed": "py.typed"}
    sources |= {folder.parent.name: folder.parent.name for folder in _ROOT.glob("*/__init__.py")}
    for link in stubs.iterdir():
        link.unlink()
    for link, source in sources.items():
        (stubs / link).symlink_to(os.path.join("..", "..", "..", source))
    return stubs
